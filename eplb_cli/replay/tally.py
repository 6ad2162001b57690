"""Sums over steps, in memory that their number does not change."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

__all__ = ["MOST_STRETCHES", "PRECISION", "Ratios", "Stretches", "Tally"]

PRECISION = 1e-4
"""Ratios that are within this share of each other may be told as one: percentiles are right to 0.01 %."""
MOST_STRETCHES = 40
"""Stretches of steps that balancedness is kept of."""
DIGITS = 9


class Ratios:
    """How often a step's max / mean was what, in bins on a logarithmic scale.

    Ratios lie in 1..G, so that there are at most ln(G) / PRECISION bins: 69,000 for 1,024 ranks.
    """

    def __init__(self) -> None:
        self._bins: dict[int, tuple[int, float]] = {}  # how many ratios are in it, and their sum
        self.worst = 0.0

    def add(self, ratio: float) -> None:
        """Count a step."""
        place = math.floor(math.log(ratio) / math.log1p(PRECISION))
        number, total = self._bins.get(place, (0, 0.0))
        self._bins[place] = number + 1, total + ratio
        self.worst = max(self.worst, ratio)

    def quantile(self, share: float) -> float:
        """As NumPy's, between neighbours by their distance, of ratios that stand for all in their bin by their mean."""
        bins = sorted(self._bins.items())
        last = np.cumsum([number for _, (number, _) in bins])
        means = [total / number for _, (number, total) in bins]
        place = share * (int(last[-1]) - 1)
        low, high = (
            means[int(np.searchsorted(last, at, side="right"))] for at in (math.floor(place), math.ceil(place))
        )
        return low + (high - low) * (place - math.floor(place))


class Stretches:
    """Sums over consecutive steps, of MOST_STRETCHES stretches at most: when they are full, each two become one."""

    def __init__(self) -> None:
        self.first_steps: list[int] = []
        self._sums: list[tuple[float, float]] = []
        self._width, self._filled = 1, 0

    def add(self, step: int, mean: float, busiest: float) -> None:
        """Add the mean and the busiest rank's tokens of a step that comes after those before."""
        if not self._sums or self._filled == self._width:
            if len(self._sums) == MOST_STRETCHES:
                self.first_steps = self.first_steps[::2]
                pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
                self._sums = [(a + c, b + d) for (a, b), (c, d) in pairs]
                self._width *= 2
            self.first_steps.append(step)
            self._sums.append((0.0, 0.0))
            self._filled = 0
        before = self._sums[-1]
        self._sums[-1] = before[0] + mean, before[1] + busiest
        self._filled += 1

    def balancedness(self) -> tuple[float, ...]:
        """Of each stretch."""
        return tuple(round(mean / busiest, DIGITS) if busiest else 1.0 for mean, busiest in self._sums)


class Tally:
    """What the steps of one phase were like under one placement and rule."""

    def __init__(self) -> None:
        self.steps = self.most_active = 0
        self.mean = self.busiest = self.active = self.time = 0.0
        self.ratios, self.stretches = Ratios(), Stretches()

    def add(self, step: int, loads: npt.NDArray[np.number], active: npt.NDArray[np.integer], price: int) -> None:
        """Count a step by its number, its tokens of each rank [L, G] and the slots that served any, [L, G]."""
        mean, busiest = float(loads.mean(1).sum()), float(loads.max(1).sum())
        self.steps += 1
        self.mean += mean
        self.busiest += busiest
        self.active += float(active.sum(1).mean())
        self.most_active = max(self.most_active, int(active.max()))
        self.time += float((loads + price * active).max(1).mean())
        self.ratios.add(busiest / mean if mean else 1.0)
        self.stretches.add(step, mean, busiest)
