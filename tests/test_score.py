"""Scoring a plan on loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.dispatch import chosen_slots
from eplb_cli.errors import LoadsError, PlacementError
from eplb_cli.loads import ExpertLoads
from eplb_cli.placement import Placement, Provenance
from eplb_cli.planner import score
from tests.conftest import Run

COUNTS = np.array([[[3, 1, 2, 2], [0, 0, 4, 4]], [[1, 3, 2, 2], [0, 0, 0, 0]]], np.int64)
"""Two windows, two layers. On ranks {0, 1} and {2, 3} layer 0 is even in both windows, layer 1 is all on one rank."""


def loads(layer_ids: tuple[int, ...] = (2, 4)) -> ExpertLoads:
    return ExpertLoads(COUNTS, np.array([8, 8]), np.array(layer_ids, np.int32))


def plan(layer_ids: tuple[int, ...] = (2, 4)) -> Placement:
    return Placement.initial(4, 0, 2, layer_ids)


def plan_of(layer_ids: list[int], experts: int) -> Placement:
    return Placement.initial(experts, 0, 2, layer_ids)


def test_figures_worked_out_by_hand() -> None:
    scored = score(plan(), loads())
    # Means 4 + 4 + 4, maxima 4 + 8 + 4; a (window, layer) without load has no ratio.
    assert scored.balancedness == 0.75
    assert scored.balancedness_of_mean == 0.75
    assert scored.per_layer == ((2, 1.0), (4, 0.5))
    assert scored.max_over_mean == pytest.approx(4 / 3, abs=1e-9)
    assert scored.max_over_mean_worst == 2.0
    assert (scored.windows, scored.tokens) == (2, 16)


def test_the_95th_percentile_is_of_all_windows_and_layers_with_load() -> None:
    order = np.random.default_rng(0).permutation(21)
    counts = np.zeros((21, 2, 2), np.int64)
    counts[:, 1] = np.stack([20 + order, 20 - order], 1)
    scored = score(plan_of([5, 9], 2), ExpertLoads(counts, np.zeros(21, np.int64), np.array([5, 9], np.int32)))
    # max / mean is 1 + t / 20; the layer without load has none.
    assert (scored.max_over_mean, scored.max_over_mean_p95, scored.max_over_mean_worst) == (1.5, 1.95, 2.0)


def test_rows_of_the_plan_meet_their_own_layers_loads() -> None:
    """The plan has layers 1, 4, 6, 9; the loads have 0, 4, 9: neither is a prefix of the other."""
    rows = np.array([[0, 1, 2, 3], [0, 2, 1, 3], [3, 2, 1, 0], [1, 2, 0, 3]], np.int32)
    placement = Placement(rows, np.array([1, 4, 6, 9], np.int32), 4, 2)
    counts = np.array([[[9, 9, 0, 0], [5, 1, 1, 5], [8, 4, 2, 6]], [[9, 9, 0, 0], [2, 2, 0, 0], [1, 1, 1, 1]]])
    scored = score(placement, ExpertLoads(counts, np.zeros(2, np.int64), np.array([0, 4, 9], np.int32)))
    # Layer 4 on ranks {0, 2}, {1, 3}: 6 | 6, 2 | 2. Layer 9 on ranks {1, 2}, {0, 3}: 6 | 14, 2 | 2.
    assert scored.per_layer == ((4, 1.0), (9, 0.75))
    assert scored.balancedness == round(20 / 24, 9)
    assert scored.warnings == (
        "the loads lack layers 1, 6, which the score leaves out",
        "the plan lacks layer 0, which the score leaves out",
    )


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


# Ranks 0, 1 | 2, 3 of two slots; experts 0 and 1 have copies.
SPREAD = np.array([[2, 0, 0, 1, 3, 0, 1, 4], [4, 0, 1, 2, 0, 3, 2, 1]], np.int32)


def spread(rule: str | None = None, nodes: int = 2) -> Placement:
    return Placement(SPREAD, np.array([3, 7], np.int32), 5, 4, nodes, Provenance(dispatch=rule))


def test_a_plan_is_scored_by_the_rule_asked_for_else_evenly() -> None:
    counts = np.array([[[8, 4, 1, 2, 3], [0, 0, 0, 0, 0]]])
    recorded = ExpertLoads(counts, np.array([18]), np.array([3, 7], np.int32))
    # SGLang on two nodes: 2 + 1, 2 + 2, 4 + 2, 2 + 3 (see test_dispatch_engines). Evenly: 3.67, 4.67, 4.67, 5.
    assert score(spread(), recorded, "sglang").per_layer[0] == (3, 0.75)
    assert score(spread(), recorded, "sglang").dispatch == "sglang"
    assert score(spread(), recorded).balancedness == pytest.approx(0.9, abs=1e-9)
    assert score(spread("sglang"), recorded) == score(spread(), recorded)


def test_layers_without_loads_still_take_part_in_sglangs_deal() -> None:
    rows = np.array([[0, 1, 2, 3, 0, 4, 0, 5]] * 5, np.int32)
    placement = Placement(rows, np.arange(5, dtype=np.int32), 6, 4)
    chosen = chosen_slots("sglang", rows, 6, 4, 1)
    for layer in range(5):
        one = ExpertLoads(np.array([[[4, 0, 0, 0, 0, 0]]]), np.array([4]), np.array([layer], np.int32))
        busiest = np.bincount(chosen[layer, 0] // 2).max()
        assert score(placement, one, "sglang").balancedness == 1 / busiest
