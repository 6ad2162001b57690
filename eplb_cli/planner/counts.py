"""How many copies each expert gets."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["window_aware_counts"]

IntArray = npt.NDArray[np.int64]


def window_aware_counts(windows: IntArray, num_slots: int, ep_size: int) -> IntArray:
    """Copies of each expert, int64 [L, E], summing to P, from loads [T, L, E].

    Greedy on sum_t max_e w[t, e] / c[e]: every window credits the holder of its largest share with the drop of the
    maximum if the holder had one copy more; the largest credit takes the next copy. With one window this is the
    reference's rule, which is optimal for it. No expert gets more copies than ranks. Ties go to an expert that comes to
    2, 4, 8, ... copies, over which vLLM's hash splits tokens evenly, then to the lowest id.
    """
    loads = windows.transpose(1, 0, 2).astype(np.float64)
    layers, num_windows, experts = loads.shape
    counts = np.ones((layers, experts), np.int64)
    shares = loads.copy()
    layer = np.arange(layers)[:, None]
    window = np.arange(num_windows)[None]
    top, runner_up = np.zeros((2, layers, num_windows), np.int64)
    changed = np.ones((layers, num_windows), bool)
    for _ in range(num_slots - experts):
        # A copy more changes one expert's share, and the order only of windows where it came first or second.
        top[changed], runner_up[changed] = _largest_two(shares[changed])
        largest = shares[layer, window, top]
        second = np.where(runner_up == top, 0.0, shares[layer, window, runner_up])
        next_share = loads[layer, window, top] / (counts[layer, top] + 1)
        credit = np.zeros((layers, experts))
        np.add.at(credit, (layer, top), largest - np.maximum(second, next_share))
        credit[counts >= ep_size] = -1.0
        winner = _first_largest(credit, counts)
        # Where all credit is nil (ties at the top, or none but full experts there) the largest mean share takes it.
        stuck = np.flatnonzero(credit[layer[:, 0], winner] <= 0.0)
        if stuck.size:
            mean_share = np.where(counts[stuck] < ep_size, loads[stuck].sum(1) / counts[stuck], -1.0)
            winner[stuck] = _first_largest(mean_share, counts[stuck])
        counts[layer[:, 0], winner] += 1
        shares[layer, window, winner[:, None]] = (
            loads[layer, window, winner[:, None]] / counts[layer[:, 0], winner][:, None]
        )
        changed = (top == winner[:, None]) | (runner_up == winner[:, None])
    return counts


def _largest_two(shares: npt.NDArray[np.float64]) -> tuple[IntArray, IntArray]:
    """Indices of the largest and the second largest of each row, the same where a row has one entry."""
    row = np.arange(len(shares))
    first = shares.argmax(1)
    shares[row, first] = -1.0
    return first, shares.argmax(1)


def _first_largest(values: npt.NDArray[np.float64], counts: IntArray) -> IntArray:
    """Index of the largest value of each row; among equals one whose next count is a power of two, then the lowest."""
    even = counts & (counts + 1) == 0
    largest = values == values.max(1, keepdims=True)
    best: IntArray = (largest * (1 + even)).argmax(1)
    return best
