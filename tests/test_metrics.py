"""Rank loads, balancedness and bounds on cases small enough to work out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_cli.errors import UsageError
from eplb_cli.metrics import (
    balancedness,
    balancedness_per_layer,
    initial_map,
    max_over_mean,
    rank_loads,
    rank_shares,
    replica_counts,
    require_table,
    smallest_redundancy,
)


@pytest.mark.parametrize(("experts", "ranks", "least"), [(128, 8, 0), (128, 12, 4), (256, 3, 2), (16, 5, 4)])
def test_the_smallest_redundancy_makes_slots_divide(experts: int, ranks: int, least: int) -> None:
    assert smallest_redundancy(experts, ranks) == least


def test_the_initial_map_repeats_the_first_experts_in_turn() -> None:
    assert initial_map(3, 4).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_copies_share_their_experts_load_equally() -> None:
    row = np.array([[0, 1, 0, 2]])
    loads = rank_loads(row, np.array([[[10, 4, 6]]]), 2)
    assert loads.tolist() == [[[9.0, 11.0]]]
    assert rank_shares(row, 3, 2)[0].tolist() == [[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]
    assert replica_counts(row, 3).tolist() == [[2, 1, 1]]


def test_two_copies_on_one_rank_serve_two_parts() -> None:
    """vLLM deals an expert's tokens to its copies in turn, wherever they are."""
    row = np.array([[2, 0, 1, 2, 2, 3]])
    assert rank_loads(row, np.array([[[10, 4, 9, 6]]]), 3).tolist() == [[[13.0, 7.0, 9.0]]]
    assert rank_loads(row, np.array([[[10, 4, 9, 6]]]), 2).tolist() == [[[17.0, 12.0]]]


def test_layers_have_their_own_rows_and_windows_their_own_loads() -> None:
    rows = np.array([[0, 1, 2, 0], [2, 1, 0, 1]])
    counts = np.array([[[4, 1, 2], [3, 8, 5]], [[6, 0, 1], [1, 2, 9]], [[0, 0, 0], [0, 0, 7]]])
    assert rank_loads(rows, counts, 2).tolist() == [
        [[3.0, 4.0], [9.0, 7.0]],
        [[3.0, 4.0], [10.0, 2.0]],
        [[0.0, 0.0], [7.0, 0.0]],
    ]
    assert rank_shares(rows, 3, 2)[1].tolist() == [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]]


def test_sizes_beyond_memory_are_refused() -> None:
    require_table(128, 1024, 1024, UsageError)
    with pytest.raises(UsageError, match="128 layers x 1,024 experts x 1,025 ranks"):
        require_table(128, 1024, 1025, UsageError)


def test_balancedness_sums_before_it_divides() -> None:
    # Two windows, one layer, two ranks: means 2 and 10, maxima 3 and 10. The ratio of sums is not the mean of ratios.
    loads = np.array([[[3.0, 1.0]], [[10.0, 10.0]]])
    assert balancedness(loads) == 12 / 13
    assert balancedness_per_layer(loads).tolist() == [12 / 13]
    assert max_over_mean(loads).tolist() == [[1.5], [1.0]]


def test_ranks_that_take_turns_are_not_balanced() -> None:
    loads = np.array([[[3.0, 1.0], [5.0, 5.0]], [[1.0, 3.0], [2.0, 6.0]]])
    assert balancedness_per_layer(loads).tolist() == [4 / 6, 9 / 11]
    assert balancedness(loads) == 13 / 17


def test_no_load_counts_as_balanced() -> None:
    loads = np.zeros((2, 3, 4))
    assert balancedness(loads) == 1.0
    assert balancedness_per_layer(loads).tolist() == [1.0] * 3
    assert max_over_mean(loads).tolist() == [[1.0] * 3] * 2
