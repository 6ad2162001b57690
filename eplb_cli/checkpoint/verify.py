"""Proof that a converted checkpoint holds the source's bytes where the plan says, and nothing else.

Independent of the writer: what must be in the output is derived here from the plan and the source's index, name by
name, and the output's own headers say where to look. Nothing that the writer planned or noted is used.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from eplb_cli.checkpoint import page_cache
from eplb_cli.checkpoint.classify import ClassifiedTensors, Kind, classify, with_expert
from eplb_cli.checkpoint.config import PLACEMENT_KEY
from eplb_cli.checkpoint.source import Checkpoint
from eplb_cli.checkpoint.verify_claims import (
    Demand,
    config_problems,
    index_problems,
    plan_problems,
    provenance_problems,
    read_config,
    shard_problems,
)
from eplb_cli.checkpoint.verify_files import file_problems, list_files, side_file_problems
from eplb_cli.errors import CheckpointError, EplbError, PlacementError
from eplb_cli.placement import PLAN_FILE, Placement
from eplb_cli.tensors import SafetensorsHeader, TensorEntry

__all__ = ["Level", "Report", "expert_problems", "verify"]

_BLOCK = 1 << 20
_CHUNK = 16 << 20
_SAMPLE = 4096
_MOST_PROBLEMS = 100


class Level(StrEnum):
    """How much is read: headers only, a page of every tensor and row and all small tables, or every byte."""

    headers = "headers"
    sample = "sample"
    full = "full"


@dataclass(frozen=True)
class Report:
    """What was proven.

    Args:
        ok: nothing was found wrong.
        level: how much was read.
        tensors: tensors of the output that were checked at that level and found right.
        problems: what is wrong, at most the first hundred.
    """

    ok: bool
    level: Level
    tensors: int
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Expected:
    """An output tensor as it must be.

    Args:
        origin: the source tensor.
        rows: for a tensor by expert, the source row of each output row; None for the whole tensor as it is.
        new_ids: for a table of expert ids, new id by source id.
    """

    origin: str
    shape: tuple[int, ...]
    rows: tuple[int, ...] | None = None
    new_ids: tuple[int, ...] | None = None


@dataclass
class _Problems:
    """Problems found so far; the first hundred in words."""

    texts: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, text: str) -> None:
        self.count += 1
        if len(self.texts) < _MOST_PROBLEMS:
            self.texts.append(text)

    def listed(self) -> tuple[str, ...]:
        more = self.count - len(self.texts)
        return (*self.texts, f"and {more} more") if more else tuple(self.texts)


def verify(
    source: Checkpoint,
    folder: Path,
    plan: Placement | None,
    level: Level,
    *,
    classified: ClassifiedTensors | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Report:
    """Compare a converted checkpoint with its source.

    Args:
        source: the checkpoint that was converted.
        folder: the converted one.
        plan: the plan it must follow; None takes the one that lies in it.
        level: how much to read.
        classified: roles of the source's tensors, where they are known already.
        progress: called with the number of bytes compared since the last call.

    Raises:
        CheckpointError: the source itself is damaged or cannot be read.
    """
    problems = _Problems()
    if classified is None:
        classified = classify(source.config, source.tensors, stored_experts=source.config.shape.num_experts)
    try:
        output, demand, files, document = _opened(source, classified, folder, plan)
    except EplbError as error:
        return Report(False, level, 0, (str(error),))
    expected = _expected(demand)
    origins = {name: want.origin for name, want in expected.items()}
    for found in (
        file_problems(source, output, files),
        config_problems(demand, folder, document),
        plan_problems(demand, folder),
        provenance_problems(demand, folder, origins),
        index_problems(source, output),
        shard_problems(demand, output, origins),
        expert_problems(demand, output),
        *(side_file_problems(source, output, demand.names, name) for name in source.side_files if name in files),
    ):
        for problem in found:
            problems.add(problem)
    right = _check_headers(source, output, expected, problems)
    if level is not Level.headers:
        right = _check_bytes(source, output, expected, right, level, problems, progress)
    return Report(problems.count == 0, level, len(right), problems.listed())


def _opened(
    source: Checkpoint, classified: ClassifiedTensors, folder: Path, plan: Placement | None
) -> tuple[Checkpoint, Demand, set[str], Any]:
    """The output, what was asked for, the output's files, and its config.json.

    Raises:
        EplbError: it cannot be looked at any further.
    """
    if not folder.is_dir():
        raise CheckpointError("no such folder", file=folder)
    # Before anything is opened: what is no file of the folder's own is not read.
    files = list_files(folder)
    document = read_config(folder)
    output = Checkpoint.open(folder)
    record = output.placement
    if record is None or record.get("layout") not in ("stock", "physical"):
        raise CheckpointError(f"has no {PLACEMENT_KEY}, so it is no converted checkpoint", file=folder / "config.json")
    inner = plan or Placement.load(folder)
    try:
        demand = Demand.of(source, classified, inner, physical=record["layout"] == "physical", given=plan is not None)
    except PlacementError as error:
        error.file = None if plan is not None else str(folder / PLAN_FILE)
        raise
    return output, demand, files, document


def _expected(demand: Demand) -> dict[str, _Expected]:
    """Every tensor that the output must hold, by name."""
    source, classified, rows, physical = demand.source, demand.classified, demand.rows, demand.physical
    num_experts = demand.plan.num_experts
    expected: dict[str, _Expected] = {}
    of_expert: dict[tuple[int, int], list[str]] = {}
    for name, role in classified.roles.items():
        entry = source.tensors[name]
        if role.kind is Kind.EXPERT:
            of_expert.setdefault((role.layer, role.expert), []).append(name)
        elif role.kind is Kind.FUSED:
            taken = tuple(rows[role.layer])
            expected[name] = _Expected(name, (len(taken), *entry.shape[1:]), rows=taken)
        elif role.kind is Kind.LOGICAL and not physical:
            expected[name] = _Expected(name, entry.shape, rows=tuple(rows[role.layer][:num_experts]))
        elif role.kind is Kind.IDS and not physical:
            place = {old: new for new, old in enumerate(rows[role.layer][:num_experts])}
            new_ids = tuple(place[old] for old in range(num_experts))
            expected[name] = _Expected(name, entry.shape, new_ids=new_ids)
        else:
            expected[name] = _Expected(name, entry.shape)
    for layer, row in rows.items():
        for slot, expert in enumerate(row if physical else row[:num_experts]):
            for name in of_expert.get((layer, expert), ()):
                # The id is the only component that changes: the slot's in place of the expert's.
                new_name = sys.intern(with_expert(name, classified.roles[name], slot))
                expected[new_name] = _Expected(name, source.tensors[name].shape)
    return expected


def _check_headers(
    source: Checkpoint, output: Checkpoint, expected: Mapping[str, _Expected], problems: _Problems
) -> list[str]:
    """Names, types and shapes; returns the tensors found right."""
    right = []
    for name, want in expected.items():
        found, origin = output.tensors.get(name), source.tensors[want.origin]
        if found is None:
            problems.add(f"{output.folder}: tensor {name} is missing")
        elif (found.dtype, found.shape) != (origin.dtype, want.shape):
            problems.add(
                f"{output.folder}, tensor {name}: is {found.dtype} {list(found.shape)}, must be "
                f"{origin.dtype} {list(want.shape)}"
            )
        else:
            right.append(name)
    for name in output.tensors:
        if name not in expected:
            problems.add(f"{output.folder / output.shard_of[name]}: tensor {name} must not be there")
    return right


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A byte range of an output file that must equal one of a source file; it begins at byte `begin` of the tensor's
    row, or of the tensor."""

    tensor: str
    row: int | None
    begin: int
    shard: str
    offset: int
    origin_shard: str
    origin_offset: int
    length: int


def expert_problems(demand: Demand, output: Checkpoint) -> Iterator[str]:
    """Every expert of a layer has the same parts, of equal number type and shape; activation scales may be missing.

    A source whose own check failed would pass the comparison with itself.
    """
    names = demand.names
    layers: dict[int, dict[int, dict[str, tuple[str, tuple[int, ...]]]]] = {}
    for name, entry in output.tensors.items():
        parsed = names.parse(name)
        if parsed is not None:
            parts = layers.setdefault(parsed.layer, {}).setdefault(parsed.id, {})
            parts[parsed.of("*")] = (entry.dtype, entry.shape)
    for layer, experts in sorted(layers.items()):
        forms: dict[str, Counter[tuple[str, tuple[int, ...]]]] = {}
        for parts in experts.values():
            for part, form in parts.items():
                forms.setdefault(part, Counter())[form] += 1
        for expert, parts in sorted(experts.items()):
            for part, counts in forms.items():
                usual = counts.most_common(1)[0][0]
                place = f"{output.folder}, layer {layer}, expert {expert}: "
                if part not in parts and not any(word in part for word in ("input", "act_", "acts_", "activation")):
                    yield f"{place}lacks {part}, which others of the layer have"
                elif parts.get(part, usual) != usual:
                    yield f"{place}{part} is {parts[part]}, that of others {usual}"


def _check_bytes(
    source: Checkpoint,
    output: Checkpoint,
    expected: Mapping[str, _Expected],
    names: Sequence[str],
    level: Level,
    problems: _Problems,
    progress: Callable[[int], None],
) -> list[str]:
    """Compare data in parallel, shard by shard in the order of the output's files; returns the tensors found right."""
    by_shard: dict[str, list[str]] = {}
    for name in names:
        by_shard.setdefault(output.shard_of[name], []).append(name)
    wrong: set[str] = set()
    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:
        for members in by_shard.values():
            members.sort(key=lambda name: output.tensors[name].begin)
            ranges = (item for name in members for item in _comparisons(source, output, name, expected[name], level))
            for found in pool.map(lambda job: _compare(source, output, job, progress), _cut(ranges)):
                for name, row, byte in found:
                    if name not in wrong:
                        place = f"tensor {name}" if row is None else f"tensor {name}, row {row}"
                        origin = expected[name].origin
                        problems.add(
                            f"{output.folder / output.shard_of[name]}, {place}: differs from the source's {origin} "
                            f"at byte {byte}"
                        )
                    wrong.add(name)
    for name in names:
        new_ids = expected[name].new_ids
        if new_ids is not None and not _same_ids(source, output, name, new_ids):
            problems.add(
                f"{output.folder / output.shard_of[name]}, tensor {name}: its expert ids do not follow the plan"
            )
            wrong.add(name)
    return [name for name in names if name not in wrong]


def _comparisons(
    source: Checkpoint, output: Checkpoint, name: str, want: _Expected, level: Level
) -> Iterator[_Comparison]:
    if want.new_ids is not None:
        return
    entry, origin = output.tensors[name], source.tensors[want.origin]
    shard, origin_shard = output.shard_of[name], source.shard_of[want.origin]
    begin, origin_begin = _start(output.shards[shard], entry), _start(source.shards[origin_shard], origin)
    if want.rows is None:
        ranges = [(None, 0, 0, entry.nbytes)]
    else:
        length = origin.nbytes // origin.shape[0]
        ranges = [(row, row * length, old * length, length) for row, old in enumerate(want.rows)]  # type: ignore[misc]
    for row, at, origin_at, length in ranges:
        if level is Level.sample and length > _SAMPLE:
            # The page is chosen by name, so that repeated runs read the same and neighbours differ.
            skip = zlib.crc32(f"{name},{row}".encode()) % (length - _SAMPLE + 1)
            chunks = [(skip, _SAMPLE)]
        else:
            chunks = [(skip, min(_CHUNK, length - skip)) for skip in range(0, length, _CHUNK)]
        for skip, count in chunks:
            yield _Comparison(
                name, row, skip, shard, begin + at + skip, origin_shard, origin_begin + origin_at + skip, count
            )


def _cut(comparisons: Iterable[_Comparison]) -> Iterator[list[_Comparison]]:
    """Pieces of work of about 64 MiB or a thousand ranges."""
    job: list[_Comparison] = []
    size = 0
    for item in comparisons:
        job.append(item)
        size += item.length
        if len(job) >= 1000 or size >= 4 * _CHUNK:
            yield job
            job, size = [], 0
    if job:
        yield job


def _compare(
    source: Checkpoint,
    output: Checkpoint,
    comparisons: Sequence[_Comparison],
    progress: Callable[[int], None],
) -> list[tuple[str, int | None, int]]:
    """(tensor, row, first differing byte within it) of the ranges that differ."""
    found = []
    files: dict[Path, int] = {}
    size = min(_BLOCK, max((item.length for item in comparisons), default=0))
    left, right = bytearray(size), bytearray(size)
    try:
        for item in comparisons:
            paths = output.folder / item.shard, source.folder / item.origin_shard
            descriptors = []
            for path in paths:
                if path not in files:
                    files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                descriptors.append(files[path])
            # What was not in the page cache before is read ahead here, and given back below.
            fresh = [
                (descriptor, offset)
                for descriptor, offset in zip(descriptors, (item.offset, item.origin_offset), strict=True)
                if item.length > _SAMPLE and not page_cache.is_resident(descriptor, offset)
            ]
            for descriptor, offset in fresh:
                page_cache.read_ahead(descriptor, offset, item.length)
            for at in range(0, item.length, _BLOCK):
                count = min(_BLOCK, item.length - at)
                one, two = memoryview(left)[:count], memoryview(right)[:count]
                for descriptor, path, view, offset in (
                    (descriptors[0], paths[0], one, item.offset + at),
                    (descriptors[1], paths[1], two, item.origin_offset + at),
                ):
                    _read(descriptor, path, view, offset)
                # Bytearrays compare by memcmp, memoryviews one item at a time.
                same = left == right if count == size else left[:count] == right[:count]
                if not same:
                    differing = np.flatnonzero(np.frombuffer(one, np.uint8) != np.frombuffer(two, np.uint8))
                    found.append((item.tensor, item.row, item.begin + at + int(differing[0])))
                    break
            for descriptor, offset in fresh:
                page_cache.drop(descriptor, offset, item.length)
            progress(item.length)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return found


def _read(descriptor: int, path: Path, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        try:
            count = os.preadv(descriptor, [view[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"cannot be read at byte {offset + done}: {error.strerror}", file=path) from error
        if count == 0:
            raise CheckpointError(f"ended at byte {offset + done} while it was being read", file=path)
        done += count


def _same_ids(source: Checkpoint, output: Checkpoint, name: str, new_ids: Sequence[int]) -> bool:
    kind = source.tensors[name].numpy_dtype
    before, after = (np.frombuffer(_tensor_bytes(checkpoint, name), kind) for checkpoint in (source, output))
    if before.size and not 0 <= int(before.min()) <= int(before.max()) < len(new_ids):
        return False
    return bool((np.array(new_ids)[before] == after).all())


def _tensor_bytes(checkpoint: Checkpoint, name: str) -> bytes:
    shard, entry = checkpoint.shard_of[name], checkpoint.tensors[name]
    with (checkpoint.folder / shard).open("rb") as stream:
        stream.seek(_start(checkpoint.shards[shard], entry))
        return stream.read(entry.nbytes)


def _start(header: SafetensorsHeader, entry: TensorEntry) -> int:
    return header.data_start + entry.begin
