"""Shared fixtures."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from eplb_cli.cli import main
from tests.ground_rules import (  # noqa: F401 - hooks and a fixture for every test
    nothing_left_behind,
    pytest_addoption,
    pytest_itemcollected,
    pytest_make_collect_report,
    pytest_runtest_makereport,
)
from tests.tiny_models import (  # noqa: F401 - session fixtures for every test
    tiny_llama4_multimodal,
    tiny_llama4_per_expert,
    tiny_llama4_text,
    tiny_qwen3_moe,
    tiny_qwen3_moe_fused,
)
from tests.vllm_cpu.engine import engines, vllm_models  # noqa: F401

# A busy machine is no defect.
settings.register_profile("eplb", deadline=None)
settings.load_profile("eplb")

# A shell's background job ignores SIGINT, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).parents[1]
SHARED_DATA = REPOSITORY.parent / "shared" / "data"


@dataclass
class Run:
    """What a command run left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as the one JSON object it must be."""
        return json.loads(self.out)


@pytest.fixture
def eplb(capsys: pytest.CaptureFixture[str]) -> Callable[..., Run]:
    """Run the command line in this process: `eplb("plan", loads, "-o", out).json`."""

    def run(*args: object) -> Run:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Run(code, captured.out, captured.err)

    return run


@pytest.fixture
def shared_data() -> Path:
    """Real loads and configs that lie beside the checkout; skips where they do not."""
    if not SHARED_DATA.is_dir():
        pytest.skip("the shared data folder is not beside this checkout")
    return SHARED_DATA


@pytest.fixture
def needs_vllm() -> None:
    """Skips where vLLM is not installed; loads nothing of it."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
