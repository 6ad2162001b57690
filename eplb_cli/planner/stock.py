"""The best relabelling for an engine whose map is fixed: slots [0..E-1], then copies of experts 0..R-1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import initial_map, rank_shares
from eplb_cli.planner.descent import LEAST_GAIN

__all__ = ["stock_map"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


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
    position = _start(loads, shares, group)
    if ep_size > 1:
        position = _descend(second_moments, position, shares, group, most_sweeps)
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
    """Swap experts between positions while Q falls; the best partner of each position in turn."""
    position = position.copy()
    layers, experts = position.shape
    distance = ((shares[:, None, :] - shares[None]) ** 2).sum(2)
    layer = np.arange(layers)[:, None]
    row = np.arange(layers)
    # Z[i, e] = sum_g s[i, g] Y[g, e] = sum_j (s_i . s_j) C[expert at j, e]; only pairs that share a rank contribute.
    overlap = shares @ shares.T
    products = np.zeros((layers, experts, experts))
    for i in range(experts):
        near = np.flatnonzero(overlap[i])
        for j in near:
            products[:, i] += overlap[i, j] * moments[row, position[:, j]]
    diagonal = moments.diagonal(axis1=1, axis2=2)
    for _ in range(most_sweeps):
        improved = False
        for i in range(experts):
            a = position[:, i]
            b = position
            mine = products[:, i][layer, b] - products[row, i, a][:, None]
            theirs = (
                products[layer, np.arange(experts)[None], b] - products[layer, np.arange(experts)[None], a[:, None]]
            )
            spread = diagonal[row, a][:, None] - 2.0 * moments[layer, a[:, None], b] + diagonal[layer, b]
            change = 2.0 * (mine - theirs) + distance[i][None] * spread
            change[:, group != group[i]] = np.inf
            best = change.argmin(1)
            at = np.flatnonzero(change[row, best] < -LEAST_GAIN)
            if not at.size:
                continue
            improved = True
            j = best[at]
            moved = moments[at, position[at, j]] - moments[at, a[at]]
            products[at] += (overlap[:, i][None] - overlap[:, j].T)[:, :, None] * moved[:, None, :]
            position[at, i], position[at, j] = position[at, j], a[at]
        if not improved:
            break
    return position
