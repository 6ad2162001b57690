"""Sums over steps: right to what is stated, in memory that the number of steps does not change."""

from __future__ import annotations

import tracemalloc

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from eplb_cli.replay.tally import MOST_STRETCHES, Ratios, Stretches, Tally


@given(st.lists(st.floats(1.0, 1024.0), min_size=1, max_size=200), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_percentiles_are_right_to_the_stated_share(values: list[float], share: float) -> None:
    ratios = Ratios()
    for value in values:
        ratios.add(value)
    exact = float(np.quantile(values, share))
    assert abs(ratios.quantile(share) - exact) <= 1e-4 * exact
    assert ratios.worst == max(values)


def test_percentiles_of_many_steps_that_are_alike_are_right_to_the_stated_share() -> None:
    values = 1 + np.random.default_rng(0).exponential(0.05, 5000)
    ratios = Ratios()
    for value in values.tolist():
        ratios.add(value)
    for share in (0.01, 0.3, 0.5, 0.95, 0.99):
        exact = float(np.quantile(values, share))
        assert abs(ratios.quantile(share) - exact) <= 1e-4 * exact


@given(st.lists(st.sampled_from([1.0, 1.25, 1.5, 2.0]), min_size=1), st.floats(0.0, 1.0))
def test_percentiles_of_ratios_that_are_far_apart_are_exact(values: list[float], share: float) -> None:
    ratios = Ratios()
    for value in values:
        ratios.add(value)
    assert abs(ratios.quantile(share) - float(np.quantile(values, share))) <= 1e-12


@given(st.integers(1, 400))
@example(MOST_STRETCHES)
@example(MOST_STRETCHES + 1)
@example(4 * MOST_STRETCHES + 1)
def test_stretches_are_few_and_of_equal_length_and_lose_no_step(number_of_steps: int) -> None:
    steps = np.random.default_rng(number_of_steps).integers(1, 50, (number_of_steps, 2)).tolist()
    stretches = Stretches()
    for number, (mean, over) in enumerate(steps, 1):
        stretches.add(number, mean, mean + over)
    first = stretches.first_steps
    assert len(first) == len(stretches.balancedness()) <= MOST_STRETCHES
    width = first[1] - first[0] if len(first) > 1 else 1
    assert len(steps) == 1 or width == 1 or len(first) > MOST_STRETCHES // 2
    assert first == list(range(1, len(steps) + 1, width))
    for start, value in zip(first, stretches.balancedness(), strict=True):
        part = steps[start - 1 : start - 1 + width]
        mean = sum(mean for mean, _ in part)
        assert abs(value - mean / (mean + sum(over for _, over in part))) < 1e-8


def test_memory_does_not_grow_with_the_steps() -> None:
    rng = np.random.default_rng(0)
    tally, active = Tally(), np.ones((1, 2), np.int64)
    held = []
    tracemalloc.start()
    for steps in (20_000, 40_000):
        for number, share in enumerate(rng.integers(1000, 2000, steps) / 2000, 1):
            tally.add(number, np.array([[1 + share, 1 - share]]), active, 0)
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[1] - held[0] < 20_000  # a list of the ratios takes 1.3 MB more


def test_a_step_without_tokens_is_perfectly_balanced() -> None:
    tally = Tally()
    tally.add(1, np.zeros((1, 2)), np.zeros((1, 2), np.int64), 0)
    assert (tally.ratios.worst, tally.stretches.balancedness()) == (1.0, (1.0,))
