"""Callbacks after an import: once, in order, also for modules that are loaded already."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eplb_cli.vllm_plugin.hooks import when_imported


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "hooked_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "module.py").write_text("value = 1\n")
    (folder / "other.py").write_text("from hooked_package.module import value\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    for name in [name for name in sys.modules if name.startswith("hooked_package")]:
        del sys.modules[name]


def test_a_callback_runs_when_the_module_has_been_executed(package: Path) -> None:
    seen: list[int] = []
    when_imported("hooked_package.module", lambda module: seen.append(vars(module)["value"]))
    when_imported("hooked_package.module", lambda module: vars(module).update(value=2))
    assert seen == []
    import hooked_package.other  # type: ignore[import-not-found]

    assert seen == [1]
    assert hooked_package.other.value == 2  # patched before anybody could take the name


def test_a_loaded_module_is_patched_at_once(package: Path) -> None:
    import hooked_package.module

    when_imported("hooked_package.module", lambda module: vars(module).update(value=3))
    assert hooked_package.module.value == 3


def test_a_module_in_the_middle_of_its_import_is_refused(package: Path) -> None:
    (package / "module.py").write_text(
        "from eplb_cli.vllm_plugin.hooks import when_imported\n"
        "when_imported('hooked_package.module', lambda module: None)\n"
    )
    with pytest.raises(ImportError, match="being imported at this moment"):
        import hooked_package.module  # noqa: F401


def test_the_module_s_source_stays_readable(package: Path) -> None:
    import inspect

    when_imported("hooked_package.module", lambda module: None)
    import hooked_package.module

    assert inspect.getsource(hooked_package.module) == "value = 1\n"
