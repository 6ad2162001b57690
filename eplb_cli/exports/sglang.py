"""SGLang's `--init-expert-location FILE`.

`{"physical_to_logical_map": [all hidden layers][E + R]}` and no other key, which would be an unexpected argument. Every
hidden layer has a row, dense ones too. SGLang tells the format by the file name's suffix.
"""

from __future__ import annotations

import shlex

from eplb_cli.dispatch import Rule
from eplb_cli.errors import PlacementError
from eplb_cli.exports.protocol import Decoded, Numbering, Table
from eplb_cli.exports.text import row_lines, rows_of, section
from eplb_cli.placement import Placement
from eplb_cli.untrusted import parse_json

__all__ = ["Sglang"]

KEY = "physical_to_logical_map"


class Sglang:
    """JSON with the map."""

    name = "sglang"
    numbering = Numbering.hidden
    suffix = ".json"
    refuses_twins = False
    keeps_slot_order = True
    dispatch: Rule | None = "sglang"

    def encode(self, table: Table) -> bytes:
        """One key, a line a layer."""
        return f'{{"{KEY}": [\n{row_lines(table.rows)}\n]}}\n'.encode()

    def decode(self, content: bytes) -> Decoded:
        """The map; a file of `logical_count` holds loads, not a placement."""
        document = parse_json(content, PlacementError)
        if isinstance(document, dict) and "logical_count" in document:
            raise PlacementError(
                "holds loads (logical_count), from which SGLang plans itself",
                hint="Read them with `eplb profile`, then plan.",
            )
        return Decoded(rows_of(section(document, {KEY}, "the file")[KEY], KEY))

    def launch(self, placement: Placement, file: str) -> str:
        """Flags; R must match the file."""
        return (
            f"--init-expert-location {shlex.quote(file)} --ep-num-redundant-experts {placement.num_redundant_experts}"
        )
