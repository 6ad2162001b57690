"""Proven bounds: against every placement of tiny cases, and against the linear program over all pairs of copies."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_cli.bounds import balancedness_bound, least_shares, pair_peaks, stock_bound
from eplb_cli.metrics import balancedness, initial_map, rank_loads

TOY = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])
"""A published example: its best placement of 16 slots on 8 ranks has a busiest rank of 196 2/3."""


def pairs_program(loads: np.ndarray, ranks: int) -> float:
    """The least T at which pairs of copies of size T, mixed in fractions, cover every expert with G pairs or fewer.

    One column for each pair of (expert, count): a copy of one of c covers 1 / c of its expert.
    """
    optimize = pytest.importorskip("scipy.optimize")
    experts = len(loads)
    items = [(e, c) for e in range(experts) for c in range(1, 2 * ranks - experts + 2)]
    low, high = max(loads.sum() / ranks, loads.max() / (2 * ranks)), 2.0 * loads.max() + loads.sum() / ranks
    while high / low > 1 + 1e-5:
        middle = (low * high) ** 0.5
        columns = []
        for (a, m), (b, n) in itertools.combinations_with_replacement(items, 2):
            if loads[a] / m + loads[b] / n <= middle:
                column = np.zeros(experts)
                column[a] += 1 / m
                column[b] += 1 / n
                columns.append(column)
        cover = np.array(columns).T if columns else np.zeros((experts, 1))
        solved = optimize.linprog(np.ones(cover.shape[1]), A_ub=-cover, b_ub=-np.ones(experts))
        feasible = solved.status == 0 and solved.fun <= ranks + 1e-7
        low, high = (low, middle) if feasible else (middle, high)
    return high


def test_a_hot_expert_caps_the_bound() -> None:
    # One expert holds 8 of 10 tokens; with 4 slots on 2 ranks it may have 2 copies of 4: below the mean of 5.
    assert balancedness_bound(np.array([[[8, 1, 1]]]), 4, 2) == pytest.approx(1.0)
    # Shares of whole counts need not be whole: two copies of 7 are 3.5 each, above the mean of 2.
    assert balancedness_bound(np.array([[[7, 1, 1, 1]]]), 5, 5) == pytest.approx(2 / 3.5)
    # Without a spare slot it stays whole on one rank.
    assert balancedness_bound(np.array([[[8, 1, 1, 0]]]), 4, 2) == pytest.approx(5 / 8, rel=1e-8)


def test_windows_and_layers_are_bounded_one_by_one() -> None:
    # Means 2, 4, 3, 6 on two ranks; the hottest experts cap at 3, 4 (mean), 5, 6 (mean).
    counts = np.array([[[3, 1, 0, 0, 0, 0], [2, 2, 2, 1, 1, 0]], [[5, 1, 0, 0, 0, 0], [2, 3, 2, 2, 2, 1]]])
    assert balancedness_bound(counts, 6, 2) == pytest.approx(15 / (3 + 4 + 5 + 6), rel=1e-12)
    assert least_shares(counts.astype(float), 6, 2).tolist() == [[3.0, 2.0], [5.0, 3.0]]
    assert least_shares(counts.astype(float), 8, 2).tolist() == [[1.5, 2.0], [2.5, 2.0]]


@settings(max_examples=60)
@given(
    st.sampled_from([(3, 2, 2), (4, 3, 2), (3, 2, 3), (3, 3, 1)]).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes),
            st.lists(st.lists(st.integers(0, 30), min_size=sizes[0], max_size=sizes[0]), min_size=1, max_size=3),
        )
    )
)
def test_no_placement_beats_the_bound(case: tuple[tuple[int, int, int], list[list[int]]]) -> None:
    (experts, ranks, room), windows = case
    counts = np.array(windows)[:, None, :]
    bound = balancedness_bound(counts, ranks * room, ranks)
    for row in itertools.product(range(experts), repeat=ranks * room):
        if len(set(row)) == experts:
            assert balancedness(rank_loads(np.array([row]), counts, ranks)) <= bound + 1e-12


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 30), min_size=4, max_size=4), min_size=1, max_size=3), st.sampled_from([2, 4]))
def test_no_relabelling_beats_the_bound_of_the_stock_map(windows: list[list[int]], redundant: int) -> None:
    counts = np.array(windows)[:, None, :]
    bound = stock_bound(counts, 4 + redundant, 2)
    for expert_at in itertools.permutations(range(4)):
        row = np.array(expert_at)[initial_map(4, redundant)]
        assert balancedness(rank_loads(row[None], counts, 2)) <= bound + 1e-12


def test_the_stock_map_cannot_give_a_hot_expert_a_third_copy() -> None:
    # 90 of 99 tokens on one expert, 12 slots on 4 ranks: free copies come to the mean, two fixed ones to 45.
    counts = np.array([[[90, 1, 1, 1, 1, 1, 1, 1, 1, 1]]])
    assert stock_bound(counts, 12, 4) == pytest.approx(99 / 4 / 45)
    assert balancedness_bound(counts, 12, 4) == pytest.approx(99 / 4 / 30)


def test_the_stock_bound_counts_every_window_and_layer() -> None:
    hot = [90, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    counts = np.array([[hot, hot[::-1]], [hot[::-1], [10] * 10]])
    assert stock_bound(counts, 12, 4) == pytest.approx((3 * 99 + 100) / 4 / (45 + 45 + 45 + 25))


def test_the_stock_bound_is_no_looser_than_that_of_any_placement() -> None:
    """Nine equal experts in pairs on eight ranks: two of them meet, whatever the labels."""
    counts = np.array([[[10] * 9 + [0] * 7]])
    best = 90 / 8 / 20
    assert best <= stock_bound(counts, 16, 8) == balancedness_bound(counts, 16, 8) <= 1.01 * best


def test_pairs_prove_more_than_shares_do() -> None:
    proven = pair_peaks(TOY, 8)[0]
    assert least_shares(TOY, 16, 8)[0] == 120.0
    assert 190 < proven <= 590 / 3


@pytest.mark.parametrize("seed", range(6))
def test_pairs_come_near_the_program_over_all_pairs_and_never_above_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = 6
    loads = np.exp(1.2 * rng.standard_normal(int(rng.integers(7, 11))))
    proven, program = pair_peaks(loads[None], ranks)[0], pairs_program(loads, ranks)
    assert proven <= program * (1 + 1e-5)
    assert proven >= 0.99 * program


def test_pairs_without_spare_slots_come_near_the_only_choice() -> None:
    # With one copy each, the best pairing puts the largest beside the smallest: 9 + 2, 7 + 3.
    assert 10.9 <= pair_peaks(np.array([[9.0, 7, 3, 2]]), 2)[0] <= 11.0


def test_pairs_of_a_layer_without_load_bound_nothing() -> None:
    assert pair_peaks(np.array([[0.0, 0, 0], [4, 2, 2]]), 2).tolist()[0] == 0.0


def test_pairs_prove_the_same_for_a_layer_alone() -> None:
    loads = np.random.default_rng(0).integers(1, 90, (3, 20)).astype(float)
    together = pair_peaks(loads, 12)
    assert [pair_peaks(row[None], 12)[0] for row in loads] == together.tolist()
