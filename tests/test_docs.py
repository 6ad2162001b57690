"""The documentation is true: generated pages are current, commands exist, the tutorial runs, the site builds."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from eplb_cli import loads as loads_module
from eplb_cli import placement as placement_module
from eplb_cli.cli import COMMANDS
from eplb_cli.loads import ExpertLoads, Source
from eplb_cli.placement import Placement, Provenance

REPOSITORY = Path(__file__).parents[1]
DOCS = REPOSITORY / "docs"
PAGES = sorted(DOCS.rglob("*.md"))


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_reference", DOCS / "generate_reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


@pytest.mark.parametrize("name", GENERATOR.pages())
def test_the_reference_is_what_the_code_says(name: str) -> None:
    assert (DOCS / "reference" / name).read_text() == GENERATOR.pages()[name], "run: python docs/generate_reference.py"


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w./-]+\.md\b", (REPOSITORY / "mkdocs.yml").read_text()))
    assert {str(page.relative_to(DOCS)) for page in PAGES} == listed


def commands_of(page: Path) -> list[list[str]]:
    """Every `eplb ...` line of a page's code blocks, as words."""
    text = page.read_text()
    fenced = re.findall(r"```(?:bash|console)\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"^    (eplb .*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    lines = [line for block in fenced for line in block.replace("\\\n", " ").splitlines()] + indented
    return [shlex.split(line, comments=True) for line in lines if line.startswith("eplb ")]


def options_of(command: str) -> set[str]:
    module_name = next(name for name in COMMANDS if name.removesuffix("_") == command)
    module = importlib.import_module(f"eplb_cli.cli.{module_name}")
    _, options = GENERATOR._parameters(getattr(module, module_name))
    return {name for spelling, _ in options for name in re.findall(r"`(-[^`]*)`", spelling)} | {"-h", "--help"}


@pytest.mark.parametrize("page", [*PAGES, REPOSITORY / "README.md"], ids=lambda page: page.name)
def test_every_command_in_a_page_exists_with_its_options(page: Path) -> None:
    known = {name.removesuffix("_") for name in COMMANDS}
    for words in commands_of(page):
        if words[1].startswith("-"):
            continue
        assert words[1] in known, words
        if words[1] not in ("serve", "record"):  # these pass vLLM's options on
            used = {word.partition("=")[0] for word in words[2:] if re.match(r"--?[a-z]", word)}
            assert used <= options_of(words[1]), words


def test_the_check_of_commands_sees_a_wrong_option(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\neplb plan loads.safetensors --no-such-option 3\n```\n")
    with pytest.raises(AssertionError):
        test_every_command_in_a_page_exists_with_its_options(page)


def plan_document() -> dict[str, Any]:
    rows = np.array([[0, 1, 2, 0]], np.int32)
    provenance = Provenance("Some", 2, "windows", "waiting", 0, "ab" * 32, {"before": 0.5, "held_out": None})
    document = json.loads(Placement(rows, np.array([3], np.int32), 3, 2, 1, provenance).to_json())
    assert isinstance(document, dict)
    return document


def test_a_plan_satisfies_its_schema_and_a_foreign_key_does_not() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema, document = GENERATOR.plan_schema(), plan_document()
    jsonschema.validate(document, schema)
    for broken in (
        {**document, "extra": 1},
        {**document, "version": 2},
        {key: value for key, value in document.items() if key != "topology"},
        {**document, "layers": [{**document["layers"][0], "physical_to_logical": [0, -1]}]},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


def test_the_plan_schema_knows_the_keys_that_the_code_knows() -> None:
    properties = GENERATOR.plan_schema()["properties"]
    assert properties.keys() == placement_module._KEYS
    assert properties["model"]["properties"].keys() == placement_module._MODEL_KEYS
    assert properties["topology"]["properties"].keys() == placement_module._TOPOLOGY_KEYS
    assert properties["layers"]["items"]["properties"].keys() == placement_module._LAYER_KEYS


def test_a_profile_satisfies_its_schema(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from safetensors import safe_open

    counts = np.ones((1, 1, 2), np.int64)
    ExpertLoads(counts, np.ones(1, np.int64), np.zeros(1, np.int32), sources=(Source("a", "b", "c"),)).save(
        tmp_path / "loads"
    )
    with safe_open(tmp_path / "loads", framework="numpy") as file:
        header = json.loads(file.metadata()[loads_module.METADATA_KEY])
    schema = GENERATOR.profile_schema()
    jsonschema.validate(header, schema)
    assert schema["properties"].keys() == loads_module._HEADER_KEYS


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    blocks = re.findall(r"```bash\n(.*?)```", (DOCS / "tutorial.md").read_text(), re.DOTALL)
    assert len(blocks) >= 6
    (tmp_path / "demo").symlink_to(REPOSITORY / "demo")
    (tmp_path / "tutorial").mkdir()
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    script = "set -euo pipefail\n" + "\n".join(blocks)
    run = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    made = {path.name for path in (tmp_path / "tutorial").iterdir()}
    assert {"monday.safetensors", "tuesday.safetensors", "plan.json", "report.html", "model-balanced"} <= made
    assert "Worth it" in run.stdout and "vllm serve model-balanced" in run.stdout


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="the docs extra is not installed")
    run = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    home = (tmp_path / "index.html").read_text()
    assert not re.findall(r'(?:src|href)="https?://[^"]*\.(?:js|css|woff2?)"', home), "the site loads from elsewhere"
    assert "make_plan" in (tmp_path / "reference" / "python" / "index.html").read_text()
