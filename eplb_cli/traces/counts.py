"""Count matrices of no particular recorder: [layers, experts] or [windows, layers, experts].

.npy; .npz, .safetensors and torch files with one such array, or one of a telling name, and optionally `layer_ids`,
`tokens` and `window_ids`; JSON as a nested list, or an object with the list under a telling name. vllm-ascend's
`expert_load_view.pt` is the bare tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.arrays import COUNT_NAMES, array_kind, sample_rows
from eplb_cli.traces.files import Container, TraceFile, tensor_to_numpy
from eplb_cli.traces.protocol import (
    CountBlock,
    LayerAxis,
    Match,
    RankDumps,
    ReadOptions,
    Recording,
    Space,
    matches,
    near_miss,
    no_match,
)

__all__ = ["CountMatrixReader", "json_matrix"]

SIDE_KEYS = ("layer_ids", "tokens", "window_ids")
RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class _Matrix:
    counts: npt.NDArray[Any]
    side: Mapping[str, npt.NDArray[Any]]


class CountMatrixReader:
    """Arrays of counts in any container."""

    name = "counts"
    looks_for = "numbers [layers, experts] or [windows, layers, experts] in .npy, .npz, .json, .safetensors or .pt"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """Two or three axes of numbers that are not per-token ids."""
        if file.container is Container.npy:
            header = file.npy_header
            shapes: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {"": (header.shape, header.dtype)}
        elif file.container is Container.npz:
            shapes = {name: (header.shape, header.dtype) for name, header in file.npz_headers().items()}
        elif file.container is Container.safetensors:
            tensors = file.safetensors_header.tensors
            shapes = {name: (entry.shape, entry.numpy_dtype) for name, entry in tensors.items()}
        elif file.container is Container.torch:
            shapes = {name: (array.shape, array.dtype) for name, array in _tensors(file.torch_object).items()}
        elif file.container is Container.json:
            return _recognise_json(file)
        else:
            return no_match()
        name = _choose(shapes)
        if name is None:
            return near_miss(f"no single array of counts among {sorted(shapes) or 'nothing'}", 15)
        shape, dtype = shapes[name]
        if len(shape) not in (2, 3) or dtype.kind not in "iuf":
            return near_miss(f"{dtype} {list(shape)} is not [layers, experts] or [windows, layers, experts]", 15)
        if file.container is Container.npy:
            kind = array_kind(shape, dtype, sample_rows(file, file.npy_header), options)
            if kind != "counts":
                return near_miss(f"{dtype} {list(shape)} does not look like counts", 10)
        elif name not in COUNT_NAMES and array_kind(shape, dtype, np.zeros((0, *shape[1:])), options) == "ids":
            return near_miss(f"{dtype} {list(shape)} looks like per-token ids, not counts", 20)
        return matches(f"{dtype} {list(shape)}", 60)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One block a file; files named after ranks are added, others are windows one after the other."""
        blocks = [_block(file) for file in recording.files]
        if _are_ranks(recording):
            yield _add_ranks(blocks, recording)
        else:
            yield from blocks


def _are_ranks(recording: Recording) -> bool:
    """True when the files are shares of one whole: the user says so, or each name holds another rank's number."""
    if len(recording.files) < 2 or recording.options.rank_dumps is RankDumps.replicated:
        return False
    if recording.options.rank_dumps is RankDumps.sum:
        return True
    found = [RANK_IN_NAME.search(file.path.name) for file in recording.files]
    ranks = {int(match[1]) for match in found if match}
    return len(ranks) == len(recording.files)


def _add_ranks(blocks: list[CountBlock], recording: Recording) -> CountBlock:
    first = blocks[0]
    for block in blocks[1:]:
        if block.counts.shape != first.counts.shape:
            raise TraceError(
                f"counts are {list(block.counts.shape)}",
                file=block.file,
                rule=f"{first.file} has {list(first.counts.shape)}; the dumps of all ranks must agree to be added",
            )
    recording.notes.append(f"the dumps of {len(blocks)} ranks were added")
    total: npt.NDArray[Any] = np.zeros(first.counts.shape, np.int64)  # float64 once a rank's counts are floats
    for block in blocks:
        total = total + block.counts
    told = [block.tokens for block in blocks if block.tokens is not None]
    tokens = np.sum(told, axis=0) if len(told) == len(blocks) else None
    return CountBlock(total, first.axis, first.file, first.window_ids, tokens)


def _block(file: TraceFile) -> CountBlock:
    matrix = _read(file)
    counts = matrix.counts
    if counts.ndim not in (2, 3) or counts.dtype.kind not in "iuf":
        raise TraceError(
            f"is {counts.dtype} {list(counts.shape)}",
            file=file.name,
            rule="counts are numbers [layers, experts] or [windows, layers, experts]",
        )
    if counts.ndim == 2:
        counts = counts[None]
    windows, layers, _ = counts.shape
    axis = LayerAxis(layers)
    if "layer_ids" in matrix.side:
        ids = matrix.side["layer_ids"]
        if ids.shape != (layers,):
            raise TraceError(f"names {ids.size} layers", file=file.name, rule=f"its layer axis has {layers}")
        axis = LayerAxis.absolute(ids.tolist())
    sides: dict[str, npt.NDArray[np.int64] | None] = {"tokens": None, "window_ids": None}
    for name in sides:
        if name in matrix.side:
            array = np.atleast_1d(matrix.side[name])
            if array.shape != (windows,) or array.dtype.kind not in "iu":
                raise TraceError(f"{name} is {array.dtype} {list(array.shape)}", file=file.name, rule=f"[{windows}]")
            sides[name] = array.astype(np.int64)
    return CountBlock(counts, axis, file.name, sides["window_ids"], sides["tokens"], space=Space.unknown)


def _read(file: TraceFile) -> _Matrix:
    if file.container is Container.npy:
        return _Matrix(file.npy_array(), {})
    if file.container is Container.json:
        return _Matrix(*_json_parts(file.document, file.name))
    if file.container is Container.npz:
        arrays = {name: file.npz_array(name) for name in file.npz_headers()}
    elif file.container is Container.safetensors:
        tensors = file.safetensors_header.tensors.values()
        arrays = {entry.name: file.safetensors_array(entry.name) for entry in tensors if entry.numpy_dtype.kind != "V"}
    elif file.container is Container.torch:
        arrays = _tensors(file.torch_object)
        file.forget()
    else:
        raise TraceError("holds no array", file=file.name, rule=CountMatrixReader.looks_for)
    name = _choose({key: (array.shape, array.dtype) for key, array in arrays.items()})
    if name is None:
        raise TraceError(
            f"holds {sorted(arrays)}", file=file.name, rule=f"one array, or one named {' or '.join(COUNT_NAMES)}"
        )
    return _Matrix(arrays[name], {key: arrays[key] for key in SIDE_KEYS if key in arrays})


def _choose(shapes: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> str | None:
    """The array that holds the counts: of a telling name, or the only one that is not a companion."""
    named = [key for key in COUNT_NAMES if key in shapes]
    if named:
        return named[0]
    others = [key for key in shapes if key not in SIDE_KEYS]
    return others[0] if len(others) == 1 else None


def _tensors(content: Any) -> dict[str, npt.NDArray[Any]]:
    import torch

    if isinstance(content, torch.Tensor):
        return {"": tensor_to_numpy(content)}
    if isinstance(content, Mapping):
        return {str(k): tensor_to_numpy(v) for k, v in content.items() if isinstance(v, torch.Tensor)}
    return {}


def _recognise_json(file: TraceFile) -> Match:
    document = file.document
    if isinstance(document, list):
        nested = document and isinstance(document[0], list)
        return matches("a nested list", 60) if nested else near_miss("the list does not hold lists", 10)
    if isinstance(document, dict):
        key = next((key for key in COUNT_NAMES if isinstance(document.get(key), list)), None)
        if key:
            return matches(f"holds `{key}`", 60)
        return near_miss(f"the object holds {sorted(map(str, document))[:8]}, not one of {list(COUNT_NAMES)}", 10)
    return no_match("not a list or an object")


def _json_parts(document: Any, file: str) -> tuple[npt.NDArray[Any], dict[str, npt.NDArray[Any]]]:
    if isinstance(document, list):
        return json_matrix(document, file), {}
    if not isinstance(document, dict):
        raise TraceError("is neither a list nor an object", file=file, rule=CountMatrixReader.looks_for)
    key = next((key for key in COUNT_NAMES if isinstance(document.get(key), list)), None)
    if key is None:
        raise TraceError(
            f"holds {sorted(map(str, document))[:8]}", file=file, rule=f"one of {list(COUNT_NAMES)} is expected"
        )
    side = {}
    for name in SIDE_KEYS:
        if name in document:
            side[name] = np.array(document[name])
    return json_matrix(document[key], file), side


def json_matrix(rows: Any, file: str) -> npt.NDArray[Any]:
    """A nested list of numbers, two or three deep, as int64, or float64 when any number has a point.

    Raises:
        TraceError: rows of different length, or anything that is not a number, with its place.
    """
    try:
        array = np.array(rows)
    except (ValueError, OverflowError):
        array = np.array(None)
    if array.dtype.kind in "iuf" and array.ndim in (2, 3):
        return array
    _find_fault(rows, file, ())
    raise TraceError(
        f"the list is {array.ndim} deep", file=file, rule="[layers, experts] or [windows, layers, experts] is expected"
    )


def _find_fault(rows: Any, file: str, at: tuple[int, ...]) -> None:
    if not isinstance(rows, list):
        layer, expert = (None, None, *at)[-2:]
        if isinstance(rows, bool) or not isinstance(rows, int | float):
            raise TraceError(f"load is {rows!r}", file=file, layer=layer, expert=expert, rule="loads are numbers")
        if isinstance(rows, int) and not -(2**63) <= rows < 2**63:
            raise TraceError(f"load is {rows}", file=file, layer=layer, expert=expert, rule="loads fit in 64 bits")
        return
    lengths = {len(row) if isinstance(row, list) else -1 for row in rows}
    if len(lengths) > 1:
        first = len(rows[0]) if isinstance(rows[0], list) else -1
        for index, row in enumerate(rows):
            length = len(row) if isinstance(row, list) else -1
            if length != first:
                raise TraceError(
                    f"entry {[*at, index]} has {length} values" if length >= 0 else f"entry {[*at, index]} is no list",
                    file=file,
                    rule=f"entry {[*at, 0]} has {first}; all must agree",
                )
    for index, row in enumerate(rows):
        _find_fault(row, file, (*at, index))
