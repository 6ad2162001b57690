"""The vLLM of this Python environment: how to start it, and what it answers to a question."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from eplb_cli.errors import ServeError
from eplb_cli.untrusted import parse_json
from eplb_cli.vllm_plugin.settings import VARIABLES

__all__ = ["SAFE_PATH", "ask", "is_installed", "plugin_names", "vllm_command"]

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Keeps the current folder off the path of a Python and of all that it starts: a model's folder may hold a torch.py."""

_ANSWER_SECONDS = 300


def is_installed() -> bool:
    """Whether there is a vLLM beside eplb."""
    return find_spec("vllm") is not None


def vllm_command() -> tuple[str, ...]:
    """The `vllm` of this Python environment, where the plugin is installed too."""
    if not is_installed():
        return ("vllm",)
    script = Path(sys.executable).with_name("vllm")
    if not script.is_file():
        return (sys.executable, "-P", "-m", "vllm.entrypoints.cli.main")
    return ("vllm",) if shutil.which("vllm") == str(script) else (str(script),)


def plugin_names() -> dict[str, str]:
    """VLLM_PLUGINS with our plugin in it.

    vLLM loads endpoint plugins only when the variable names them. Where it is not set, all plugins that vLLM would load
    anyway are named as well, so that setting it switches none of them off.
    """
    given = os.environ.get("VLLM_PLUGINS")
    if given is not None:
        names = [name for name in given.split(",") if name]
    else:
        groups = ("general", "platform", "io_processor", "stat_logger")
        names = sorted({point.name for group in groups for point in entry_points(group=f"vllm.{group}_plugins")})
    return {"VLLM_PLUGINS": ",".join(dict.fromkeys([*names, "eplb"]))}


def ask(module: str, question: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Run `module` with the question as JSON on its standard input; its last line is the answer.

    In a process of its own, because importing vLLM takes seconds and a broken one may end the process.

    Raises:
        ServeError: there is no answer; the reason is the last line of the process's errors.
    """
    # Our own variables stay out of it, and so does what they would make the plugin do.
    clean = {name: value for name, value in environment.items() if name not in VARIABLES.values()}
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", module],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            errors="replace",
            env=clean | SAFE_PATH,
            timeout=_ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ServeError(f"importing vLLM takes more than {_ANSWER_SECONDS} s") from None
    for line in process.stdout.splitlines()[-1:]:
        with contextlib.suppress(ServeError):
            answer: dict[str, Any] = parse_json(line, ServeError, finite=False)
            return answer
    errors = [line.strip() for line in process.stderr.splitlines() if line.strip()]
    raise ServeError(f"vLLM cannot be imported: {errors[-1] if errors else f'exit code {process.returncode}'}")
