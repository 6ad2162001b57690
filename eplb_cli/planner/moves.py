"""From a plan in force to a better one, for as few moved weights as possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from eplb_cli.planner.search import Level, refine
from eplb_cli.planner.spare import with_spare_copies
from eplb_cli.planner.windows import Evidence

__all__ = ["TradeOff", "keep_slots", "match_ranks", "moved_slots", "options_by_copies", "options_by_swaps", "trade_off"]

IntArray = npt.NDArray[np.int64]
Rows = TypeVar("Rows", bound=npt.NDArray[np.integer])

PRICES = (1e-2, 2e-3, 4e-4, 8e-5)
"""Prices of a moved slot that are tried, in units of Phi (`polish`), from dear to cheap."""
COPY_PRICES = (2e-2, 5e-3, 1e-3, 0.0)
"""The same for a spare copy, in mean rank loads."""


def _held(rows: npt.NDArray[np.integer], ranks: int, experts: int) -> npt.NDArray[np.int32]:
    """Copies of each expert on each rank, [L, G, E]."""
    layers, slots = rows.shape
    rank = np.arange(slots) // (slots // ranks)
    held = np.zeros((layers, ranks, experts), np.int32)
    np.add.at(held, (np.arange(layers)[:, None], rank[None], rows), 1)
    return held


def moved_slots(
    previous: npt.NDArray[np.integer], placed: npt.NDArray[np.integer], ep_size: int
) -> npt.NDArray[np.int64]:
    """Slots per layer whose expert was not on that rank before, int64 [L], from maps [L, P'] and [L, P].

    Copies count one by one; where within its rank an expert sits does not matter.
    """
    experts = int(max(previous.max(initial=0), placed.max(initial=0))) + 1
    new = _held(placed, ep_size, experts) - _held(previous, ep_size, experts)
    moved: npt.NDArray[np.int64] = np.maximum(new, 0).sum((1, 2), dtype=np.int64)
    return moved


def match_ranks(previous: IntArray, placed: IntArray, ep_size: int) -> IntArray:
    """The placement with its ranks renumbered, layer by layer, to share as many experts as may be with before.

    Pairs of most shared experts first, then exchanges of partners while any helps. Ranks are alike, so balance stays.
    """
    layers, slots = placed.shape
    experts = int(max(previous.max(initial=0), placed.max(initial=0))) + 1
    before, after = _held(previous, ep_size, experts), _held(placed, ep_size, experts)
    shared = np.stack(
        [
            np.minimum(before[:, :, None], after[:, g : g + 1, None].transpose(0, 2, 1, 3)).sum(-1)[:, :, 0]
            for g in range(ep_size)
        ],
        axis=2,
    ).astype(np.int64)
    layer = np.arange(layers)
    partner = np.zeros((layers, ep_size), np.int64)
    open_ = shared.copy()
    for _ in range(ep_size):
        best = open_.reshape(layers, -1).argmax(1)
        old, new = best // ep_size, best % ep_size
        partner[layer, old] = new
        open_[layer, old, :] = -1
        open_[layer, :, new] = -1
    for _ in range(ep_size * ep_size):
        # gain[i, j]: old ranks i and j exchange their partners.
        cross = np.take_along_axis(shared, np.repeat(partner[:, None, :], ep_size, 1), 2)
        kept = cross[layer[:, None], np.arange(ep_size), np.arange(ep_size)]
        gain = cross + cross.transpose(0, 2, 1) - kept[:, :, None] - kept[:, None, :]
        best = gain.reshape(layers, -1).argmax(1)
        at = np.flatnonzero(gain.reshape(layers, -1)[layer, best] > 0)
        if not at.size:
            break
        i, j = best[at] // ep_size, best[at] % ep_size
        partner[at, i], partner[at, j] = partner[at, j], partner[at, i]
    matched: IntArray = placed.reshape(layers, ep_size, -1)[layer[:, None], partner]
    return matched.reshape(layers, slots)


def keep_slots(previous: IntArray, placed: IntArray, ep_size: int) -> IntArray:
    """The placement with experts that stay on their rank in the slots they had, so that nothing is copied."""
    layers, slots = placed.shape
    room = slots // ep_size
    result = placed.reshape(-1, room).copy()
    for row, (old, new) in enumerate(zip(previous.reshape(-1, room), placed.reshape(-1, room), strict=True)):
        left = new.tolist()
        kept = [-1] * room
        for slot, expert in enumerate(old.tolist()):
            if expert in left:
                left.remove(expert)
                kept[slot] = expert
        coming = iter(left)
        result[row] = [next(coming) if expert < 0 else expert for expert in kept]
    return result.reshape(layers, slots)


def without_twins(rows: Rows, loads: IntArray, ep_size: int) -> Rows:
    """The placement [L, P] with each second copy of an expert on a rank replaced by what the rank lacks and needs most.

    The reference and vLLM's policy make such copies, which serve nothing; `loads` [L, E] says what is needed.
    """
    mended = rows.copy()
    per_rank = rows.shape[1] // ep_size
    by_rank = np.sort(rows.reshape(len(rows), ep_size, per_rank), -1)
    for layer, rank in np.unique(np.argwhere(by_rank[..., 1:] == by_rank[..., :-1])[:, :2], axis=0):
        copies = np.bincount(mended[layer], minlength=loads.shape[1])
        slots = mended[layer, rank * per_rank : (rank + 1) * per_rank]
        for slot in range(per_rank):
            if (slots[:slot] == slots[slot]).any():
                share = loads[layer] / copies
                share[slots] = -1.0
                copies[slots[slot]] -= 1
                slots[slot] = share.argmax()
                copies[slots[slot]] += 1
    return mended


@dataclass(frozen=True, eq=False)
class TradeOff:
    """Placements by the number of moved slots.

    Args:
        moves, balancedness: of each point of the curve, over the evidence's windows; the first is the previous plan.
        placed: the placement chosen, [L, P].
    """

    moves: tuple[int, ...]
    balancedness: tuple[float, ...]
    placed: IntArray


def options_by_swaps(
    evidence: Evidence, previous: IntArray, fresh: IntArray, ep_size: int, effort: Level, seed: int
) -> list[IntArray]:
    """Placements [X, P] from the previous one to the fresh one, whose ranks are matched.

    For a range of prices per moved slot the results of two searches, from the previous placement (best while traffic is
    steady) and from the fresh one (best after it shifted).
    """
    held = _held(previous, ep_size, evidence.totals.shape[1])
    matched = match_ranks(previous, fresh, ep_size)
    absent = (held == 0).astype(np.float32)
    # A layer with twins (the reference leaves some) cannot stay as it is.
    twinned: npt.NDArray[np.bool_] = np.asarray((held > 1).any((1, 2)))
    stay = np.where(twinned[:, None], matched, previous)
    options = [stay, matched]
    level: Level = "fast" if effort == "fast" else "settled"
    for start, prices in ((stay, PRICES), (matched, PRICES[::-1])):
        for price in prices:
            start = refine(evidence, start, ep_size, level, seed, price=absent * price)
            options.append(start)
    return options


def options_by_copies(
    evidence: Evidence, previous: IntArray, fresh: IntArray, ep_size: int, effort: Level, seed: int
) -> list[IntArray]:
    """As `options_by_swaps`, for a choice of copies by load: the previous placement with other spare copies."""
    options = [previous, match_ranks(previous, fresh, ep_size)]
    for price in COPY_PRICES:
        options.append(with_spare_copies(evidence.windows, previous, ep_size, effort, seed, price))
    return options


def trade_off(
    previous: IntArray,
    options: Sequence[IntArray],
    cost: npt.NDArray[np.float64],
    mean: float,
    ep_size: int,
    most_moves: int | None,
) -> TradeOff:
    """The best choice of an option for every layer with at most `most_moves` moved slots, and the curve it lies on.

    Layers take their next option in the order of what a moved slot gains.

    Args:
        previous: the placement in force [L, P].
        options: N placements [L, P], of which the first moves least.
        cost: sum over windows of the busiest rank's load, [N, L].
        mean: sum over windows and layers of the mean rank load.
        ep_size: G.
        most_moves: None for as many as improve.
    """
    moves = np.stack([moved_slots(previous, option, ep_size) for option in options])
    chosen, curve = _walk(moves, cost, most_moves)
    return TradeOff(
        tuple(int(point) for point, _ in curve),
        tuple(mean / peak if peak else 1.0 for _, peak in curve),
        np.stack(options)[chosen, np.arange(len(previous))],
    )


def _walk(
    moves: IntArray, cost: npt.NDArray[np.float64], most_moves: int | None
) -> tuple[IntArray, list[tuple[int, float]]]:
    """Option of each layer, and the (moves, cost) curve, from options [N, L] of which the first moves nothing."""
    layers = moves.shape[1]
    steps = []
    for layer in range(layers):
        at = 0
        while True:
            # The next corner of the layer's lower convex hull: the steepest fall of cost per moved slot.
            gain, more = cost[at, layer] - cost[:, layer], moves[:, layer] - moves[at, layer]
            better = np.flatnonzero((gain > 0) & (more > 0))
            free = np.flatnonzero((gain > 0) & (more <= 0))
            if free.size:
                at = int(free[cost[free, layer].argmin()])
                steps.append((np.inf, layer, at))
                continue
            if not better.size:
                break
            slope = gain[better] / more[better]
            at = int(better[slope.argmax()])
            steps.append((float(slope.max()), layer, at))
    steps.sort(key=lambda step: -step[0])
    chosen = np.zeros(layers, np.int64)
    layer_index = np.arange(layers)
    curve = [(int(moves[0].sum()), float(cost[0].sum()))]
    for _, layer, option in steps:
        total = int(moves[chosen, layer_index].sum() - moves[chosen[layer], layer] + moves[option, layer])
        if most_moves is not None and total > most_moves:
            continue  # and so will the layer's later steps, which move more
        chosen[layer] = option
        curve.append((total, float(cost[chosen, layer_index].sum())))
    return chosen, curve
