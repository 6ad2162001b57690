"""The `balanced` rule in torch: the ids that a router chose become physical ids, and loads are counted.

It is `eplb_cli.dispatch.balanced` to the bit, for devices without Triton, and says what the kernels of
`balanced_triton` compute. Every shape follows from the shapes of the arguments, the loops have as many passes whatever
the ids are, and nothing is read back to the host.

Letters: n tokens, k experts per token, E logical experts, W width of the map, C copies that may serve, P slots, G EP
ranks, T tries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eplb_cli.dispatch.balanced import MOST_OPEN, PRIMARIES, ROUNDS, tried_worths

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GOLDEN", "Layer", "Rule", "map_and_record"]

GOLDEN = 0x1E3779B97F4A7C15
"""An odd number of 61 bits, which spreads places over the digest's words (Fibonacci hashing)."""


@dataclass(frozen=True)
class Rule:
    """The rule for one model on one device.

    Args:
        ep_size: G.
        num_slots: P.
        price: tokens of the batch that an active slot costs.
        whole_step: the batch is all of the step, see `choose_copies`.
        worths: int64 [T], the tokens that a copy must be worth, in the order in which they are tried.
    """

    ep_size: int
    num_slots: int
    price: int
    whole_step: bool
    worths: Tensor

    @classmethod
    def on(cls, device: object, ep_size: int, num_slots: int, price: int, *, whole_step: bool) -> Rule:
        """The rule with its constants on a device."""
        import torch

        worths = torch.tensor(tried_worths(price, whole_step=whole_step), dtype=torch.int64, device=device)  # type: ignore[arg-type]
        return cls(ep_size, num_slots, price, whole_step, worths)

    def most_copies(self, num_experts: int, width: int) -> int:
        """C: the copies that an expert can have in a map of that width, as far as the rule opens them."""
        return min(width, self.num_slots - num_experts + 1, MOST_OPEN)


@dataclass(frozen=True)
class Layer:
    """What belongs to one MoE layer; all on the device, and at one address as long as the server runs.

    Args:
        logical_to_physical: int64 [E, W], vLLM's map: each expert's slots, then -1.
        replica_count: int64 [E], vLLM's number of copies.
        load: int32 [P], vLLM's counter of tokens per slot.
        record_enabled: bool [], whether `load` is counted.
        served: int64 [P], tokens per slot, counted always.
        digest: int64 [1], a sum over all choices that differs when any of them does.
    """

    logical_to_physical: Tensor
    replica_count: Tensor
    load: Tensor
    record_enabled: Tensor
    served: Tensor
    digest: Tensor


def map_and_record(ids: Tensor, rule: Rule, layer: Layer, *, counted: Tensor | None, recorded: Tensor | None) -> Tensor:
    """The slot that serves each expert of each token, [n, k] of the dtype of `ids`; adds to the layer's counters.

    Equal to `eplb_cli.dispatch.serving_slots` on the map that `layer` holds.

    Args:
        ids: [n, k], the experts that the router chose; -1 for none.
        rule, layer: which rule, and where.
        counted: int32 [], the rows that the choice is made for; the rest is padding, which goes to primaries. None:
            all rows.
        recorded: int32 [], the rows that are added to vLLM's load. None: all rows.
    """
    import torch

    if ids.numel() == 0:
        return ids
    experts = layer.replica_count.shape[0]
    flat = ids.reshape(-1).long()
    places = torch.arange(flat.shape[0], device=ids.device)
    row = places // ids.shape[1]
    known = (flat >= 0) & (flat < experts)
    chosen = known if counted is None else known & (row < counted)
    expert, key = torch.where(known, flat, 0), torch.where(chosen, flat, experts)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add_(0, key, torch.ones_like(key))
    slots = _copies(rule, layer)
    ends = _quota(counts[:experts], slots, rule, layer).cumsum(1)
    by_expert = torch.argsort(key, stable=True)
    first = counts.cumsum(0) - counts
    place = torch.empty_like(flat).scatter_(0, by_expert, places - first[key[by_expert]])
    copy = torch.where(chosen, (place[:, None] >= ends[expert]).sum(1), 0)
    serving = slots[expert, torch.where(chosen, copy, 0)]
    physical = torch.where(known, serving, -1)

    seen = known & layer.record_enabled
    seen = seen if recorded is None else seen & (row < recorded)
    layer.load.scatter_add_(0, serving, seen.to(layer.load.dtype))
    layer.served.scatter_add_(0, serving, chosen.long())
    layer.digest.add_((torch.where(chosen, serving + 1, 0) * ((places * GOLDEN) | 1)).sum())
    return physical.to(ids.dtype).reshape(ids.shape)


def _copies(rule: Rule, layer: Layer) -> Tensor:
    """The first C copies of each expert in the order of `Copies`: place on the rank, then rank; int64 [E, C]."""
    import torch

    experts, width = layer.logical_to_physical.shape
    width = min(width, rule.num_slots - experts + 1)
    most, per_rank = rule.most_copies(experts, width), rule.num_slots // rule.ep_size
    table = layer.logical_to_physical[:, :width]
    held = torch.arange(width, device=table.device) < layer.replica_count[:, None]
    order = torch.where(held, table % per_rank * rule.ep_size + table // per_rank, rule.num_slots)
    order = order.sort(1).values[:, :most]
    order = torch.where(order < rule.num_slots, order, order[:, :1])
    return order % rule.ep_size * per_rank + order // rule.ep_size


def _quota(counts: Tensor, slots: Tensor, rule: Rule, layer: Layer) -> Tensor:
    """Tokens that each copy serves, int64 [E, C]: of all tries the one with the fastest slowest rank."""
    import torch

    experts, most = slots.shape
    tries = rule.worths.shape[0]
    copy = torch.arange(most, device=slots.device)
    ranks = slots // (rule.num_slots // rule.ep_size)
    opened = _opened(counts, layer.replica_count.clamp(max=most), rule, most)
    is_open = copy < opened[:, :, None]
    parts = torch.div(counts, opened.clamp(min=1), rounding_mode="floor")
    rest = counts - parts * opened
    quota = torch.where(is_open, parts[:, :, None] + (copy < rest[:, :, None]), 0)
    everywhere = ranks.reshape(1, -1).expand(tries, -1)
    loads = torch.zeros((tries, rule.ep_size), dtype=torch.int64, device=slots.device)
    loads.scatter_add_(1, everywhere, (quota + rule.price * is_open).reshape(tries, -1))
    # As many experts as can have copies; those at the end may have none, and are poured back as they were.
    shared = torch.argsort(layer.replica_count <= 1, stable=True)[: min(experts, rule.num_slots - experts)]
    for _ in range(ROUNDS):
        for index in range(shared.shape[0]):
            expert = shared[index : index + 1]
            at = ranks[expert].expand(tries, -1)
            before = quota[:, expert][:, 0]
            loads.scatter_add_(1, at, -before)
            live = opened[:, expert] > 1
            poured = _pour(counts[expert], loads.gather(1, at), is_open[:, expert][:, 0])
            after = torch.where(live, poured, before)
            loads.scatter_add_(1, at, after)
            quota.index_copy_(1, expert, after[:, None])
    loads.scatter_add_(1, everywhere, -rule.price * (is_open & (quota == 0)).reshape(tries, -1).long())
    best = torch.argmin(loads.max(1).values * tries + torch.arange(tries, device=slots.device), keepdim=True)
    return quota.index_select(0, best)[0]


def _opened(counts: Tensor, copies: Tensor, rule: Rule, most: int) -> Tensor:
    """Copies that may serve, int64 [T, E]; none of an expert without tokens."""
    import torch

    worth = rule.worths[:, None]
    spare = counts[:, None] - worth[:, :, None] * torch.arange(1, most + 1, device=counts.device)
    worthy = spare >= 0
    if not rule.whole_step:
        worthy &= spare * spare >= 4 * counts[:, None]
    opened = torch.minimum(worthy.sum(2).clamp(min=1), copies)
    opened = torch.where(worth == 0, copies, torch.where(worth == PRIMARIES, 1, opened))
    return torch.where(counts > 0, opened, 0)


def _pour(tokens: Tensor, loads: Tensor, among: Tensor) -> Tensor:
    """Tokens [1] poured over copies `among` [T, C], on ranks of these loads [T, C], lowest first: int64 [T, C]."""
    import torch

    heights, order = torch.where(among, loads, 1 << 60).sort(dim=1, stable=True)
    dry = heights == 1 << 60
    below = torch.where(dry, 0, heights).cumsum(1)
    number = torch.arange(1, heights.shape[1] + 1, device=loads.device)
    width = (~dry & (heights * number - below < tokens)).sum(1, keepdim=True).clamp(min=1)
    total = tokens + below.gather(1, width - 1)
    level = torch.div(total, width, rounding_mode="floor")
    given = torch.where(number <= width, level - heights + (number <= total - level * width), 0)
    return torch.empty_like(given).scatter_(1, order, given)
