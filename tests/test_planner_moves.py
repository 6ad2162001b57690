"""From a plan in force to a better one."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import balancedness, rank_loads
from eplb_cli.placement import Placement
from eplb_cli.planner import PlanRequest, make_plan
from eplb_cli.planner.moves import keep_slots, match_ranks, moved_slots
from tests.test_planner_search import traffic


def loads_from(counts: np.ndarray) -> ExpertLoads:
    return ExpertLoads(counts, counts[:, 0].sum(-1), np.arange(counts.shape[1], dtype=np.int32))


def test_moves_count_copies_that_a_rank_did_not_hold() -> None:
    previous, placed = np.array([[0, 1, 2, 0]]), np.array([[1, 2, 0, 0]])
    # Rank 0 gains 2; rank 1 has one copy of 0 already and gains another.
    assert moved_slots(previous, placed, 2).tolist() == [2]


def test_matching_ranks_undoes_a_renumbering() -> None:
    rng = np.random.default_rng(0)
    previous = np.stack([rng.permutation(24) for _ in range(5)])
    renumbered = previous.reshape(5, 6, 4)[:, rng.permutation(6)].reshape(5, 24)
    assert moved_slots(previous, match_ranks(previous, renumbered, 6), 6).sum() == 0


def test_matching_ranks_comes_close_to_the_best_assignment() -> None:
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(1)
    previous, placed = (np.stack([rng.permutation(64) for _ in range(8)]) for _ in range(2))
    kept = 64 - moved_slots(previous, match_ranks(previous, placed, 8), 8)
    for layer in range(8):
        shared = [
            [
                len(set(previous[layer, 8 * i : 8 * i + 8].tolist()) & set(placed[layer, 8 * j : 8 * j + 8].tolist()))
                for j in range(8)
            ]
            for i in range(8)
        ]
        rows, columns = optimize.linear_sum_assignment(shared, maximize=True)
        assert kept[layer] >= 0.85 * np.array(shared)[rows, columns].sum()


def test_experts_that_stay_keep_their_slots() -> None:
    assert keep_slots(np.array([[3, 1, 0, 2]]), np.array([[1, 0, 2, 3]]), 2).tolist() == [[0, 1, 3, 2]]


@pytest.fixture(scope="module")
def earlier() -> Placement:
    return make_plan(loads_from(traffic(windows=32)[:16]), PlanRequest(8, 8, folds=0)).placement


def plan_after(earlier: Placement, counts: np.ndarray, most_moves: int | None) -> tuple[int, float]:
    result = make_plan(loads_from(counts), PlanRequest(8, 8, folds=0, previous=earlier, max_moves=most_moves))
    assert result.moves is not None
    assert result.placement.twins() == []
    assert result.curve is not None
    assert list(result.curve.balancedness) == sorted(result.curve.balancedness)
    return result.moves, result.balancedness.after


def test_no_moves_means_the_plan_in_force(earlier: Placement) -> None:
    counts = traffic(windows=32)[16:]
    result = make_plan(loads_from(counts), PlanRequest(8, 8, folds=0, previous=earlier, max_moves=0))
    np.testing.assert_array_equal(result.placement.physical_to_logical, earlier.physical_to_logical)


def test_more_moves_never_make_it_worse_and_the_limit_is_kept(earlier: Placement) -> None:
    counts = traffic(windows=32)[16:]
    limits = [0, 20, 80, 300, None]
    found = [plan_after(earlier, counts, limit) for limit in limits]
    for (moves, _), limit in zip(found, limits, strict=True):
        assert limit is None or moves <= limit
    values = [value for _, value in found]
    assert values == sorted(values)
    assert values[-1] > values[0]


def test_a_budget_that_is_a_point_of_the_curve_is_used_up(earlier: Placement) -> None:
    loads = loads_from(traffic(windows=32)[16:])
    free = make_plan(loads, PlanRequest(8, 8, folds=0, effort="fast", previous=earlier)).curve
    assert free is not None and len(free.moves) > 4
    for most in (free.moves[2], free.moves[4]):
        result = make_plan(loads, PlanRequest(8, 8, folds=0, effort="fast", previous=earlier, max_moves=most))
        assert result.moves == most


def test_in_steady_traffic_few_moves_reach_the_quality_of_a_plan_from_scratch() -> None:
    recorded = traffic(windows=160)
    earlier = make_plan(loads_from(recorded[:64]), PlanRequest(8, 8, folds=0)).placement
    counts, later = recorded[48:112], recorded[112:]
    slots = earlier.num_slots * earlier.num_layers
    few = make_plan(loads_from(counts), PlanRequest(8, 8, folds=0, previous=earlier, max_moves=int(0.15 * slots)))
    scratch = make_plan(loads_from(counts), PlanRequest(8, 8, folds=0))
    held_out = [balancedness(rank_loads(result.placement.physical_to_logical, later, 8)) for result in (few, scratch)]
    assert held_out[0] >= 0.995 * held_out[1]


def test_after_a_shift_of_traffic_the_plan_follows(earlier: Placement) -> None:
    counts = traffic(windows=32, seed=9)
    kept = balancedness(rank_loads(earlier.physical_to_logical, counts, 8))
    _, value = plan_after(earlier, counts, None)
    assert value > kept + 0.05


def test_twins_of_a_plan_in_force_are_cleared_away() -> None:
    counts = traffic(layers=2)
    earlier = make_plan(loads_from(counts), PlanRequest(4, 32, strategy="deepseek", folds=0)).placement
    result = make_plan(loads_from(counts), PlanRequest(4, 32, folds=0, previous=earlier))
    assert earlier.twins()
    assert result.placement.twins() == []


def test_held_out_figures_with_a_previous_plan_are_of_plans_that_start_from_it(earlier: Placement) -> None:
    counts = traffic(windows=32)[16:]
    result = make_plan(loads_from(counts), PlanRequest(8, 8, folds=2, effort="fast", previous=earlier, max_moves=0))
    assert result.balancedness.held_out == result.balancedness.after


def test_layers_that_the_new_loads_lack_stay_as_they_were(earlier: Placement) -> None:
    counts = traffic(windows=32)[16:, :18]
    result = make_plan(loads_from(counts), PlanRequest(8, 8, folds=0, effort="fast", previous=earlier))
    assert result.placement.num_layers == 20
    np.testing.assert_array_equal(result.placement.physical_to_logical[18:], earlier.physical_to_logical[18:])
    assert any("the previous plan's layers 18, 19: they stay as they were" in warning for warning in result.warnings)
