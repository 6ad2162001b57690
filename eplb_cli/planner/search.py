"""The planner's own placement: copies, packing, descent, polish; one path for every objective but the reference's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from eplb_cli.planner.counts import window_aware_counts
from eplb_cli.planner.descent import gram_descent
from eplb_cli.planner.packing import pack
from eplb_cli.planner.polish import Polisher
from eplb_cli.planner.recount import MOST_SLOTS, recount
from eplb_cli.planner.stock import STOCK_SWEEPS, stock_map
from eplb_cli.planner.tournament import over_layers
from eplb_cli.planner.windows import Evidence, peaks, spread

__all__ = ["LEVELS", "Level", "refine", "search"]

IntArray = npt.NDArray[np.int64]


Level = Literal["fast", "settled", "normal", "thorough"]
LEVELS: tuple[Level, ...] = get_args(Level)
"""The efforts, and between them what is left of "normal" without annealing, for plans that are only compared."""

DESCENT = {"fast": (4_500, 4), "settled": (40_000, 30)}
"""Pairs of ranks that a layer's descent looks at, and its most sweeps; it makes one at least."""
POLISHED, LEAST_POLISH, MOST_POLISH = 768_000, 2, 6
"""Pairs of ranks times windows that a layer's polish looks at, and its sweeps. It takes as many windows as leave it the
least of sweeps, and LEAST_WINDOWS at least."""
LEAST_WINDOWS = 64
ANNEALING = {"normal": (256_000, 30), "thorough": (6_400_000, 600)}
"""Pairs of ranks times windows that a layer's annealing looks at, and its most sweeps. Chosen so that the efforts stay
within their aims (0.5, 3 and 60 seconds of one processor) on the shapes measured in docs/planner.md."""

RECOUNTED = {"fast": 150_000, "settled": 500_000, "normal": 1_200_000, "thorough": 12_000_000}
"""Slots times windows that the search over a layer's copies looks at, sorting included (`recount`)."""
MOST_STOCK_WORK = 65_536
"""E^2 G up to which the best relabelling of the stock map is one more start, next to free."""
LEAST_SWEEPS = 3
"""Fewer cannot cool: hot and cold would meet in one sweep."""


def search(evidence: Evidence, num_slots: int, ep_size: int, effort: Level, seed: int, nodes: int = 1) -> IntArray:
    """A placement [X, P] for each row of the evidence, without twins.

    Args:
        evidence: the loads.
        num_slots, ep_size: P and G of a row.
        effort: how far to go; each level starts from the result of the one before and keeps, layer by layer, whichever
            has the lower sum over windows of the busiest rank's load.
        seed: of the annealing.
        nodes: consecutive rows that make one layer.
    """
    copies = window_aware_counts(evidence.windows, num_slots, ep_size)
    start = pack(evidence.totals, copies, ep_size)
    if ep_size == 1:
        return start
    placed = start
    for level in _levels(effort):
        placed = _improve(evidence, placed, ep_size, level, seed, nodes)
        if level == "settled" and level != effort:
            continue  # "normal" follows, and tries the same starts with more steps
        for other in _other_starts(evidence, start, ep_size, level, seed, nodes):
            better = _better(evidence, placed, other, ep_size, nodes)
            if not np.array_equal(better, placed):
                # No annealing: its noise would tell what it costs to try, and the next level anneals.
                swaps: Level = "fast" if level == "fast" else "settled"
                polished = _improve(evidence, better, ep_size, swaps, seed, nodes)
                placed = _better(evidence, better, polished, ep_size, nodes)
    return placed


def _other_starts(
    evidence: Evidence, start: IntArray, ep_size: int, level: Level, seed: int, nodes: int
) -> Iterator[IntArray]:
    """Placements made in other ways, where they may be better or cost next to nothing."""
    slots, experts = start.shape[1], evidence.totals.shape[1]
    if slots == experts:
        return
    if slots <= MOST_SLOTS * ep_size:
        yield over_layers(
            lambda rows: recount(evidence.windows[:, rows], start[rows], ep_size, RECOUNTED[level], seed), len(start)
        )
    if nodes == 1 and experts**2 * ep_size <= MOST_STOCK_WORK:
        yield stock_map(evidence.totals, evidence.moments, slots, ep_size, STOCK_SWEEPS[level])


def refine(
    evidence: Evidence,
    start: IntArray,
    ep_size: int,
    effort: Level,
    seed: int,
    nodes: int = 1,
    price: npt.NDArray[np.float32] | None = None,
) -> IntArray:
    """The start [X, P] improved by swaps; with a price [X, G, E], by swaps that are worth what they cost."""
    placed = start
    for level in _levels(effort):
        placed = _improve(evidence, placed, ep_size, level, seed, nodes, price)
    return placed


def _levels(effort: Level) -> tuple[Level, ...]:
    return LEVELS[: LEVELS.index(effort) + 1]


def _improve(
    evidence: Evidence,
    placed: IntArray,
    ep_size: int,
    level: Level,
    seed: int,
    nodes: int,
    price: npt.NDArray[np.float32] | None = None,
) -> IntArray:
    """What one level makes of the result [X, P] of the one before."""
    slots = placed.shape[1]
    pairs = max(1, ep_size * (ep_size - 1) // 2)
    looked_at, most = DESCENT.get(level, (0, 0))
    polished = spread(len(evidence.windows), max(LEAST_WINDOWS, POLISHED // (LEAST_POLISH * pairs)))
    polish = max(LEAST_POLISH, min(MOST_POLISH, POLISHED // (pairs * len(polished))))
    sweeps = _annealing_sweeps(level, pairs * len(polished), slots // ep_size)
    if slots == ep_size or (level in ANNEALING and not sweeps):
        return placed  # with one slot a rank every arrangement of the copies is as good

    def improve(rows: slice) -> IntArray:
        paid = None if price is None else price[rows]
        found = placed[rows]
        if most:
            found = gram_descent(evidence.moments[rows], found, ep_size, max(1, min(most, looked_at // pairs)), paid)
        if level == "fast":
            return found
        windows, means = evidence.windows[polished, rows], evidence.window_means[polished, rows]
        polisher = Polisher(windows, means, found, ep_size, first_row=rows.start, price=paid)
        polisher.anneal(sweeps, seed)
        polisher.descend(polish)
        return polisher.placed

    improved = over_layers(improve, len(placed))
    # Prices are not part of the peaks, so with prices every level's result stands.
    if level == "fast" or price is not None:
        return improved
    return _better(evidence, placed, improved, ep_size, nodes)


def _annealing_sweeps(level: Level, a_sweep: int, room: int) -> int:
    """Sweeps over all pairs of ranks and windows within the level's budget; S x S swaps count by what they cost."""
    budget, most = ANNEALING.get(level, (0, 0))
    cost = 1.0 + room**2 / 40.0
    sweeps = min(most, round(budget / (cost * a_sweep)))
    return sweeps if sweeps >= LEAST_SWEEPS else 0


def _better(evidence: Evidence, old: IntArray, new: IntArray, ep_size: int, nodes: int) -> IntArray:
    keep = peaks(evidence.windows, new, ep_size, nodes) < peaks(evidence.windows, old, ep_size, nodes)
    return np.where(np.repeat(keep, nodes)[:, None], new, old)
