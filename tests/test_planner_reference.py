"""The deepseek strategy gives the reference's placement, and vLLM's."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_cli.planner.reference import deepseek_map

README_LOADS = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ]
)
"""The worked example of the public reference: 2 layers, 12 experts in 4 groups, 16 slots, 8 ranks on 2 nodes."""


def test_the_references_worked_example() -> None:
    assert deepseek_map(README_LOADS, 16, 8, num_groups=4, num_nodes=2).tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]


def test_ties_go_to_the_lowest_ids_and_twins_are_kept() -> None:
    # Copies go to 0 and 1; then 2, 3 (share 1), 0, 1, 0, 1 (share 1/2) are packed in turn.
    assert deepseek_map(np.ones((1, 4)), 6, 2).tolist() == [[2, 0, 0, 3, 1, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_vllms_own_policy_gives_the_same_map(seed: int) -> None:
    torch = pytest.importorskip("torch")
    policy = pytest.importorskip("vllm.distributed.eplb.policy.default").DefaultEplbPolicy
    rng = np.random.default_rng(seed)
    for _ in range(50):
        nodes = int(rng.choice([1, 2, 4]))
        groups = nodes * int(rng.integers(1, 4))
        experts = groups * int(rng.integers(2, 9))
        ranks = nodes * int(rng.integers(1, 5))
        slots = experts + -experts % ranks + ranks * int(rng.integers(0, 3))
        # Continuous loads: two equal shares, which sorts may order either way, do not occur.
        loads = rng.lognormal(0.0, 1.0, (int(rng.integers(1, 6)), experts)).astype(np.float32)
        theirs = policy.rebalance_experts(torch.from_numpy(loads), slots, groups, nodes, ranks).numpy()
        np.testing.assert_array_equal(deepseek_map(loads, slots, ranks, groups, nodes), theirs)
