"""omni-infer's pattern: .npy int32 [ranks, MoE layers, experts], 1 where the rank holds the expert.

It tells neither the order of a rank's slots nor two copies on a rank, so twins are refused, and a plan comes back with
each rank's experts in ascending order.
"""

from __future__ import annotations

import io

import numpy as np

from eplb_cli.errors import PlacementError
from eplb_cli.exports.protocol import Decoded, Numbering, Table
from eplb_cli.placement import Placement

__all__ = ["OmniInfer"]


class OmniInfer:
    """The pattern file."""

    name = "omni-infer"
    numbering = Numbering.ordinal
    suffix = ".npy"
    refuses_twins = True
    keeps_slot_order = False

    def encode(self, table: Table) -> bytes:
        """Zeros and ones."""
        layers, slots = table.rows.shape
        pattern = np.zeros((table.ep_size, layers, table.num_experts), np.int32)
        rank = np.arange(slots) // (slots // table.ep_size)
        pattern[rank[None], np.arange(layers)[:, None], table.rows] = 1
        stream = io.BytesIO()
        np.save(stream, pattern)
        return stream.getvalue()

    def decode(self, content: bytes) -> Decoded:
        """Each rank's experts, ascending."""
        try:
            pattern = np.load(io.BytesIO(content), allow_pickle=False)
        except (ValueError, EOFError, OSError) as error:
            raise PlacementError(f"is no .npy pattern ({error})") from None
        if not isinstance(pattern, np.ndarray) or pattern.ndim != 3 or pattern.dtype.kind not in "iu":
            raise PlacementError("is no integer array [ranks, MoE layers, experts]")
        if not np.isin(pattern, (0, 1)).all():
            raise PlacementError(
                f"holds {int(pattern[~np.isin(pattern, (0, 1))][0])}", rule="a pattern is zeros and ones"
            )
        held = pattern.sum(2)
        if len(np.unique(held)) != 1 or not held[0, 0]:
            rank, layer = (int(i) for i in np.argwhere(held != held[0, 0])[0]) if held[0, 0] else (0, 0)
            raise PlacementError(
                f"MoE layer {layer} has {held[rank, layer]} slots",
                rank=rank,
                rule=f"rank 0 has {held[0, 0]} in layer 0; a plan's ranks and layers hold equally many, at least one",
            )
        ranks, layers, experts = pattern.shape
        rows = np.nonzero(pattern.transpose(1, 0, 2))[2].reshape(layers, -1)
        return Decoded(rows.astype(np.int64), num_experts=experts, ep_size=ranks)

    def launch(self, placement: Placement, file: str) -> str:
        """The setting."""
        return f"pattern_path: {file}, max_moe_layer_num: {placement.num_layers}"
