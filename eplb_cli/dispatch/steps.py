"""One engine step under a rule: the tokens that every slot serves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.balanced import choose_copies
from eplb_cli.dispatch.copies import Copies
from eplb_cli.dispatch.rules import Rule
from eplb_cli.metrics import replica_counts

__all__ = ["rank_times", "slot_tokens"]

IntArray = npt.NDArray[np.int64]

HASH_MULTIPLIER = 2654435769
"""vLLM's: copy = (place in the batch x this mod 2^32) mod copies."""


def slot_tokens(
    ids: npt.NDArray[np.integer],
    source: IntArray,
    physical_to_logical: npt.NDArray[np.integer],
    num_experts: int,
    ep_size: int,
    rule: Rule,
    price: int = 0,
) -> npt.NDArray[np.number]:
    """Tokens that each slot serves in one step, [L, P]; whole numbers but for the even split.

    Args:
        ids: [n, L, k], the logical experts of the step's tokens; -1 where a token has none.
        source: [n], which batch each token is in, from 0; each batch chooses by itself. All 0: one batch of all ranks.
        physical_to_logical: the map [L, P].
        num_experts, ep_size: E and G.
        rule: who chooses.
        price: what a slot that serves any token costs the step, in tokens; the hash does not ask.
    """
    layers, num_slots = physical_to_logical.shape
    layer = np.arange(layers)[None, :, None]
    if rule == "even":
        flat = (layer * num_experts + ids)[ids >= 0]
        of_expert = np.bincount(flat, minlength=layers * num_experts).reshape(layers, num_experts)
        parts = of_expert / replica_counts(physical_to_logical, num_experts)
        split: npt.NDArray[np.float64] = np.take_along_axis(parts, np.asarray(physical_to_logical, np.int64), 1)
        return split
    if rule == "hash":
        # vLLM lists an expert's copies by slot.
        count = replica_counts(physical_to_logical, num_experts)
        by_slot = np.argsort(physical_to_logical, axis=1, kind="stable")
        first = np.cumsum(count, 1) - count
        place = np.empty_like(source)
        order = np.argsort(source, kind="stable")
        sizes = np.bincount(source)
        place[order] = np.arange(len(source)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        hashed = (place * HASH_MULTIPLIER & 0xFFFFFFFF)[:, None, None]
        known = np.maximum(ids, 0)
        slot = by_slot[layer, first[layer, known] + hashed % count[layer, known]]
        flat = (slot + layer * num_slots)[ids >= 0]
        hashed_to: IntArray = np.bincount(flat, minlength=layers * num_slots)
        return hashed_to.reshape(layers, num_slots)
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


def rank_times(served: npt.NDArray[np.number], ep_size: int, price: int) -> npt.NDArray[np.number]:
    """Tokens of each rank plus `price` for each of its slots that serves any, [..., G], from slots [..., P]."""
    by_rank = served.reshape(*served.shape[:-1], ep_size, -1)
    times: npt.NDArray[np.number] = by_rank.sum(-1) + price * (by_rank > 0).sum(-1)
    return times
