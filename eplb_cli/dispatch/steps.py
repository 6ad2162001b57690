"""One engine step under a rule: the tokens that every slot serves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.balanced import choose_copies
from eplb_cli.dispatch.copies import Copies
from eplb_cli.dispatch.rules import STATIC_RULES, Rule
from eplb_cli.metrics import replica_counts

__all__ = ["rank_times", "slot_tokens"]

IntArray = npt.NDArray[np.int64]

HASH_MULTIPLIER = 2654435769
"""vLLM's: copy = (place in the batch x this mod 2^32) mod copies."""
TENSORRT_BLOCK = 1024
"""TensorRT-LLM's picks per thread block, each of which goes round the copies by itself (`moeLoadBalanceKernels.cu` at
ada8389: 256 threads of 4 picks)."""


def slot_tokens(
    ids: npt.NDArray[np.integer],
    source: IntArray,
    physical_to_logical: npt.NDArray[np.integer],
    num_experts: int,
    ep_size: int,
    rule: Rule,
    price: int = 0,
    chosen: IntArray | None = None,
) -> npt.NDArray[np.number]:
    """Tokens that each slot serves in one step, [L, P]; whole numbers but for the even split.

    Args:
        ids: [n, L, k], the logical experts of the step's tokens; -1 where a token has none.
        source: [n], which batch each token is in, from 0; each batch chooses by itself. All 0: one batch of all ranks.
        physical_to_logical: the map [L, P].
        num_experts, ep_size: E and G.
        rule: who chooses.
        price: what a slot that serves any token costs the step, in tokens; only `balanced` asks.
        chosen: `chosen_slots` of the map, [L, E, G]; needed under a static rule. The tokens of a batch are spread over
            its ranks: of B batches, batch b has the ranks from b G / B to (b + 1) G / B.
    """
    layers, num_slots = physical_to_logical.shape
    layer = np.arange(layers)[None, :, None]
    if rule == "even":
        flat = (layer * num_experts + ids)[ids >= 0]
        of_expert = np.bincount(flat, minlength=layers * num_experts).reshape(layers, num_experts)
        parts = of_expert / replica_counts(physical_to_logical, num_experts)
        split: npt.NDArray[np.float64] = np.take_along_axis(parts, np.asarray(physical_to_logical, np.int64), 1)
        return split
    known = np.maximum(ids, 0)
    if rule != "balanced":
        if rule in STATIC_RULES:
            assert chosen is not None  # noqa: S101 - as documented
            slot = chosen[layer, known, _source_ranks(source, ep_size)[:, None, None]]
        else:
            turn = _hashed(source) if rule == "hash" else _round_robin(ids, source, num_experts, ep_size)
            # Both list an expert's copies by slot.
            count = replica_counts(physical_to_logical, num_experts)
            by_slot = np.argsort(physical_to_logical, axis=1, kind="stable")
            first = np.cumsum(count, 1) - count
            slot = by_slot[layer, first[layer, known] + turn % count[layer, known]]
        flat = (slot + layer * num_slots)[ids >= 0]
        sent_to: IntArray = np.bincount(flat, minlength=layers * num_slots)
        return sent_to.reshape(layers, num_slots)
    sources = int(source.max(initial=0)) + 1
    row = layer * sources + source[:, None, None]
    flat = (row * num_experts + ids)[ids >= 0]
    counts = np.bincount(flat, minlength=layers * sources * num_experts).reshape(layers * sources, num_experts)
    copies = Copies.of(physical_to_logical, num_experts, ep_size).repeat(sources)
    quota = choose_copies(counts, copies, price // sources, whole_step=sources == 1)
    served = np.zeros((layers * sources, num_slots), np.int64)
    np.add.at(served, (np.arange(len(served))[:, None, None], copies.slots), quota)
    of_step: IntArray = served.reshape(layers, sources, num_slots).sum(1)
    return of_step


def _places(source: IntArray) -> IntArray:
    """The place of each token in its batch, [n]."""
    place = np.empty_like(source)
    order = np.argsort(source, kind="stable")
    sizes = np.bincount(source)
    place[order] = np.arange(len(source)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place


def _source_ranks(source: IntArray, ep_size: int) -> IntArray:
    """The rank that brings each token, [n]."""
    sizes = np.bincount(source)
    ranks: IntArray = (source * sizes[source] + _places(source)) * ep_size // (len(sizes) * sizes[source])
    return ranks


def _hashed(source: IntArray) -> IntArray:
    """vLLM's hash of each token, [n, 1, 1]."""
    hashed: IntArray = (_places(source) * HASH_MULTIPLIER & 0xFFFFFFFF)[:, None, None]
    return hashed


def _round_robin(ids: npt.NDArray[np.integer], source: IntArray, num_experts: int, ep_size: int) -> IntArray:
    """TensorRT-LLM's turn of each pick, [n, L, k]: how many of its expert came before in its block, plus the block.

    Where the ranks have batches of their own, the rank is added (`offsetByEpRank`, with attention data parallelism).
    """
    _, layers, top_k = ids.shape
    pick = _places(source)[:, None] * top_k + np.arange(top_k)
    block = pick // TENSORRT_BLOCK
    batches = int(source.max(initial=0)) + 1
    start = block + (source * ep_size // batches)[:, None]
    order = np.lexsort((pick.ravel(), np.repeat(source, top_k)))
    group = (np.repeat(source, top_k) * (int(block.max(initial=0)) + 1) + block.ravel()) * num_experts
    turns = np.empty_like(ids, np.int64)
    for layer in range(layers):
        expert = np.maximum(ids[:, layer].ravel(), 0)
        # A pick of nothing takes no turn: it gets a group of its own, before all others.
        of = np.where(ids[:, layer].ravel() >= 0, group + expert, -1)[order]
        by_group = np.argsort(of, kind="stable")
        _, sizes = np.unique(of, return_counts=True)
        before = np.empty_like(of)
        before[by_group] = np.arange(len(of)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        earlier = np.empty_like(of)
        earlier[order] = before
        turns[:, layer] = earlier.reshape(-1, top_k) + start
    return turns


def rank_times(served: npt.NDArray[np.number], ep_size: int, price: int) -> npt.NDArray[np.number]:
    """Tokens of each rank plus `price` for each of its slots that serves any, [..., G], from slots [..., P]."""
    by_rank = served.reshape(*served.shape[:-1], ep_size, -1)
    times: npt.NDArray[np.number] = by_rank.sum(-1) + price * (by_rank > 0).sum(-1)
    return times
