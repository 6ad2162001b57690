"""Copies onto ranks: heaviest share first, lightest rank first, never two copies of an expert on one rank."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["pack"]

IntArray = npt.NDArray[np.int64]


def pack(loads: npt.NDArray[np.number], counts: IntArray, ep_size: int) -> IntArray:
    """A placement [L, P] of c copies of each expert on G ranks, from summed loads [L, E] and counts [L, E].

    Longest processing time first: experts by falling share w / c; the c copies of an expert go to the c lightest ranks
    that have room. A layer where that runs into a corner (fewer than c ranks have room) is packed again on the emptiest
    ranks first, which by the Gale-Ryser theorem always succeeds when c <= G.
    """
    placed, stuck = _pack(loads, counts, ep_size, emptiest_first=False)
    if stuck.any():
        placed[stuck], _ = _pack(loads[stuck], counts[stuck], ep_size, emptiest_first=True)
    return placed


def _pack(
    loads: npt.NDArray[np.number], counts: IntArray, ranks: int, *, emptiest_first: bool
) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    layers, experts = counts.shape
    room = int(counts[0].sum()) // ranks if layers else 0
    shares = loads / counts
    order = np.argsort(-shares, axis=1, kind="stable")
    slots = np.full((layers, ranks, room), -1, np.int64)
    rank_loads = np.zeros((layers, ranks))
    filled = np.zeros((layers, ranks), np.int64)
    stuck = np.zeros(layers, bool)
    layer = np.arange(layers)
    for step in range(experts):
        expert = order[:, step]
        copies = counts[layer, expert]
        share = shares[layer, expert]
        key = np.where(filled < room, rank_loads, np.inf)
        # lexsort's last key is the first criterion; both sorts are stable, so ties go to the lowest rank.
        deepest = int(copies.max(initial=0))
        if emptiest_first:
            chosen = np.lexsort((key, filled), axis=1)[:, :deepest]
        elif deepest == 1:
            chosen = key.argmin(1)[:, None]
        else:
            chosen = np.argsort(key, axis=1, kind="stable")[:, :deepest]
        at_layer, at_choice = np.nonzero(np.arange(deepest) < copies[:, None])
        rank = chosen[at_layer, at_choice]
        fits = filled[at_layer, rank] < room
        stuck[at_layer[~fits]] = True
        at_layer, rank = at_layer[fits], rank[fits]
        slots[at_layer, rank, filled[at_layer, rank]] = expert[at_layer]
        filled[at_layer, rank] += 1
        rank_loads[at_layer, rank] += share[at_layer]
    return slots.reshape(layers, ranks * room), stuck
