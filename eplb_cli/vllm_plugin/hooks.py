"""Runs a callback right after a module has been imported, so that nothing of vLLM is imported before its time."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["when_imported"]

Callback = Callable[[ModuleType], None]

_callbacks: dict[str, list[Callback]] = {}


def when_imported(name: str, callback: Callback) -> None:
    """Call `callback(module)` now when the module is imported already, else as soon as its import has finished.

    Raises:
        ImportError: the module is in the middle of its import, where a patch could be overwritten.
    """
    module = sys.modules.get(name)
    if module is not None:
        if getattr(module.__spec__, "_initializing", False):
            raise ImportError(
                f"eplb: {name} is being imported at this moment; it cannot be patched reliably", name=name
            )
        callback(module)
        return
    _callbacks.setdefault(name, []).append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the modules waited for through the other finders, and wraps their loader."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _callbacks or fullname in self._searching:
            return None
        self._searching.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching.discard(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """The module's own loader, followed by the callbacks."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        for callback in _callbacks.pop(module.__name__, ()):
            callback(module)

    def __getattr__(self, name: str) -> Any:  # get_source, get_data, is_package and the like
        return getattr(self._loader, name)
