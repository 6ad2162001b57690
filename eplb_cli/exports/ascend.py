"""The expert map of vllm-ascend (`expert_map_path`) and MindIE (`expert_map_file`).

`{"moe_layer_count", "layer_list": [{"layer_id", "device_count", "device_list": [{"device_id", "device_expert"}]}]}`.
Layers and devices are read by their position: MoE ordinal and EP rank. vllm-ascend serves wrong weights without a word
when a device holds an expert twice, or when an expert is missing, so both are refused here.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

import numpy as np

from eplb_cli.dispatch import Rule
from eplb_cli.errors import PlacementError
from eplb_cli.exports.protocol import Decoded, Numbering, Table
from eplb_cli.exports.text import integer, rows_of, section
from eplb_cli.placement import Placement
from eplb_cli.untrusted import parse_json

__all__ = ["Mindie", "VllmAscend"]


class _ExpertMap:
    numbering = Numbering.ordinal
    suffix = ".json"
    refuses_twins = True
    keeps_slot_order = True
    dispatch: Rule | None = "vllm-ascend"

    def encode(self, table: Table) -> bytes:
        """A line a layer."""
        lines = []
        for ordinal, row in enumerate(table.rows):
            devices = [
                {"device_id": rank, "device_expert": slots.tolist()}
                for rank, slots in enumerate(np.split(row, table.ep_size))
            ]
            lines.append(json.dumps({"layer_id": ordinal, "device_count": table.ep_size, "device_list": devices}))
        body = ",\n".join(lines)
        return f'{{"moe_layer_count": {len(lines)}, "layer_list": [\n{body}\n]}}\n'.encode()

    def decode(self, content: bytes) -> Decoded:
        """Rows of equal devices, in the order of the file."""
        document = section(parse_json(content, PlacementError), {"moe_layer_count", "layer_list"}, "the file")
        layers = document["layer_list"]
        count = integer(document["moe_layer_count"], "moe_layer_count")
        if not isinstance(layers, list) or not layers or count != len(layers):
            raise PlacementError(
                f"moe_layer_count is {count}",
                rule=f"layer_list has {len(layers) if isinstance(layers, list) else 'no'} layers",
            )
        rows = []
        sizes: set[tuple[int, int]] = set()
        for position, layer in enumerate(layers):
            devices = _devices(layer, position)
            sizes |= {(len(devices), len(experts)) for experts in devices}
            if len(sizes) > 1:
                rank = next(i for i, experts in enumerate(devices) if (len(devices), len(experts)) != min(sizes))
                raise PlacementError(
                    f"layer_list entry {position}: device {rank} of {len(devices)} holds {len(devices[rank])} slots",
                    rank=rank,
                    rule="all devices of all layers hold equally many",
                )
            rows.append([expert for experts in devices for expert in experts])
        return Decoded(rows_of(rows, "layer_list"), ep_size=len(_devices(layers[0], 0)))

    def launch(self, placement: Placement, file: str) -> str:
        """The setting."""
        raise NotImplementedError


def _devices(layer: Any, position: int) -> list[list[int]]:
    what = f"layer_list entry {position}"
    layer = section(layer, {"layer_id", "device_count", "device_list"}, what)
    if integer(layer["layer_id"], f"{what}: layer_id") != position:
        raise PlacementError(
            f"{what}: layer_id is {layer['layer_id']}", rule="engines read by position, so ids must be 0, 1, 2, .."
        )
    devices = layer["device_list"]
    count = integer(layer["device_count"], f"{what}: device_count")
    if not isinstance(devices, list) or not devices or len(devices) != count:
        raise PlacementError(f"{what}: device_count is {count}, device_list does not hold as many")
    found = []
    for rank, device in enumerate(devices):
        entry = section(device, {"device_id", "device_expert"}, f"{what}, device {rank}")
        if integer(entry["device_id"], f"{what}: device_id") != rank:
            raise PlacementError(f"{what}: device_id is {entry['device_id']} at position {rank}", rank=rank)
        experts = entry["device_expert"]
        if not isinstance(experts, list) or any(type(expert) is not int for expert in experts):
            raise PlacementError(f"{what}: device_expert is no list of whole numbers", rank=rank)
        found.append(experts)
    return found


class VllmAscend(_ExpertMap):
    """`expert_map_path`, model runner V1."""

    name = "vllm-ascend"

    def launch(self, placement: Placement, file: str) -> str:
        """The flag."""
        config = json.dumps({"eplb_config": {"expert_map_path": file}})
        return f"--additional-config {shlex.quote(config)}  # an absolute path, at {placement.ep_size} EP ranks"


class Mindie(_ExpertMap):
    """`expert_map_file` of MindIE's config.json."""

    name = "mindie"

    def launch(self, placement: Placement, file: str) -> str:
        """The setting."""
        config = json.dumps({"level": 1, "expert_map_file": file})
        return f'"eplb": {config}  # an absolute path, at {placement.ep_size} ranks'
