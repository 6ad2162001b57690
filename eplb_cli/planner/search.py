"""The planner's own placement: copies, packing, descent, polish; one path for every objective but the reference's."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_cli.planner.counts import window_aware_counts
from eplb_cli.planner.descent import gram_descent
from eplb_cli.planner.packing import pack
from eplb_cli.planner.polish import Polisher
from eplb_cli.planner.request import Effort
from eplb_cli.planner.tournament import over_layers
from eplb_cli.planner.windows import Evidence

__all__ = ["peaks", "refine", "search"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Budget:
    """How far an effort goes: sweeps of the two descents; pairs of ranks that each layer's annealing looks at, in at most
    so many sweeps.
    """

    gram_sweeps: int
    polish_sweeps: int
    annealed_pairs: int
    annealing_sweeps: int


BUDGETS: dict[Effort, _Budget] = {
    "fast": _Budget(4, 0, 0, 0),
    "normal": _Budget(30, 30, 5_000, 30),
    "thorough": _Budget(30, 100, 100_000, 600),
}
"""Chosen so that each stays within its aim (0.5, 3 and 60 seconds of one processor) on the largest shapes measured."""


def search(evidence: Evidence, num_slots: int, ep_size: int, effort: Effort, seed: int, nodes: int = 1) -> IntArray:
    """A placement [X, P] for each row of the evidence, without twins.

    Args:
        evidence: the loads.
        num_slots, ep_size: P and G of a row.
        effort: how far to go; each level starts from the result of the one before and keeps, layer by layer, whichever
            has the lower sum over windows of the busiest rank's load.
        seed: of the annealing.
        nodes: consecutive rows that make one layer.
    """
    if ep_size == 1 or not len(evidence.totals):
        return np.tile(np.arange(num_slots), (len(evidence.totals), 1))
    copies = window_aware_counts(evidence.windows, num_slots, ep_size)
    start = pack(evidence.totals, copies, ep_size)
    return refine(evidence, start, ep_size, effort, seed, nodes)


def refine(
    evidence: Evidence,
    start: IntArray,
    ep_size: int,
    effort: Effort,
    seed: int,
    nodes: int = 1,
    price: npt.NDArray[np.float32] | None = None,
) -> IntArray:
    """The start [X, P] improved by swaps; with a price [X, G, E], by swaps that are worth what they cost."""
    levels: tuple[Effort, ...] = ("fast", "normal", "thorough")
    placed = start
    for level in levels[: levels.index(effort) + 1]:
        budget = BUDGETS[level]

        def improve(rows: slice, budget: _Budget = budget, placed: IntArray = placed) -> IntArray:
            paid = None if price is None else price[rows]
            if not budget.polish_sweeps:
                return gram_descent(evidence.moments[rows], placed[rows], ep_size, budget.gram_sweeps, paid)
            settled = gram_descent(evidence.moments[rows], placed[rows], ep_size, budget.gram_sweeps, paid)
            polisher = Polisher(
                evidence.windows[:, rows],
                evidence.window_means[:, rows],
                settled,
                ep_size,
                first_row=rows.start,
                price=paid,
            )
            polisher.descend(budget.polish_sweeps)
            polisher.anneal(_sweeps(budget, ep_size, placed.shape[1]), seed)
            polisher.descend(budget.polish_sweeps)
            return polisher.placed

        improved = over_layers(improve, len(placed))
        if level == "fast":
            placed = improved
        elif price is None:
            placed = _better(evidence, placed, improved, ep_size, nodes)
        else:
            placed = improved
    return placed


def _sweeps(budget: _Budget, ranks: int, slots: int) -> int:
    """Sweeps over all pairs of ranks that look at about so many; a pair with S x S swaps counts by what it costs."""
    cost = 1.0 + (slots // ranks) ** 2 / 40.0
    return min(budget.annealing_sweeps, round(budget.annealed_pairs / (cost * ranks * (ranks - 1) / 2)))


def peaks(evidence: Evidence, placed: IntArray, ep_size: int, nodes: int = 1) -> FloatArray:
    """Sum over the merged windows of the busiest rank's load, [L]; slots are summed in an order that never changes."""
    rows, slots = placed.shape
    room = slots // ep_size
    copies = np.zeros((rows, evidence.totals.shape[1]))
    np.add.at(copies, (np.arange(rows)[:, None], placed), 1.0)
    shares = evidence.windows / copies
    row = np.arange(rows)[:, None]
    held = placed.reshape(rows, ep_size, room)
    loads = shares[:, row, held[:, :, 0]]
    for slot in range(1, room):
        loads += shares[:, row, held[:, :, slot]]
    busiest: FloatArray = loads.reshape(len(loads), rows // nodes, nodes * ep_size).max(2).sum(0)
    return busiest


def _better(evidence: Evidence, old: IntArray, new: IntArray, ep_size: int, nodes: int) -> IntArray:
    keep = peaks(evidence, new, ep_size, nodes) < peaks(evidence, old, ep_size, nodes)
    return np.where(np.repeat(keep, nodes)[:, None], new, old)
