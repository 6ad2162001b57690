"""eplb's run-time policy: what it remembers, what it moves, and when it leaves things alone."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_cli.dispatch import loads_under
from eplb_cli.metrics import balancedness, initial_map, rank_loads
from eplb_cli.planner.rebalancing import RING_WINDOWS, Rebalancer

LAYERS, EXPERTS, REDUNDANT, RANKS = 3, 16, 8, 4
SLOTS = EXPERTS + REDUNDANT
START = np.tile(initial_map(EXPERTS, REDUNDANT), (LAYERS, 1))


def skewed(seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return (random.dirichlet(np.full(EXPERTS, 0.3), LAYERS) * 1e5).astype(np.int64)


def figure(rows: np.ndarray, *windows: np.ndarray) -> float:
    return balancedness(rank_loads(rows, np.stack(windows), RANKS))


def steady(windows: int, seed: int = 0) -> np.ndarray:
    """Windows of about 20,000 tokens of one kind of traffic, [W, L, E]."""
    random = np.random.default_rng(seed)
    shares = np.random.default_rng(9).dirichlet(np.full(EXPERTS, 2.0), LAYERS)
    return np.stack([[random.multinomial(20_000, row) for row in shares] for _ in range(windows)])


def pairs(first: tuple[int, int], second: tuple[int, int], tokens: int = 1000) -> list[np.ndarray]:
    """Two windows of four experts: in each a pair is busy, and the other one idle."""
    windows = np.zeros((2, 1, 4), np.int64)
    windows[0, 0, list(first)] = tokens
    windows[1, 0, list(second)] = tokens
    return list(windows)


def test_experts_that_are_busy_together_are_kept_apart() -> None:
    """0 with 2, then 1 with 3: each window alone and their sum are as well served by {0, 1} and {2, 3} as by others."""
    policy = Rebalancer(2, max_moves=4, min_gain=0.0)
    live = np.array([[0, 2, 1, 3]], np.int32)
    for _ in range(2):
        for window in pairs((0, 2), (1, 3)):
            live = policy.rebalance(window, live)
    assert balancedness(rank_loads(live, np.stack(pairs((0, 2), (1, 3))), 2)) == 1.0


def test_a_window_is_forgotten_when_the_ring_is_full() -> None:
    """Whatever came first, RING_WINDOWS later two policies answer alike."""
    later = [skewed(seed) for seed in range(RING_WINDOWS)]
    answers = []
    for first in (skewed(100), skewed(101) * 1000):
        policy = Rebalancer(RANKS, max_moves=LAYERS * SLOTS, min_gain=1.0)
        for window in (first, *later[:-1]):
            policy.rebalance(window, START)
        policy.min_gain = 0.0
        answers.append(policy.rebalance(later[-1], START))
    assert np.array_equal(*answers) and not np.array_equal(answers[0], START)


def test_a_window_still_counts_while_the_ring_holds_it() -> None:
    answers = []
    for first in (skewed(100), skewed(101) * 10_000):
        policy = Rebalancer(RANKS, max_moves=LAYERS * SLOTS, min_gain=1.0)
        for window in (first, *(skewed(seed) for seed in range(RING_WINDOWS - 2))):
            policy.rebalance(window, START)
        policy.min_gain = 0.0
        answers.append(policy.rebalance(skewed(50), START))
    assert not np.array_equal(*answers)


def test_a_lasting_change_of_traffic_is_followed_within_a_few_windows() -> None:
    """Twenty windows of the old traffic do not outvote four of the new."""
    old, new = skewed(1), skewed(2)
    policy = Rebalancer(RANKS, max_moves=LAYERS * SLOTS)
    live = START
    for window in [old] * 20 + [new] * 4:
        live = policy.rebalance(window, live)
    assert figure(live, new) > 0.9


def test_memory_is_bounded_by_the_ring() -> None:
    policy = Rebalancer(RANKS, max_moves=LAYERS * SLOTS, min_gain=1.0)
    for window in steady(RING_WINDOWS + 3):
        policy.rebalance(window, START)
    assert sum(window.nbytes for window in policy._ring) == 32 * LAYERS * EXPERTS * 8


@pytest.mark.parametrize("max_moves", [3, 5, 20])
def test_few_slots_move(max_moves: int) -> None:
    new = Rebalancer(RANKS, max_moves=max_moves, min_gain=0.0).rebalance(skewed(), START)
    assert 0 < int((new != START).sum()) <= max_moves
    assert figure(new, skewed()) > figure(START, skewed())


def test_a_twentieth_of_the_slots_moves_unless_told_otherwise() -> None:
    new = Rebalancer(RANKS, min_gain=0.0).rebalance(skewed(), START)
    assert 0 < int((new != START).sum()) <= LAYERS * SLOTS // 20


def test_the_first_move_from_a_start_that_is_no_plan_has_no_budget_and_later_ones_have() -> None:
    policy = Rebalancer(RANKS, starts_planned=False, max_moves=3, min_gain=0.0)
    first = policy.rebalance(skewed(), START)
    assert int((first != START).sum()) > 3 and figure(first, skewed()) > 0.9
    second = policy.rebalance(skewed(7), first)
    assert 0 < int((second != first).sum()) <= 3


def test_the_move_without_a_budget_is_not_lost_on_a_window_that_moves_nothing() -> None:
    policy = Rebalancer(RANKS, starts_planned=False, max_moves=3)
    even = np.full((LAYERS, EXPERTS), 100)
    even[:, :REDUNDANT] *= 2  # what vLLM's initial layout is best for
    assert np.array_equal(policy.rebalance(even, START), START)
    assert int((policy.rebalance(skewed(), START) != START).sum()) > 3


def test_small_gains_are_left_alone() -> None:
    assert np.array_equal(Rebalancer(RANKS, min_gain=1.0).rebalance(skewed(), START), START)


def test_steady_traffic_moves_nothing_once_it_is_planned_for() -> None:
    policy = Rebalancer(RANKS, starts_planned=False)
    windows = steady(40)
    live = START
    for window in windows[:8]:
        live = policy.rebalance(window, live)
    settled = live
    for window in windows[8:]:
        live = policy.rebalance(window, live)
        assert np.array_equal(live, settled)
    assert figure(live, *windows[8:]) > 0.95


def test_a_layer_without_load_in_the_window_stays() -> None:
    policy = Rebalancer(RANKS, starts_planned=False, min_gain=1.0)
    policy.rebalance(skewed(), START)
    policy.min_gain = 0.0
    window = skewed()
    window[1] = 0
    new = policy.rebalance(window, START)
    assert np.array_equal(new[1], START[1]) and not np.array_equal(new[0], START[0])


def test_traffic_that_is_all_on_one_expert_moves_nothing() -> None:
    """vLLM's monolithic kernels record this where they record nothing."""
    window = np.zeros((LAYERS, EXPERTS), np.int64)
    window[:, 0] = 1000
    assert np.array_equal(Rebalancer(RANKS, starts_planned=False, min_gain=0.0).rebalance(window, START), START)


TWINS = np.array([0, 0, 1, 2, 3, 3, 4, 5], np.int32)
"""Ranks {0, 0, 1, 2} and {3, 3, 4, 5}: vLLM's policy may leave two copies on one rank."""


def of_six(*tokens: int) -> np.ndarray:
    return np.array([[layer, 1, 1, layer, 1, 1] for layer in tokens], np.int64)


def test_mending_twins_counts_like_any_other_change() -> None:
    """Each of three layers has two of them; the budget is for two layers."""
    live = np.tile(TWINS, (3, 1))
    new = Rebalancer(2, max_moves=4, min_gain=0.0).rebalance(of_six(70, 80, 90) * [9, 1, 1, 1, 1, 1], live)
    assert 0 < int((new != live).sum()) <= 4


def test_twins_are_mended_first_where_that_gains_most_per_changed_slot() -> None:
    live = np.tile(TWINS, (3, 1))
    new = Rebalancer(2, max_moves=2, min_gain=0.0).rebalance(of_six(20, 30, 9000) * [9, 1, 1, 1, 1, 1], live)
    assert np.array_equal(new[:2], live[:2])
    assert balancedness(rank_loads(new[2:], (of_six(9000) * [9, 1, 1, 1, 1, 1])[None], 2)) > 0.9


def test_gains_are_judged_by_the_rule_in_force() -> None:
    """An even split would be served better by other copies; a choice by load gives each rank the same as it is."""
    live = np.array([[1, 4, 2, 3, 0, 4, 3, 5]], np.int32)
    loads = np.array([[90, 70, 60, 50, 60, 90]], np.int64)
    assert balancedness(loads_under("balanced", live, loads[None], 2)) == 1.0
    assert not np.array_equal(Rebalancer(2, starts_planned=False).rebalance(loads, live), live)
    assert np.array_equal(Rebalancer(2, starts_planned=False, dispatch="balanced").rebalance(loads, live), live)
