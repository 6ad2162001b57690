"""Placement files of vLLM's open proposals; no released vLLM reads one.

- pull request 41141, `initial_mapping_path`: one JSON line with the MoE layers' ordinals as text keys.
- pull request 49572, `initial_expert_map_path`: a JSON list, one row for all layers or a row a MoE layer.
"""

from __future__ import annotations

import json
import shlex

from eplb_cli.dispatch import Rule
from eplb_cli.errors import PlacementError
from eplb_cli.exports.protocol import Decoded, Numbering, Table
from eplb_cli.exports.text import integer, row_lines, rows_of, section
from eplb_cli.placement import Placement
from eplb_cli.untrusted import parse_json, shown

__all__ = ["VllmJsonl", "VllmList"]

RECORD = "eplb_initial_mapping"
VERSION = 1
KEYS = {"record_type", "version", "num_redundant_experts", "num_slots", "initial_global_assignments"}


class VllmJsonl:
    """The record of 41141."""

    name = "vllm-jsonl"
    numbering = Numbering.ordinal
    suffix = None
    refuses_twins = False
    keeps_slot_order = True
    dispatch: Rule | None = "hash"

    def encode(self, table: Table) -> bytes:
        """One line."""
        record = {
            "record_type": RECORD,
            "version": VERSION,
            "num_redundant_experts": table.rows.shape[1] - table.num_experts,
            "num_slots": table.rows.shape[1],
            "initial_global_assignments": {str(index): row.tolist() for index, row in enumerate(table.rows)},
        }
        return (json.dumps(record) + "\n").encode()

    def decode(self, content: bytes) -> Decoded:
        """The one mapping record; there must be no other line."""
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) != 1:
            raise PlacementError(f"holds {len(lines)} records", rule=f"one {RECORD} is expected")
        record = section(parse_json(lines[0], PlacementError), KEYS, "the record")
        if record["record_type"] != RECORD or integer(record["version"], "version") != VERSION:
            raise PlacementError(
                f"is {shown(record['record_type'])} version {record['version']}", rule=f"{RECORD} {VERSION} is known"
            )
        assignments = record["initial_global_assignments"]
        if not isinstance(assignments, dict) or set(assignments) != {str(i) for i in range(len(assignments))}:
            raise PlacementError("initial_global_assignments does not count the MoE layers from 0")
        rows = rows_of([assignments[str(i)] for i in range(len(assignments))], "initial_global_assignments")
        slots, redundant = (integer(record[key], key) for key in ("num_slots", "num_redundant_experts"))
        if rows.shape[1] != slots or redundant >= slots:
            raise PlacementError(
                f"rows have {rows.shape[1]} slots, {redundant} redundant", rule=f"num_slots is {slots}"
            )
        return Decoded(rows, num_experts=slots - redundant)

    def launch(self, placement: Placement, file: str) -> str:
        """The flag of the proposal."""
        config = json.dumps({"num_redundant_experts": placement.num_redundant_experts, "initial_mapping_path": file})
        return f"--enable-eplb --eplb-config {shlex.quote(config)}  # a vLLM with pull request 41141"


class VllmList:
    """The list of 49572."""

    name = "vllm-list"
    numbering = Numbering.ordinal
    suffix = None
    refuses_twins = False
    keeps_slot_order = True
    dispatch: Rule | None = "hash"

    def encode(self, table: Table) -> bytes:
        """A line a layer."""
        return f"[\n{row_lines(table.rows)}\n]\n".encode()

    def decode(self, content: bytes) -> Decoded:
        """The rows, or the one row that stands for all layers."""
        document = parse_json(content, PlacementError)
        flat = isinstance(document, list) and bool(document) and not isinstance(document[0], list)
        return Decoded(rows_of([document] if flat else document, "the file"), repeats=flat)

    def launch(self, placement: Placement, file: str) -> str:
        """The flag of the proposal."""
        config = json.dumps({"num_redundant_experts": placement.num_redundant_experts, "initial_expert_map_path": file})
        return f"--enable-eplb --eplb-config {shlex.quote(config)}  # a vLLM with pull request 49572"
