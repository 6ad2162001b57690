"""What our own plugin records in a running vLLM: `<run>-dp<D>-pp<P>.jsonl`.

The first line is a header, every other a part of a window: `{"window", "phase", "steps", "tokens", "dropped",
"counts"}` with counts [layers][experts] of logical experts. Lines of equal window and phase add up over data parallel
ranks, whose windows run in step; the layers of pipeline stages join.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.loads import PHASES
from eplb_cli.traces.files import TraceFile
from eplb_cli.traces.protocol import (
    MOST_EXPERTS,
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
from eplb_cli.traces.ranks import check_ranks, name_gaps
from eplb_cli.untrusted import shown

__all__ = ["EplbRecordingReader"]

FORMAT = "eplb-recording"
VERSION = 1
HEADER_KEYS = ("run", "num_experts", "top_k", "layer_ids", "dp_rank", "dp_size", "pp_rank", "pp_size")


@dataclass(frozen=True, eq=False)
class _Part:
    window: int
    phase: int
    tokens: int
    dropped: int
    counts: npt.NDArray[np.int64]
    dp_rank: int
    stage: int


class EplbRecordingReader:
    """The folder that `eplb serve --record` wrote."""

    name = "eplb-recording"
    looks_for = f'JSONL whose first line says "format": "{FORMAT}"'
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The first line says so."""
        record = file.first_record
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            return no_match()
        if record.get("version") != VERSION:
            return near_miss(f"recording version {record.get('version')}; this eplb reads version {VERSION}", 49)
        return matches("the header says so", 99)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """Runs one after the other; in each, windows in order."""
        headers = [(file, _header(file)) for file in recording.files]
        for run in dict.fromkeys(header["run"] for _, header in headers):
            yield from _read_run([(f, h) for f, h in headers if h["run"] == run], recording)


def _header(file: TraceFile) -> Mapping[str, Any]:
    header = file.first_record
    if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
        raise TraceError(f"is not an {FORMAT} of version {VERSION}", file=file.name)
    missing = [key for key in HEADER_KEYS if key not in header]
    if missing:
        raise TraceError(f"its header lacks {missing}", file=file.name)
    numbers = ("num_experts", "top_k", "dp_rank", "dp_size", "pp_rank", "pp_size")
    odd = [key for key in numbers if type(header[key]) is not int or not 0 <= header[key] <= MOST_EXPERTS]
    if odd:
        raise TraceError(f"{odd[0]} is {shown(header[odd[0]])}", file=file.name, rule=f"a number 0..{MOST_EXPERTS}")
    return header


def _read_run(files: list[tuple[TraceFile, Mapping[str, Any]]], recording: Recording) -> Iterator[CountBlock]:
    first = files[0][1]
    stages: dict[int, list[int]] = {}
    for file, header in files:
        for key in ("num_experts", "top_k", "dp_size", "pp_size"):
            if header[key] != first[key]:
                raise TraceError(f"{key} is {header[key]}", file=file.name, rule=f"its run has {first[key]}")
        layers = [int(layer) for layer in header["layer_ids"]]
        if stages.setdefault(int(header["pp_rank"]), layers) != layers:
            raise TraceError(f"holds layers {layers}", file=file.name, rule="ranks of a stage hold the same layers")
    for stage in range(int(first["pp_size"])):
        ranks_of_stage = {int(h["dp_rank"]) for _, h in files if h["pp_rank"] == stage}
        if not ranks_of_stage:
            raise TraceError(
                f"run {first['run']} lacks the files of pipeline stage {stage}",
                file=recording.folder,
                rule=f"it had {first['pp_size']} stages, each with its own layers",
            )
        check_ranks(ranks_of_stage, recording, expected=int(first["dp_size"]))
    recording.top_k = int(first["top_k"])
    recording.architecture = first.get("architecture")
    all_layers = [layer for stage in sorted(stages) for layer in stages[stage]]
    offset = {stage: sum(len(stages[s]) for s in sorted(stages) if s < stage) for stage in stages}
    ranks = {(int(h["dp_rank"]), int(h["pp_rank"])) for _, h in files}
    seen: list[int] = []
    short = 0
    parts = heapq.merge(*(_parts(file, header, recording) for file, header in files), key=lambda part: part.window)
    for window, group in groupby(parts, key=lambda part: part.window):
        seen.append(window)
        sums: dict[int, tuple[npt.NDArray[np.int64], dict[int, int]]] = {}
        present = set()
        for part in group:
            counts, tokens = sums.setdefault(
                part.phase, (np.zeros((len(all_layers), int(first["num_experts"])), np.int64), {})
            )
            counts[offset[part.stage] : offset[part.stage] + len(part.counts)] += part.counts
            tokens[part.stage] = tokens.get(part.stage, 0) + part.tokens
            recording.drop("ids_without_expert", part.dropped)
            present.add((part.dp_rank, part.stage))
        short += present != ranks
        for phase, (counts, tokens) in sorted(sums.items()):
            yield CountBlock(
                counts[None],
                LayerAxis.absolute(all_layers),
                str(recording.folder),
                np.array([window]),
                np.array([max(tokens.values())]),
                phase,
                Space.logical,
            )
    name_gaps(seen, recording, "window")
    if short:
        recording.warnings.append(f"{short} of {len(seen)} windows lack some ranks' lines (idle or stopped ranks)")


def _parts(file: TraceFile, header: Mapping[str, Any], recording: Recording) -> Iterator[_Part]:
    shape = (len(header["layer_ids"]), int(header["num_experts"]))
    previous = -1
    for line, record, cut in file.records():
        if cut:
            recording.warnings.append(f"{file.label}: the last line ({line}) is cut and was left out")
            continue
        if line == 1 or "end" in record:
            if line > 1:
                recording.warnings.append(f"{file.label}: the recorder stopped early: {record['end']}")
            continue
        try:
            counts = np.array(record["counts"])
            window, phase = int(record["window"]), PHASES.index(record["phase"])
            tokens, dropped = int(record["tokens"]), int(record.get("dropped", 0))
        except (KeyError, ValueError, TypeError) as error:
            raise TraceError(f"is not a part of a window ({error})", file=file.name, row=line) from None
        if counts.shape != shape or counts.dtype.kind not in "iu":
            raise TraceError(f"counts are {list(counts.shape)}", file=file.name, row=line, rule=f"{list(shape)}")
        if window < previous:
            raise TraceError(f"window {window} comes after {previous}", file=file.name, row=line)
        previous = window
        yield _Part(
            window, phase, tokens, dropped, counts.astype(np.int64), int(header["dp_rank"]), int(header["pp_rank"])
        )
