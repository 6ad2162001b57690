"""Recorders that write one file a layer.

- ESFT: text, a line a token or a sequence: ids tab separated, two tabs, the router's weights. The file's name holds the
  layer's number, and line n of all files is the same text.
- STeP: .npz with `data` [tokens, k], one layer and iteration a file, both numbers in the name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.protocol import LayerAxis, Match, ReadOptions, Recording, TokenBlock, matches, near_miss, no_match
from eplb_cli.traces.ranks import name_gaps

__all__ = ["EsftReader", "StepReader"]

LAYER = re.compile(r"layer[_-]?(\d+)", re.IGNORECASE)
ITERATION = re.compile(r"iter(?:ation)?[_-]?(\d+)", re.IGNORECASE)
LINES_A_BLOCK = 1024
MAX_TOP_K = 64
MOST_LINE_BYTES = 64 << 20
"""Longest line of text: a sequence of a million tokens of the largest top-k."""


class EsftReader:
    """ESFT's expert outputs."""

    name = "esft"
    looks_for = "text lines of ids, two tabs and weights, in files named after layers"
    replicas_possible = False

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The first line has as many ids as weights."""
        if file.container is not Container.text:
            return no_match()
        ids, separator, weights = file.head.split(b"\n", 1)[0].partition(b"\t\t")
        cells = ids.split(b"\t")
        if not separator or not all(cell.strip().isdigit() for cell in cells):
            return no_match()
        if len(file.head) < 1 << 16 and len(cells) != len(weights.split(b"\t")):
            return near_miss("a line has different numbers of ids and weights", 30)
        if _layer_of(file) is None:
            return near_miss("ids and weights, but the file's name holds no layer number", 40)
        return matches("ids and weights by line", 90)

    def read(self, recording: Recording) -> Iterator[TokenBlock]:
        """Lines of all layers side by side."""
        files = {}
        for file in recording.files:
            layer = _layer_of(file)
            if layer is None or layer in files:
                raise TraceError(
                    "the name holds no layer number" if layer is None else f"layer {layer} is there twice",
                    file=file.name,
                    rule="one file a layer, named layer_3.txt or 3.txt",
                )
            files[layer] = file
        layers = sorted(files)
        axis = LayerAxis.absolute(layers)
        where = str(recording.folder)
        width = recording.options.top_k
        position, held = 0, []
        for number, lines in enumerate(zip_longest(*(_ids(files[layer]) for layer in layers)), 1):
            if any(line is None or len(line) != len(lines[0]) for line in lines):
                raise TraceError(
                    f"line {number} has different numbers of ids in the layers' files",
                    file=where,
                    rule="line n of all files is the same text",
                )
            width = width or len(lines[0])
            if width > MAX_TOP_K or len(lines[0]) % width:
                raise UsageError(
                    f"line {number} has {len(lines[0])} ids", file=where, hint="Pass --model MODEL: it tells top-k."
                )
            held.append(np.stack([np.array(line, np.int64).reshape(-1, width) for line in lines], 1))
            if len(held) == LINES_A_BLOCK:
                block = np.concatenate(held)
                yield TokenBlock(block, axis, where, position)
                position, held = position + len(block), []
        if held:
            yield TokenBlock(np.concatenate(held), axis, where, position)


def _layer_of(file: TraceFile) -> int | None:
    match = LAYER.search(file.path.stem) or re.fullmatch(r"(\d+)", file.path.stem)
    return int(match[1]) if match else None


def _ids(file: TraceFile) -> Iterator[list[int]]:
    with file.open() as stream:
        for number, line in enumerate(iter(lambda: stream.readline(MOST_LINE_BYTES + 1), b""), 1):
            if len(line) > MOST_LINE_BYTES:
                raise TraceError("is too long", file=file.name, row=number, rule=f"at most {MOST_LINE_BYTES:,} bytes")
            if not line.strip():
                continue
            ids = line.rstrip(b"\r\n").partition(b"\t\t")[0].split(b"\t")
            if any(len(cell) > 9 or not cell.strip().isdigit() for cell in ids):
                raise TraceError("an id is no number", file=file.name, row=number, rule="ids are whole numbers")
            yield [int(cell) for cell in ids]


class StepReader:
    """The STeP artefact's routing."""

    name = "step-npz"
    looks_for = ".npz with `data` [tokens, k] named after a layer and an iteration"
    replicas_possible = False

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """`data` alone, integers of two axes, and a layer in the name."""
        if file.container is not Container.npz:
            return no_match()
        headers = file.npz_headers()
        if set(headers) != {"data"} or len(headers["data"].shape) != 2 or headers["data"].dtype.kind not in "iu":
            return no_match()
        if not LAYER.search(file.path.stem):
            return near_miss("`data` [tokens, k], but the file's name holds no layer number", 40)
        return matches("`data` of a layer", 90)

    def read(self, recording: Recording) -> Iterator[TokenBlock]:
        """Layers of an iteration side by side, iterations in order."""
        found: dict[int, dict[int, npt.NDArray[np.int64]]] = {}
        for file in recording.files:
            in_layer, in_iteration = LAYER.search(file.path.stem), ITERATION.search(file.path.stem)
            if in_layer is None:
                raise TraceError("the name holds no layer number", file=file.name)
            of_iteration = found.setdefault(int(in_iteration[1]) if in_iteration else 0, {})
            if int(in_layer[1]) in of_iteration:
                raise TraceError(f"layer {in_layer[1]} of its iteration is there twice", file=file.name)
            of_iteration[int(in_layer[1])] = file.npz_array("data")
        name_gaps(found, recording, "iteration")
        layers = sorted({layer for one in found.values() for layer in one})
        position = 0
        for iteration in sorted(found):
            parts = found[iteration]
            shapes = {part.shape for part in parts.values()}
            if parts.keys() != set(layers) or len(shapes) > 1:
                raise TraceError(
                    f"iteration {iteration} holds layers {sorted(parts)} of shapes {sorted(shapes)}",
                    file=recording.folder,
                    rule=f"every iteration holds layers {layers} with the same tokens",
                )
            block = np.stack([parts[layer] for layer in layers], 1)
            yield TokenBlock(block, LayerAxis.absolute(layers), str(recording.folder), position)
            position += len(block)
