"""Route logs of hooks around vLLM: JSONL, a line for each token and layer.

First `{"type": "meta", "layers_logged": [..], "top_k": k}`, then `{"type": "route", "req_id", "token_idx", "layer",
"topk_ids", "topk_weights"}`. Layers are absolute. Most of a real file is the start-up profile run: thousands of rows
with identical ids in front. Leading runs of identical rows are dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import TraceFile
from eplb_cli.traces.jsonl import RouteLines, read_routes
from eplb_cli.traces.protocol import LayerAxis, Match, ReadOptions, Recording, TokenBlock, matches, near_miss, no_match
from eplb_cli.untrusted import shown

__all__ = ["VllmRoutesReader"]

SHORTEST_RUN = 4
"""Identical leading rows from this number on are a dummy batch: real tokens do not choose alike in all layers."""
BLOCK_ROWS = 4096


class VllmRoutesReader:
    """The file of `VLLM_LOG_MOE` and its relatives."""

    name = "vllm-routes"
    looks_for = 'JSONL lines with "type": "route" and topk_ids'
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The first record is of type meta or route."""
        record = file.first_record
        if not isinstance(record, dict):
            return no_match()
        if record.get("type") == "route" and "topk_ids" in record:
            return matches("the first record is a route", 95)
        if record.get("type") == "meta" and ("layers_logged" in record or b'"route"' in file.head):
            return matches("the first record is the meta of routes", 95)
        return near_miss(f"its type is {shown(record['type'])}", 20) if "type" in record else no_match()

    def read(self, recording: Recording) -> Iterator[TokenBlock]:
        """Tokens in order, all layers side by side."""
        for file in recording.files:
            yield from _read_file(file, recording)


def _read_file(file: TraceFile, recording: Recording) -> Iterator[TokenBlock]:
    queues: dict[int, list[npt.NDArray[np.integer]]] = {}
    layers: list[int] | None = None
    start = _Start()
    position = 0
    for lines in read_routes(file, recording):
        _enqueue(lines, queues, file, recording)
        if layers is None and len(lines.layer):
            layers = lines.layers_logged or sorted(queues)
        if layers is None:
            continue
        unknown = queues.keys() - set(layers)
        if unknown:
            if position:
                raise TraceError(
                    f"layer {min(unknown)} appears first after {position} tokens", file=file.name, layer=min(unknown)
                )
            layers = sorted(queues)
        ready = min(_rows(queues.get(layer)) for layer in layers)
        if ready >= BLOCK_ROWS:
            block = _take(queues, layers, ready)
            yield from _block(start.drop(block, recording), layers, file, position)
            position += ready
    if layers is None:
        raise TraceError("holds no route", file=file.name)
    rows = [_rows(queues.get(layer)) for layer in layers]
    if len(set(rows)) > 1:
        recording.warnings.append(
            f"{file.label}: layers differ in logged tokens by up to {max(rows) - min(rows)}; missing ones count nothing"
        )
    block = _take(queues, layers, max(rows), pad=True)
    yield from _block(start.drop(block, recording, last=True), layers, file, position)


def _block(ids: npt.NDArray[np.integer], layers: list[int], file: TraceFile, position: int) -> Iterator[TokenBlock]:
    yield TokenBlock(ids, LayerAxis.absolute(layers), file.name, position)


def _enqueue(
    lines: RouteLines, queues: dict[int, list[npt.NDArray[np.integer]]], file: TraceFile, recording: Recording
) -> None:
    if not len(lines.layer):
        return
    if recording.top_k is not None and recording.top_k != lines.ids.shape[1]:
        raise TraceError(
            f"a route holds {lines.ids.shape[1]} ids", file=file.name, rule=f"earlier ones hold {recording.top_k}"
        )
    recording.top_k = lines.ids.shape[1]
    order = np.argsort(lines.layer, kind="stable")
    layers, first = np.unique(lines.layer[order], return_index=True)
    for layer, rows in zip(layers.tolist(), np.split(lines.ids[order], first[1:]), strict=True):
        queues.setdefault(layer, []).append(rows)


def _rows(queue: list[npt.NDArray[np.integer]] | None) -> int:
    return sum(len(rows) for rows in queue or ())


def _take(
    queues: dict[int, list[npt.NDArray[np.integer]]], layers: list[int], count: int, *, pad: bool = False
) -> npt.NDArray[np.integer]:
    """The first `count` rows of each layer, [count, layers, k]; with `pad`, missing rows are -1."""
    columns = []
    for layer in layers:
        rows = np.concatenate(queues[layer]) if queues.get(layer) else np.zeros((0, 0), np.int64)
        queues[layer] = [rows[count:]]
        columns.append(rows[:count])
    width = max(column.shape[1] for column in columns)
    block = np.full((count, len(layers), width), -1, np.int64)
    for index, column in enumerate(columns):
        block[: len(column), index, : column.shape[1]] = column
    return block


class _Start:
    """Drops the runs of identical rows in front of the first real token, over block boundaries."""

    def __init__(self) -> None:
        self._over = False
        self._held: npt.NDArray[np.integer] | None = None

    def drop(
        self, block: npt.NDArray[np.integer], recording: Recording, *, last: bool = False
    ) -> npt.NDArray[np.integer]:
        """What is left of a block once the runs are gone; a run that reaches its end is held until its length shows."""
        if self._over:
            return block
        if self._held is not None:
            block = np.concatenate([self._held, block])
            self._held = None
        while len(block):
            same = (block == block[0]).all(axis=(1, 2))
            run = len(block) if same.all() else int(np.argmin(same))
            if run == len(block) and not last:
                # Two rows tell the run as well as all of them; the others are counted now.
                keep = min(run, SHORTEST_RUN)
                recording.drop("startup_profile_rows", run - keep)
                self._held = block[:keep]
                return block[:0]
            if run < SHORTEST_RUN:
                break
            recording.drop("startup_profile_rows", run)
            block = block[run:]
        self._over = True
        return block
