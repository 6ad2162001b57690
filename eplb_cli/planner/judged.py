"""Placements judged by an engine's own choice of copies, where that is fixed for each source rank.

Under such a rule copies get uneven parts, which depend on the node that a copy is on and on the order of the ranks. The
search knows none of that: it exchanges slots and moves copies, and asks the rule what the two experts' new shares are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import SglangDeals, StaticRule, loads_under, shares_of_slots, usual_shares
from eplb_cli.metrics import initial_map, replica_counts
from eplb_cli.planner.moves import without_twins
from eplb_cli.planner.request import Topology
from eplb_cli.planner.search import Level
from eplb_cli.planner.windows import spread

__all__ = ["judged_map"]

IntArray = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

MOST_WINDOWS = 64
"""Windows that the search looks at, spread over all."""
TRIES = 4
"""Proposals that a layer weighs at a time, of which it takes one at most."""
LOOKED_AT: dict[Level, int] = {
    "fast": 70_000_000,
    "settled": 140_000_000,
    "normal": 600_000_000,
    "thorough": 10_000_000_000,
}
"""Rank loads that the annealing looks at: layers x TRIES x ranks x windows, and ROUND more for each round. Chosen so
that with the search over deals the efforts add about 0.5, 1, 3 and 60 seconds of one processor to the starts's."""
ROUND = 60_000
DRAWN: dict[Level, int] = {"fast": 30_000, "settled": 50_000, "normal": 150_000, "thorough": 3_000_000}
"""Cards that the search over SGLang's deals may draw, in all layers together; TRIAL more for each trial."""
TRIAL = 75
HOTTEST, COLDEST = 1e-3, 2e-5
"""Temperatures of the annealing, in means of the rank loads; over the last COOLED of the rounds it is 0."""
COOLED = 0.2
BUSY, MOVED = 0.9, 0.25
"""Parts of the proposals that start from the busiest rank of a window, and that move a copy instead of a slot."""
SPREAD_WEIGHT = 0.5
"""What the mean square of the rank loads counts beside the busiest one, which alone would not tell a step towards a
lower peak from a useless one while two ranks are equally busy."""
LEAST_GAIN = 1e-9


def judged_map(
    rule: StaticRule,
    counts: IntArray,
    starts: Sequence[IntArray],
    topology: Topology,
    level: Level,
    seed: int,
    *,
    within_nodes: bool,
) -> IntArray:
    """The placement [L, P] with the least sum over windows of the busiest rank's load under the rule, of those found.

    1. The starts' twins give way to copies of other experts; each layer goes on from its better start.
    2. Annealing, then descent, on the usual shares (`usual_shares`).
    3. SGLang's deals are searched layer after layer, since each depends on those before.

    Never worse than any of the starts (before twins give way, unless they are what makes it good).

    Args:
        rule: who chooses.
        counts: loads [W, L, E].
        starts: placements [L, P].
        topology: sizes, nodes and layers.
        level, seed: how far to go, and the seed of all draws.
        within_nodes: exchange within nodes only.
    """
    ranks, nodes = topology.ep_size, topology.num_nodes
    options = [without_twins(start, counts.sum(0), ranks) for start in starts]
    windows = counts[spread(len(counts), MOST_WINDOWS)]
    best = _better_layers(rule, windows, options, ranks, nodes)
    loaded = counts.any((0, 2))
    found = best.copy()
    found[loaded] = _anneal(rule, windows[:, loaded], best[loaded], topology, level, seed, within_nodes=within_nodes)
    best = _better_layers(rule, windows, [best, found], ranks, nodes)
    if rule == "sglang":
        options.append(best)
        best = _search_deals(windows, best, topology, level, seed, within_nodes=within_nodes)
    options.append(best)
    peaks = [
        float(loads_under(rule, option, counts, ranks, nodes, topology.layer_ids).max(2).sum()) for option in options
    ]
    # Of equals the last one, which was searched longest.
    return options[len(options) - 1 - int(np.argmin(peaks[::-1]))]


def _holders(placed: IntArray, experts: int, ranks: int) -> BoolArray:
    """Which ranks hold each expert, [L, E, G]."""
    layers, slots = placed.shape
    held = np.zeros((layers, experts, ranks), bool)
    held[np.arange(layers)[:, None], placed, np.arange(slots) // (slots // ranks)] = True
    return held


def _better_layers(
    rule: StaticRule, windows: IntArray, options: Sequence[IntArray], ranks: int, nodes: int
) -> IntArray:
    """Of each layer the option with the least sum of busiest ranks' loads by the usual shares; of equals the first."""
    by_layer = windows.transpose(1, 0, 2).astype(np.float64)
    peaks = [
        (by_layer @ usual_shares(rule, _holders(option, windows.shape[2], ranks), nodes)).max(2).sum(1)
        for option in options
    ]
    chosen = np.argmin(peaks, axis=0)
    result: IntArray = np.stack(options)[chosen, np.arange(len(chosen))]
    return result


@dataclass(frozen=True, eq=False)
class _Proposals:
    """Two slots of a layer, and what is proposed to hold: of equal shapes, [L, K] or of one layer [K].

    A swap exchanges the experts a and b; else one of them takes the other's slot as well.

    Args:
        rank, slot, expert: g, s and a, of the first slot.
        other_rank, other_slot, other_expert: h, r and b, of the second.
        first, second: what the two slots are to hold.
    """

    rank: IntArray
    slot: IntArray
    expert: IntArray
    other_rank: IntArray
    other_slot: IntArray
    other_expert: IntArray
    first: IntArray
    second: IntArray

    @classmethod
    def draw(
        cls, rng: np.random.Generator, placed: IntArray, busiest: IntArray, nodes: int, *, within_nodes: bool
    ) -> _Proposals:
        """For layers [L, G, S], starting from the busiest rank of some window, [L, K], or from any rank."""
        layer = np.arange(len(placed))[:, None]
        _, ranks, room = placed.shape
        shape = busiest.shape
        start, kind = rng.random(shape), rng.random(shape)
        rank = np.where(start < BUSY, busiest, rng.integers(0, ranks, shape))
        other_rank = rng.integers(0, ranks, shape)
        if within_nodes:
            per_node = ranks // nodes
            other_rank = rank // per_node * per_node + other_rank % per_node
        slot, other_slot = rng.integers(0, room, shape), rng.integers(0, room, shape)
        a, b = placed[layer, rank, slot], placed[layer, other_rank, other_slot]
        first = np.where(kind < MOVED / 2, a, b)
        second = np.where((kind >= MOVED / 2) & (kind < MOVED), b, a)
        return cls(rank, slot, a, other_rank, other_slot, b, first, second)

    def holders(self, held: BoolArray) -> tuple[BoolArray, BoolArray, BoolArray]:
        """Which ranks would hold a and b, [L, K, G] each, from [L, E, G]; and which proposals are possible, [L, K]."""
        layer = np.arange(len(held))[:, None]
        ranks = np.arange(held.shape[2])
        at, at_other = self.rank[..., None] == ranks, self.other_rank[..., None] == ranks
        a, b = self.expert[..., None], self.other_expert[..., None]
        first, second = self.first[..., None], self.second[..., None]
        before_a, before_b = held[layer, self.expert], held[layer, self.other_expert]
        # The first slot held a, so there b can only come: its rank may hold b in another slot. And the other way round.
        holds_a = np.where(at, first == a, before_a | (at_other & (second == a)))
        holds_b = np.where(at_other, second == b, before_b | (at & (first == b)))
        new_twin = (before_a & at_other & (second == a)).any(-1) | (before_b & at & (first == b)).any(-1)
        possible = (self.rank != self.other_rank) & ~new_twin & holds_a.any(-1) & holds_b.any(-1)
        return holds_a, holds_b, possible

    def make(self, placed: IntArray, layer: IntArray, number: IntArray) -> None:
        """Write proposal `number` [n] of each `layer` [n] into the slots [L, G, S]."""
        at = layer, number
        placed[layer, self.rank[at], self.slot[at]] = self.first[at]
        placed[layer, self.other_rank[at], self.other_slot[at]] = self.second[at]


def _cost(loads: npt.NDArray[np.floating], per_mean: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    """Sum over windows of the busiest rank's load, and SPREAD_WEIGHT of mean square over mean, from [..., G, T]."""
    square = (loads * loads).mean(-2) * per_mean
    cost: npt.NDArray[np.floating] = (loads.max(-2) + np.float32(SPREAD_WEIGHT) * square).sum(-1)
    return cost


def _scaled(windows: IntArray, ranks: int) -> tuple[Float32, Float32]:
    """Loads [L, E, T], so that a layer's mean rank loads sum to 1 over windows; and one over each mean, [L, T]."""
    means = windows.sum(2) / ranks
    total = np.maximum(means.sum(0), 1e-9)
    loads = np.ascontiguousarray((windows / total[:, None]).transpose(1, 2, 0), np.float32)
    return loads, (total / np.maximum(means, 1e-9)).T.astype(np.float32)


def _anneal(
    rule: StaticRule,
    windows: IntArray,
    start: IntArray,
    topology: Topology,
    level: Level,
    seed: int,
    *,
    within_nodes: bool,
) -> IntArray:
    """The start [L, P] after annealing on the usual shares, all layers at once."""
    ranks, nodes = topology.ep_size, topology.num_nodes
    layers, slots = start.shape
    placed = start.reshape(layers, ranks, -1).copy()
    whole, per_mean = _scaled(windows, ranks)
    held = _holders(start, windows.shape[2], ranks)
    shares = usual_shares(rule, held, nodes).astype(np.float32)
    loads = np.einsum("leg,let->lgt", shares, whole)
    cost = _cost(loads, per_mean)
    layer, rows = np.arange(layers), np.arange(layers)[:, None]
    rounds = LOOKED_AT[level] // (layers * TRIES * ranks * whole.shape[2] + ROUND)
    heat = HOTTEST * (COLDEST / HOTTEST) ** (np.arange(rounds) / max(1.0, (1 - COOLED) * rounds))
    heat[int((1 - COOLED) * rounds) :] = 0.0
    rng = np.random.default_rng(seed)
    for step in range(rounds):
        seen = rng.integers(0, whole.shape[2], (layers, TRIES))
        drawn = _Proposals.draw(rng, placed, loads[rows, :, seen].argmax(2), nodes, within_nodes=within_nodes)
        a, b = drawn.expert, drawn.other_expert
        holds_a, holds_b, possible = drawn.holders(held)
        # What is impossible is judged as no change, so that the rule never sees an expert without a copy.
        holds_a, holds_b = (
            np.where(possible[..., None], new, held[rows, of]) for new, of in ((holds_a, a), (holds_b, b))
        )
        shares_a, shares_b = (usual_shares(rule, new, nodes).astype(np.float32) for new in (holds_a, holds_b))
        then = loads[:, None] + (shares_a - shares[rows, a])[..., None] * whole[rows, a][:, :, None]
        then += (shares_b - shares[rows, b])[..., None] * whole[rows, b][:, :, None]
        cost_then = _cost(then, per_mean[:, None])
        change = np.where(possible, cost_then - cost[:, None] - heat[step] * rng.standard_exponential(a.shape), np.inf)
        best = change.argmin(1)
        at = np.flatnonzero(change[layer, best] < -LEAST_GAIN)
        taken = at, best[at]
        drawn.make(placed, *taken)
        loads[at], cost[at] = then[taken], cost_then[taken]
        held[at, a[taken]], held[at, b[taken]] = holds_a[taken], holds_b[taken]
        shares[at, a[taken]], shares[at, b[taken]] = shares_a[taken], shares_b[taken]
    return placed.reshape(layers, slots)


def _search_deals(
    windows: IntArray, start: IntArray, topology: Topology, level: Level, seed: int, *, within_nodes: bool
) -> IntArray:
    """The start [L, P] after descent on SGLang's exact shares, one layer after the other.

    An exchange that touches a dealt expert deals anew all that come after it in the layer.
    """
    experts, ranks, nodes = topology.num_experts, topology.ep_size, topology.num_nodes
    result = start.copy()
    whole, per_mean = _scaled(windows, ranks)
    cards = (replica_counts(start, experts) > 1).sum(1) * ranks
    between = initial_map(experts, topology.num_redundant_experts)
    row_of = {layer: row for row, layer in enumerate(topology.layer_ids)}
    deals = SglangDeals(experts, ranks, nodes)
    for layer in range(topology.layer_ids[-1] + 1):
        if layer not in row_of:
            deals.next_layer(between)
            continue
        row = row_of[layer]
        after, loads = _served(deals, result[row], whole[row])
        rng = np.random.default_rng((seed, layer))
        cost = _cost(loads, per_mean[row])
        trials = DRAWN[level] // (len(result) * (int(cards[row]) + TRIAL)) if whole[row].any() else 0
        for _ in range(trials):
            busiest = loads[:, rng.integers(0, loads.shape[1])].argmax()
            trial = result[row].reshape(1, ranks, -1).copy()
            drawn = _Proposals.draw(rng, trial, np.array([[busiest]]), nodes, within_nodes=within_nodes)
            if not drawn.holders(_holders(trial.reshape(1, -1), experts, ranks))[2].all():
                continue
            drawn.make(trial, np.array([0]), np.array([0]))
            after_trial, loads_trial = _served(deals, trial.reshape(-1), whole[row])
            cost_trial = _cost(loads_trial, per_mean[row])
            if cost_trial < cost - LEAST_GAIN:
                result[row], after, loads, cost = trial.reshape(-1), after_trial, loads_trial, cost_trial
        deals = after
    return result


def _served(deals: SglangDeals, row: IntArray, whole: Float32) -> tuple[SglangDeals, FloatArray]:
    """The deals after a layer [P], and the rank loads [G, T] in it, from loads [E, T]."""
    after = deals.fork()
    shares = shares_of_slots(after.next_layer(row), len(row))
    return after, shares.T @ whole
