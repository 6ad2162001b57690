"""Proof that a converted checkpoint holds the source's bytes where the plan says.

Independent of the writer: what must be in the output is derived here from the plan and the source's index, name by
name, and the output's own headers say where to look. Nothing that the writer planned or noted is used.
"""

from __future__ import annotations

import json
import os
import re
import sys
import zlib
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
from eplb_cli.checkpoint.safetensors_file import SafetensorsHeader, TensorEntry
from eplb_cli.checkpoint.source import INDEX_FILE, PROVENANCE_FILE, Checkpoint
from eplb_cli.errors import CheckpointError, EplbError, PlacementError
from eplb_cli.placement import PLAN_FILE, Placement

__all__ = ["Level", "Report", "verify"]

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
    if not folder.is_dir():
        problems.add(f"{folder}: no such folder")
        return Report(False, level, 0, problems.listed())
    try:
        output = Checkpoint.open(folder)
    except EplbError as error:
        problems.add(str(error))
        return Report(False, level, 0, problems.listed())
    record = output.placement
    if record is None or record.get("layout") not in ("stock", "physical"):
        problems.add(f"{folder / 'config.json'}: has no {PLACEMENT_KEY}, so it is no converted checkpoint")
        return Report(False, level, 0, problems.listed())
    physical = record["layout"] == "physical"
    inner = _plan_inside(folder, problems)
    if plan is None and inner is None:
        return Report(False, level, 0, problems.listed())
    try:
        rows = _rows(plan or inner, source)  # type: ignore[arg-type]
    except EplbError as error:
        problems.add(str(error))
        return Report(False, level, 0, problems.listed())
    slots = len(next(iter(rows.values())))
    _check_plans(folder, inner, rows, record, source, problems)
    if classified is None:
        classified = classify(source.config, source.tensors, stored_experts=source.config.shape.num_experts)
    expected = _expected(source, classified, rows, physical=physical)
    _check_config(source, output, rows, slots, record, physical=physical, problems=problems)
    _check_side_files(source, output, rows, physical=physical, problems=problems)
    right = _check_headers(source, output, expected, problems)
    if level is not Level.headers:
        right = _check_bytes(source, output, expected, right, level, problems, progress)
    return Report(problems.count == 0, level, len(right), problems.listed())


def _plan_inside(folder: Path, problems: _Problems) -> Placement | None:
    try:
        return Placement.load(folder)
    except PlacementError as error:
        problems.add(str(error))
        return None


def _rows(plan: Placement, source: Checkpoint) -> dict[int, list[int]]:
    """Expert of each slot by MoE layer; a layer that the plan lacks keeps the start layout."""
    num_experts = source.config.shape.num_experts
    if plan.num_experts != num_experts:
        raise PlacementError(f"the plan has {plan.num_experts} experts, the model {num_experts}")
    given = dict(zip(plan.layer_ids.tolist(), plan.physical_to_logical.tolist(), strict=True))
    layers = source.config.shape.moe_layer_ids or ()
    unknown = sorted(set(given) - set(layers))
    if unknown:
        raise PlacementError(f"the plan has the layers {unknown}, which are no MoE layers of the model")
    start = [slot if slot < num_experts else (slot - num_experts) % num_experts for slot in range(plan.num_slots)]
    return {layer: given.get(layer, start) for layer in layers}


def _check_plans(
    folder: Path,
    inner: Placement | None,
    rows: Mapping[int, Sequence[int]],
    record: Mapping[str, Any],
    source: Checkpoint,
    problems: _Problems,
) -> None:
    """The plan inside must be the one asked for, and the one that config.json names."""
    if inner is None:
        return
    inside = dict(zip(inner.layer_ids.tolist(), inner.physical_to_logical.tolist(), strict=True))
    differing = [layer for layer in rows if inside.get(layer) != rows[layer]]
    if differing or inside.keys() - rows.keys():
        where = f"layer {differing[0]}" if differing else f"layer {min(inside.keys() - rows.keys())}"
        problems.add(f"{folder / PLAN_FILE}, {where}: is not the plan asked for")
    if record.get("plan_sha256") != inner.map_sha256:
        problems.add(f"{folder / PLAN_FILE}: is not the plan that config.json names (its sha256 differs)")


def _expected(
    source: Checkpoint, classified: ClassifiedTensors, rows: Mapping[int, Sequence[int]], *, physical: bool
) -> dict[str, _Expected]:
    """Every tensor that the output must hold, by name."""
    num_experts = source.config.shape.num_experts
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
    """Names, types, shapes and the index; returns the tensors found right."""
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
    if output.index_name is not None:
        total = sum(entry.nbytes for entry in output.tensors.values())
        if output.index_metadata.get("total_size") != total:
            problems.add(
                f"{output.folder / output.index_name}: total_size is {output.index_metadata.get('total_size')}, "
                f"the tensors have {total} bytes"
            )
    return right


def _check_config(
    source: Checkpoint,
    output: Checkpoint,
    rows: Mapping[int, Sequence[int]],
    slots: int,
    record: Mapping[str, Any],
    *,
    physical: bool,
    problems: _Problems,
) -> None:
    """config.json must be the source's but for the record, the expert count, and the names of experts."""
    file, num_experts = output.folder / "config.json", source.config.shape.num_experts
    count = slots if physical else num_experts
    for key in output.config.count_keys:
        if output.config.values[key] != count:
            problems.add(f"{file}: the expert count {key} is {output.config.values[key]}, must be {count}")
    wanted = {"num_logical_experts": num_experts, "num_physical_experts": slots}
    for key, value in wanted.items():
        if record.get(key) != value:
            problems.add(f"{file}: {PLACEMENT_KEY}.{key} is {record.get(key)}, must be {value}")
    before, after = json.loads(json.dumps(source.config.document)), json.loads(json.dumps(output.config.document))
    for document, config in ((before, source.config), (after, output.config)):
        document.pop(PLACEMENT_KEY, None)
        section = document if config.section is None else document[config.section]
        for key in config.count_keys:
            section[key] = None
    if _flat(before, {}) != _flat(after, rows):
        changed = sorted({".".join(path) for path, _ in _flat(before, {}) ^ _flat(after, rows)})
        problems.add(f"{file}: differs from the source's in more than the experts: {', '.join(changed[:3])}")


def _check_side_files(
    source: Checkpoint,
    output: Checkpoint,
    rows: Mapping[int, Sequence[int]],
    *,
    physical: bool,
    problems: _Problems,
) -> None:
    present = set(output.side_files)
    for name in source.side_files:
        if name not in present:
            problems.add(f"{output.folder / name}: the side file is missing")
        elif not _same_side_file(source.folder / name, output.folder / name, rows):
            problems.add(f"{output.folder / name}: differs from the source's")
    for name in output.left_out:
        if name not in (PLAN_FILE, PROVENANCE_FILE):
            problems.add(f"{output.folder / name}: weights that must not be there")
    if PROVENANCE_FILE not in output.left_out:
        problems.add(f"{output.folder / PROVENANCE_FILE}: is missing")
    if len(output.shards) > 1 and output.index_name is None:
        problems.add(f"{output.folder / INDEX_FILE}: is missing")


def _same_side_file(before: Path, after: Path, rows: Mapping[int, Sequence[int]]) -> bool:
    """Equal, but for names of experts that follow the plan."""
    if before.name.endswith((".json", ".yaml", ".yml")):
        # A file that names experts must have changed, so equal bytes would be wrong there.
        texts = [path.read_bytes().decode(errors="surrogateescape") for path in (before, after)]
        if re.search(r"\bexperts\.(?:\w+\.)?\d", texts[0]):
            if not before.name.endswith(".json"):
                return texts[0] == _original(texts[1], rows)
            try:
                return _flat(json.loads(texts[0]), {}) == _flat(json.loads(texts[1]), rows)
            except json.JSONDecodeError:
                return False
    with before.open("rb") as one, after.open("rb") as two:
        while True:
            block = one.read(_BLOCK)
            if block != two.read(_BLOCK):
                return False
            if not block:
                return True


def _original(text: str, rows: Mapping[int, Sequence[int]]) -> str:
    """Names of the output's experts turned back into the source's."""

    def back(match: re.Match[str]) -> str:
        row = rows.get(int(match["layer"]))
        slot = int(match["slot"])
        return match[0] if row is None or slot >= len(row) else f"{match['before']}{row[slot]}"

    pattern = (
        r"(?P<before>(?<![\w.])(?!(?:[\w.]+\.)?mtp\.)(?:[\w.]+\.)?layers\.(?P<layer>\d+)\.(?:[a-z_]+\.)?experts\.(?:[a-z]\w*\.)?)"
        r"(?P<slot>\d+)(?![\w])"
    )
    return re.sub(pattern, back, text)


def _flat(
    value: Any, rows: Mapping[int, Sequence[int]], path: tuple[str, ...] = ()
) -> set[tuple[tuple[str, ...], str]]:
    """A JSON value as a set of (path, leaf), names of experts turned back; lists count by content where they hold
    names, since an expert of several slots is listed several times."""
    found: set[tuple[tuple[str, ...], str]] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            found |= _flat(item, rows, (*path, _original(key, rows)))
        return found or {(path, "{}")}
    if isinstance(value, list):
        named = any(isinstance(item, str) and "experts" in item for item in value)
        for index, item in enumerate(value):
            found |= _flat(item, rows, (*path, "[]" if named else f"[{index}]"))
        return found or {(path, "[]")}
    return {(path, _original(value, rows) if isinstance(value, str) else json.dumps(value))}


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
    entry = source.tensors[name]
    width = entry.nbytes // max(1, int(np.prod(entry.shape)))
    before, after = (np.frombuffer(_tensor_bytes(checkpoint, name), f"<i{width}") for checkpoint in (source, output))
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
