"""How many redundant experts pay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from eplb_cli.bounds import least_shares
from eplb_cli.metrics import smallest_redundancy
from eplb_cli.planner.windows import IntArray

__all__ = ["CROSSOVER_TOKENS", "KNEE", "SweepPoint", "candidates", "compulsory", "knee"]

KNEE = 0.005
"""Held-out balancedness that a further slot per rank must add to be worth its memory."""
MOST_STEPS = 4
CROSSOVER_TOKENS = 90
"""Tokens per expert and step below which reading an expert's weights takes longer than using them.

2 n / F = b / B for n tokens, at F = 600 TFLOP/s reached of a matrix unit, B = 3.35 TB/s of memory and b = 1 byte a
weight (FP8 on an H100): n = F b / (2 B) = 90. Below it a copy adds a read and saves nothing.
"""


@dataclass(frozen=True)
class SweepPoint:
    """One R of the sweep: balancedness on the planned windows and held out, and the memory it takes of each rank."""

    num_redundant_experts: int
    after: float
    held_out: float | None
    extra_gib_per_rank: float | None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON output."""
        return {
            "num_redundant_experts": self.num_redundant_experts,
            "after": self.after,
            "held_out": self.held_out,
            "extra_gib_per_rank": self.extra_gib_per_rank,
        }


def candidates(num_experts: int, ep_size: int) -> list[int]:
    """The smallest valid R and up to MOST_STEPS more slots a rank, while of use and at most doubling the slots."""
    smallest = smallest_redundancy(num_experts, ep_size)
    most = min(num_experts * (ep_size - 1), max(num_experts, smallest))
    return [
        smallest + step * ep_size for step in range(MOST_STEPS + 1) if step == 0 or smallest + step * ep_size <= most
    ]


def compulsory(totals: IntArray, options: list[int], ep_size: int) -> int:
    """The first R with which no expert's copy outweighs a mean rank in any layer of loads [L, E]; else the last."""
    mean = totals.sum(1) / ep_size
    for redundant in options:
        least = least_shares(totals.astype(np.float64), totals.shape[1] + redundant, ep_size)
        if (least <= mean * (1 + 1e-9)).all():
            return redundant
    return options[-1]


def knee(points: list[SweepPoint], least: int) -> int:
    """Index of the R to take: the first from `least` on after which no further one adds KNEE per slot added to a rank.

    Figures are held out where they are known. Looking at all further ones, not only the next, steps over a dent.
    """
    figures = [point.after if point.held_out is None else point.held_out for point in points]
    for index, point in enumerate(points):
        if point.num_redundant_experts < least:
            continue
        if all(figures[more] - figures[index] < KNEE * (more - index) for more in range(index + 1, len(points))):
            return index
    return len(points) - 1
