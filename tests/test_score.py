"""Scoring a plan on loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.errors import LoadsError, PlacementError
from eplb_cli.loads import ExpertLoads
from eplb_cli.placement import Placement
from eplb_cli.planner import score
from tests.conftest import Run

COUNTS = np.array([[[3, 1, 2, 2], [0, 0, 4, 4]], [[1, 3, 2, 2], [0, 0, 0, 0]]], np.int64)
"""Two windows, two layers. On ranks {0, 1} and {2, 3} layer 0 is even in both windows, layer 1 is all on one rank."""


def loads(layer_ids: tuple[int, ...] = (2, 4)) -> ExpertLoads:
    return ExpertLoads(COUNTS, np.array([8, 8]), np.array(layer_ids, np.int32))


def plan(layer_ids: tuple[int, ...] = (2, 4)) -> Placement:
    return Placement.initial(4, 0, 2, layer_ids)


def test_figures_worked_out_by_hand() -> None:
    scored = score(plan(), loads())
    # Means 4 + 4 + 4, maxima 4 + 8 + 4; a (window, layer) without load has no ratio.
    assert scored.balancedness == 0.75
    assert scored.balancedness_of_mean == 0.75
    assert scored.per_layer == ((2, 1.0), (4, 0.5))
    assert scored.max_over_mean == pytest.approx(4 / 3, abs=1e-9)
    assert scored.max_over_mean_worst == 2.0
    assert (scored.windows, scored.tokens) == (2, 16)


def test_the_summed_load_hides_ranks_that_take_turns() -> None:
    turns = ExpertLoads(np.array([[[8, 0]], [[0, 8]]], np.int64), np.zeros(2, np.int64), np.array([2], np.int32))
    scored = score(Placement.initial(2, 0, 2, [2]), turns)
    assert (scored.balancedness, scored.balancedness_of_mean) == (0.5, 1.0)


def test_layers_match_by_id_and_the_rest_is_named() -> None:
    scored = score(plan((2, 3)), loads())
    assert scored.per_layer == ((2, 1.0),)
    assert scored.warnings == (
        "the loads lack layer 3, which the score leaves out",
        "the plan lacks layer 4, which the score leaves out",
    )


def test_loads_that_were_never_filled_in_are_not_scored() -> None:
    dead = ExpertLoads(COUNTS * 0 + np.array([0, 5, 0, 0]), np.array([8, 8]), np.array((2, 4), np.int32))
    with pytest.raises(LoadsError, match="layers 2, 4 send everything to a single expert"):
        score(plan((2, 4)), dead)


def test_plans_of_another_model_are_refused() -> None:
    with pytest.raises(PlacementError, match="places 5 experts, the loads are of 4"):
        score(Placement.initial(5, 1, 2, [2]), loads())
    with pytest.raises(PlacementError, match="no layer in common"):
        score(plan((7, 8)), loads())


def test_the_commands_json_has_the_contracts_keys(eplb: Callable[..., Run], tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    loads().save(tmp_path / "loads.safetensors")
    run = eplb("score", tmp_path / "plan.json", tmp_path / "loads.safetensors", "--format", "json")
    assert run.code == 0
    assert {
        "balancedness",
        "balancedness_of_mean",
        "max_over_mean",
        "per_layer",
        "windows",
        "tokens",
    } <= run.json.keys()
    assert run.json["max_over_mean"].keys() == {"mean", "p95", "worst"}
    assert run.json["per_layer"] == [{"layer_id": 2, "balancedness": 1.0}, {"layer_id": 4, "balancedness": 0.5}]


def test_people_see_the_least_balanced_layers_first(eplb: Callable[..., Run], tmp_path: Path) -> None:
    plan().save(tmp_path / "plan.json")
    loads().save(tmp_path / "loads.safetensors")
    out = eplb("score", tmp_path / "plan.json", tmp_path / "loads.safetensors").out
    assert out.index("0.5000") < out.index("1.0000")
    assert "balancedness = sum of the mean rank load" in out
