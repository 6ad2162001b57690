"""omni-infer's activation dump: `activation_counts_recordstep_{n}_rank_{r}.txt`, and the same numbers in its log.

One line a MoE layer, tab separated with a tab at the end, of slots: a rank's own, or all ranks' when only rank 0 wrote
(the cluster's dump). Values are the counts since the step before. The folder's name tells prefill from decode.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.protocol import (
    ALL,
    DECODE,
    PREFILL,
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
from eplb_cli.traces.ranks import missing_numbers, name_gaps
from eplb_cli.traces.tables import number_matrix

__all__ = ["OmniInferReader"]

NAME = re.compile(r"activation_counts_recordstep_(\d+)_rank_(\d+)\.txt$")
LOG = re.compile(
    rb"\[dump activation\]\s*(\w+)\s+step\s+(\d+)\s+in\s+rank\s+(\d+)\s+for\s+layer\s+(\d+)"
    rb"\s+get\s+(\d+)\s+experts\s+data:([^\n]*)"
)
MOST_DIGITS = 18
"""Of a number in a log, so that it fits in 64 bits."""
Step = dict[int, npt.NDArray[np.int64]]


class OmniInferReader:
    """The folder that `dump_dir` named, or a log."""

    name = "omni-infer"
    looks_for = "tab-separated numbers called activation_counts_recordstep_{n}_rank_{r}.txt, or [dump activation] lines"
    replicas_possible = False

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The name and a line of numbers, or a log line."""
        if file.container is not Container.text:
            return no_match()
        if file.path.name.startswith("topk_ids_count"):
            return near_miss("topk_ids_count files hold counts divided by 128 and rounded; give the dump itself", 45)
        if NAME.search(file.path.name):
            first = file.head.split(b"\n", 1)[0].split()
            numbers = bool(first) and all(cell.isdigit() for cell in first)
            return matches("a step's dump", 95) if numbers else near_miss("the first line holds no numbers", 40)
        return matches("[dump activation] lines", 90) if LOG.search(file.head) else no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a step, the columns of all ranks side by side."""
        steps: dict[tuple[int, int], Step] = {}
        for file in recording.files:
            match = NAME.search(file.path.name)
            if match:
                phase = _phase(file.path.parent.name)
                steps.setdefault((phase, int(match[1])), {})[int(match[2])] = number_matrix(file, "\t")
            else:
                _read_log(file, steps)
        for phase in sorted({phase for phase, _ in steps}):
            name_gaps([step for p, step in steps if p == phase], recording, "record step")
        ranks = {rank for step in steps.values() for rank in step}
        if ranks == {0}:
            recording.notes.append("rank 0 alone wrote: its columns are taken as all ranks' slots")
        for (phase, step), parts in sorted(steps.items()):
            absent = sorted(ranks - parts.keys()) or missing_numbers(ranks, first=0)
            if absent:
                raise TraceError(
                    f"step {step} lacks ranks {absent}", file=recording.folder, rule="a rank's file holds its own slots"
                )
            rows = {len(part) for part in parts.values()}
            if len(rows) > 1:
                raise TraceError(f"step {step}: ranks have {sorted(rows)} lines", file=recording.folder)
            counts = np.concatenate([parts[rank] for rank in sorted(parts)], axis=1)
            yield CountBlock(
                counts[None],
                LayerAxis(len(counts), ordinal=True),
                str(recording.folder),
                np.array([step]),
                phase=phase,
                space=Space.physical,
            )


def _phase(word: str) -> int:
    return PREFILL if "prefill" in word.lower() else DECODE if "decode" in word.lower() else ALL


def _read_log(file: TraceFile, steps: dict[tuple[int, int], Step]) -> None:
    rows: dict[tuple[int, int, int], dict[int, npt.NDArray[np.int64]]] = {}
    for word, step, rank, layer, count, data in LOG.findall(file.read_bytes()):
        cells = re.findall(rb"\d+", data)
        longest = max(map(len, (step, rank, layer, count, *cells)))
        if longest > MOST_DIGITS:
            raise TraceError(f"holds a number of {longest} digits", file=file.name, rule=f"at most {MOST_DIGITS}")
        values = np.array(cells, np.int64)
        if len(values) != int(count):
            raise TraceError(
                f"step {int(step)}, rank {int(rank)}, layer {int(layer)} has {len(values)} numbers",
                file=file.name,
                rule=f"the line promises {int(count)}",
            )
        rows.setdefault((_phase(word.decode()), int(step), int(rank)), {})[int(layer)] = values
    for (phase, step, rank), layers in rows.items():
        absent = missing_numbers(layers)
        if absent:
            raise TraceError(f"step {step}, rank {rank} lacks layers {absent}", file=file.name)
        steps.setdefault((phase, step), {})[rank] = np.stack([layers[layer] for layer in sorted(layers)])
