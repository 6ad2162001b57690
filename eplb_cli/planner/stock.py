"""The best relabelling for an engine whose map is fixed: slots [0..E-1], then copies of experts 0..R-1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import initial_map, rank_shares
from eplb_cli.planner.descent import LEAST_GAIN
from eplb_cli.planner.tournament import over_layers

__all__ = ["STOCK_SWEEPS", "stock_map"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

STOCK_SWEEPS = {"fast": 2, "settled": 8, "normal": 8, "thorough": 40}
"""Sweeps over all positions, by level of effort (`search`)."""


def stock_map(
    loads: npt.NDArray[np.number],
    second_moments: FloatArray,
    num_slots: int,
    ep_size: int,
    most_sweeps: int,
    num_groups: int = 1,
) -> IntArray:
    """A placement of the stock form, int64 [L, P], from summed loads [L, E] and C [L, E, E].

    The expert at position i (i < E) is served by the ranks of slot i and of its fixed copies. The hottest experts start
    on the positions with most copies, spread over ranks; then positions are swapped while that lowers Q (see
    `descent`), which here moves whole experts with all their copies. A router with expert groups picks groups by their
    place, so there experts are relabelled within their group only.
    """
    experts = loads.shape[1]
    slot_position = initial_map(experts, num_slots - experts)
    # s[i, g]: the part of position i's load that rank g serves.
    shares = rank_shares(slot_position[None], experts, ep_size)[0]
    group = np.arange(experts) // (experts // num_groups)
    start = _start(loads, shares, group)
    position = over_layers(
        lambda rows: _descend(second_moments[rows], start[rows], shares, group, most_sweeps), len(loads)
    )
    return position[:, slot_position]


def _start(loads: npt.NDArray[np.number], shares: FloatArray, group: IntArray) -> IntArray:
    """Expert at each position, [L, E]: heaviest first, to the position whose ranks' peak stays lowest."""
    layers, experts = loads.shape
    copies = (shares > 0).sum(1)
    order = np.argsort(-loads, axis=1, kind="stable")
    at = np.full((layers, experts), -1, np.int64)
    rank_loads = np.zeros((layers, shares.shape[1]))
    taken = np.zeros((layers, experts), bool)
    layer = np.arange(layers)
    for step in range(experts):
        expert = order[:, step]
        load = loads[layer, expert]
        peak = np.where(shares[None] > 0, rank_loads[:, None, :] + load[:, None, None] * shares[None], 0.0).max(2)
        free = ~taken & (group[None] == group[expert][:, None])
        most = np.where(free, copies, 0).max(1)
        peak[~free | (copies[None] != most[:, None])] = np.inf
        chosen = peak.argmin(1)
        at[layer, chosen] = expert
        taken[layer, chosen] = True
        rank_loads += load[:, None] * shares[chosen]
    return at


def _descend(
    moments: FloatArray, position: IntArray, shares: FloatArray, group: IntArray, most_sweeps: int
) -> IntArray:
    """Swap experts between positions while Q falls: each position in turn with its best partner.

    Swapping expert a at position i with b at j moves s_i - s_j of both, s_i[g] being the part that rank g serves:
    dQ = 2 (s_i - s_j) . (Y[:, b] - Y[:, a]) + |s_i - s_j|^2 (C_aa - 2 C_ab + C_bb), with Y = V C as in `descent`.
    """
    result = position.copy()
    layers, experts = position.shape
    ranks = shares.shape[1]
    distance = ((shares[:, None, :] - shares[None]) ** 2).sum(2).astype(np.float32)
    copies = int((shares > 0).sum(1).max())
    rank_of = np.argsort(-shares, axis=1, kind="stable")[:, :copies]
    part_of = np.take_along_axis(shares, rank_of, 1).astype(np.float32)
    second = moments.astype(np.float32)
    products = np.zeros((layers, ranks, experts), np.float32)
    everywhere = np.arange(layers)
    for i in range(experts):
        for rank, part in zip(rank_of[i], part_of[i], strict=True):
            products[:, rank] += part * second[everywhere, position[:, i]]
    active, position = everywhere, position.copy()
    for _ in range(most_sweeps):
        row = np.arange(len(active))
        layer = row[:, None]
        diagonal = second.diagonal(axis1=1, axis2=2)
        improved = np.zeros(len(active), bool)
        for i in range(experts):
            a, b = position[:, i], position
            mine, theirs = np.zeros(b.shape, np.float32), np.zeros(b.shape, np.float32)
            for k in range(copies):
                served = products[:, rank_of[i, k]]
                mine += part_of[i, k] * (served[layer, b] - served[row, a][:, None])
                ranks_k = rank_of[None, :, k]
                theirs += part_of[None, :, k] * (products[layer, ranks_k, b] - products[layer, ranks_k, a[:, None]])
            spread = diagonal[row, a][:, None] - 2.0 * second[row, a][layer, b] + diagonal[layer, b]
            change = 2.0 * (mine - theirs) + distance[i] * spread
            change[:, group != group[i]] = np.inf
            best = change.argmin(1)
            at = np.flatnonzero(change[row, best] < -LEAST_GAIN)
            if not at.size:
                continue
            improved[at] = True
            j = best[at]
            moved = second[at, position[at, j]] - second[at, a[at]]
            for k in range(copies):
                products[at, rank_of[i, k]] += part_of[i, k] * moved
                products[at, rank_of[j, k]] -= part_of[j, k][:, None] * moved
            position[at, i], position[at, j] = position[at, j], a[at]
        result[active] = position
        if not improved.any():
            break
        if not improved.all():
            active, position, products, second = (x[improved] for x in (active, position, products, second))
    return result
