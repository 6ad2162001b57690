"""From a recorder's layer axis to decoder layers, by the model's rule and never by what a row looks like."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.loads import ModelShape
from eplb_cli.traces.protocol import LayerAxis
from eplb_cli.untrusted import shown

__all__ = ["LayerRows", "resolve_layers"]

MOST_LAYERS = 1 << 16
"""More than any model has; an id beyond is damage, and one row for each layer below it would fill the memory."""


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Which rows of a layer axis are MoE layers.

    Args:
        positions: int64 [L], rows that are kept.
        layer_ids: int32 [L], their decoder layers, ascending.
        dense: row -> decoder layer of the rows the model says are dense.
        beyond: decoder layers past the model's last, left out (a draft layer).
    """

    positions: npt.NDArray[np.int64]
    layer_ids: npt.NDArray[np.int32]
    dense: dict[int, int]
    beyond: tuple[int, ...] = ()


def resolve_layers(axis: LayerAxis, model: ModelShape | None, file: str) -> LayerRows:
    """Name the decoder layer of each row.

    Without the model's layers, rows without ids of their own are layers 0..L-1.

    Raises:
        TraceError: the axis fits neither the MoE layers nor the hidden layers of the model, a layer id repeats or is
            negative, or none of the layers is a MoE layer.
    """
    moe = None if model is None else model.moe_layer_ids
    hidden = None if model is None else model.num_hidden_layers
    if axis.ids is not None:
        return _by_id(axis.ids, moe, hidden, file)
    if moe is None:
        if hidden is not None and axis.length != hidden:
            raise TraceError(
                f"the layer axis has {axis.length} rows", file=file, rule=f"the model has {hidden} hidden layers"
            )
        return _rows(range(axis.length), range(axis.length))
    if axis.length == len(moe):
        return _rows(range(axis.length), moe)
    if axis.ordinal and axis.length == len(moe) + 1:
        draft = hidden if hidden is not None else moe[-1] + 1
        return LayerRows(np.arange(len(moe)), np.array(moe, np.int32), {}, (draft,))
    if not axis.ordinal and axis.length == hidden:
        dense = {layer: layer for layer in range(hidden) if layer not in set(moe)}
        return LayerRows(np.array(moe, np.int64), np.array(moe, np.int32), dense)
    raise TraceError(
        f"the layer axis has {axis.length} rows",
        file=file,
        rule=f"the model has {len(moe)} MoE layers"
        + ("" if hidden is None or axis.ordinal else f" and {hidden} hidden layers"),
        hint="Is --model the model that was recorded?",
    )


def _rows(positions: range, ids: range | tuple[int, ...]) -> LayerRows:
    return LayerRows(np.array(positions, np.int64), np.array(ids, np.int32), {})


def _by_id(ids: tuple[int, ...], moe: tuple[int, ...] | None, hidden: int | None, file: str) -> LayerRows:
    if len(set(ids)) != len(ids) or min(ids, default=0) < 0 or max(ids, default=0) >= MOST_LAYERS:
        raise TraceError(
            f"the layer ids are {shown(list(ids))}",
            file=file,
            rule=f"each layer appears once and is 0..{MOST_LAYERS - 1}",
        )
    order = sorted(range(len(ids)), key=lambda row: ids[row])
    beyond = tuple(ids[row] for row in order if hidden is not None and ids[row] >= hidden)
    known = [row for row in order if ids[row] not in beyond]
    kept = [row for row in known if moe is None or ids[row] in moe]
    dense = {row: ids[row] for row in known if row not in kept}
    if not kept and ids:
        raise TraceError(
            f"none of the layers {list(ids)} is a MoE layer of the model",
            file=file,
            rule=f"its MoE layers are {list(moe or ())}",
            hint="Is --model the model that was recorded?",
        )
    return LayerRows(np.array(kept, np.int64), np.array([ids[row] for row in kept], np.int32), dense, beyond)
