"""What the search needs of the windows, taken from them once.

All of it is exact integer arithmetic (in int64, or in float64 below 2**53), so that no order of summation, thread count
or BLAS can change a plan.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import replica_counts

__all__ = ["Evidence", "gram", "peaks", "spread"]

IntArray = npt.NDArray[np.int64]

MOST_WINDOWS = 512
"""Windows T that decide copies, the polish and which placement is better; of more, these are spread evenly over them.
Sums of neighbours would not do: a rank's busy and idle windows cancel in them."""
GRAM_BITS = 26
"""Bits of a normalised load. Sums of squares stay below 2**(2 * 26), hence exact in float64."""


def spread(windows: int, most: int) -> IntArray:
    """Indices of at most `most` windows, one of each of as many equal stretches.

    Their places within the stretches follow the golden ratio, so that no rhythm of the traffic, such as prefill and
    decode in turns, is always met at the same beat.
    """
    if windows <= most:
        return np.arange(windows)
    edges = np.arange(most + 1) * windows // most
    part = np.arange(most) * 0x9E3779B9 % 2**32
    chosen: IntArray = edges[:-1] + (np.diff(edges) * part >> 32)
    return chosen


def gram(counts: IntArray, window_total: IntArray) -> npt.NDArray[np.float64]:
    """Second moments of the experts' loads over windows, float64 [X, E, E], from loads [W, X, E] and n_t [W, X].

    C = sum_t w_t w_t^T / (n_t n), with n_t the load of window t in that layer and n the sum of n_t: each window weighs
    as much as the time it takes. With all experts of the layer in the row, the entries of C sum to 1.
    """
    _, rows, experts = counts.shape
    moments = np.empty((rows, experts, experts))
    # Row by row, so that thousands of windows are never copied as a whole.
    for row in range(rows):
        in_window = window_total[:, row]
        scale = np.sqrt(np.maximum(in_window, 1) * float(max(int(in_window.sum()), 1)))
        # Cauchy-Schwarz: a column of loads / scale has norm <= 1, so no sum of products exceeds 2**(2 * GRAM_BITS).
        scaled = np.rint(counts[:, row] / scale[:, None] * 2.0**GRAM_BITS)
        moments[row] = scaled.T @ scaled
    return moments * 2.0 ** (-2 * GRAM_BITS)


@dataclass(frozen=True, eq=False)
class Evidence:
    """The loads of X rows (a layer each, or a node's share of a layer) in the forms that the search reads.

    Args:
        totals: int64 [X, E], loads summed over windows.
        windows: int64 [T, X, E], MOST_WINDOWS windows at most.
        window_means: float64 [T, X], mean rank load of the whole layer in each of them.
        moments: float64 [X, E, E], C of `gram` over all windows, times G^2: rank loads in units of their mean.
    """

    totals: IntArray
    windows: IntArray
    window_means: npt.NDArray[np.float64]
    moments: npt.NDArray[np.float64]

    @classmethod
    def of(cls, counts: IntArray, ep_size: int) -> Evidence:
        """Of whole layers, from loads [W, L, E] and the ranks G they are spread over."""
        windows = counts if len(counts) <= MOST_WINDOWS else counts[spread(len(counts), MOST_WINDOWS)]
        moments = gram(counts, counts.sum(2)) * float(ep_size) ** 2
        return cls(counts.sum(0), windows, windows.sum(2) / ep_size, moments)

    def of_nodes(self, experts_by_node: IntArray) -> Evidence:
        """Of each node by itself, in rows layer by layer, from the experts [L, M, E / M] that live there."""
        layers, nodes, experts = experts_by_node.shape
        layer = np.arange(layers)[:, None, None]
        rows = layers * nodes
        picked = self.moments[
            np.arange(layers)[:, None, None, None], experts_by_node[:, :, :, None], experts_by_node[:, :, None, :]
        ]
        return Evidence(
            self.totals[layer, experts_by_node].reshape(rows, experts),
            self.windows[:, layer, experts_by_node].reshape(-1, rows, experts),
            np.repeat(self.window_means, nodes, axis=1),
            picked.reshape(rows, experts, experts),
        )


def peaks(windows: IntArray, placed: IntArray, ep_size: int, nodes: int = 1) -> npt.NDArray[np.float64]:
    """Sum over windows of the busiest rank's load, [L], from loads [T, X, E] and maps [X, P]; X = L x nodes rows.

    Slots are summed one after the other, in an order that never changes.
    """
    rows, slots = placed.shape
    shares = windows / replica_counts(placed, windows.shape[2])
    row = np.arange(rows)[:, None]
    held = placed.reshape(rows, ep_size, slots // ep_size)
    loads = shares[:, row, held[:, :, 0]]
    for slot in range(1, slots // ep_size):
        loads += shares[:, row, held[:, :, slot]]
    busiest: npt.NDArray[np.float64] = loads.reshape(len(loads), rows // nodes, nodes * ep_size).max(2).sum(0)
    return busiest
