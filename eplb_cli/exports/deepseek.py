"""The tensors of DeepSeek's EPLB, as safetensors: what `rebalance_experts` returns.

`phy2log` int64 [MoE layers, slots], `log2phy` int64 [MoE layers, experts, most copies] padded with -1, `logcnt` int64
[MoE layers, experts].
"""

from __future__ import annotations

import io

import numpy as np

from eplb_cli.dispatch import Rule
from eplb_cli.errors import PlacementError
from eplb_cli.exports.protocol import Decoded, Numbering, Table
from eplb_cli.placement import Placement
from eplb_cli.tensors import read_tensors
from eplb_cli.untrusted import shown

__all__ = ["DeepSeek"]


class DeepSeek:
    """Three tensors."""

    name = "deepseek"
    numbering = Numbering.ordinal
    suffix = None
    refuses_twins = False
    keeps_slot_order = True
    dispatch: Rule | None = None

    def encode(self, table: Table) -> bytes:
        """All three, derived from the rows."""
        from safetensors.numpy import save

        tensors = _tensors(table.rows, table.num_experts)
        content: bytes = save(tensors)
        return content

    def decode(self, content: bytes) -> Decoded:
        """`phy2log`; the others must follow from it."""
        tensors, _ = read_tensors(io.BytesIO(content), PlacementError)
        if set(tensors) != {"phy2log", "log2phy", "logcnt"}:
            raise PlacementError(f"holds {shown(sorted(tensors))}", rule="phy2log, log2phy and logcnt are expected")
        rows, counts = tensors["phy2log"], tensors["logcnt"]
        if rows.ndim != 2 or counts.ndim != 2 or not rows.size:
            raise PlacementError(f"phy2log is {rows.dtype} {list(rows.shape)}", rule="integers [layers, slots]")
        experts = int(counts.shape[1])
        if rows.min() < 0 or rows.max() >= experts:
            raise PlacementError(f"phy2log holds {int(rows.max())}", rule=f"logcnt has {experts} experts")
        for name, derived in _tensors(rows.astype(np.int32), experts).items():
            if not np.array_equal(tensors[name], derived):
                raise PlacementError(f"{name} does not follow from phy2log", rule="the three tensors say the same")
        return Decoded(rows.astype(np.int64), num_experts=experts)

    def launch(self, placement: Placement, file: str) -> str:
        """How to load it."""
        return f"safetensors.torch.load_file({file!r})  # for {placement.ep_size} ranks"


def _tensors(rows: np.ndarray, num_experts: int) -> dict[str, np.ndarray]:
    order = Placement(rows, np.arange(len(rows), dtype=np.int32), num_experts, 1)
    return {
        "phy2log": np.ascontiguousarray(rows, np.int64),
        "log2phy": order.logical_to_physical().astype(np.int64),
        "logcnt": order.replica_counts(),
    }
