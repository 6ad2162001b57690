"""TensorRT-LLM's `moe_config.load_balancer: FILE.yaml`.

`initial_global_assignments: {decoder layer: [experts]}`, `num_slots`, `layer_updates_per_iter: 0` (static). Unknown
keys are refused by the engine; only its report script wants `ep_size` in a copy of the file.
"""

from __future__ import annotations

import json

import numpy as np

from eplb_cli.dispatch import Rule
from eplb_cli.errors import PlacementError
from eplb_cli.exports.protocol import Decoded, Numbering, Table
from eplb_cli.exports.text import integer, parse_yaml, rows_of, section
from eplb_cli.placement import Placement

__all__ = ["TensorrtLlm"]

KEYS = {"initial_global_assignments", "num_slots", "layer_updates_per_iter"}


class TensorrtLlm:
    """The YAML of a static placement."""

    name = "tensorrt-llm"
    numbering = Numbering.absolute
    suffix = None
    refuses_twins = False
    keeps_slot_order = True
    dispatch: Rule | None = "tensorrt-llm"

    def encode(self, table: Table) -> bytes:
        """A line a layer."""
        lines = ["initial_global_assignments:"]
        lines += [f"  {layer}: {row.tolist()}" for layer, row in zip(table.layer_ids, table.rows, strict=True)]
        lines += [f"num_slots: {table.rows.shape[1]}", "layer_updates_per_iter: 0"]
        return ("\n".join(lines) + "\n").encode()

    def decode(self, content: bytes) -> Decoded:
        """The assignments, under the decoder layers' numbers."""
        optional = frozenset({"ep_size"})
        document = section(parse_yaml(content), KEYS - {"layer_updates_per_iter"}, "the file", optional=optional | KEYS)
        assignments = document["initial_global_assignments"]
        if not isinstance(assignments, dict) or not assignments or any(type(key) is not int for key in assignments):
            raise PlacementError("initial_global_assignments is no mapping of layer numbers")
        layers = sorted(integer(layer, "a layer") for layer in assignments)
        rows = rows_of([assignments[layer] for layer in layers], "initial_global_assignments")
        slots = integer(document["num_slots"], "num_slots")
        if rows.shape[1] != slots:
            raise PlacementError(f"a layer has {rows.shape[1]} slots", layer=layers[0], rule=f"num_slots is {slots}")
        ep_size = integer(document["ep_size"], "ep_size") if "ep_size" in document else None
        return Decoded(rows.astype(np.int64), tuple(layers), ep_size=ep_size)

    def launch(self, placement: Placement, file: str) -> str:
        """The line of the options file."""
        return f"moe_config: {{load_balancer: {json.dumps(file)}}}  # with ep_size {placement.ep_size}"
