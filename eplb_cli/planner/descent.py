"""Descent by swaps on the variance of rank loads over windows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["swap_descent"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

LEAST_GAIN = 1e-9
"""A swap must lower Q by more than this; Q of a perfectly flat placement is 1 / G."""


def swap_descent(second_moments: FloatArray, placed: IntArray, ep_size: int, most_sweeps: int) -> IntArray:
    """A placement [L, P] that no swap of two slots improves, or the one reached after `most_sweeps` sweeps.

    Minimises Q = sum_g v_g^T C v_g, where v_g[e] is the part of expert e's load that rank g serves: the rank loads'
    second moment over windows, whose least value is that of equal loads in every window. With Y = V C kept, a swap of
    a on rank g and b on rank h costs O(1) whatever the number of windows:

        dQ = 2 ((Y_h[a] - Y_g[a]) / c_a - (Y_h[b] - Y_g[b]) / c_b)
           + 2 (C_aa / c_a^2 - 2 C_ab / (c_a c_b) + C_bb / c_b^2).

    A sweep visits every rank once and makes its best swap with any slot elsewhere. Copies are never brought together
    on one rank. All layers step at once; a layer without an improvement in a whole sweep is done.

    Args:
        second_moments: C [L, E, E] of `gram`.
        placed: the start [L, P], without twins.
    """
    layers = placed.shape[0]
    if ep_size == 1 or layers == 0:
        return placed
    result = placed.copy()
    active = np.arange(layers)
    state = _State(second_moments, placed, ep_size)
    for _ in range(most_sweeps):
        improved = np.zeros(len(active), bool)
        order = np.argsort(-state.rank_moments(), axis=1, kind="stable")
        for step in range(ep_size):
            improved |= state.best_swap(order[:, step])
        result[active] = state.placed
        if not improved.any():
            break
        if not improved.all():
            active = active[improved]
            state.keep(improved)
    return result


class _State:
    """Placements of the layers still at work, with Y and who is where."""

    def __init__(self, moments: FloatArray, placed: IntArray, ranks: int) -> None:
        layers, slots = placed.shape
        experts = moments.shape[1]
        self.ranks, self.room = ranks, slots // ranks
        self.moments = moments
        self.placed = placed.copy()
        self.rank_of_slot = np.arange(slots) // self.room
        layer = np.arange(layers)[:, None]
        copies = np.zeros((layers, experts))
        np.add.at(copies, (layer, placed), 1.0)
        self.inverse = 1.0 / copies
        weighted = moments * self.inverse[:, :, None]
        # Summed over the second-last axis, rank by rank: a fixed order, unlike a matrix product's.
        self.products = np.stack(
            [weighted[layer, placed[:, g * self.room : (g + 1) * self.room]].sum(1) for g in range(ranks)], axis=1
        )
        self.holds = np.zeros((layers, ranks, experts), bool)
        self.holds[layer, self.rank_of_slot[None], placed] = True

    def keep(self, mask: npt.NDArray[np.bool_]) -> None:
        for name in ("moments", "placed", "inverse", "products", "holds"):
            setattr(self, name, getattr(self, name)[mask])

    def rank_moments(self) -> FloatArray:
        """v_g^T C v_g, [layers, G]."""
        layers = len(self.placed)
        layer = np.arange(layers)[:, None]
        parts = self.products[layer, self.rank_of_slot[None], self.placed] * self.inverse[layer, self.placed]
        moments: FloatArray = parts.reshape(layers, self.ranks, self.room).transpose(2, 0, 1).sum(0)
        return moments

    def best_swap(self, rank: IntArray) -> npt.NDArray[np.bool_]:
        """Make the best improving swap of each layer's given rank; True where there was one."""
        layers, slots = self.placed.shape
        row = np.arange(layers)
        layer = row[:, None]
        own = rank[:, None] * self.room + np.arange(self.room)
        here = self.placed[layer, own]
        there = self.placed
        share_here = self.inverse[layer, here]
        share_there = self.inverse[layer, there]
        product = self.products[row, rank]
        diagonal = self.moments.diagonal(axis1=1, axis2=2)

        leave = (
            self.products[row[:, None, None], np.arange(self.ranks)[:, None], here[:, None, :]]
            - product[layer, here][:, None, :]
        ) * share_here[:, None, :]
        enter = (self.products[layer, self.rank_of_slot[None], there] - product[layer, there]) * share_there
        cross = self.moments[row[:, None, None], here[:, :, None], there[:, None, :]]
        cross *= share_there[:, None, :]
        cross *= 2.0 * share_here[:, :, None]
        change = np.repeat(leave.transpose(0, 2, 1), self.room, axis=2)
        change -= cross
        change += (diagonal[layer, there] * share_there**2 - enter)[:, None, :]
        change += (diagonal[layer, here] * share_here**2)[:, :, None]

        # A twin would arise where the other rank holds `here` already, or this rank holds `there`; own slots too.
        twin = np.repeat(
            self.holds[row[:, None, None], np.arange(self.ranks)[:, None], here[:, None, :]].transpose(0, 2, 1),
            self.room,
            axis=2,
        )
        twin |= self.holds[layer, rank[:, None], there][:, None, :]
        change[twin] = np.inf

        flat = change.reshape(layers, -1)
        best = flat.argmin(1)
        found: npt.NDArray[np.bool_] = flat[row, best] < -LEAST_GAIN
        at = np.flatnonzero(found)
        if at.size:
            self._swap(at, own[at, best[at] // slots], best[at] % slots)
        return found

    def _swap(self, at: IntArray, slot: IntArray, other: IntArray) -> None:
        a, b = self.placed[at, slot], self.placed[at, other]
        g, h = self.rank_of_slot[slot], self.rank_of_slot[other]
        moved = self.moments[at, a] * self.inverse[at, a][:, None] - self.moments[at, b] * self.inverse[at, b][:, None]
        self.products[at, g] -= moved
        self.products[at, h] += moved
        self.placed[at, slot], self.placed[at, other] = b, a
        self.holds[at, g, a] = self.holds[at, h, b] = False
        self.holds[at, g, b] = self.holds[at, h, a] = True
