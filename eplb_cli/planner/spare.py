"""Spare copies for a choice by load: in every window an expert's tokens may be split over its copies in any way.

Primaries are a plan without spare copies, so that a step which opens no copy is as fast as that plan's. A spare copy
takes some of its expert's tokens off the primary's rank, in each window as many as is best. These flows are relaxed
copy by copy, each evening out its two ranks as far as the expert has tokens there: exact descent on the sum of squared
rank loads, whose least value no split has a lower busiest rank than.

Letters as in `eplb_cli.planner`; X layers side by side, T windows that judge them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from eplb_cli.planner.search import LEVELS, Level
from eplb_cli.planner.windows import spread

__all__ = ["with_spare_copies"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

JUDGED = 16
"""Windows that judge the copies: more teach little, and each costs the same again."""
AMPLIFIED = 1.5
"""Windows to come differ from their mean by more than those recorded, which the copies are fitted to: each window is
judged a second time with its differences so much larger."""
SOFTNESS = 0.05
"""Rank loads below the busiest by this part of the mean have a price still, when copies are proposed."""
ANNEALING = ((50_000, 200), (150_000, 600), (400_000, 1_500), (8_000_000, 10_000))
"""Spare copies times windows that a layer's annealing looks at, and its most steps, by level of effort."""
HOTTEST, COLDEST = 0.01, 0.0003
"""Temperatures, in parts of the mean rank load, between which the annealing cools."""


@dataclass(frozen=True, eq=False)
class _Copies:
    """Spare copies of X layers, and what they do in T windows; loads in units of the mean rank load.

    Args:
        whole: float64 [X, E, T], loads of the experts.
        primary: int64 [X, E], the rank of each expert's primary.
        rank: int64 [X, R], the rank of each spare copy.
        expert: int64 [X, R], the expert of each; -1 for none yet.
        flow: float64 [X, R, T], what each takes off its primary.
        left: float64 [X, E, T], what is left to each primary.
        loads: float64 [X, G, T], of the ranks.
    """

    whole: FloatArray
    primary: IntArray
    rank: IntArray
    expert: IntArray
    flow: FloatArray
    left: FloatArray
    loads: FloatArray

    def cost(self, start: IntArray, price: float) -> FloatArray:
        """The busiest rank's load, averaged over windows, and the price of each expert not in the start [X, R]; [X]."""
        cost: FloatArray = self.loads.max(1).mean(1) + price * ((self.expert != start) & (start >= 0)).sum(1)
        return cost

    def tried(self) -> _Copies:
        """A copy of what changes."""
        return replace(
            self, expert=self.expert.copy(), flow=self.flow.copy(), left=self.left.copy(), loads=self.loads.copy()
        )

    def take(self, other: _Copies, layers: npt.NDArray[np.bool_]) -> None:
        """Become the other in some layers."""
        for name in ("expert", "flow", "left", "loads"):
            getattr(self, name)[layers] = getattr(other, name)[layers]

    def withdraw(self, number: int) -> None:
        """Give the tokens of one spare copy of each layer back to its primary."""
        layer, expert, flow = np.arange(len(self.rank)), self.expert[:, number], self.flow[:, number]
        self.loads[layer, self.primary[layer, expert]] += flow
        self.loads[layer, self.rank[:, number]] -= flow
        self.left[layer, expert] += flow
        self.flow[:, number] = 0.0

    def relax(self, numbers: npt.NDArray[np.integer]) -> None:
        """Even out the two ranks of each of these spare copies, one after the other."""
        layer = np.arange(len(self.rank))
        for number in numbers:
            expert, there, flow = self.expert[:, number], self.rank[:, number], self.flow[:, number]
            here, left = self.primary[layer, expert], self.left[layer, expert]
            at_here, at_there = self.loads[layer, here], self.loads[layer, there]
            moved = np.maximum(np.minimum((at_here - at_there) * 0.5, left), -flow)
            self.loads[layer, here] = at_here - moved
            self.loads[layer, there] = at_there + moved
            self.left[layer, expert] = left - moved
            self.flow[:, number] = flow + moved

    def worth(self, number: int) -> FloatArray:
        """What a copy of each expert in this spare slot would take off the busiest ranks, [X, E]; the own rank's
        experts are worth nothing there.

        Each rank has a price, the higher the nearer its load is to the busiest (an exponential's polynomial cousin,
        which every machine rounds alike): a token is worth the difference of two prices.
        """
        layer, there = np.arange(len(self.rank)), self.rank[:, number]
        price = np.maximum(0.0, 1.0 + (self.loads - self.loads.max(1, keepdims=True)) * (0.125 / SOFTNESS))
        for _ in range(3):
            price *= price
        price /= price.sum(1, keepdims=True)
        gain = np.take_along_axis(price, self.primary[:, :, None], 1)
        gain -= price[layer, there][:, None]
        gain *= self.whole
        worth: FloatArray = gain.mean(2)
        worth[self.primary == there[:, None]] = -np.inf
        at, other = np.nonzero((self.rank == there[:, None]) & (self.expert >= 0))
        worth[at, self.expert[at, other]] = -np.inf
        return worth


def with_spare_copies(
    windows: IntArray, start: IntArray, ep_size: int, level: Level, seed: int, price: float = 0.0
) -> IntArray:
    """The start [X, P] with its primaries where they are and its spare slots filled, or filled anew.

    Spare slots that hold nothing (-1) are filled one by one with the copy that is worth most. Then, step by step, one
    of all spare slots is offered another expert, drawn by its worth, and takes it by Metropolis' rule. Draws are the
    same for all layers, so that a layer's result does not depend on its neighbours. Where the start had empty slots,
    the copies that take most come first on each rank; else every slot that keeps its expert stays where it was.

    Args:
        windows: loads [T, X, E].
        start: every expert at least once, the first by place on the rank, then by rank, as its primary; without twins.
        ep_size: G.
        level: how far to go; each starts from the best of the one before.
        seed: of the draws.
        price: of a slot that gets another expert than the start has there, in mean rank loads.
    """
    (layers, num_slots), experts = start.shape, windows.shape[2]
    room, layer = num_slots // ep_size, np.arange(layers)[:, None]
    # 1. Primaries, and the spare slots by their place on the rank.
    by_place = np.arange(num_slots).reshape(ep_size, room).T.ravel()
    first = np.full((layers, experts + 1), -1)
    for slot in by_place[::-1]:
        first[layer[:, 0], start[:, slot]] = slot
    first = first[:, :experts]
    spare = np.ones((layers, num_slots), bool)
    spare[layer, first] = False
    copies = by_place[np.nonzero(spare[:, by_place])[1].reshape(layers, -1)]
    held_before = start[layer, copies]
    # 2. The windows, and as many that differ more.
    judged = windows[spread(len(windows), JUDGED)].astype(np.float64)
    judged /= np.maximum(judged.sum(2, keepdims=True), 1.0) / ep_size
    mean = judged.mean(0)
    if len(judged) > 1:
        judged = np.concatenate([judged, np.maximum(mean + AMPLIFIED * (judged - mean), 0.0)])
    whole = np.ascontiguousarray(judged.transpose(1, 2, 0))
    primary = first // room
    loads = np.zeros((layers, ep_size, whole.shape[2]))
    np.add.at(loads, (layer, primary), whole)
    number = copies.shape[1]
    now = _Copies(
        whole,
        primary,
        copies // room,
        held_before.copy(),
        np.zeros((layers, number, whole.shape[2])),
        whole.copy(),
        loads,
    )
    # 3. Fill; a copy that is not there yet takes nothing.
    empty = held_before < 0
    for copy in range(number):
        absent = empty[:, copy]
        now.expert[:, copy] = np.where(absent, now.worth(copy).argmax(1), held_before[:, copy])
        now.relax(np.arange(copy, -1, -1))
    # 4. Anneal, unless every rank holds every expert, or nothing is twice.
    best = now.tried()
    rng = np.random.default_rng(seed)
    for budget, most in () if room == experts or not number else ANNEALING[: LEVELS.index(level) + 1]:
        steps = min(most, budget // (number * whole.shape[2]))
        now = best.tried()
        cost = least = now.cost(held_before, price)
        for step in range(steps):
            heat = HOTTEST * (COLDEST / HOTTEST) ** (step / steps)
            copy, luck, noise = int(rng.integers(number)), rng.random(), rng.gumbel(size=experts)
            tried = now.tried()
            tried.withdraw(copy)
            tried.expert[:, copy] = (tried.worth(copy) + 2.0 * heat * noise).argmax(1)
            tried.relax(np.concatenate([[copy], rng.permutation(number)]))
            after = tried.cost(held_before, price)
            taken = after < cost - np.log1p(-luck) * heat
            now.take(tried, taken)
            cost = np.where(taken, after, cost)
            better = cost < least
            best.take(now, better)
            least = np.where(better, cost, least)
    placed = start.copy()
    placed[layer, copies] = best.expert
    if not empty.any():
        return placed
    # 5. Those that take most open first.
    later = np.zeros((layers, num_slots))
    later[layer, copies] = 1.0 + 1.0 / (1.0 + best.flow.sum(2))
    order = np.argsort(later.reshape(layers, ep_size, room), axis=2, kind="stable")
    return np.take_along_axis(placed.reshape(layers, ep_size, room), order, 2).reshape(layers, num_slots)
