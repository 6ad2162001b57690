"""The copy that other engines choose: one for each source rank and expert, fixed when the engine starts.

Under such a rule it matters on which node a copy is, and in which order the ranks are. Read in the engines' sources:

- `sglang`: 0.5.23, `srt/eplb/expert_location.py`, `--ep-dispatch-algorithm static`, the default with an all-to-all
  backend. A rank serves itself when it holds a copy; else, where some but not all copies are on its node, it sends to
  the first slot of them; else it takes its place in a deal: the copies as often as they go into the ranks that are in
  the same position, the rest drawn, all shuffled. Each rank draws with a generator of its own, seed 42, and draws only
  for experts of which it finds no near copy, so that ranks with different copies see different deals.
- `vllm-ascend`: 0.18.0, `eplb/core/eplb_utils.py`: the copies by rank, and of those number (source rank mod copies).
  Of two copies on one rank it knows the last slot only. Since pull request 9239 the number is (tensor-parallel rank +
  data-parallel rank + expert) mod copies where tensor parallelism is above 1, which is not modelled.

TensorRT-LLM goes round the copies token by token, so over a window its split is even (`steps`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.rules import StaticRule
from eplb_cli.errors import PlacementError
from eplb_cli.metrics import initial_map, require_table

__all__ = ["SglangDeals", "chosen_slots", "shares_of_slots", "static_shares", "usual_shares"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

SGLANG_SEED = 42
NONE = -1


def chosen_slots(
    rule: StaticRule,
    physical_to_logical: npt.NDArray[np.integer],
    num_experts: int,
    ep_size: int,
    num_nodes: int,
    layer_ids: Sequence[int] | npt.NDArray[np.integer] | None = None,
) -> IntArray:
    """The slot to which each source rank sends its tokens of each expert, int64 [L, E, G].

    Args:
        rule: the engine's.
        physical_to_logical: the map [L, P], every expert in every row.
        num_experts, ep_size: E and G.
        num_nodes: nodes that the ranks are spread over, in equal consecutive blocks.
        layer_ids: decoder layers of the rows, ascending; None for 0, 1, 2, .. SGLang deals layer after layer, dense
            ones too: layers that are not listed are taken as `eplb export` writes them, in the initial layout.

    Raises:
        PlacementError: a layer id is beyond any model's.
    """
    if rule == "vllm-ascend":
        return _by_rank_modulo(physical_to_logical, num_experts, ep_size)
    ids = np.arange(len(physical_to_logical)) if layer_ids is None else np.asarray(layer_ids, np.int64)
    require_table(int(ids.max(initial=0)) + 1, num_experts, ep_size, PlacementError)
    return _nearest_or_dealt(physical_to_logical, num_experts, ep_size, num_nodes, ids)


def static_shares(
    rule: StaticRule,
    physical_to_logical: npt.NDArray[np.integer],
    num_experts: int,
    ep_size: int,
    num_nodes: int,
    layer_ids: Sequence[int] | npt.NDArray[np.integer] | None = None,
) -> FloatArray:
    """The part of each expert's load that each rank serves, float64 [L, E, G]; source ranks bring equal parts.

    Arguments as in `chosen_slots`.
    """
    chosen = chosen_slots(rule, physical_to_logical, num_experts, ep_size, num_nodes, layer_ids)
    return shares_of_slots(chosen, physical_to_logical.shape[1])


def shares_of_slots(chosen: IntArray, num_slots: int) -> FloatArray:
    """The part of each expert's load that each rank serves, float64 [..., E, G], from the slots of `chosen_slots`."""
    ep_size = chosen.shape[-1]
    first = np.arange(chosen.size // ep_size).reshape(*chosen.shape[:-1], 1) * ep_size
    sources = np.bincount((first + chosen // (num_slots // ep_size)).ravel(), minlength=chosen.size)
    shares: FloatArray = sources.reshape(chosen.shape) / ep_size
    return shares


def usual_shares(rule: StaticRule, held: BoolArray, num_nodes: int) -> FloatArray:
    """The parts that the ranks serve of experts of which each holds one copy or none, float64 [..., G], from [..., G].

    Of what SGLang deals every copy gets an equal part, which is the mean of its deals; all else is exact.
    """
    ranks = held.shape[-1]
    copies = held.sum(-1, keepdims=True)
    if rule == "vllm-ascend":
        place = np.cumsum(held, -1) - 1
        by_turn: FloatArray = np.where(held, ranks // copies + (place < ranks % copies), 0) / ranks
        return by_turn
    by_node = held.reshape(*held.shape[:-1], num_nodes, -1)
    on_node = by_node.sum(-1)
    without = by_node.shape[-1] - on_node
    near = (on_node > 0) & (on_node < copies)
    first = by_node & (np.cumsum(by_node, -1) == 1)
    sources = by_node + first * np.where(near, without, 0)[..., None]
    dealt = np.where(near, 0, without).sum(-1, keepdims=True)
    shares: FloatArray = (sources.reshape(held.shape) + held * (dealt / copies)) / ranks
    return shares


def _by_rank_modulo(physical_to_logical: npt.NDArray[np.integer], num_experts: int, ep_size: int) -> IntArray:
    layers, slots = physical_to_logical.shape
    on_rank = np.full((layers, num_experts, ep_size), NONE, np.int64)
    layer = np.arange(layers)
    # Slot by slot, so that the last one on a rank stands.
    for slot in range(slots):
        on_rank[layer, physical_to_logical[:, slot], slot // (slots // ep_size)] = slot
    copies = (on_rank != NONE).sum(2, keepdims=True)
    by_rank = np.argsort(on_rank == NONE, axis=2, kind="stable")
    holder = np.take_along_axis(by_rank, np.arange(ep_size) % copies, 2)
    return np.take_along_axis(on_rank, holder, 2)


def _nearest_or_dealt(
    physical_to_logical: npt.NDArray[np.integer], num_experts: int, ep_size: int, num_nodes: int, ids: IntArray
) -> IntArray:
    chosen = np.empty((len(ids), num_experts, ep_size), np.int64)
    between = initial_map(num_experts, physical_to_logical.shape[1] - num_experts)
    row_of = dict(zip(ids.tolist(), range(len(ids)), strict=True))
    deals = SglangDeals(num_experts, ep_size, num_nodes)
    for layer in range(int(ids.max(initial=-1)) + 1):
        if layer in row_of:
            chosen[row_of[layer]] = deals.next_layer(physical_to_logical[row_of[layer]])
        else:
            deals.next_layer(between)
    return chosen


class SglangDeals:
    """SGLang's choice of copies, layer after layer.

    Every rank draws with a generator of its own; ranks that have drawn the same so far share one here.
    """

    def __init__(self, num_experts: int, ep_size: int, num_nodes: int) -> None:
        self.num_experts, self.ep_size, self.num_nodes = num_experts, ep_size, num_nodes
        self._players = [(tuple(range(ep_size)), random.Random(SGLANG_SEED))]  # noqa: S311 - the engine's own

    def fork(self) -> SglangDeals:
        """Another one in the same state."""
        other = SglangDeals(self.num_experts, self.ep_size, self.num_nodes)
        other._players = [(ranks, _same_state(generator)) for ranks, generator in self._players]
        return other

    def next_layer(self, row: npt.NDArray[np.integer]) -> IntArray:
        """The slot to which each source rank sends its tokens of each expert, int64 [E, G], in the next layer [P]."""
        chosen: IntArray = _nearest(row[None], self.num_experts, self.ep_size, self.num_nodes)[0]
        unmet = chosen == NONE
        dealt = np.flatnonzero(unmet.any(1)).tolist()
        copies = {expert: np.flatnonzero(row == expert).tolist() for expert in dealt}
        places = (np.cumsum(unmet, 1) - 1).tolist()
        sources = unmet.sum(1).tolist()
        players = []
        for ranks, generator in self._players:
            alike: dict[bytes, list[int]] = {}
            for rank in ranks:
                alike.setdefault(unmet[:, rank].tobytes(), []).append(rank)
            for group in alike.values():
                own = generator if len(alike) == 1 else _same_state(generator)
                players.append((tuple(group), own))
                for expert in dealt:
                    if unmet[expert, group[0]]:
                        hand = _deal(copies[expert], sources[expert], own)
                        for rank in group:
                            chosen[expert, rank] = hand[places[expert][rank]]
        self._players = players
        return chosen


def _same_state(generator: random.Random) -> random.Random:
    other = random.Random()  # noqa: S311 - the engine's own
    other.setstate(generator.getstate())
    return other


def _nearest(physical_to_logical: npt.NDArray[np.integer], num_experts: int, ep_size: int, num_nodes: int) -> IntArray:
    """SGLang's near copy of each expert for each rank, int64 [L, E, G]; NONE where it deals."""
    layers, slots = physical_to_logical.shape
    on_rank = np.full((layers, num_experts, ep_size), slots, np.int64)
    copies = np.zeros((layers, num_experts, num_nodes), np.int64)
    layer = np.arange(layers)
    for slot in reversed(range(slots)):
        expert, rank = physical_to_logical[:, slot], slot // (slots // ep_size)
        on_rank[layer, expert, rank] = slot
        copies[layer, expert, rank // (ep_size // num_nodes)] += 1
    total = copies.sum(2, keepdims=True)
    first_on_node = on_rank.reshape(layers, num_experts, num_nodes, -1).min(3)
    sole = np.broadcast_to(first_on_node.min(2, keepdims=True), first_on_node.shape)
    near = np.where(total == 1, sole, np.where((copies > 0) & (copies < total), first_on_node, NONE))
    nearest: IntArray = np.where(on_rank < slots, on_rank, np.repeat(near, ep_size // num_nodes, axis=2))
    return nearest


def _deal(copies: list[int], sources: int, generator: random.Random) -> list[int]:
    """One of the copies for each source: each equally often, the remainder drawn; in random order."""
    times, rest = divmod(sources, len(copies))
    hand = copies * times + generator.sample(copies, rest)
    generator.shuffle(hand)
    return hand
