"""The built wheel, installed where the checkout is not importable."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

REPOSITORY = Path(__file__).parents[1]


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that the checkout stays clean."""
    source = tmp_path_factory.mktemp("source")
    names = ("pyproject.toml", "README.md", "LICENSE", "eplb_cli", "models")
    subprocess.run(["cp", "-r", *(str(REPOSITORY / name) for name in names), str(source)], check=True)
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source))
    return next(folder.glob("eplb-*.whl"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that holds the wheel, and sees the dependencies of this one but not its editable eplb."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    interpreter = environment / "bin" / "python"
    pip("--python", str(interpreter), "install", "--no-deps", str(wheel))
    site = next((environment / "lib").glob("python*/site-packages"))
    # A path named in a .pth file is searched, but its own .pth files (the editable install) are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return interpreter


@pytest.mark.slow
def test_the_wheel_holds_the_families_and_no_package_called_models(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "eplb_cli/models/qwen3_moe.toml" in names
    assert "eplb_cli/models/llama4.toml" in names
    assert "eplb_cli/py.typed" in names
    assert {f"eplb_cli/report/page.{kind}" for kind in ("html", "css", "js")} <= set(names)
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eplb_cli", "eplb"}


@pytest.mark.slow
def test_it_works_beside_a_folder_called_models(python: Path, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").write_text("raise RuntimeError('the wrong models')\n")
    code = (
        "import importlib.resources, eplb_cli, eplb_cli.models as models\n"
        "assert 'environment' in eplb_cli.__file__, eplb_cli.__file__\n"
        "print(sum(entry.name.endswith('.toml') for entry in importlib.resources.files(models).iterdir()))\n"
    )
    done = subprocess.run([str(python), "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert int(done.stdout) == len(list((REPOSITORY / "models").glob("*.toml"))) > 0


@pytest.mark.slow
def test_the_script_answers_from_any_directory(python: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [str(python.parent / "eplb"), "--help"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "profile routing, plan a placement" in done.stdout


def test_ci_tries_the_oldest_versions_that_are_allowed() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    allowed = dict(line.split(">=") for line in [*project["dependencies"], *project["optional-dependencies"]["test"]])
    lines = (REPOSITORY / "constraints-lowest.txt").read_text().splitlines()
    tried = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, version in allowed.items():
        pinned = tried[name.lower().replace("_", "-")]
        assert Version(pinned) == Version(version), f"{name}: make constraints-lowest.txt anew"
