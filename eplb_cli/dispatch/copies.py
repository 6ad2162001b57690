"""The copies of every expert in a map, in the order in which they open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import replica_counts

__all__ = ["Copies"]

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Copies:
    """The copies of every expert in a map, primary first.

    The order is in the map itself: a rank's first slots are the primaries of experts, the slots after them hold spare
    copies in the order in which they open. An expert's copies are therefore sorted by their place on the rank, then by
    rank.

    Args:
        slots: int64 [X, E, C], physical slots, padded with the primary.
        count: int64 [X, E], copies.
        ep_size: G.
        num_slots: P.
    """

    slots: IntArray
    count: IntArray
    ep_size: int
    num_slots: int

    @classmethod
    def of(cls, physical_to_logical: npt.NDArray[np.integer], num_experts: int, ep_size: int) -> Self:
        """Of a map [X, P], which has every expert in every row."""
        rows, num_slots = physical_to_logical.shape
        count = replica_counts(physical_to_logical, num_experts)
        by_place = np.arange(num_slots).reshape(ep_size, -1).T.ravel()
        held = physical_to_logical[:, by_place]
        order = np.argsort(held, axis=1, kind="stable")
        first = np.cumsum(count, 1) - count
        copy = np.minimum(np.arange(int(count.max(initial=1)))[None, None], count[:, :, None] - 1)
        copy = np.where(np.arange(copy.shape[2]) < count[:, :, None], copy, 0)
        place = np.take_along_axis(order, (first[:, :, None] + copy).reshape(rows, -1), 1)
        return cls(by_place[place].reshape(copy.shape), count, ep_size, num_slots)

    @property
    def ranks(self) -> IntArray:
        """The rank of every copy, int64 [X, E, C]."""
        return self.slots // (self.num_slots // self.ep_size)

    def repeat(self, times: int) -> Copies:
        """Each row `times` times, one after the other."""
        return Copies(np.repeat(self.slots, times, 0), np.repeat(self.count, times, 0), self.ep_size, self.num_slots)
