"""The published DeepSeek EPLB algorithm, global and hierarchical, vectorised over layers.

Its result is for comparison: it balances the summed load, and may put two copies of an expert on one rank. Arithmetic
follows vLLM's NumPy policy: loads in float32, shares and sums in float64. Ties go to the lowest index.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["deepseek_map"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.floating]


def deepseek_map(
    loads: npt.NDArray[np.number], num_slots: int, ep_size: int, num_groups: int = 1, num_nodes: int = 1
) -> npt.NDArray[np.int32]:
    """The reference's placement, int32 [L, P], of summed loads [L, E].

    Hierarchical when `num_nodes` divides `num_groups`, else global (one group, one node), as the reference decides.

    1. Whole groups are packed on nodes, heaviest first, each on the lightest node that has room.
    2. Within a node, spare slots go one by one to the expert with the largest share w / c.
    3. Within a node, copies are packed on ranks like groups on nodes.
    """
    if num_groups % num_nodes:
        num_groups, num_nodes = 1, 1
    layers, experts = loads.shape
    weights = loads.astype(np.float32)
    group_size = experts // num_groups

    slot_of_group = _pack(weights.reshape(layers, num_groups, group_size).sum(-1), num_nodes)
    group_in_slot = np.argsort(slot_of_group, axis=1)
    by_node = (group_in_slot[:, :, None] * group_size + np.arange(group_size)).reshape(layers * num_nodes, -1)
    node_layer = np.repeat(np.arange(layers), num_nodes)[:, None]

    node_weights = weights[node_layer, by_node]
    copies, counts = _replicate(node_weights, num_slots // num_nodes)
    shares = np.take_along_axis(node_weights / counts, copies, 1)
    slot_of_copy = _pack(shares, ep_size // num_nodes)
    placed = np.take_along_axis(copies, np.argsort(slot_of_copy, axis=1), 1)
    return np.take_along_axis(by_node, placed, 1).reshape(layers, num_slots).astype(np.int32)


def _pack(weights: FloatArray, packs: int) -> IntArray:
    """Put n items in equally full packs, heaviest first, each in the lightest pack with room; slot of each, [X, n]."""
    rows, items = weights.shape
    room = items // packs
    if room == 1:
        return np.tile(np.arange(items), (rows, 1))
    order = np.argsort(-weights, axis=1, kind="stable")
    slot = np.empty((rows, items), np.int64)
    pack_loads = np.zeros((rows, packs))
    filled = np.zeros((rows, packs), np.int64)
    row = np.arange(rows)
    for step in range(items):
        item = order[:, step]
        pack = pack_loads.argmin(1)
        place = filled[row, pack]
        slot[row, item] = pack * room + place
        filled[row, pack] = place + 1
        pack_loads[row, pack] = np.where(place + 1 == room, np.inf, pack_loads[row, pack] + weights[row, item])
    return slot


def _replicate(weights: FloatArray, slots: int) -> tuple[IntArray, IntArray]:
    """Experts of all copies [X, slots] (one of each, then the spare ones as given) and the copies of each, [X, E]."""
    rows, experts = weights.shape
    copies = np.empty((rows, slots), np.int64)
    copies[:, :experts] = np.arange(experts)
    counts = np.ones((rows, experts), np.int64)
    shares = weights / counts
    row = np.arange(rows)
    for slot in range(experts, slots):
        hottest = shares.argmax(1)
        copies[:, slot] = hottest
        counts[row, hottest] += 1
        shares[row, hottest] = weights[row, hottest] / counts[row, hottest]
    return copies, counts
