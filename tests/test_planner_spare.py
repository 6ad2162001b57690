"""Plans for a choice by load: `eplb plan --dispatch balanced`."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from eplb_cli import ExpertLoads, Placement
from eplb_cli.dispatch import loads_under
from eplb_cli.errors import UsageError
from eplb_cli.metrics import balancedness
from eplb_cli.planner import PlanRequest, PlanResult, make_plan
from eplb_cli.planner.spare import with_spare_copies


def loads_of(counts: np.ndarray | list[list[list[int]]]) -> ExpertLoads:
    array = np.asarray(counts, np.int64)
    return ExpertLoads(array, array.sum(2).max(1), np.arange(array.shape[1], dtype=np.int32) + 3, top_k=1)


def skewed(seed: int, windows: int = 6, layers: int = 2, experts: int = 12) -> ExpertLoads:
    rng = np.random.default_rng(seed)
    rates = 300 * rng.lognormal(0.0, 0.9, (layers, experts)) * rng.lognormal(0.0, 0.3, (windows, layers, experts))
    return loads_of(rng.poisson(rates))


def planned(loads: ExpertLoads, ranks: int, redundant: int, **changes: object) -> PlanResult:
    request = PlanRequest(ranks, redundant, dispatch="balanced", effort="fast", folds=0)
    return make_plan(loads, replace(request, **changes))


def by_rank(placement: Placement, slots: slice = slice(None)) -> list[list[set[int]]]:
    """Experts in some of every rank's slots, by layer and rank."""
    rows = placement.physical_to_logical.reshape(placement.num_layers, placement.ep_size, -1)[:, :, slots]
    return [[set(rank.tolist()) for rank in row] for row in rows]


def test_the_first_slots_are_the_plan_without_copies() -> None:
    loads = skewed(1)
    without = make_plan(loads, PlanRequest(4, 0, effort="fast", folds=0)).placement
    assert by_rank(planned(loads, 4, 8).placement, slice(3)) == by_rank(without)


def test_copies_go_where_any_split_levels_the_ranks() -> None:
    # The primaries are 12 | 4 + 4; half of what 0 has too much goes to the other rank, and no other copy helps.
    result = planned(loads_of([[[12, 4, 4, 0]]]), 2, 2)
    assert result.balancedness.after == 1.0
    rows = result.placement.physical_to_logical[0]
    assert (rows == 0).sum() == 2


def test_the_copy_that_takes_most_opens_first() -> None:
    loads = skewed(9, layers=4, experts=16)
    placement = planned(loads, 4, 8).placement
    ranks = placement.physical_to_logical.reshape(4, 4, 6)
    whole = loads.counts.sum(0)
    first, second = (
        np.mean([whole[layer, expert] for layer in range(4) for expert in ranks[layer, :, place]]) for place in (4, 5)
    )
    assert first > second


def test_the_figures_are_those_of_the_choice_by_load_and_of_the_even_split() -> None:
    loads = skewed(2)
    result = planned(loads, 4, 8, folds=3)
    rows = result.placement.physical_to_logical
    assert result.balancedness.after == pytest.approx(balancedness(loads_under("balanced", rows, loads.counts, 4)))
    assert result.balancedness.even == pytest.approx(balancedness(loads_under("even", rows, loads.counts, 4)))
    assert result.balancedness.after > result.balancedness.even
    assert result.balancedness.held_out is not None
    provenance = Placement.from_json(result.placement.to_json()).provenance
    assert provenance.dispatch == "balanced"
    assert provenance.balancedness["even"] == result.balancedness.even
    assert result.as_dict()["dispatch"] == "balanced"


def test_a_choice_by_load_serves_its_plan_better_than_an_even_split_serves_its_own() -> None:
    loads = skewed(0, windows=8, layers=3, experts=32)
    even = make_plan(loads, PlanRequest(8, 8, effort="fast", folds=0)).balancedness.after
    assert planned(loads, 8, 8).balancedness.after > even + 0.02


def test_more_search_of_copies_is_no_worse() -> None:
    loads = skewed(5, windows=4, layers=3, experts=32)
    primaries = make_plan(loads, PlanRequest(8, 0, effort="fast", folds=0)).placement.physical_to_logical
    start = np.full((3, 8, 5), -1)
    start[:, :, :4] = primaries.reshape(3, 8, 4)
    found = []
    for level in ("fast", "normal"):
        rows = with_spare_copies(loads.counts, start.reshape(3, 40), 8, level, 0)
        found.append(balancedness(loads_under("balanced", rows, loads.counts, 8)))
    assert found[1] > found[0]


def test_a_layers_copies_do_not_depend_on_its_neighbours() -> None:
    loads = skewed(3, layers=3)
    alone = planned(loads.for_layers(np.array([4], np.int32)), 4, 4).placement.physical_to_logical[0]
    assert planned(loads, 4, 4).placement.physical_to_logical[1].tolist() == alone.tolist()


def test_another_seed_draws_another_search() -> None:
    loads = skewed(4, layers=4, experts=32)
    maps = {planned(loads, 8, 8, seed=seed).placement.physical_to_logical.tobytes() for seed in (0, 0, 1)}
    assert len(maps) == 2


@settings(max_examples=30)
@given(st.data())
def test_every_shape_has_every_expert_no_twins_and_a_bound_that_holds(data: st.DataObject) -> None:
    ranks, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 9))
    least = -experts % ranks
    most = experts * (ranks - 1)
    assume(least <= most)
    redundant = data.draw(st.sampled_from(range(least, most + 1, ranks)))
    row = st.lists(st.integers(0, 50), min_size=experts, max_size=experts).filter(lambda row: sum(map(bool, row)) > 1)
    counts = data.draw(st.lists(row, min_size=1, max_size=3))
    result = planned(loads_of([[row] for row in counts]), ranks, redundant)
    result.placement.require_distinct_copies(None)
    assert result.balancedness.after <= result.balancedness.bound + 1e-9


def lowest_peak(loads: np.ndarray, holds: np.ndarray) -> float:
    """The busiest rank under the best split, by linear program; `holds` [G, E]."""
    at = np.argwhere(holds)
    rank = np.zeros((holds.shape[0], len(at) + 1))
    rank[at[:, 0], np.arange(len(at))] = 1
    rank[:, -1] = -1
    whole = np.zeros((holds.shape[1], len(at) + 1))
    whole[at[:, 1], np.arange(len(at))] = 1
    return float(linprog(np.eye(len(at) + 1)[-1], rank, np.zeros(len(holds)), whole, loads).fun)


@pytest.mark.parametrize("counts", [[9, 1, 1, 1], [6, 5, 1, 0], [7, 7, 7, 1], [20, 3, 2, 1]])
def test_no_placement_of_a_small_case_is_above_the_bound(counts: list[int]) -> None:
    subsets = [set(pair) for pair in itertools.combinations(range(4), 3)]
    peaks = [
        lowest_peak(np.array(counts), np.array([[e in a for e in range(4)], [e in b for e in range(4)]]))
        for a in subsets
        for b in subsets
        if a | b == set(range(4))
    ]
    best = sum(counts) / 2 / min(peaks)
    result = planned(loads_of([[counts]]), 2, 2)
    assert best <= result.balancedness.bound + 1e-9
    assert result.balancedness.after <= best + 0.5 / min(peaks) + 1e-9  # whole tokens may round a peak up


def test_experts_that_do_not_divide_keep_every_primary_within_the_fewest_slots() -> None:
    loads = skewed(6, experts=10)
    placement = planned(loads, 4, 10).placement
    for row in by_rank(placement, slice(3)):
        assert set.union(*row) == set(range(10))


def test_few_moves_change_spare_copies_and_no_primaries() -> None:
    before = planned(skewed(8), 4, 8).placement
    loads = skewed(108)
    result = planned(loads, 4, 8, previous=before, max_moves=3)
    assert result.moves is not None
    assert 0 < result.moves <= 3
    assert by_rank(result.placement, slice(3)) == by_rank(before, slice(3))
    stay = balancedness(loads_under("balanced", before.physical_to_logical, loads.counts, 4))
    assert result.balancedness.after > stay + 0.01


def test_home_nodes_are_refused() -> None:
    with pytest.raises(UsageError, match="--node-policy strict with --dispatch balanced"):
        planned(skewed(8), 4, 4, node_policy="strict", num_groups=4, num_nodes=2)
