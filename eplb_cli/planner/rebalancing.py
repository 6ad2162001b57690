"""eplb's run-time policy: from the live placement to a better one in few moves, by the windows that it has been given.

vLLM hands its policy one summed window of loads each time, which tells how busy an expert is, but not with which others
it is busy at once. The last of them together do.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import Rule, loads_under
from eplb_cli.errors import LoadsError
from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import balancedness
from eplb_cli.placement import Placement
from eplb_cli.planner.moves import without_twins
from eplb_cli.planner.plan import make_plan
from eplb_cli.planner.request import PlanRequest

__all__ = ["MIN_GAIN", "RING_WINDOWS", "Rebalancer"]

IntArray = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]

RING_WINDOWS = 32
"""Windows that are kept; the oldest goes first."""
FADING_WINDOWS = 4
"""A window counts twice as much as one that is so many windows older: with all alike, a plan follows a lasting change
of traffic a whole ring too late; with the newest alone, it follows chance (benchmarks/policy.py)."""
MIN_GAIN = 0.02
"""Gain in balancedness under which nothing moves."""


@dataclass(eq=False)
class Rebalancer:
    """The policy of one model, and the windows that it remembers: at most RING_WINDOWS x L x E x 8 bytes.

    Args:
        ep_size: EP ranks G.
        starts_planned: the placement to start from is a plan. From any other, the first move has no budget: what it
            would keep is there by chance.
        max_moves: slots that change in one rebalance at most; None for a twentieth of all slots.
        min_gain: the predicted gain in balancedness under which nothing moves.
        dispatch: the rule that chooses among copies.
    """

    ep_size: int
    starts_planned: bool = True
    max_moves: int | None = None
    min_gain: float = MIN_GAIN
    dispatch: Rule = "even"
    _ring: deque[IntArray] = field(default_factory=lambda: deque(maxlen=RING_WINDOWS), init=False)

    def rebalance(self, loads: IntArray, live: Rows) -> Rows:
        """Remember a window, int64 [L, E], and return the placement [L, P] for what comes next.

        That is the live one with as few slots changed as help most, or as it is when that gains too little. Layers
        without load in the window stay. The same windows and placements give the same answer on every rank.
        """
        self._ring.append(loads)
        counts = _fading(self._ring)
        layers = np.arange(len(live), dtype=np.int32)
        start = Placement(without_twins(live, counts.sum(0), self.ep_size), layers, loads.shape[1], self.ep_size)
        most = live.size
        if self.starts_planned:
            most = max(1, live.size // 20) if self.max_moves is None else self.max_moves
        request = PlanRequest(
            ep_size=self.ep_size,
            num_redundant_experts=start.num_redundant_experts,
            strategy="windows",
            dispatch=self.dispatch,
            effort="fast",
            folds=0,
            previous=start,
            max_moves=most,
        )
        windows = ExpertLoads(counts, np.zeros(len(counts), np.int64), layers)
        try:
            planned = make_plan(windows, request).placement.physical_to_logical
        except LoadsError:  # every layer's traffic is on one expert: nothing can be spread
            return live
        planned = np.where(loads.sum(1, keepdims=True) > 0, planned, live)
        peaks = [loads_under(self.dispatch, rows, counts, self.ep_size).max(-1).sum(0) for rows in (live, planned)]
        proposal = _within(most, live, planned, peaks[0] - peaks[1])
        before, after = (
            balancedness(loads_under(self.dispatch, rows, counts, self.ep_size)) for rows in (live, proposal)
        )
        if np.array_equal(proposal, live) or after - before < self.min_gain:
            return live
        self.starts_planned = True
        return proposal


def _fading(ring: Sequence[IntArray]) -> IntArray:
    """Windows [W, L, E], the newest last, as often as each counts; by shifts, which are exact on every rank."""
    younger = RING_WINDOWS - np.arange(len(ring), 0, -1)
    counted: IntArray = np.stack(ring) << (younger // FADING_WINDOWS)[:, None, None]
    return counted


def _within(most: int, old: Rows, new: Rows, gain: npt.NDArray[np.float64]) -> Rows:
    """`new` in the layers that gain [L] most per changed slot, `old` in the others; at most `most` slots change."""
    changed = (old != new).sum(1)
    if changed.sum() <= most:
        return new
    per_slot = gain / np.maximum(changed, 1)
    kept = old.copy()
    for layer in np.argsort(-per_slot, kind="stable"):
        if gain[layer] > 0 and changed[layer] <= most:
            kept[layer] = new[layer]
            most -= int(changed[layer])
    return kept
