"""Expert groups on nodes: who is at home where, what keeping groups whole costs, and how much load leaves home.

A router with expert groups sends a token to few of them; with whole groups on nodes it crosses few node borders. But
groups are of unequal load, and whole groups put a bound on balance that no placement within nodes can lift.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_cli.bounds import least_shares
from eplb_cli.metrics import rank_shares
from eplb_cli.planner.windows import IntArray

__all__ = ["NodeOption", "experts_by_node", "off_home_price", "off_home_share", "strict_peaks"]

MOST_PARTITIONS = 20_000
"""Ways to split groups over nodes that are all tried; beyond, groups are packed heaviest first."""


@dataclass(frozen=True)
class NodeOption:
    """One way to treat expert groups on nodes.

    Args:
        policy: "flat", "relaxed" or "strict".
        balancedness: of the plan on the planned windows.
        bound: upper bound of that policy; None where there are too many ways to split the groups.
        off_home_share: share of the load served outside the node that serves most of its group.
    """

    policy: str
    balancedness: float
    bound: float | None
    off_home_share: float


def _partitions(groups: int, nodes: int) -> list[list[tuple[int, ...]]] | None:
    """All ways to split groups into equal sets, one a node; None when there are too many."""
    size = groups // nodes
    ways = math.factorial(groups) // (math.factorial(size) ** nodes * math.factorial(nodes))
    if ways > MOST_PARTITIONS:
        return None

    def split(rest: tuple[int, ...]) -> list[list[tuple[int, ...]]]:
        if not rest:
            return [[]]
        found = []
        for others in itertools.combinations(rest[1:], size - 1):
            block = (rest[0], *others)
            left = tuple(group for group in rest if group not in block)
            found += [[block, *tail] for tail in split(left)]
        return found

    return split(tuple(range(groups)))


def experts_by_node(windows: IntArray, num_groups: int, num_nodes: int) -> IntArray:
    """The experts at home on each node, [L, M, E / M], from loads [T, L, E].

    Whole groups, split so that the sum over windows of the busiest node's load is least.
    """
    merged, layers, experts = windows.shape
    size, per_node = experts // num_groups, num_groups // num_nodes
    by_group = windows.reshape(merged, layers, num_groups, size).sum(-1)
    partitions = _partitions(num_groups, num_nodes)
    home = np.zeros((layers, num_groups), np.int64)
    if partitions is None:
        order = np.argsort(-by_group.sum(0), axis=1, kind="stable")
        load, room = np.zeros((layers, num_nodes)), np.full((layers, num_nodes), per_node)
        layer = np.arange(layers)
        for step in range(num_groups):
            group = order[:, step]
            node = np.where(room > 0, load, np.inf).argmin(1)
            home[layer, group] = node
            load[layer, node] += by_group.sum(0)[layer, group]
            room[layer, node] -= 1
    else:
        least = np.full(layers, np.inf)
        for partition in partitions:
            busiest = np.stack([by_group[:, :, block].sum(-1) for block in partition]).max(0).sum(0)
            better = busiest < least
            least[better] = busiest[better]
            for node, block in enumerate(partition):
                home[np.ix_(better, block)] = node
    groups_in_order = np.argsort(home, axis=1, kind="stable").reshape(layers, num_nodes, per_node)
    members: IntArray = groups_in_order[..., None] * size + np.arange(size)
    return members.reshape(layers, num_nodes, per_node * size)


def off_home_price(experts: IntArray, ep_size: int, price: float) -> npt.NDArray[np.float32]:
    """What holding an expert off its home node costs, [L, G, E], from the experts [L, M, E / M] at home."""
    layers, nodes, per_node = experts.shape
    prices = np.full((layers, nodes, nodes * per_node), price, np.float32)
    prices[np.arange(layers)[:, None, None], np.arange(nodes)[:, None], experts] = 0.0
    return np.repeat(prices, ep_size // nodes, axis=1)


def off_home_share(placed: IntArray, totals: IntArray, ep_size: int, num_groups: int, num_nodes: int) -> float:
    """Share of the load that is served outside the node that serves most of its group's load."""
    layers, experts = totals.shape
    served = rank_shares(placed, experts, ep_size) * totals[:, :, None]
    by_node = served.reshape(layers, num_groups, experts // num_groups, num_nodes, -1).sum((2, 4))
    total = float(totals.sum())
    return 1.0 - float(by_node.max(2).sum()) / total if total else 0.0


def strict_peaks(counts: IntArray, num_slots: int, ep_size: int, num_groups: int, num_nodes: int) -> float | None:
    """A lower bound on the sum over windows and layers of the busiest rank's load, when groups stay whole on nodes.

    For every split of the groups over nodes, window and node: no rank of the node is below max(its mean, its least
    possible largest share). The best split of each layer counts. None when there are too many splits to try.
    """
    partitions = _partitions(num_groups, num_nodes)
    if partitions is None:
        return None
    windows, layers, experts = counts.shape
    by_group = counts.reshape(windows, layers, num_groups, experts // num_groups)
    ranks, slots = ep_size // num_nodes, num_slots // num_nodes
    floor = {}
    for block in {block for partition in partitions for block in partition}:
        loads = by_group[:, :, block].reshape(windows, layers, -1).astype(np.float64)
        floor[block] = np.maximum(loads.sum(-1) / ranks, least_shares(loads, slots, ranks))
    per_split = np.stack([np.maximum.reduce([floor[block] for block in partition]).sum(0) for partition in partitions])
    return float(per_split.min(0).sum())
