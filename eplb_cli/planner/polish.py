"""Descent and annealing by swaps, on a smooth stand-in for the busiest rank of every window.

The load of the busiest rank, summed over windows, is what a step waits for; but the exact maximum of the windows at
hand is not that of windows to come, whose rank loads differ by about as much as rank loads differ now. So each rank's
load x[t, g] (in means of its window) counts by

    phi(x) = max(0, 1 + beta (x - 1) / 8)^8 / beta^2,    Phi = sum_t m_t sum_g phi(x[t, g]) / sum_t m_t,

an exponential's polynomial cousin: near the variance for small beta, near the maximum for large. beta = 1.5 / sigma,
with sigma the spread of the rank loads at the start, leaves it soft on the scale of what is not known. The eighth power
takes products only, which every machine rounds alike.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import replica_counts
from eplb_cli.planner.tournament import rounds

__all__ = ["Polisher"]

IntArray = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]

ONE = np.float32(1.0)
SOFTNESS = 1.5
LEAST_BETA, MOST_BETA = 4.0, 1000.0
LEAST_GAIN = 1e-7
"""A swap must lower Phi by more than this."""
EXACT_CANDIDATES = 2
"""Swaps per pair of ranks that are judged exactly, out of the S x S that a second-order estimate ranks."""
NOISE_BITS = 16


class Polisher:
    """Layers' placements with their slots' loads, and the searches on Phi.

    Args:
        windows: loads [T, L, E].
        window_means: mean rank load m [T, L]; of the whole layer even where `windows` are one node's experts.
        placed: the start [L, P], without twins; copied.
        ep_size: ranks G.
        first_row: number of the first layer among all, so that noise does not depend on how layers are spread.
        price: [L, G, E], added to Phi for every expert that a rank holds.
    """

    def __init__(
        self,
        windows: IntArray,
        window_means: npt.NDArray[np.float64],
        placed: IntArray,
        ep_size: int,
        *,
        first_row: int = 0,
        price: Float32 | None = None,
    ) -> None:
        layers, slots = placed.shape
        experts = windows.shape[2]
        self.layers, self.ranks, self.room, self.first_row = layers, ep_size, slots // ep_size, first_row
        self.held = placed.copy().reshape(layers * ep_size, self.room)
        means = np.maximum(window_means, 1e-9)
        whole = np.ascontiguousarray((windows / means[:, :, None]).transpose(1, 2, 0), np.float32)
        shares = whole / replica_counts(placed, experts).astype(np.float32)[:, :, None]
        self.weights: Float32 = (window_means / np.maximum(window_means.sum(0), 1e-9)).T.astype(np.float32)
        self.slot_loads: Float32 = shares[np.arange(layers)[:, None], placed].reshape(layers * ep_size, self.room, -1)
        self.loads: Float32 = self.slot_loads.sum(1)
        self.holds = np.zeros((layers * ep_size, experts), bool)
        self.holds[np.arange(layers * ep_size)[:, None], self.held] = True
        self.price = None if price is None else price.reshape(layers * ep_size, experts)
        self.beta = self._softness()

    def _softness(self) -> Float32:
        by_layer = self.loads.reshape(self.layers, self.ranks, -1)
        variance = np.einsum("lgt,lt->l", (by_layer - ONE) ** 2, self.weights) / self.ranks
        self.variance = np.maximum(variance.astype(np.float64), 1e-12)
        beta: Float32 = np.clip(SOFTNESS / np.sqrt(self.variance), LEAST_BETA, MOST_BETA).astype(np.float32)
        return beta

    @property
    def placed(self) -> IntArray:
        """The placement reached, [L, P]."""
        return self.held.reshape(self.layers, -1).copy()

    def descend(self, most_sweeps: int) -> None:
        """Make every pair's best swap that lowers Phi, until none does or after `most_sweeps` sweeps."""
        unsettled = np.ones((self.layers, self.ranks, self.ranks), bool)
        for _ in range(most_sweeps):
            swapped = False
            for left, right in rounds(self.ranks):
                at, pair = np.nonzero(unsettled[:, left, right])
                if not at.size:
                    continue
                rank_g, rank_h = left[pair], right[pair]
                unsettled[at, rank_g, rank_h] = False
                found = self._swap_pairs(at, rank_g, rank_h)
                swapped |= bool(found.size)
                for rank in (rank_g[found], rank_h[found]):
                    unsettled[at[found], rank, :] = True
                    unsettled[at[found], :, rank] = True
            if not swapped:
                break

    def anneal(self, sweeps: int, seed: int, hottest: float = 0.25, coldest: float = 0.01) -> None:
        """Sweeps in which pairs also make swaps that raise Phi by about the temperature, which falls geometrically.

        Temperatures are in parts of the variance of rank loads. Each pair draws a swap by the estimate plus Gumbel
        noise, which is a draw by its Boltzmann weight, and makes it by Metropolis' rule on the exact change.
        """
        noise = _Noise(seed)
        pairings = rounds(self.ranks)
        layer = np.arange(self.layers)
        steps = sweeps * len(pairings)
        scale = self.variance.astype(np.float32)
        for step in range(steps):
            left, right = pairings[step % len(pairings)]
            at = np.repeat(layer, len(left))
            rank_g, rank_h = np.tile(left, self.layers), np.tile(right, self.layers)
            heat = np.float32(hottest * (coldest / hottest) ** (step / steps)) * scale[at]
            self._swap_pairs(at, rank_g, rank_h, heat, noise.offsets(self.first_row + at, step, rank_g), noise)

    def _swap_pairs(
        self,
        at: IntArray,
        rank_g: IntArray,
        rank_h: IntArray,
        heat: Float32 | None = None,
        offsets: IntArray | None = None,
        noise: _Noise | None = None,
    ) -> IntArray:
        """Make at most one swap in each of n disjoint pairs of ranks; indices of the pairs that made one."""
        room = self.room
        g, h = at * self.ranks + rank_g, at * self.ranks + rank_h
        row = np.arange(len(g))
        step = (self.beta[at] * np.float32(0.125))[:, None]
        weights = self.weights[at]
        load_g, load_h, slots_g, slots_h = self.loads[g], self.loads[h], self.slot_loads[g], self.slot_loads[h]
        scale = np.float32(64.0) * step[:, 0] ** 2
        here, there = self.held[g], self.held[h]
        if room == 2 and heat is None and self.price is None:
            # The other two of the four swaps lead to the same two ranks under each other's names: nothing to rank.
            change = np.zeros((len(g), 2, 2), np.float32)
            change[:, 1] = np.inf
            before = _eighth(load_g, step) + _eighth(load_h, step)
        else:
            change, before = _second_order(load_g, load_h, slots_g, slots_h, step, weights)
        if self.price is not None:
            change += (self.price[h[:, None], here] - self.price[g[:, None], here])[:, :, None] * scale[:, None, None]
            change -= (self.price[h[:, None], there] - self.price[g[:, None], there])[:, None] * scale[:, None, None]
        change[self.holds[h[:, None], here]] = np.inf
        change.transpose(0, 2, 1)[self.holds[g[:, None], there]] = np.inf
        flat = change.reshape(len(g), -1)
        if heat is None or noise is None or offsets is None:
            few = min(EXACT_CANDIDATES, flat.shape[1])
            chosen = np.argpartition(flat, few - 1, axis=1)[:, :few]
            allowed = -LEAST_GAIN * scale
        else:
            flat -= noise.gumbel(offsets, flat.shape[1]) * (heat * scale)[:, None]
            chosen = flat.argmin(1)[:, None]
            allowed = noise.exponential(offsets) * heat * scale
        i, j = chosen // room, chosen % room
        shift = slots_g[row[:, None], i] - slots_h[row[:, None], j]
        after = _eighth(load_g[:, None] - shift, step[:, None]) + _eighth(load_h[:, None] + shift, step[:, None])
        after -= before[:, None]
        exact = np.einsum("nct,nt->nc", after, weights)
        if self.price is not None:
            a, b = here[row[:, None], i], there[row[:, None], j]
            gg, hh = g[:, None], h[:, None]
            paid = self.price[hh, a] - self.price[gg, a] + self.price[gg, b] - self.price[hh, b]
            exact += paid * scale[:, None]
        exact[np.isinf(flat[row[:, None], chosen])] = np.inf
        best = exact.argmin(1)
        found = np.flatnonzero(exact[row, best] < allowed)
        best = best[found]
        self._swap(g[found], h[found], i[found, best], j[found, best], shift[found, best])
        return found

    def _swap(self, g: IntArray, h: IntArray, i: IntArray, j: IntArray, shift: Float32) -> None:
        self.loads[g] -= shift
        self.loads[h] += shift
        self.slot_loads[g, i], self.slot_loads[h, j] = self.slot_loads[h, j], self.slot_loads[g, i]
        a, b = self.held[g, i], self.held[h, j]
        self.held[g, i], self.held[h, j] = b, a
        self.holds[g, a] = self.holds[h, b] = False
        self.holds[g, b] = self.holds[h, a] = True


def _second_order(
    load_g: Float32, load_h: Float32, slots_g: Float32, slots_h: Float32, step: Float32, weights: Float32
) -> tuple[Float32, Float32]:
    """What each swap of a slot of g with one of h does to Phi, to second order, [n, S, S]; and phi of both now, [n, T].

    In units of 1 / beta^2, like phi = y^8, whose derivatives by x are 8 step y^7 and 56 step^2 y^6.
    """
    y_g, y_h = _base(load_g, step), _base(load_h, step)
    square_g, square_h = y_g * y_g, y_h * y_h
    sixth_g, sixth_h = square_g * square_g * square_g, square_h * square_h * square_h
    slope = (sixth_h * y_h - sixth_g * y_g) * weights * (np.float32(8.0) * step)
    curvature = (sixth_g + sixth_h) * weights * (np.float32(28.0) * step * step)
    curved_g = slots_g * curvature[:, None]
    leave = np.einsum("nit,nt->ni", slots_g, slope) + np.einsum("nit,nit->ni", curved_g, slots_g)
    enter = np.einsum("nit,nt->ni", slots_h, slope) - np.einsum("nit,nit,nt->ni", slots_h, slots_h, curvature)
    change = np.einsum("nit,njt->nij", curved_g, slots_h)
    change *= np.float32(-2.0)
    change += leave[:, :, None]
    change -= enter[:, None, :]
    return change, sixth_g * square_g + sixth_h * square_h


def _base(loads: Float32, step: Float32) -> Float32:
    base: Float32 = np.maximum((loads - ONE) * step + ONE, 0)
    return base


def _eighth(loads: Float32, step: Float32) -> Float32:
    y = _base(loads, step)
    y *= y
    y *= y
    y *= y
    return y


class _Noise:
    """Reproducible noise by position: the same for a layer, round and pair wherever and whenever it is computed."""

    def __init__(self, seed: int) -> None:
        uniform = np.random.default_rng(seed).random(1 << NOISE_BITS)
        exponential = -np.log1p(-uniform)
        self._exponential = exponential.astype(np.float32)
        self._gumbel = (-np.log(np.maximum(exponential, 1e-300))).astype(np.float32)

    def offsets(self, rows: IntArray, step: int, ranks: IntArray) -> IntArray:
        key = (rows * 1_000_003 + step) * 1_009 + ranks
        mixed = key.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(64 - NOISE_BITS)).astype(np.int64)

    def gumbel(self, offsets: IntArray, width: int) -> Float32:
        drawn: Float32 = self._gumbel[(offsets[:, None] + np.arange(width)) & ((1 << NOISE_BITS) - 1)]
        return drawn

    def exponential(self, offsets: IntArray) -> Float32:
        # Far from the stretch that the Gumbel noise of the same pair reads.
        drawn: Float32 = self._exponential[(offsets + (1 << (NOISE_BITS - 1))) & ((1 << NOISE_BITS) - 1)]
        return drawn
