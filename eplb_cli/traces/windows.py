"""Windows of counts in bounded memory: neighbours merge, two by two, once there are too many to keep apart."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["BUDGET_BYTES", "TOKEN_BUDGET_BYTES", "WindowStore"]

BUDGET_BYTES = 128 << 20
"""Counts of recorded steps kept at most; beyond it neighbours merge."""
TOKEN_BUDGET_BYTES = 64 << 20
"""The same for windows cut from per-token traces, whose size is ours to choose."""


class WindowStore:
    """Counts of consecutive windows, int64 [capacity, L, E].

    Args:
        layers, experts: L and E.
        limit: most windows kept; an append beyond it first halves their number by merging neighbours.
            None keeps all.
    """

    def __init__(self, layers: int, experts: int, limit: int | None) -> None:
        self.limit = limit
        # Zeroed pages take no memory until written, so a bounded store is as large as it may become from the start.
        self._counts = np.zeros((limit or 64, layers, experts), np.int64)
        self._tokens = np.zeros(len(self._counts), np.int64)
        self._ids = np.zeros(len(self._counts), np.int64)
        self._used = 0
        self.merged = 1
        """Recorded windows in each kept one."""
        self._filled = 0
        """Recorded windows in the last kept one."""

    def append(self, counts: npt.NDArray[np.int64], tokens: int, window_id: int) -> None:
        """Add a window after the last."""
        if self._used and self._filled < self.merged:
            self._counts[self._used - 1] += counts
            self._tokens[self._used - 1] += tokens
            self._filled += 1
            return
        if self.limit is not None and self._used == self.limit:
            self._halve()
            self.append(counts, tokens, window_id)
            return
        if self._used == len(self._counts):
            self._grow()
        self._counts[self._used] = counts
        self._tokens[self._used] = tokens
        self._ids[self._used] = window_id
        self._used += 1
        self._filled = 1

    def _grow(self) -> None:
        for name in ("_counts", "_tokens", "_ids"):
            old = getattr(self, name)
            new = np.zeros((2 * self._used, *old.shape[1:]), np.int64)
            new[: self._used] = old
            setattr(self, name, new)

    def _halve(self) -> None:
        pairs, odd = divmod(self._used, 2)
        for i in range(pairs):  # in place: a copy of the counts would double the memory
            self._counts[i] = self._counts[2 * i] + self._counts[2 * i + 1]
            self._tokens[i] = self._tokens[2 * i] + self._tokens[2 * i + 1]
            self._ids[i] = self._ids[2 * i]
        if odd:
            for array in (self._counts, self._tokens, self._ids):
                array[pairs] = array[2 * pairs]
        self._used = pairs + odd
        self._filled = self._filled if odd else self.merged + self._filled
        self.merged *= 2

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """counts [W, L, E], tokens [W], window ids [W]."""
        return self._counts[: self._used], self._tokens[: self._used], self._ids[: self._used]
