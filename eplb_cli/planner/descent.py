"""Descent by swaps on the variance of rank loads over all windows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import replica_counts
from eplb_cli.planner.tournament import rounds

__all__ = ["LEAST_GAIN", "gram_descent"]

IntArray = npt.NDArray[np.int64]

LEAST_GAIN = 1e-6
"""A swap must lower the objective by more than this part of a squared mean rank load: well above float32's noise."""


def gram_descent(
    moments: npt.NDArray[np.float64],
    placed: IntArray,
    ep_size: int,
    most_sweeps: int,
    price: npt.NDArray[np.float32] | None = None,
) -> IntArray:
    """A placement [L, P] that no swap of two slots improves, or the one reached after `most_sweeps` sweeps.

    Minimises Q = sum_g v_g^T C v_g, where v_g[e] is the part of expert e's load that rank g serves: the second moment
    of rank loads over windows, whose least value is that of equal loads in every window. With Y = V C kept, a swap of a
    on rank g and b on rank h costs O(1) whatever the number of windows; with C in units of shares (over c_a c_b):

        dQ / 2 = (Y_h[a] - Y_g[a]) - (Y_h[b] - Y_g[b]) + C_aa - 2 C_ab + C_bb.

    Each pair of ranks makes its best swap of S x S, pair by pair of a tournament; a pair is looked at again only after
    one of its ranks changed. Copies are never brought together on one rank.

    Args:
        moments: C [L, E, E] of `gram`, times G^2, so that rank loads are in units of their mean.
        placed: the start [L, P], without twins.
        price: [L, G, E], added to Q / 2 for every expert that a rank holds; None for nothing.
    """
    layers, slots = placed.shape
    experts, room = moments.shape[1], slots // ep_size
    placed = placed.copy()
    layer = np.arange(layers)
    copies = replica_counts(placed, experts)
    # float32 halves the traffic; every step is elementwise or a sum in fixed order, so the result is reproducible.
    shares = (moments / copies[:, :, None] / copies[:, None, :]).astype(np.float32)
    diagonal = np.ascontiguousarray(shares.diagonal(axis1=1, axis2=2)).ravel()
    products = np.stack(
        [shares[layer[:, None], placed[:, g * room : (g + 1) * room]].sum(1) for g in range(ep_size)], 1
    ).reshape(layers * ep_size, experts)
    held = placed.reshape(layers * ep_size, room)
    holds = np.zeros((layers * ep_size, experts), bool)
    holds[np.arange(layers * ep_size)[:, None], held] = True
    flat_shares, flat_products, flat_holds = shares.ravel(), products.ravel(), holds.ravel()
    flat_price = None if price is None else price.ravel()
    unsettled = np.ones((layers, ep_size, ep_size), bool)
    for _ in range(most_sweeps):
        swapped = False
        for left, right in rounds(ep_size):
            at, pair = np.nonzero(unsettled[:, left, right])
            if not at.size:
                continue
            rank_g, rank_h = left[pair], right[pair]
            unsettled[at, rank_g, rank_h] = False
            g, h = at * ep_size + rank_g, at * ep_size + rank_h
            here, there = held[g], held[h]
            in_g, in_h, in_layer = (g * experts)[:, None], (h * experts)[:, None], (at * experts)[:, None]
            leave = flat_products[in_h + here] - flat_products[in_g + here] + diagonal[in_layer + here]
            enter = flat_products[in_h + there] - flat_products[in_g + there] - diagonal[in_layer + there]
            if flat_price is not None:
                leave += flat_price[in_h + here] - flat_price[in_g + here]
                enter += flat_price[in_h + there] - flat_price[in_g + there]
            change = flat_shares[((in_layer + here) * experts)[:, :, None] + there[:, None, :]]
            change *= np.float32(-2.0)
            change += leave[:, :, None]
            change -= enter[:, None, :]
            change[flat_holds[in_h + here]] = np.inf
            change.transpose(0, 2, 1)[flat_holds[in_g + there]] = np.inf
            flat = change.reshape(len(g), -1)
            best = flat.argmin(1)
            found = np.flatnonzero(flat[np.arange(len(g)), best] < -0.5 * LEAST_GAIN)
            if not found.size:
                continue
            swapped = True
            at, g, h, best = at[found], g[found], h[found], best[found]
            i, j = best // room, best % room
            a, b = held[g, i], held[h, j]
            moved = shares[at, a] - shares[at, b]
            products[g] -= moved
            products[h] += moved
            held[g, i], held[h, j] = b, a
            holds[g, a] = holds[h, b] = False
            holds[g, b] = holds[h, a] = True
            for rank in (rank_g[found], rank_h[found]):
                unsettled[at, rank, :] = True
                unsettled[at, :, rank] = True
        if not swapped:
            break
    return held.reshape(layers, slots)
