"""The `balanced` rule as three Triton kernels, which compute what `balanced_torch` does.

1. `_count_and_order`: counts each expert's tokens, block by block, and each token's place within its block; sorts each
   expert's copies.
2. `_fill_and_scan`: one program a try spreads the tokens over the copies; one program an expert adds up the blocks.
3. `_map`: picks the fastest try, maps the tokens, and counts.

The grid and every buffer follow from the shapes of the arguments, so CUDA graphs capture them as they are. Sums by
atomics are of whole numbers, so their order does not matter. A try is one warp: what it writes to memory it reads again
behind a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from eplb_cli.dispatch.balanced import PRIMARIES, ROUNDS
from eplb_cli.vllm_plugin.balanced_torch import GOLDEN, Layer, Rule

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["map_and_record"]

BLOCK = 128
"""Ids of a program."""
EXPERTS = 32
"""Experts that a try looks at together."""
PER_STEP = ["numel", "blocks"]
"""Arguments that differ between steps: nothing is compiled for their values, which would hold a step up."""


@triton.jit(do_not_specialize=PER_STEP)
def _count_and_order(
    ids, counted, table, replica_count,
    counts, block_counts, shared, places, slots,
    numel, top_k, num_experts, stride, blocks, ep_size, per_rank,
    HAS_COUNTED: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, COPIES: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < blocks:
        lane = tl.arange(0, BLOCK)
        place = program * BLOCK + lane
        expert = tl.load(ids + place, mask=place < numel, other=-1).to(tl.int64)
        chosen = (expert >= 0) & (expert < num_experts)
        if HAS_COUNTED:
            chosen = chosen & (place < tl.load(counted) * top_k)
        key = tl.where(chosen, expert, -1)
        earlier = (key[:, None] == key[None, :]) & (lane[None, :] < lane[:, None])
        tl.store(places + place, tl.sum(earlier.to(tl.int64), 1), mask=place < numel)
        one = tl.full([BLOCK], 1, tl.int64)
        known = tl.where(chosen, expert, 0)
        tl.atomic_add(block_counts + program * num_experts + known, one, mask=chosen, sem="relaxed")
        tl.atomic_add(counts + known, one, mask=chosen, sem="relaxed")
    else:
        owner = program - blocks
        copies = tl.load(replica_count + owner)
        column = tl.arange(0, WIDTH)
        slot = tl.load(table + owner.to(tl.int64) * stride + column, mask=column < copies, other=0).to(tl.int64)
        never = (ep_size * per_rank).to(tl.int64)
        order = tl.where(column < copies, slot % per_rank * ep_size + slot // per_rank, never)
        first = tl.min(order, 0)
        for index in range(COPIES):
            least = tl.min(order, 0)
            order = tl.where(order == least, never, order)
            opens = tl.where(least < never, least, first)
            tl.store(slots + owner * COPIES + index, opens % ep_size * per_rank + opens // ep_size)
        others = tl.arange(0, ALL)
        several = tl.load(replica_count + others, mask=others < num_experts, other=0) > 1
        if copies > 1:
            # Numbered from 1: 0 says that there is no more.
            tl.store(shared + tl.sum((several & (others < owner)).to(tl.int64), 0), owner.to(tl.int64) + 1)


@triton.jit(do_not_specialize=PER_STEP)
def _fill_and_scan(
    counts, block_counts, shared, slots, replica_count, worths,
    loads, opened, quota, ends, times, before,
    price, num_experts, blocks, tries, ep_size, per_rank,
    SURE: tl.constexpr, SHARED: tl.constexpr, ROUNDS: tl.constexpr, PRIMARIES: tl.constexpr,
    EXPERTS: tl.constexpr, COPIES: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program >= tries:
        owner = program - tries
        so_far = tl.zeros([1], tl.int64)
        for start in range(0, blocks, BLOCK):
            block = start + tl.arange(0, BLOCK)
            tokens_here = tl.load(block_counts + block * num_experts + owner, mask=block < blocks, other=0)
            tl.store(
                before + block * num_experts + owner,
                so_far + tl.cumsum(tokens_here, 0) - tokens_here,
                mask=block < blocks,
            )
            so_far += tl.sum(tokens_here, 0)
    else:
        worth = tl.load(worths + program)
        loads += program * ep_size
        opened += program * num_experts
        quota += program * num_experts * COPIES
        ends += program * num_experts * COPIES
        copy = tl.arange(0, COPIES)
        # 1. How many copies open, and an even split over them.
        for start in range(0, num_experts, EXPERTS):
            expert = start + tl.arange(0, EXPERTS)
            here = expert < num_experts
            tokens = tl.load(counts + expert, mask=here, other=0)
            most = tl.minimum(tl.load(replica_count + expert, mask=here, other=1), COPIES)
            spare = tokens[:, None] - worth * (copy[None, :] + 1)
            worthy = spare >= 0
            if SURE:
                worthy = worthy & (spare * spare >= 4 * tokens[:, None])
            number = tl.minimum(tl.maximum(tl.sum(worthy.to(tl.int64), 1), 1), most)
            number = tl.where(worth == 0, most, tl.where(worth == PRIMARIES, 1, number))
            number = tl.where(tokens > 0, number, 0)
            tl.store(opened + expert, number, mask=here)
            is_open = here[:, None] & (copy[None, :] < number[:, None])
            part = tokens // tl.maximum(number, 1)
            rest = tokens - part * number
            share = tl.where(is_open, part[:, None] + (copy[None, :] < rest[:, None]).to(tl.int64), 0)
            cell = expert[:, None] * COPIES + copy[None, :]
            tl.store(quota + cell, share, mask=here[:, None])
            rank = tl.load(slots + cell, mask=here[:, None], other=0) // per_rank
            tl.atomic_add(loads + rank, share + price, mask=is_open, sem="relaxed")
        tl.debug_barrier()
        # 2. One expert after the other is taken off its ranks and poured back.
        for _ in range(ROUNDS):
            for index in range(SHARED):
                expert = tl.load(shared + index) - 1
                number = tl.load(opened + tl.maximum(expert, 0))
                if (expert >= 0) & (number > 1):
                    tokens = tl.load(counts + expert)
                    cell = expert * COPIES + copy
                    rank = tl.load(slots + cell) // per_rank
                    among = copy < number
                    # Copies of one rank have its load in common.
                    same = (rank[:, None] == rank[None, :]) & among[None, :]
                    share = tl.load(quota + cell)
                    height = tl.load(loads + rank) - tl.sum(tl.where(same, share[None, :], 0), 1)
                    lower = (height[None, :] < height[:, None]) | (
                        (height[None, :] == height[:, None]) & (copy[None, :] < copy[:, None])
                    )
                    lower = lower & among[None, :]
                    number_lower = tl.sum(lower.to(tl.int64), 1)
                    below = height + tl.sum(tl.where(lower, height[None, :], 0), 1)
                    filled = among & (height * (number_lower + 1) - below < tokens)
                    width = tl.sum(filled.to(tl.int64), 0)
                    total = tokens + tl.sum(tl.where(filled, height, 0), 0)
                    level = total // width
                    rest = total - level * width
                    share = tl.where(filled, level - height + (number_lower < rest).to(tl.int64), 0)
                    tl.store(quota + cell, share, mask=among)
                    tl.store(loads + rank, height + tl.sum(tl.where(same, share[None, :], 0), 1), mask=among)
                tl.debug_barrier()
        # 3. Where each copy's part of the tokens ends; a copy for which none were left is not read.
        for start in range(0, num_experts, EXPERTS):
            expert = start + tl.arange(0, EXPERTS)
            here = expert < num_experts
            cell = expert[:, None] * COPIES + copy[None, :]
            share = tl.load(quota + cell, mask=here[:, None], other=0)
            is_open = copy[None, :] < tl.load(opened + expert, mask=here, other=0)[:, None]
            rank = tl.load(slots + cell, mask=here[:, None], other=0) // per_rank
            unread = tl.zeros([EXPERTS, COPIES], tl.int64) - price
            tl.atomic_add(loads + rank, unread, mask=is_open & (share == 0), sem="relaxed")
            tl.store(ends + cell, tl.cumsum(share, 1), mask=here[:, None])
        tl.debug_barrier()
        rank = tl.arange(0, RANKS)
        tl.store(times + program, tl.max(tl.load(loads + rank, mask=rank < ep_size, other=0), 0))


@triton.jit(do_not_specialize=PER_STEP)
def _map(
    ids, counted, recorded, record_enabled, places, before, slots, ends, times,
    out, load, served, digest,
    numel, top_k, num_experts, tries,
    HAS_COUNTED: tl.constexpr, HAS_RECORDED: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr,
    TRIES: tl.constexpr, GOLDEN: tl.constexpr,
):  # fmt: skip
    # Of the fastest tries the first; times are small enough to carry the try's number.
    attempt = tl.arange(0, TRIES)
    time = tl.load(times + attempt, mask=attempt < tries, other=1 << 40)
    best = tl.min(time * TRIES + attempt, 0) % TRIES
    program = tl.program_id(0)
    place = program * BLOCK + tl.arange(0, BLOCK)
    inside = place < numel
    expert = tl.load(ids + place, mask=inside, other=-1).to(tl.int64)
    known = (expert >= 0) & (expert < num_experts)
    chosen = known
    if HAS_COUNTED:
        chosen = known & (place < tl.load(counted) * top_k)
    expert = tl.where(known, expert, 0)
    number = tl.load(places + place, mask=inside, other=0) + tl.load(before + program * num_experts + expert)
    copy = tl.arange(0, COPIES)
    ends_at = ends + best * num_experts * COPIES + expert[:, None] * COPIES + copy[None, :]
    index = tl.sum((number[:, None] >= tl.load(ends_at)).to(tl.int64), 1)
    slot = tl.load(slots + expert * COPIES + tl.where(chosen, index, 0))
    tl.store(out + place, tl.where(known, slot, -1), mask=inside)
    seen = known & (tl.load(record_enabled) != 0)
    if HAS_RECORDED:
        seen = seen & (place < tl.load(recorded) * top_k)
    tl.atomic_add(load + slot, tl.full([BLOCK], 1, tl.int32), mask=seen, sem="relaxed")
    tl.atomic_add(served + slot, tl.full([BLOCK], 1, tl.int64), mask=chosen, sem="relaxed")
    golden = tl.full([BLOCK], GOLDEN, tl.int64)
    words = tl.where(chosen, (slot + 1) * ((place.to(tl.int64) * golden) | 1), 0)
    tl.atomic_add(digest, tl.sum(words, 0), sem="relaxed")


def map_and_record(ids: Tensor, rule: Rule, layer: Layer, *, counted: Tensor | None, recorded: Tensor | None) -> Tensor:
    """What `balanced_torch.map_and_record` computes, by the kernels."""
    if ids.numel() == 0:
        return ids
    ids = ids.contiguous()
    numel, top_k = ids.numel(), ids.shape[1]
    table = layer.logical_to_physical
    experts, width = table.shape[0], min(table.shape[1], rule.num_slots - table.shape[0] + 1)
    copies = triton.next_power_of_2(rule.most_copies(experts, width))
    blocks, tries = triton.cdiv(numel, BLOCK), rule.worths.shape[0]
    most_shared = min(experts, rule.num_slots - experts)
    counts, block_counts, loads, shared = _buffers(
        torch.zeros, ids, experts, blocks * experts, tries * rule.ep_size, most_shared + 1
    )
    cells = tries * experts * copies
    places, slots, before, opened, quota, ends, times = _buffers(
        torch.empty, ids, numel, experts * copies, blocks * experts, tries * experts, cells, cells, tries
    )
    out = torch.empty_like(ids)
    per_rank = rule.num_slots // rule.ep_size
    _count_and_order[(blocks + experts,)](
        ids, counted, table, layer.replica_count,
        counts, block_counts, shared, places, slots,
        numel, top_k, experts, table.stride(0), blocks, rule.ep_size, per_rank,
        HAS_COUNTED=counted is not None, BLOCK=BLOCK, WIDTH=triton.next_power_of_2(width), COPIES=copies,
        ALL=triton.next_power_of_2(experts), num_warps=4,
    )  # fmt: skip
    _fill_and_scan[(tries + experts,)](
        counts, block_counts, shared, slots, layer.replica_count, rule.worths,
        loads, opened, quota, ends, times, before,
        rule.price, experts, blocks, tries, rule.ep_size, per_rank,
        SURE=not rule.whole_step, SHARED=most_shared, ROUNDS=ROUNDS, PRIMARIES=PRIMARIES,
        EXPERTS=EXPERTS, COPIES=copies, RANKS=triton.next_power_of_2(rule.ep_size), BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip
    _map[(blocks,)](
        ids, counted, recorded, layer.record_enabled, places, before, slots, ends, times,
        out, layer.load, layer.served, layer.digest,
        numel, top_k, experts, tries,
        HAS_COUNTED=counted is not None, HAS_RECORDED=recorded is not None, BLOCK=BLOCK, COPIES=copies,
        TRIES=triton.next_power_of_2(tries), GOLDEN=GOLDEN, num_warps=4,
    )  # fmt: skip
    return out


def _buffers(make: Callable[..., Tensor], ids: Tensor, *sizes: int) -> Sequence[Tensor]:
    """Buffers of int64 in one allocation, each at a multiple of 16 bytes, as Triton compiles for."""
    even = [size + size % 2 for size in sizes]
    buffers: Sequence[Tensor] = make(sum(even), dtype=torch.int64, device=ids.device).split(even)
    return buffers
