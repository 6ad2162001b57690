"""The JSONL of vLLM's proposed offline EPLB (pull request 41141): slot counts and the map in force, a record a step.

`{"record_type": "eplb_load_stats", "step", "num_ranks", "expert_load": [layers][slots], "p2l_map": [layers][slots]}`.
Rows are the MoE layers in order, already summed over ranks. The second revision writes one `eplb_load_meta` first.
Records of other types, which people's files hold, are counted and passed over.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import TraceFile
from eplb_cli.traces.numbers import whole_number
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
from eplb_cli.traces.ranks import name_gaps
from eplb_cli.untrusted import shown

__all__ = ["VllmLoadStatsReader"]

STATS, META = "eplb_load_stats", "eplb_load_meta"
VERSION = 1


class VllmLoadStatsReader:
    """The file of `expert_load_stats_path` or `write_stats_path`."""

    name = "vllm-load-stats"
    looks_for = f'JSONL records with "record_type": "{STATS}"'
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The first record says its type; sessions of other tools may stand before it."""
        record = file.first_record
        if not isinstance(record, dict) or "record_type" not in record:
            return no_match()
        if record["record_type"] in (STATS, META):
            return matches(f"the first record is {record['record_type']}", 95)
        if f'"{STATS}"'.encode() in file.head:
            return matches(f"holds {STATS} records", 90)
        return near_miss(f"record_type is {shown(record['record_type'])}", 30)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a record, each folded by its own map."""
        for file in recording.files:
            yield from _read_file(file, recording)


def _read_file(file: TraceFile, recording: Recording) -> Iterator[CountBlock]:
    meta = stats = 0
    steps: list[int] = []
    for line, record, cut in file.records():
        if cut:
            recording.warnings.append(f"{file.label}: the last line ({line}) is cut and was left out")
            continue
        kind = record.get("record_type") if isinstance(record, dict) else None
        if kind in (META, STATS) and record.get("version", VERSION) != VERSION:
            raise TraceError(
                f"{kind} has version {shown(record['version'])}",
                file=file.name,
                row=line,
                rule=f"version {VERSION} is known",
            )
        if kind == META:
            meta += 1
            if meta > 1 or stats:
                raise TraceError(
                    f"{META} comes {'again' if meta > 1 else 'after the first step'}",
                    file=file.name,
                    row=line,
                    rule="a recording has one, in front",
                    hint="Were two recordings appended to one file? Cut it there.",
                )
        elif kind == STATS:
            stats += 1
            step = whole_number(record.get("step", stats - 1), "step", file.name, row=line)
            counts, table = (_matrix(record, key, file, line) for key in ("expert_load", "p2l_map"))
            if counts.shape != table.shape:
                raise TraceError(
                    f"expert_load is {list(counts.shape)}",
                    file=file.name,
                    row=line,
                    rule=f"p2l_map is {list(table.shape)}",
                )
            steps.append(step)
            yield CountBlock(
                counts[None],
                LayerAxis(len(counts), ordinal=True),
                f"{file.name} (line {line})",
                np.array([step]),
                space=Space.physical,
                physical_to_logical=table,
            )
        else:
            recording.drop("other_records", 1)
    if not stats:
        raise TraceError(f"holds no {STATS} record", file=file.name)
    if any(later <= earlier for earlier, later in pairwise(steps)):
        recording.warnings.append(f"{file.label}: steps do not ascend; the file holds several runs")
    elif len({b - a for a, b in pairwise(steps)}) > 1:
        stride = min(b - a for a, b in pairwise(steps))
        name_gaps([step // stride for step in steps], recording, "recording")


def _matrix(record: dict[str, Any], key: str, file: TraceFile, line: int) -> npt.NDArray[Any]:
    try:
        array = np.array(record.get(key))
    except (ValueError, OverflowError):
        array = np.zeros(0)
    if array.ndim != 2 or array.dtype.kind not in "iuf" or (key == "p2l_map" and array.dtype.kind == "f"):
        raise TraceError(f"`{key}` is not a list of equal lists of numbers", file=file.name, row=line)
    return array
