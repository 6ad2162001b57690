"""SGLang's expert distribution recorder in `stat` and `stat_approx` mode, and the JSON that people share of it.

The torch file is one dictionary, written by rank 0: `logical_count` int32 [buffer, hidden layers, experts], one row a
forward pass in a circular buffer. Rows of zeros were never filled. A newer variant says `logical_count_layout:
"rank_layer_expert"`; its first axis is the source rank, and all ranks add up to one window.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.counts import json_matrix
from eplb_cli.traces.files import Container, TraceFile, tensor_to_numpy
from eplb_cli.traces.protocol import (
    CountBlock,
    LayerAxis,
    Match,
    ReadOptions,
    Recording,
    Space,
    matches,
    near_miss,
    no_match,
)

__all__ = ["SglangJsonReader", "SglangStatReader"]

KEY = "logical_count"
LAYOUT_KEY = "logical_count_layout"
RANK_LAYOUT = "rank_layer_expert"


class SglangStatReader:
    """`expert_distribution_recorder_{time}.pt`."""

    name = "sglang-stat"
    looks_for = "a torch dictionary with `logical_count`"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The dictionary holds `logical_count`."""
        if file.container is not Container.torch:
            return no_match()
        content = file.torch_object
        if isinstance(content, Mapping) and KEY in content:
            return matches("holds `logical_count`", 95)
        if isinstance(content, Mapping):
            return near_miss(f"the dictionary holds {sorted(map(str, content))[:8]}, not `logical_count`")
        return no_match("not a dictionary")

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """The filled rows of each dump."""
        for file in recording.files:
            content = file.torch_object
            file.forget()
            yield from _read_dump(content, file, recording)


def _read_dump(content: Any, file: TraceFile, recording: Recording) -> Iterator[CountBlock]:
    import torch

    tensor = content.get(KEY) if isinstance(content, Mapping) else None
    if not isinstance(tensor, torch.Tensor) or tensor.ndim not in (2, 3):
        raise TraceError(f"`{KEY}` is not a tensor of two or three axes", file=file.name)
    counts = tensor_to_numpy(tensor)
    counts = counts[None] if counts.ndim == 2 else counts
    layout = content.get(LAYOUT_KEY)
    if layout == RANK_LAYOUT:
        if counts.dtype.kind in "iu":
            counts = counts.sum(0, dtype=np.int64, keepdims=True)
        recording.notes.append(f"{file.label}: {tensor.shape[0]} ranks were added ({LAYOUT_KEY}: {RANK_LAYOUT})")
    elif layout is not None:
        raise TraceError(f"{LAYOUT_KEY} is {layout!r}", file=file.name, rule=f"only {RANK_LAYOUT!r} is known")
    window_ids = None
    if len(counts) > 1:
        filled = counts.reshape(len(counts), -1).any(1)
        if filled.all():
            recording.warnings.append(
                f"{file.label}: all {len(counts)} rows of the recorder's buffer are filled; it wraps around, so older "
                "passes are lost and rows are not in the order of time "
                "(--expert-distribution-recorder-buffer-size -1 keeps all)"
            )
        elif filled.any():
            # Their place in the buffer says when they came; that they are zeros says nothing about the traffic.
            recording.drop("unfilled_buffer_rows", int((~filled).sum()))
            window_ids = np.flatnonzero(filled)
            counts = counts[filled]
    yield CountBlock(counts, LayerAxis(counts.shape[1]), file.name, window_ids, space=Space.logical)


class SglangJsonReader:
    """`{"logical_count": [[..]]}`, accepted by SGLang's --init-expert-location."""

    name = "sglang-json"
    looks_for = "a JSON object with `logical_count`"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The object holds `logical_count`."""
        if file.container is not Container.json:
            return no_match()
        document = file.document
        if not isinstance(document, dict):
            return no_match("not an object")
        if KEY in document:
            return matches("holds `logical_count`", 95)
        return near_miss(f"the object holds {sorted(document)[:8]}, not `logical_count`", 10)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One block a file; its rows are absolute layers unless it names them."""
        for file in recording.files:
            document = file.document
            file.forget()
            if not isinstance(document, dict) or KEY not in document:
                raise TraceError(f"does not hold `{KEY}`", file=file.name)
            counts = json_matrix(document[KEY], file.name)
            counts = counts[None] if counts.ndim == 2 else counts
            ids = document.get("layer_ids", document.get("layers"))
            axis = LayerAxis(counts.shape[1])
            if ids is not None:
                if not isinstance(ids, list) or len(ids) != counts.shape[1] or any(type(i) is not int for i in ids):
                    raise TraceError(
                        f"names the layers {ids!r:.60}", file=file.name, rule=f"{counts.shape[1]} integers are expected"
                    )
                axis = LayerAxis.absolute(ids)
            if type(document.get("top_k")) is int:
                recording.top_k = document["top_k"]
            yield CountBlock(counts, axis, file.name, tokens=_tokens(document, counts, file), space=Space.logical)


def _tokens(document: Mapping[str, Any], counts: npt.NDArray[Any], file: TraceFile) -> npt.NDArray[np.int64] | None:
    tokens = document.get("tokens")
    if tokens is None:
        return None
    array = np.atleast_1d(np.array(tokens))
    if array.shape != (len(counts),) or array.dtype.kind not in "iu":
        raise TraceError(f"tokens is {tokens!r:.60}", file=file.name, rule=f"{len(counts)} integers are expected")
    return array.astype(np.int64)
