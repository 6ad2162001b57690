"""Bounds and plans against the exact optimum of small cases, by mixed-integer programming (HiGHS)."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_cli.bounds import balancedness_bound
from eplb_cli.planner.nodes import experts_by_node, strict_peaks
from eplb_cli.planner.search import search
from eplb_cli.planner.windows import Evidence, peaks

optimize = pytest.importorskip("scipy.optimize")


def least_peak(counts: np.ndarray, slots: int, ranks: int, home: np.ndarray | None = None) -> float:
    """The least sum over windows of the busiest rank's load, over all twin-free placements, for loads [W, E].

    x[e, c, g] = 1 when expert e has c copies and one is on rank g; y[e, c] = 1 when it has c copies; T[t] the peaks.
    With `home` [E], the node of each expert, ranks of other nodes are out (ranks in equal consecutive blocks).
    """
    windows, experts = counts.shape
    nx = experts * ranks * ranks

    def x(e: int, c: int, g: int) -> int:
        return (e * ranks + c - 1) * ranks + g

    def y(e: int, c: int) -> int:
        return nx + e * ranks + c - 1

    size = nx + experts * ranks + windows
    rows, low, high = [], [], []

    def add(terms: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(size)
        for index, value in terms.items():
            row[index] = value
        rows.append(row)
        low.append(least)
        high.append(most)

    choices = range(1, ranks + 1)
    for e in range(experts):
        add({y(e, c): 1.0 for c in choices}, 1, 1)
        for c in choices:
            add({**{x(e, c, g): 1.0 for g in range(ranks)}, y(e, c): -float(c)}, 0, 0)
    for g in range(ranks):
        add({x(e, c, g): 1.0 for e in range(experts) for c in choices}, slots // ranks, slots // ranks)
        for t in range(windows):
            terms = {x(e, c, g): counts[t, e] / c for e in range(experts) for c in choices}
            add({**terms, nx + experts * ranks + t: -1.0}, -np.inf, 0)
    upper = np.r_[np.ones(nx + experts * ranks), np.full(windows, np.inf)]
    if home is not None:
        per_node = ranks // (int(home.max()) + 1)
        for e in range(experts):
            for c in choices:
                for g in range(ranks):
                    if g // per_node != home[e]:
                        upper[x(e, c, g)] = 0.0
    found = optimize.milp(
        np.r_[np.zeros(nx + experts * ranks), np.ones(windows)],
        constraints=optimize.LinearConstraint(np.array(rows), low, high),
        integrality=np.r_[np.ones(nx + experts * ranks), np.zeros(windows)],
        bounds=optimize.Bounds(0, upper),
    )
    assert found.success
    return float(found.fun)


MISSED = {(0, 6): 1.0, (1, 6): 2.0, (2, 6): 5.5, (3, 6): 2.5}
"""Tokens by which the search misses the optimum of CASES, by seed and experts; it finds the others."""

CASES = [
    (seed, experts, slots, ranks) for seed in range(4) for experts, slots, ranks in ((5, 6, 3), (6, 8, 2), (4, 6, 3))
]


@pytest.mark.parametrize(("seed", "experts", "slots", "ranks"), CASES)
def test_the_optimum_lies_between_the_plan_and_the_bound(seed: int, experts: int, slots: int, ranks: int) -> None:
    counts = np.random.default_rng(seed).integers(1, 60, (3, experts))
    optimum = least_peak(counts, slots, ranks)
    mean = counts.sum() / ranks
    evidence = Evidence.of(counts[:, None], ranks)
    planned = float(peaks(evidence.windows, search(evidence, slots, ranks, "normal", 0), ranks)[0])
    assert mean / optimum <= balancedness_bound(counts[:, None], slots, ranks) + 1e-9
    assert planned - optimum == pytest.approx(MISSED.get((seed, experts), 0.0), abs=1e-6)


@pytest.mark.parametrize(("seed", "least", "bound"), [(0, 137.0, 128.0), (1, 139.5, 136.0), (2, 130.5, 127.0)])
def test_the_strict_bound_holds_for_the_best_strict_placement(seed: int, least: float, bound: float) -> None:
    counts = np.random.default_rng(seed).integers(1, 60, (2, 8))
    assert strict_peaks(counts[:, None], 12, 4, num_groups=4, num_nodes=2) == pytest.approx(bound)
    best = np.inf
    for other in (1, 2, 3):
        # Group 0 shares its node with one of the three others.
        home = np.repeat([0 if group in (0, other) else 1 for group in range(4)], 2)
        best = min(best, least_peak(counts, 12, 4, home))
    assert best == pytest.approx(least)


def test_experts_of_a_node_are_whole_groups_and_the_busiest_node_is_lightest() -> None:
    counts = np.array([[[8, 8, 1, 1, 7, 7, 2, 2]]])
    home = experts_by_node(counts, num_groups=4, num_nodes=2)
    assert home.tolist() == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_every_split_of_the_groups_is_tried() -> None:
    """Heaviest first ends at 7 and 5; 3 + 3 + 0 beside 2 + 2 + 2 is even."""
    home = experts_by_node(np.array([[[2, 3, 2, 0, 3, 2]]]), num_groups=6, num_nodes=2)
    assert sorted(map(sorted, home[0].tolist())) == [[0, 2, 5], [1, 3, 4]]


def test_too_many_splits_to_try_are_packed_heaviest_group_first() -> None:
    counts = np.random.default_rng(0).integers(1, 60, (2, 3, 64))
    home = experts_by_node(counts, num_groups=32, num_nodes=4)
    assert (np.sort(home.reshape(3, -1), -1) == np.arange(64)).all()
    assert strict_peaks(counts, 64, 8, num_groups=32, num_nodes=4) is None
