"""What the search needs of the windows, taken from them once.

All of it is exact integer arithmetic (in int64, or in float64 below 2**53), so that no order of summation, thread count
or BLAS can change a plan.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["gram", "merge_windows"]

IntArray = npt.NDArray[np.int64]

GRAM_BITS = 26
"""Bits of a normalised load. Sums of squares stay below 2**(2 * 26), hence exact in float64."""


def merge_windows(counts: IntArray, most: int) -> IntArray:
    """Loads [W, L, E] with consecutive windows summed until at most `most` are left; totals are kept."""
    windows = counts.shape[0]
    if windows <= most:
        return counts
    first = np.arange(most) * windows // most
    return np.add.reduceat(counts, first, axis=0)


def gram(counts: IntArray) -> npt.NDArray[np.float64]:
    """Second moments of the experts' loads over windows, float64 [L, E, E], from loads [W, L, E].

    C = sum_t w_t w_t^T / (n_t n), with n_t the load of window t in that layer and n the sum of n_t: each window weighs
    as much as the time it takes. The entries of C sum to 1.
    """
    by_layer = counts.transpose(1, 0, 2)
    window_total = by_layer.sum(-1)
    total = window_total.sum(-1)
    scale = np.sqrt(np.maximum(window_total, 1) * np.maximum(total, 1)[:, None].astype(np.float64))
    # Cauchy-Schwarz: a column of by_layer / scale has norm <= 1, so no sum of products exceeds 2**(2 * GRAM_BITS).
    scaled = np.rint(by_layer / scale[:, :, None] * 2.0**GRAM_BITS)
    moments: npt.NDArray[np.float64] = (scaled.transpose(0, 2, 1) @ scaled) * 2.0 ** (-2 * GRAM_BITS)
    return moments
