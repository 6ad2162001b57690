"""SGLang's recorder in `per_pass` and `per_token` mode.

Every rank writes a torch file: `records`, one a forward pass with `global_physical_count` [hidden layers, slots] of
that rank's tokens, and `last_physical_to_logical_map` [hidden layers, slots]. Passes of equal id add up over ranks.
`per_token` records hold the ids themselves in `topk_ids_of_layer` [hidden layers, tokens, 8], -1 where unused, and the
pass's `forward_mode` (1 extend, 2 decode), which tells the phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import Container, TraceFile, tensor_to_numpy
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
from eplb_cli.traces.ranks import check_ranks, name_gaps

__all__ = ["SglangPassesReader"]

MAP_KEY = "last_physical_to_logical_map"
PHASE_OF_MODE = {1: PREFILL, 2: DECODE}


@dataclass
class _Pass:
    counts: npt.NDArray[np.int64]
    phase: int
    tokens: int | None
    ranks: set[int]


class SglangPassesReader:
    """`expert_distribution_recorder_{time}_{rank}.pt`."""

    name = "sglang-passes"
    looks_for = f"a torch dictionary with `records` and `{MAP_KEY}`"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The dictionary holds records and the map."""
        if file.container is not Container.torch:
            return no_match()
        content = file.torch_object
        if not isinstance(content, Mapping) or "records" not in content:
            return no_match("no `records`")
        return matches("holds records and a map", 95) if MAP_KEY in content else near_miss(f"lacks `{MAP_KEY}`", 40)

    def read(self, recording: Recording) -> Iterator[CountBlock]:
        """One window a forward pass, summed over ranks."""
        passes: dict[int, _Pass] = {}
        table: npt.NDArray[Any] | None = None
        seen: set[tuple[int, int, str]] = set()
        ranks: set[int] = set()
        for file in recording.files:
            content = file.torch_object
            file.forget()
            own = tensor_to_numpy(content[MAP_KEY])
            if table is not None and not np.array_equal(table, own):
                raise TraceError(
                    "its map differs from the other ranks' map",
                    file=file.name,
                    rule="all ranks of one server share a map",
                    hint="Are these dumps of different servers or times? Give them apart.",
                )
            table = own
            for record in content["records"]:
                ranks.add(_add(record, table, file, passes, seen))
        check_ranks(ranks, recording)
        name_gaps(passes, recording, "forward pass")
        partial = [number for number, one in sorted(passes.items()) if one.ranks != ranks]
        if partial:
            recording.warnings.append(f"{len(partial)} passes lack some ranks' records, the first is {partial[0]}")
        for number in sorted(passes):
            one = passes.pop(number)
            yield CountBlock(
                one.counts[None],
                LayerAxis(len(one.counts)),
                str(recording.folder),
                np.array([number]),
                None if one.tokens is None else np.array([one.tokens]),
                one.phase,
                Space.physical,
                table,
            )


def _add(
    record: Mapping[str, Any],
    table: npt.NDArray[Any],
    file: TraceFile,
    passes: dict[int, _Pass],
    seen: set[tuple[int, int, str]],
) -> int:
    """Add one record to its pass, and return its rank."""
    try:
        number, rank = int(record["forward_pass_id"]), int(record["rank"])
    except (KeyError, TypeError, ValueError):
        raise TraceError("a record lacks `forward_pass_id` or `rank`", file=file.name) from None
    identity = (rank, number, str(record.get("gatherer_key", "primary")))
    if identity in seen:
        raise TraceError(
            f"pass {number} of rank {rank} is there twice",
            file=file.name,
            rule="two dumps of one server must not be mixed in a folder",
            hint="Give each dump's files apart.",
        )
    seen.add(identity)
    counts = _counts(record, table, file)
    tokens = len(record["positions"]) if record.get("positions") is not None else None
    phase = PHASE_OF_MODE.get(int(record["forward_mode"]), ALL) if "forward_mode" in record else ALL
    if number in passes:
        one = passes[number]
        one.counts += counts
        one.phase = one.phase if one.phase == phase else ALL
        one.tokens = None if one.tokens is None or tokens is None else one.tokens + tokens
        one.ranks.add(rank)
    else:
        passes[number] = _Pass(counts, phase, tokens, {rank})
    return rank


def _counts(record: Mapping[str, Any], table: npt.NDArray[Any], file: TraceFile) -> npt.NDArray[np.int64]:
    if record.get("global_physical_count") is not None:
        counts = tensor_to_numpy(record["global_physical_count"]).astype(np.int64)
        if counts.shape != table.shape:
            raise TraceError(f"counts are {list(counts.shape)}", file=file.name, rule=f"the map is {list(table.shape)}")
        return counts
    if record.get("topk_ids_of_layer") is None:
        raise TraceError("a record holds neither counts nor ids", file=file.name)
    ids = tensor_to_numpy(record["topk_ids_of_layer"])
    layers, slots = table.shape
    if ids.ndim != 3 or len(ids) != layers or (ids >= slots).any():
        raise TraceError(
            f"ids are {list(ids.shape)} up to {ids.max(initial=-1)}",
            file=file.name,
            rule=f"{layers} layers, {slots} slots",
        )
    counts = np.zeros((layers, slots), np.int64)
    layer, token, column = np.nonzero(ids >= 0)
    np.add.at(counts, (layer, ids[layer, token, column].astype(np.int64)), 1)
    return counts
