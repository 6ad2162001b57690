"""SGLang 0.4.4's recorder: one CSV a rank, `layer_id,expert_id,count`, without the pairs that count zero.

Under tensor parallelism all ranks repeat the same counts, under data-parallel attention each has a part: files of equal
content are kept once, others are added.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import TraceFile
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
from eplb_cli.traces.ranks import check_ranks
from eplb_cli.traces.sparse import dense_counts
from eplb_cli.traces.tables import csv_header, csv_rows, number

__all__ = ["SglangCsvReader"]

COLUMNS = ["layer_id", "expert_id", "count"]
NAME = re.compile(r"rank(\d+)(?:_timestamp([\d.]+))?", re.IGNORECASE)


class SglangCsvReader:
    """`expert_distribution_rank{r}_timestamp{t}.csv`."""

    name = "sglang-csv"
    looks_for = "a CSV with the header layer_id,expert_id,count"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The header names the three columns."""
        header = csv_header(file)
        if header == COLUMNS:
            return matches("the header names layer_id, expert_id and count", 95)
        missing = [column for column in COLUMNS if column not in header]
        if len(missing) < 2:
            return near_miss(
                f"missing column {missing[0]}" if missing else f"its columns are {header}, in another order", 40
            )
        return no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window: the outer sum over (layer, expert) of all ranks' files; several dumps of a rank are windows."""
        dumps: dict[int, list[TraceFile]] = {}
        for index, file in enumerate(recording.files):
            match = NAME.search(file.path.name)
            dumps.setdefault(int(match[1]) if match else index, []).append(file)
        check_ranks(dumps, recording)
        lengths = {rank: len(files) for rank, files in dumps.items()}
        if len(set(lengths.values())) > 1:
            raise TraceError(
                f"ranks have different numbers of dumps: {lengths}",
                file=recording.folder,
                rule="the n-th dumps of all ranks are one window",
            )
        windows = [
            dense_counts(
                (entry for files in dumps.values() for entry in _entries(files[index])),
                recording.options.need_num_experts(str(recording.folder)),
                str(recording.folder),
            )
            for index in range(max(lengths.values()))
        ]
        layers = sorted({layer for _, axis in windows for layer in axis.ids or ()})
        for counts, axis in windows:
            whole = np.zeros((1, len(layers), counts.shape[2]), np.int64)
            whole[:, np.searchsorted(layers, axis.ids or ())] = counts
            yield CountBlock(whole, LayerAxis.absolute(layers), str(recording.folder), space=Space.logical)


def _entries(file: TraceFile) -> Iterator[tuple[int, int, int]]:
    for line, (layer, expert, count) in csv_rows(file, 3, header=True):
        yield (
            number(layer, file, line, "layer_id"),
            number(expert, file, line, "expert_id"),
            number(count, file, line, "count"),
        )
