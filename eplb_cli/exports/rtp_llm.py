"""rtp-llm's `phy2log_path`: a JSON list [all hidden layers][slots], at most E redundant slots."""

from __future__ import annotations

import shlex

from eplb_cli.dispatch import Rule
from eplb_cli.errors import PlacementError
from eplb_cli.exports.protocol import Decoded, Numbering, Table
from eplb_cli.exports.text import row_lines, rows_of
from eplb_cli.placement import Placement
from eplb_cli.untrusted import parse_json

__all__ = ["RtpLlm"]


class RtpLlm:
    """The bare list."""

    name = "rtp-llm"
    numbering = Numbering.hidden
    suffix = None
    refuses_twins = False
    keeps_slot_order = True
    dispatch: Rule | None = "even"

    def encode(self, table: Table) -> bytes:
        """A line a layer."""
        redundant = table.rows.shape[1] - table.num_experts
        if redundant > table.num_experts:
            raise PlacementError(
                f"{redundant} redundant experts", rule=f"rtp-llm takes at most as many as experts, {table.num_experts}"
            )
        return f"[\n{row_lines(table.rows)}\n]\n".encode()

    def decode(self, content: bytes) -> Decoded:
        """The rows."""
        return Decoded(rows_of(parse_json(content, PlacementError), "the file"))

    def launch(self, placement: Placement, file: str) -> str:
        """The setting."""
        return f"phy2log_path = {shlex.quote(file)}, {placement.num_redundant_experts} redundant experts"
