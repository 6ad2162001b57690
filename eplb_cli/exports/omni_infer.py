"""omni-infer's pattern: .npy int32 [ranks, MoE layers, experts], 1 where the rank holds the expert.

It tells neither the order of a rank's slots nor two copies on a rank, so twins are refused, and a plan comes back with
each rank's experts in ascending order.
"""

from __future__ import annotations

import io
import math
import re
import shlex

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import Rule
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
    dispatch: Rule | None = None

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
        pattern = _array(content)
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
        return f"pattern_path: {shlex.quote(file)}, max_moe_layer_num: {placement.num_layers}"


HEADER = re.compile(
    rb"\{'descr': '([<>|][iu][1248])', 'fortran_order': (True|False), "
    rb"'shape': \((\d{1,9}), (\d{1,9}), (\d{1,9})\), ?\} *\n"
)
"""What NumPy writes for an integer array of three axes. Its own reader allocates whatever the header claims."""


def _array(content: bytes) -> npt.NDArray[np.integer]:
    """The three axes of a .npy file."""
    wide = 2 if content[6:7] == b"\x01" else 4
    start = 8 + wide + int.from_bytes(content[8 : 8 + wide], "little")
    header = HEADER.fullmatch(content[8 + wide : start])
    if content[:6] != b"\x93NUMPY" or header is None:
        raise PlacementError("is no .npy file of an integer array [ranks, MoE layers, experts]")
    dtype, shape = np.dtype(header[1].decode()), tuple(int(axis) for axis in header.groups()[2:])
    if 0 in shape or len(content) - start != math.prod(shape) * dtype.itemsize:
        raise PlacementError(
            f"holds {len(content) - start:,} bytes of {dtype} {list(shape)}", rule="the array fills the file"
        )
    return np.frombuffer(content, dtype, offset=start).reshape(shape, order="F" if header[2] == b"True" else "C")
