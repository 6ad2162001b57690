"""The Python API: which names there are, that they are what the command line uses, and that they come lazily."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import eplb_cli
from eplb_cli.planner import make_plan

NAMES = [
    "ENGINES",
    "Advice",
    "Conversion",
    "EplbError",
    "ExpertLoads",
    "Model",
    "ModelShape",
    "Placement",
    "PlanRequest",
    "PlanResult",
    "Provenance",
    "ReadOptions",
    "Score",
    "Situation",
    "advise",
    "balancedness",
    "concatenate",
    "export_placement",
    "import_placement",
    "plan",
    "prepare_conversion",
    "rank_loads",
    "read_traces",
    "score",
]


def test_the_public_names_are_these() -> None:
    assert eplb_cli.__all__ == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_there_and_documented(name: str) -> None:
    assert name in dir(eplb_cli)
    assert getattr(eplb_cli, name).__doc__


def test_the_api_is_what_the_command_line_uses() -> None:
    assert eplb_cli.plan is make_plan


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'plam'"):
        eplb_cli.plam  # noqa: B018


def test_a_name_loads_only_what_it_needs() -> None:
    code = (
        "import sys, eplb_cli\n"
        "assert 'numpy' not in sys.modules\n"
        "eplb_cli.EplbError\n"
        "assert 'numpy' not in sys.modules\n"
        "eplb_cli.plan\n"
        "assert 'numpy' in sys.modules and not {'torch', 'vllm', 'bokeh'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loads_become_a_scored_plan(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(50, (6, 2, 8)).astype(np.int64)
    loads = eplb_cli.ExpertLoads(counts, counts.sum((1, 2)), np.array([0, 1], np.int32))
    result = eplb_cli.plan(loads, eplb_cli.PlanRequest(ep_size=2))
    result.placement.save(tmp_path / "plan.json")
    again = eplb_cli.Placement.load(tmp_path / "plan.json")
    assert eplb_cli.score(again, loads).balancedness == result.balancedness.after
