"""What is live in this worker, read back from the model that serves, and compared with the plan's file read anew.

It shares nothing with the code that moves experts. It reads the file itself; it takes each layer's number from the
module's place in the model, and the row that the layer uses from where its router's table lies in memory, never from
the order of a list; and it reads what decides: the router's table and replica counts, and the bytes of the slots.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eplb_cli.errors import ServeError
from eplb_cli.placement import MOST_PLAN_BYTES
from eplb_cli.untrusted import read_json

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "LiveLayer",
    "Wanted",
    "all_slots",
    "fault",
    "first_copies",
    "live_layers",
    "live_sha256",
    "own_slots",
    "slot_checksums",
]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed 64-bit number


@dataclass(frozen=True)
class Wanted:
    """What a plan's file asks for.

    Args:
        num_experts: logical experts E.
        ep_size: EP ranks.
        rows: the expert of every slot, for each decoder layer.
        relabelled: the served checkpoint numbers a layer's experts by the slots that hold their first copies.
    """

    num_experts: int
    ep_size: int
    rows: Mapping[int, Sequence[int]]
    relabelled: bool = False

    @classmethod
    def read(cls, file: Path, layout: str) -> Wanted:
        """Read the plan's file.

        Raises:
            ServeError: the file cannot be read, or lacks what a plan has.
        """
        document = read_json(file, ServeError, most_bytes=MOST_PLAN_BYTES)
        try:
            rows = {entry["layer_id"]: list(entry["physical_to_logical"]) for entry in document["layers"]}
            experts, ranks = document["model"]["experts"], document["topology"]["ep_size"]
        except (KeyError, TypeError) as error:
            raise ServeError(f"is not a plan: {error!r}", file=file) from None
        return cls(experts, ranks, rows, layout == "stock")

    def names(self, layer: int) -> Sequence[int]:
        """The plan's name of each expert number of the served checkpoint."""
        return self.rows[layer][: self.num_experts] if self.relabelled else range(self.num_experts)


@dataclass(frozen=True)
class LiveLayer:
    """One MoE layer as it runs on this rank.

    Args:
        experts: the expert of every slot [P], as vLLM's rebalancing knows it.
        copies: the slots to which the router sends each expert's tokens [E].
        module: the layer.
    """

    experts: list[int]
    copies: list[list[int]]
    module: Any


def live_layers(model_state: Any, model: Any) -> dict[int, LiveLayer]:
    """Every MoE layer of this worker's model, by decoder layer.

    Raises:
        ServeError: a layer's number is not to be told, or a router does not look at the tables that vLLM keeps.
    """
    tables, counts = model_state.logical_to_physical_map, model_state.logical_replica_count
    rows = model_state.physical_to_logical_map.tolist()
    layers: dict[int, LiveLayer] = {}
    used: dict[int, int] = {}
    for name, module in model.named_modules():
        seen = _router_state(module) if hasattr(module, "get_expert_weights") else None
        if seen is None:
            continue
        numbers = re.findall(r"(?:^|\.)layers\.(\d+)(?:\.|$)", name)
        if len(numbers) != 1 or int(numbers[0]) in layers:
            raise ServeError(f"the decoder layer of {name!r} is not to be told from its name")
        layer = int(numbers[0])
        table, count = seen.logical_to_physical_map, seen.logical_replica_count
        row = _row(table, tables)
        if row is None or row != _row(count, counts) or row in used:
            raise ServeError("the router does not see the map that vLLM keeps for it", layer=layer)
        used[row] = layer
        used_columns = table[:, : int(count.max())].tolist()
        slots = [held[:number] for held, number in zip(used_columns, count.tolist(), strict=True)]
        layers[layer] = LiveLayer(rows[row], slots, module)
    if len(layers) != len(rows):
        raise ServeError(f"{len(layers)} MoE layers are found in the model, vLLM's EPLB keeps {len(rows)}")
    return layers


def _router_state(module: Any) -> Any | None:
    """What the module's router reads at each step, or None."""
    router = getattr(module, "router", None)
    for holder in (getattr(router, "eplb_state", None), getattr(module, "eplb_state", None), module):
        if getattr(holder, "logical_to_physical_map", None) is not None:
            return holder
    return None


def _row(view: Tensor, whole: Tensor) -> int | None:
    """Which row of `whole` the `view` is, by memory; None when it is none."""
    row, rest = divmod(view.data_ptr() - whole.data_ptr(), whole.stride(0) * whole.element_size())
    return row if not rest and 0 <= row < whole.shape[0] and view.shape == whole.shape[1:] else None


def own_slots(live: Mapping[int, LiveLayer]) -> dict[int, dict[int, int]]:
    """The checksum of each slot that this rank holds, by layer and slot.

    Which of the rank's weights are which slot is read from the map that the layer's kernels use.
    """
    sums: dict[int, dict[int, int]] = {}
    for layer, found in live.items():
        held = slot_checksums(list(found.module.get_expert_weights())).tolist()
        local = getattr(found.module, "expert_map", None)
        places = range(len(held)) if local is None else local.tolist()[: len(found.experts)]
        sums[layer] = {slot: held[place] for slot, place in enumerate(places) if place >= 0}
    return sums


def all_slots(ranks: Sequence[Mapping[int, Mapping[int, int]]]) -> dict[int, dict[int, int]]:
    """What all ranks' `own_slots` say together.

    Raises:
        ServeError: two ranks hold the same slot.
    """
    together: dict[int, dict[int, int]] = {}
    for rank, layers in enumerate(ranks):
        for layer, held in layers.items():
            known = together.setdefault(layer, {})
            if twice := known.keys() & held.keys():
                raise ServeError(f"slot {min(twice)} is on two ranks", layer=layer, rank=rank)
            known.update(held)
    return together


def first_copies(
    wanted: Wanted, live: Mapping[int, LiveLayer], slots: Mapping[int, Mapping[int, int]], layout: str
) -> dict[int, dict[int, int]]:
    """The checksum of each expert's first copy as loaded, by layer and expert; taken before anything moves.

    A `physical` checkpoint is loaded slot by slot as the plan says, the others in vLLM's start layout.
    """
    firsts: dict[int, dict[int, int]] = {}
    for layer, found in live.items():
        held = wanted.rows.get(layer, ()) if layout == "physical" else found.experts
        first = firsts.setdefault(layer, {})
        for slot, expert in enumerate(held):
            first.setdefault(expert, slots[layer][slot])
    return firsts


def fault(
    wanted: Wanted,
    live: Mapping[int, LiveLayer],
    *,
    all_layers: bool,
    weights: tuple[Mapping[int, Mapping[int, int]], Mapping[int, Mapping[int, int]]] | None = None,
) -> ServeError | None:
    """The first thing in which the live layout is not the plan's, or None.

    Args:
        wanted: the plan.
        live: this worker's layers.
        all_layers: the worker holds all layers of the model, no pipeline stage of it.
        weights: the checksums of all slots and of the experts' first copies, by layer; None to look at the maps only.
    """
    if missing := sorted(set(live) - set(wanted.rows)):
        return ServeError("the plan's file has no row for this layer of the model", layer=missing[0])
    if all_layers and (foreign := sorted(set(wanted.rows) - set(live))):
        return ServeError("the plan's file has a row for a layer that is not live", layer=foreign[0])
    wrong: list[tuple[int, int]] = []
    for layer, found in sorted(live.items()):
        row, names = wanted.rows[layer], wanted.names(layer)
        per_rank = len(row) // wanted.ep_size
        if len(found.experts) != len(row):
            return ServeError(f"{len(found.experts)} slots are live, the plan has {len(row)}", layer=layer)
        for slot, (expert, planned) in enumerate(zip(found.experts, row, strict=True)):
            if not 0 <= expert < len(names) or names[expert] != planned:
                return ServeError(
                    f"slot {slot} is said to hold expert {expert}", layer=layer, rank=slot // per_rank,
                    rule=f"the plan puts expert {planned} there",
                )  # fmt: skip
        if len(found.copies) != len(names):
            return ServeError(f"the router knows {len(found.copies)} experts, the plan {len(names)}", layer=layer)
        holders: dict[int, list[int]] = {}
        for slot, planned in enumerate(row):
            holders.setdefault(planned, []).append(slot)
        for expert, slots in enumerate(found.copies):
            if sorted(slots) != holders[names[expert]]:
                return ServeError(
                    f"the router sends the expert's tokens to slots {sorted(slots)}", layer=layer, expert=expert,
                    rule=f"the plan has its copies in slots {holders[names[expert]]}",
                )  # fmt: skip
        if weights is not None:
            held, first = (part[layer] for part in weights)
            number = {name: expert for expert, name in enumerate(names)}
            expected = [first[number[planned]] for planned in row]
            wrong += [(layer, slot) for slot, digest in enumerate(expected) if held.get(slot) != digest]
    if not wrong:
        return None
    layer, slot = wrong[0]
    total = sum(len(wanted.rows[each]) for each in live)
    return ServeError(
        f"slot {slot} does not hold expert {wanted.rows[layer][slot]} ({len(wrong)} of {total} slots hold the wrong "
        "weights)",
        layer=layer,
        rank=slot // (len(wanted.rows[layer]) // wanted.ep_size),
    )


def live_sha256(wanted: Wanted, live: Mapping[int, LiveLayer]) -> str:
    """`Placement.map_sha256` of the plan with this worker's layers as they are live.

    It is the plan's own as long as nothing has moved; the layers of other pipeline stages are taken from the file.
    """
    rows = dict(wanted.rows)
    for layer, found in live.items():
        names = wanted.names(layer)
        rows[layer] = [names[expert] if 0 <= expert < len(names) else -1 for expert in found.experts]
    digest = hashlib.sha256(f"{wanted.num_experts},{wanted.ep_size}".encode())
    layers = sorted(rows)
    for numbers in (layers, [expert for layer in layers for expert in rows[layer]]):
        digest.update(struct.pack(f"<{len(numbers)}i", *numbers))
    return digest.hexdigest()


def slot_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum of each slot's bytes over all its weight tensors, int64 [slots] on the CPU.

    Each 32-bit word is multiplied by an odd number that depends on its place and tensor, and summed modulo 2^64: any
    single changed word, and any two words or tensors exchanged, change the sum.

    Args:
        tensors: [slots, ...] each, any dtype.
    """
    import torch

    slots = tensors[0].shape[0]
    total = torch.zeros(slots, dtype=torch.int64, device=tensors[0].device)
    place = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(slots, -1).view(torch.uint8)
        words = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4)).view(torch.int32)
        # In pieces: 64-bit copies of whole weights would not fit beside them.
        piece = max(1, (1 << 24) // slots)
        for begin in range(0, words.shape[1], piece):
            part = words[:, begin : begin + piece].long()
            index = torch.arange(place + begin, place + begin + part.shape[1], device=part.device)
            total += (part * ((index * _GOLDEN) | 1)).sum(1)
        place += words.shape[1]
    return total.cpu()
