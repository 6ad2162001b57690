"""The hit profile of the ds4 engine: CSV `layer,expert,hits,layer_rows[,weight]`, all pairs, zeros included.

`layer_rows` is the tokens of that layer, so the hits of a layer add up to top-k times it. Some files lack the header.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import TraceFile
from eplb_cli.traces.protocol import CountBlock, Match, ReadOptions, Recording, Space, matches, near_miss, no_match
from eplb_cli.traces.sparse import dense_counts
from eplb_cli.traces.tables import csv_header, csv_rows, number

__all__ = ["Ds4HitsReader"]

COLUMNS = ["layer", "expert", "hits", "layer_rows"]


class Ds4HitsReader:
    """The file that DS4_EXPERT_HITS_OUT named."""

    name = "ds4-hits"
    looks_for = "a CSV with the header layer,expert,hits,layer_rows"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The header, or rows that count experts up from 0 with the same number of tokens."""
        header = csv_header(file)
        if header[:4] == COLUMNS:
            return matches("the header names layer, expert, hits and layer_rows", 95)
        if set(header) >= {"layer", "expert", "hits"}:
            return near_miss("missing column layer_rows", 30)
        if _is_bare(file):
            return matches("rows count experts up from 0 in each layer", 70)
        return no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a file; tokens are layer_rows."""
        for file in recording.files:
            cells = csv_header(file)
            entries: list[tuple[int, int, int]] = []
            rows_of: dict[int, int] = {}
            for line, row in csv_rows(file, len(cells), header=cells[:4] == COLUMNS):
                layer, expert, hits, rows = (number(row[i], file, line, COLUMNS[i]) for i in range(4))
                if rows_of.setdefault(layer, rows) != rows:
                    raise TraceError(
                        f"layer_rows is {rows}", file=file.name, layer=layer, row=line, rule=f"it was {rows_of[layer]}"
                    )
                entries.append((layer, expert, hits))
            if not entries:
                raise TraceError("holds no row", file=file.name)
            if len({(layer, expert) for layer, expert, _ in entries}) != len(entries):
                raise TraceError("a pair of layer and expert is there twice", file=file.name)
            experts = recording.options.num_experts or max(expert for _, expert, _ in entries) + 1
            counts, axis = dense_counts(entries, experts, file.name)
            ratios = {
                int(total) / rows_of[layer]
                for layer, total in zip(axis.ids or (), counts[0].sum(1), strict=True)
                if rows_of[layer]
            }
            if recording.top_k is None and len(ratios) == 1 and (ratio := next(iter(ratios))) == int(ratio):
                recording.top_k = int(ratio)
            tokens = np.array([max(rows_of.values())])
            yield CountBlock(counts, axis, file.name, tokens=tokens, space=Space.logical)


def _is_bare(file: TraceFile) -> bool:
    lines = [line.split(b",") for line in file.head.split(b"\n")[:3]]
    if len(lines) < 2 or not all(4 <= len(line) <= 5 for line in lines[:2]):
        return False
    try:
        first, second = ([int(cell) for cell in line[:4]] for line in lines[:2])
    except ValueError:
        return False
    return first[1] == 0 and second[1] == 1 and first[0] == second[0] and first[3] == second[3]
