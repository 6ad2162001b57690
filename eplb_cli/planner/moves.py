"""Weights that must change rank when one placement follows another."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["moved_slots"]

IntArray = npt.NDArray[np.integer]


def moved_slots(previous: IntArray, placed: IntArray, ep_size: int) -> npt.NDArray[np.int64]:
    """Slots per layer whose expert was not on that rank before, int64 [L], from maps [L, P'] and [L, P].

    Copies count one by one; where within its rank an expert sits does not matter.
    """
    layers = placed.shape[0]
    experts = int(max(previous.max(initial=0), placed.max(initial=0))) + 1
    before, after = (_held(rows, ep_size, experts) for rows in (previous, placed))
    return np.maximum(after - before, 0).sum((1, 2)) if layers else np.zeros(0, np.int64)


def _held(rows: IntArray, ranks: int, experts: int) -> npt.NDArray[np.int64]:
    layers, slots = rows.shape
    rank = np.arange(slots) // (slots // ranks)
    held = np.zeros((layers, ranks, experts), np.int64)
    np.add.at(held, (np.arange(layers)[:, None], rank[None], rows), 1)
    return held
