"""dlBLAS and lmdeploy: cumulative counts of all ranks, and each rank's own.

`rank{r}_step{n}_experts_counts.json` is a list [layers][experts] of counts since the start, summed over ranks, which
every rank writes: one rank's files are read, in the order of steps. `expert_load_rank{r}.json` is `{"layer_{i}": [..]}`
of that rank alone: ranks add up.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from eplb_cli.errors import TraceError
from eplb_cli.traces.counts import json_matrix
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.protocol import CountBlock, LayerAxis, Match, ReadOptions, Recording, Space, matches, no_match
from eplb_cli.traces.ranks import check_ranks

__all__ = ["DlblasCountsReader", "DlblasLoadReader"]

COUNTS_NAME = re.compile(r"rank(\d+)_step(\d+)_experts_counts\.json$")
LOAD_NAME = re.compile(r"rank(\d+)\.json$")
LAYER_KEY = re.compile(r"layer_(\d+)$")


class DlblasCountsReader:
    """`rank{r}_step{n}_experts_counts.json`."""

    name = "dlblas-counts"
    looks_for = "a JSON list of lists called rank{r}_step{n}_experts_counts.json"
    replicas_possible = False

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """A list of lists under the recorder's name: nothing inside tells that it is cumulative."""
        if file.container is not Container.json or not COUNTS_NAME.search(file.path.name):
            return no_match()
        document = file.document
        nested = isinstance(document, list) and bool(document) and isinstance(document[0], list)
        return matches("cumulative counts of a step", 95) if nested else no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """The lowest rank's snapshots, in the order of steps; the pipeline takes the differences."""
        recording.cumulative = True
        by_rank: dict[int, dict[int, TraceFile]] = {}
        for file in recording.files:
            match = COUNTS_NAME.search(file.path.name)
            if match is None:
                raise TraceError("the name does not tell rank and step", file=file.name)
            by_rank.setdefault(int(match[1]), {})[int(match[2])] = file
        rank = min(by_rank)
        if len(by_rank) > 1:
            _check_copies(by_rank, rank)
            recording.notes.append(f"all {len(by_rank)} ranks hold the same sums; rank {rank}'s were read")
        recording.files = [by_rank[rank][step] for step in sorted(by_rank[rank])]
        for step in sorted(by_rank[rank]):
            file = by_rank[rank][step]
            counts = json_matrix(file.document, file.name)
            file.forget()
            yield CountBlock(counts[None], LayerAxis(len(counts)), file.name, np.array([step]), space=Space.logical)


def _check_copies(by_rank: dict[int, dict[int, TraceFile]], rank: int) -> None:
    for other, files in by_rank.items():
        for step, file in files.items():
            first = by_rank[rank].get(step)
            if first is not None and file.document != first.document:
                raise TraceError(
                    f"differs from rank {rank}'s counts of step {step}",
                    file=file.name,
                    rank=other,
                    rule="the counts are summed over ranks, so all ranks write the same",
                )


class DlblasLoadReader:
    """`expert_load_rank{r}.json`."""

    name = "dlblas-load"
    looks_for = 'a JSON object of lists called "layer_{i}"'
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """Every key is layer_{i}, every value a list."""
        document = file.document if file.container is Container.json else None
        if not isinstance(document, dict) or not document:
            return no_match()
        fits = all(LAYER_KEY.match(key) and isinstance(value, list) for key, value in document.items())
        return matches("lists by layer", 95) if fits else no_match()

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window, the sum over ranks."""
        ranks = {}
        total: np.ndarray | None = None
        layers: list[int] = []
        for index, file in enumerate(recording.files):
            match = LOAD_NAME.search(file.path.name)
            ranks[int(match[1]) if match else index] = file
            keyed = {int(LAYER_KEY.match(key)[1]): value for key, value in file.document.items()}  # type: ignore[index]
            counts = json_matrix([keyed[layer] for layer in sorted(keyed)], file.name)
            if total is not None and (counts.shape != total.shape or sorted(keyed) != layers):
                raise TraceError(
                    f"counts are {list(counts.shape)}", file=file.name, rule="all ranks have the same layers"
                )
            layers = sorted(keyed)
            total = counts if total is None else total + counts
        check_ranks(ranks, recording)
        if total is not None:
            yield CountBlock(total[None], LayerAxis.absolute(layers), str(recording.folder), space=Space.logical)
