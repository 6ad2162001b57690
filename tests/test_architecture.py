"""The import arrows of docs/architecture.md: rooms import downwards only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "eplb_cli"

BASE = {"errors", "files", "untrusted", "metrics", "dispatch", "loads", "placement"}
ALLOWED = {
    "errors": set(),
    "console": {"errors"},
    "files": {"errors"},
    "untrusted": {"errors"},
    "metrics": {"errors"},
    "tensors": {"errors", "untrusted"},
    "bounds": {"metrics"},
    "dispatch": {"errors", "metrics"},
    "loads": {"errors", "files", "metrics", "tensors", "untrusted"},
    "placement": {"dispatch", "errors", "files", "metrics", "untrusted"},
    "traces": BASE | {"tensors"},
    "replay": BASE | {"traces", "planner"},
    "planner": BASE | {"bounds"},
    "exports": BASE | {"tensors"},
    "checkpoint": BASE | {"models", "tensors"},
    "vllm_plugin": BASE | {"planner", "checkpoint"},
    "serve": BASE | {"checkpoint", "vllm_plugin"},
    "versions": set(),
    "doctor": BASE | {"serve", "vllm_plugin", "versions"},
    "advice": BASE | {"planner", "checkpoint"},
    "report": BASE | {"console", "bounds", "planner", "checkpoint", "advice", "replay"},
}


def room_of(path: Path) -> str:
    """`checkpoint` for eplb_cli/checkpoint/family.py, `loads` for eplb_cli/loads.py."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eplb_cli."):
            rooms.add(node.module.split(".")[1])
        elif isinstance(node, ast.ImportFrom) and node.module == "eplb_cli":
            rooms.update(alias.name for alias in node.names if not alias.name.startswith("__"))
        elif isinstance(node, ast.Import):
            rooms.update(alias.name.split(".")[1] for alias in node.names if alias.name.startswith("eplb_cli."))
    return rooms


FILES = [path for path in sorted(ROOT.rglob("*.py")) if room_of(path) in ALLOWED]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_imports_only_what_lies_below_it(path: Path) -> None:
    room = room_of(path)
    assert imported_rooms(path) - {room} <= ALLOWED[room]


def test_every_file_is_in_a_known_room() -> None:
    assert {room_of(path) for path in ROOT.rglob("*.py")} - ALLOWED.keys() <= {"__init__", "__main__", "cli", "api"}


def test_the_package_and_the_help_page_load_nothing_heavy() -> None:
    code = (
        "import sys, eplb_cli\n"
        "from eplb_cli.cli import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {'torch', 'vllm', 'numba', 'transformers', 'numpy', 'safetensors', 'huggingface_hub'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
