"""The search: what it minimises, what it never does, and that nothing but the request decides its result."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_cli.metrics import rank_loads
from eplb_cli.planner.counts import window_aware_counts
from eplb_cli.planner.descent import gram_descent
from eplb_cli.planner.packing import pack
from eplb_cli.planner.polish import Polisher
from eplb_cli.planner.recount import recount
from eplb_cli.planner.request import EFFORTS
from eplb_cli.planner.search import Level, refine, search
from eplb_cli.planner.stock import STOCK_SWEEPS, stock_map
from eplb_cli.planner.tournament import over_layers, rounds
from eplb_cli.planner.windows import MOST_WINDOWS, Evidence, gram, peaks, spread


def traffic(windows: int = 24, layers: int = 20, experts: int = 32, seed: int = 0) -> np.ndarray:
    """Loads [W, L, E] of four topics whose shares wander."""
    rng = np.random.default_rng(seed)
    topics = rng.lognormal(0.0, 0.8, (4, layers, experts))
    mix = rng.dirichlet(np.ones(4), windows)
    return rng.poisson(500 * np.einsum("wk,kle->wle", mix, topics)).astype(np.int64)


def exact_peaks(placed: np.ndarray, counts: np.ndarray, ranks: int) -> np.ndarray:
    return rank_loads(placed, counts, ranks).max(-1).sum(0)


@pytest.mark.parametrize("ranks", [2, 3, 8, 9])
def test_a_tournament_pairs_all_ranks_once_and_each_rank_once_a_round(ranks: int) -> None:
    seen = set()
    for left, right in rounds(ranks):
        assert len({*left.tolist(), *right.tolist()}) == 2 * len(left)
        seen |= {frozenset(pair) for pair in zip(left.tolist(), right.tolist(), strict=True)}
    assert len(seen) == ranks * (ranks - 1) // 2


def test_all_windows_are_looked_at_where_they_are_few() -> None:
    assert spread(10, 10).tolist() == list(range(10))


def test_one_window_of_each_stretch_is_looked_at() -> None:
    edges = np.arange(65) * 1000 // 64
    assert ((edges[:-1] <= spread(1000, 64)) & (spread(1000, 64) < edges[1:])).all()


@pytest.mark.parametrize("period", [2, 3, 4, 8, 16, 64])
def test_no_rhythm_of_the_traffic_is_met_at_one_beat_only(period: int) -> None:
    met = np.bincount(spread(2048, 512) % period, minlength=period)
    assert met.min() >= 0.75 * 512 / period
    assert met.max() <= 1.5 * 512 / period


def fine_windows(windows: int) -> np.ndarray:
    """Two groups of experts, hot in turns from one window to the next, [W, 2, 16]."""
    rng = np.random.default_rng(3)
    hot = np.where((np.arange(16) < 8)[None] == (np.arange(windows) % 2 == 0)[:, None], 90, 10)
    return rng.poisson(hot[:, None] * rng.uniform(0.5, 1.5, (2, 16)))


@pytest.mark.parametrize("windows", [65, 500, 1500])
def test_effort_pays_however_many_windows_there_are(windows: int) -> None:
    counts = fine_windows(windows)
    evidence = Evidence.of(counts, 4)
    planned = [peaks(counts, search(evidence, 20, 4, effort, 0), 4).sum() for effort in EFFORTS]
    # 2 % for the windows that were not looked at one by one.
    assert planned[1] <= planned[0] * (1.0 if windows <= MOST_WINDOWS else 1.02)
    assert planned[2] <= planned[1] * (1.0 if windows <= MOST_WINDOWS else 1.02)


def test_second_moments_are_exact_whatever_the_order_of_summation() -> None:
    counts = traffic(windows=33)
    shuffled = counts[np.random.default_rng(1).permutation(33)]
    first, second = (gram(x, x.sum(2)) for x in (counts, shuffled))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first.sum((1, 2)), 1.0, atol=1e-6)


@settings(max_examples=50)
@given(st.integers(2, 9), st.integers(2, 6), st.integers(0, 20), st.integers(0, 99))
def test_packing_never_makes_twins_and_fills_every_rank(experts: int, ranks: int, more: int, seed: int) -> None:
    slots = experts + -experts % ranks + ranks * more
    slots = min(slots, experts * ranks)
    counts = np.random.default_rng(seed).integers(0, 40, (3, 4, experts))
    copies = window_aware_counts(counts, slots, ranks)
    assert (copies.sum(1) == slots).all()
    assert copies.min() >= 1
    assert copies.max() <= ranks
    placed = pack(counts.sum(0), copies, ranks).reshape(4, ranks, -1)
    assert placed.min() >= 0
    assert (np.diff(np.sort(placed, -1), axis=-1) > 0).all()


def test_copies_follow_windows_not_sums() -> None:
    # Expert 0 is as hot as 1 in sum, but all in one window: that window waits for it.
    counts = np.array([[[80, 20, 10]], [[0, 60, 10]]])
    assert window_aware_counts(counts, 4, 2)[0].tolist() == [2, 1, 1]


def test_gram_descent_lowers_the_variance_of_rank_loads_and_ends_where_no_swap_does() -> None:
    counts = traffic(layers=3)
    evidence = Evidence.of(counts, 4)
    start = np.tile(np.arange(32), (3, 1))
    settled = gram_descent(evidence.moments, start, 4, 100)

    def variance(placed: np.ndarray) -> np.ndarray:
        loads = rank_loads(placed, counts, 4)
        return ((loads - loads.mean(-1, keepdims=True)) ** 2 / np.maximum(loads.mean(-1, keepdims=True), 1)).sum((0, 2))

    assert (variance(settled) < variance(start)).all()
    best = variance(settled)
    for i in range(0, 32, 5):
        for j in range(32):
            other = settled.copy()
            other[:, [i, j]] = other[:, [j, i]]
            assert (variance(other) >= best * (1 - 1e-4)).all()


def test_the_polish_lowers_the_peaks_that_descent_leaves() -> None:
    counts = traffic()
    evidence = Evidence.of(counts, 8)
    settled = gram_descent(evidence.moments, np.tile(np.arange(32), (20, 1)), 8, 100)
    polisher = Polisher(evidence.windows, evidence.window_means, settled, 8)
    polisher.descend(30)
    assert exact_peaks(polisher.placed, counts, 8).sum() < exact_peaks(settled, counts, 8).sum()
    # The loads that it keeps by increments are those of the placement that it reports.
    expected = rank_loads(polisher.placed, counts, 8) / rank_loads(polisher.placed, counts, 8).mean(-1, keepdims=True)
    np.testing.assert_allclose(polisher.loads.reshape(20, 8, -1), expected.transpose(1, 2, 0), atol=1e-3)


def test_a_tie_for_a_copy_goes_to_counts_that_split_evenly() -> None:
    # A third copy of expert 1 and a second one of expert 2 would do the same.
    assert window_aware_counts(np.array([[[7, 2, 1]]]), 8, 4)[0].tolist() == [4, 2, 2]


@pytest.mark.parametrize("effort", ["fast", "normal"])
def test_two_slots_a_rank_reach_the_proven_optimum_that_greedy_copies_miss(effort: Level) -> None:
    counts = np.array([[[600, 560, 120, 120, 20, 10, 10, 10]]])
    evidence = Evidence.of(counts, 8)
    greedy = pack(evidence.totals, window_aware_counts(counts, 16, 8), 8)
    assert exact_peaks(greedy, counts, 8)[0] == pytest.approx(232)
    for seed in range(5):
        placed = search(evidence, 16, 8, effort, seed)
        assert exact_peaks(placed, counts, 8)[0] == pytest.approx(560 / 3 + 10)


def test_one_slot_a_rank_searches_the_copies_too() -> None:
    counts = np.random.default_rng(1).integers(1, 90, (4, 20, 6))
    evidence = Evidence.of(counts, 12)
    greedy = pack(evidence.totals, window_aware_counts(counts, 12, 12), 12)
    searched = search(evidence, 12, 12, "fast", 0)
    assert (exact_peaks(searched, counts, 12) <= exact_peaks(greedy, counts, 12) + 1e-9).all()
    assert exact_peaks(searched, counts, 12).sum() < exact_peaks(greedy, counts, 12).sum() - 1


@settings(max_examples=25)
@given(
    st.sampled_from([(4, 8, 32), (4, 4, 32), (8, 8, 24), (2, 2, 6), (3, 9, 6), (8, 8, 8)]),
    st.sampled_from([1, 2, 12]),
    st.sampled_from([0.1, 0.6, 1.6]),
    st.sampled_from(["fast", "settled", "normal"]),
    st.integers(0, 99),
)
def test_no_layer_is_worse_than_under_the_stock_map_at_the_same_effort(
    shape: tuple[int, int, int], windows: int, skew: float, effort: Level, seed: int
) -> None:
    ranks, redundant, experts = shape
    rng = np.random.default_rng(seed)
    rates = rng.lognormal(0.0, skew, (2, experts)) * rng.lognormal(0.0, 0.3, (windows, 2, experts))
    counts = rng.poisson(50 * rates) + 1
    evidence = Evidence.of(counts, ranks)
    stock = stock_map(evidence.totals, evidence.moments, experts + redundant, ranks, STOCK_SWEEPS[effort])
    placed = search(evidence, experts + redundant, ranks, effort, 0)
    assert (exact_peaks(placed, counts, ranks) <= exact_peaks(stock, counts, ranks) * (1 + 1e-9)).all()


def test_peaks_agree_with_rank_loads() -> None:
    counts = traffic()
    evidence = Evidence.of(counts, 8)
    placed = search(evidence, 40, 8, "fast", 0)
    np.testing.assert_allclose(peaks(evidence.windows, placed, 8), exact_peaks(placed, counts, 8))


@pytest.mark.parametrize(("slots", "ranks"), [(32, 8), (40, 8), (40, 20)])
def test_each_effort_is_no_worse_than_the_one_before_in_any_layer(slots: int, ranks: int) -> None:
    counts = traffic(layers=6)
    evidence = Evidence.of(counts, ranks)
    fast, normal, thorough = (
        exact_peaks(search(evidence, slots, ranks, effort, 0), counts, ranks)
        for effort in ("fast", "normal", "thorough")
    )
    assert (normal <= fast + 1e-6).all()
    assert (thorough <= normal + 1e-6).all()
    assert thorough.sum() < fast.sum()


def test_threads_and_neighbouring_layers_do_not_change_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = traffic(layers=24)
    evidence = Evidence.of(counts, 8)
    many = []
    for processors in (1, 2, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, n=processors: set(range(n)))
        many.append(search(evidence, 40, 8, "normal", 5))
    np.testing.assert_array_equal(many[0], many[1])
    np.testing.assert_array_equal(many[0], many[2])
    alone = search(Evidence.of(counts[:, :1], 8), 40, 8, "normal", 5)
    np.testing.assert_array_equal(many[0][:1], alone)


def test_neighbouring_layers_do_not_change_searched_copies() -> None:
    counts = traffic(layers=5, windows=4)
    start = pack(counts.sum(0), window_aware_counts(counts, 40, 20), 20)
    together = recount(counts, start, 20, 200_000, 0)
    assert (together != start).any()
    for layer in range(5):
        alone = recount(counts[:, layer : layer + 1], start[layer : layer + 1], 20, 200_000, 0)
        np.testing.assert_array_equal(alone[0], together[layer])


def test_layers_are_split_over_threads_and_joined_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    slices = []

    def work(rows: slice) -> np.ndarray:
        slices.append(rows)
        return np.arange(rows.start, rows.stop)

    assert over_layers(work, 30).tolist() == list(range(30))
    assert len(slices) == 3


def test_searched_copies_are_never_twins_nor_more_than_ranks() -> None:
    """Ten slots on five ranks: more copies of expert 2 than ranks, or two on a rank, would look best."""
    windows, start = np.array([[[22, 3, 1828, 495]]]), np.array([[2, 3, 2, 3, 2, 3, 2, 0, 2, 1]])
    placed = recount(windows, start, 5, 10**7, 2)
    by_rank = np.sort(placed.reshape(5, 2), 1)
    assert (by_rank[:, 0] != by_rank[:, 1]).all()
    # 530.6 at the start: five copies of expert 2, three of expert 3. Now expert 3 whole, beside a quarter of expert 1.
    assert exact_peaks(placed, windows, 5)[0] == pytest.approx(495 + 3 / 4, rel=1e-12)


def test_the_seed_decides_the_annealing() -> None:
    evidence = Evidence.of(traffic(), 8)
    first, again, other = (search(evidence, 40, 8, "normal", seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_a_price_keeps_experts_where_they_are() -> None:
    counts = traffic()
    evidence = Evidence.of(counts, 8)
    start = np.tile(np.arange(32), (20, 1))
    price = np.ones((20, 8, 32), np.float32)
    price[:, np.arange(32) // 4, np.arange(32)] = 0.0
    for scale, stays in ((100.0, True), (0.0, False)):
        placed = refine(evidence, start, 8, "settled", 0, price=price * np.float32(scale))
        assert (np.sort(placed.reshape(20, 8, 4), -1) == start.reshape(20, 8, 4)).all() == stays
