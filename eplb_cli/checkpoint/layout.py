"""From a checked checkpoint and a placement to the files of the new one: headers and byte ranges, nothing is read.

`stock`: experts are renumbered so that vLLM's own start layout is the plan. New expert p is the source's expert
`physical_to_logical[p]`; everything indexed by expert follows. Fused tensors also get the rows of the R copies, which
an unmodified engine takes from there.

`physical`: the experts of all P slots in plan order, each rank's in files of its own; the router stays logical. The
config's expert count becomes P, so that an engine which does not know the layout refuses the router's shape.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from eplb_cli.checkpoint.classify import ClassifiedTensors, Kind, Role, with_expert
from eplb_cli.checkpoint.safetensors_file import header_bytes
from eplb_cli.checkpoint.source import INDEX_FILE, Checkpoint
from eplb_cli.errors import PlacementError, spans
from eplb_cli.placement import Placement
from eplb_cli.tensors import TensorEntry

__all__ = [
    "CLONE_BLOCK",
    "Layout",
    "OutputShard",
    "OutputTensor",
    "Piece",
    "Rewrite",
    "complete_placement",
    "require_convertible",
    "rewrite",
]

CLONE_BLOCK = 4096
"""Block size to which file systems that share extents align them (XFS and btrfs defaults)."""

_PHYSICAL_SHARD_BYTES = 5_000_000_000
_MOST_RESIDUES = 16
_WORTH_A_FILE = 256 << 20
"""A group of tensors gets files of its own from this average size on, and at most so many groups do."""


class Layout(StrEnum):
    """How a converted checkpoint stores experts."""

    stock = "stock"
    physical = "physical"


@dataclass(frozen=True, slots=True)
class Piece:
    """A byte range of a source file; where `renumber` is set, its values are expert ids of `dtype` to be mapped."""

    shard: str
    offset: int
    length: int
    renumber: tuple[int, ...] | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor to be written: its name, type and shape, the source tensor of each piece's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    origin: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class OutputShard:
    """A file to be written: a header, then pieces one after the other.

    Args:
        name: file name.
        header: length field, JSON and padding.
        tensors: names of its tensors, in the order of their data.
        pieces: ranges to copy, neighbours merged.
        unchanged: the source shard of which the file is a copy byte for byte, when it is one.
    """

    name: str
    header: bytes
    tensors: tuple[str, ...]
    pieces: tuple[Piece, ...]
    unchanged: str | None = None

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(piece.length for piece in self.pieces)


@dataclass(frozen=True)
class Rewrite:
    """All weight files of a converted checkpoint.

    Args:
        layout: how it stores experts.
        shards: files to write, in order.
        index_name: name of the index file to write; None when one file without an index suffices.
        origins: source tensor by output tensor.
        data_bytes: bytes of all tensors, the index's total_size.
    """

    layout: Layout
    shards: tuple[OutputShard, ...]
    index_name: str | None
    origins: Mapping[str, str]
    data_bytes: int


def complete_placement(placement: Placement, layer_ids: Sequence[int]) -> tuple[Placement, tuple[int, ...]]:
    """The placement for all MoE layers of the model, and the layers that it lacked.

    A layer that the plan lacks keeps the engine's start layout: expert p in slot p, copies of the first R after them.

    Raises:
        PlacementError: the plan has a layer that is no MoE layer of the model.
    """
    known = set(layer_ids)
    unknown = [int(layer) for layer in placement.layer_ids if int(layer) not in known]
    if unknown:
        raise PlacementError(
            f"the plan has {'layer' if len(unknown) == 1 else 'layers'} {', '.join(map(str, unknown))}",
            rule=f"the model's MoE layers are {spans(layer_ids)}",
            hint="The plan was made for another model.",
        )
    missing = tuple(sorted(known - set(placement.layer_ids.tolist())))
    return placement.for_layers(layer_ids, missing="initial"), missing


def require_convertible(layout: Layout, placement: Placement, *, num_experts: int, num_expert_groups: int) -> None:
    """Check that a placement can be written in a layout.

    Raises:
        PlacementError: expert counts differ; `stock` and the plan is not of the stock form, or tears apart the groups
            of group-limited routing; `physical` without redundant experts.
    """
    if placement.num_experts != num_experts:
        raise PlacementError(
            f"the plan has {placement.num_experts} experts, the model {num_experts}",
            rule="they must be the same",
            hint="The plan was made for another model.",
        )
    if layout is Layout.physical:
        if placement.num_redundant_experts == 0:
            raise PlacementError(
                "the plan has no redundant experts, so the physical layout would keep the model's expert count",
                rule="an engine that does not know the layout would load it without an error and answer wrongly",
                hint="Use --layout stock, which places the same experts and runs everywhere.",
            )
        return
    if not placement.is_stock_form():
        raise PlacementError(
            f"the plan is not of the stock form: its {placement.num_redundant_experts} spare slots are not copies of "
            f"slots 0..{max(placement.num_redundant_experts - 1, 0)} in every layer",
            rule="an unmodified vLLM fills its spare slots that way",
            hint=f"Make one with: eplb plan LOADS --ep-size {placement.ep_size} --num-redundant-experts "
            f"{placement.num_redundant_experts} --strategy stock -o PLAN (or convert with --layout physical)",
        )
    if num_expert_groups > 1:
        _require_whole_groups(placement, num_expert_groups)


def _require_whole_groups(placement: Placement, groups: int) -> None:
    """Group-limited routing first picks groups of consecutive ids, so a group's experts must stay together."""
    size = placement.num_experts // groups
    for layer, row in placement.rows().items():
        source_groups = np.array(row[: placement.num_experts]).reshape(groups, size) // size
        torn = np.flatnonzero((source_groups != source_groups[:, :1]).any(axis=1))
        if torn.size:
            raise PlacementError(
                f"new experts {torn[0] * size}..{torn[0] * size + size - 1} come from several of the {groups} groups",
                layer=layer,
                rule="the model routes to groups of experts first, so whole groups must map to whole groups",
                hint="Use --layout physical, which keeps the router's numbering, or serve the unconverted model with "
                "`eplb serve MODEL --plan PLAN`.",
            )


def rewrite(
    source: Checkpoint,
    classified: ClassifiedTensors,
    placement: Placement,
    layout: Layout,
    *,
    max_shard_bytes: int | None = None,
) -> Rewrite:
    """Files of the converted checkpoint.

    Args:
        source: the checked source.
        classified: roles of its tensors.
        placement: a row for every MoE layer, already found convertible.
        layout: how to store the experts.
        max_shard_bytes: largest shard; None keeps the source's shards (stock) or means 5 GB (physical).
    """
    rows = placement.rows()
    groups: Iterable[tuple[str, Iterable[OutputTensor]]]
    if layout is Layout.physical:
        groups = _physical_groups(source, classified, rows, placement, max_shard_bytes or _PHYSICAL_SHARD_BYTES)
    else:

        def renumbered(shard: str) -> Iterator[OutputTensor]:
            for name in source.shards[shard].tensors:
                yield _stock_tensor(source, name, classified.roles[name], rows, placement.num_experts)

        if max_shard_bytes is None:
            groups = ((shard, renumbered(shard)) for shard in source.shards)
        else:
            everything = [tensor for shard in source.shards for tensor in renumbered(shard)]
            groups = _cut(everything, max_shard_bytes, "model-{:05d}-of-{:05d}.safetensors")
    shards, origins, data_bytes = [], {}, 0
    # One shard at a time: large models have a hundred thousand tensors.
    for file, group in groups:
        tensors = list(group)
        shards.append(_shard(source, file, tensors))
        origins.update({tensor.name: tensor.origin for tensor in tensors})
        data_bytes += sum(tensor.nbytes for tensor in tensors)
    # Without an index, loaders look for one file of the usual name.
    needs_index = source.index_name is not None or [shard.name for shard in shards] != list(source.shards)
    return Rewrite(
        layout=layout,
        shards=tuple(shards),
        index_name=(source.index_name or INDEX_FILE) if needs_index else None,
        origins=origins,
        data_bytes=data_bytes,
    )


def _stock_tensor(
    source: Checkpoint, name: str, role: Role, rows: Mapping[int, list[int]], num_experts: int
) -> OutputTensor:
    if role.kind is Kind.COPY:
        return _whole(source, name, name)
    row = rows[role.layer]
    if role.kind is Kind.EXPERT:
        return _whole(source, name, with_expert(name, role, row[:num_experts].index(role.expert)))
    if role.kind is Kind.FUSED:
        return _gathered(source, name, row)
    if role.kind is Kind.LOGICAL:
        return _gathered(source, name, row[:num_experts])
    entry = source.tensors[name]
    renumber = [0] * num_experts
    for new, old in enumerate(row[:num_experts]):
        renumber[old] = new
    (piece,) = _whole(source, name, name).pieces
    mapped = piece if renumber == list(range(num_experts)) else replace(
        piece, renumber=tuple(renumber), dtype=entry.dtype
    )  # fmt: skip
    return OutputTensor(name, entry.dtype, entry.shape, (mapped,), name)


def _physical_groups(
    source: Checkpoint,
    classified: ClassifiedTensors,
    rows: Mapping[int, list[int]],
    placement: Placement,
    max_shard_bytes: int,
) -> Iterator[tuple[str, list[OutputTensor]]]:
    """Shared files, then each rank's. A fused tensor holds all slots under one name, so it stays in a shared file."""
    by_expert: dict[tuple[int, int], list[str]] = {}
    shared = []
    for header in source.shards.values():
        for name in header.tensors:
            role = classified.roles[name]
            if role.kind is Kind.EXPERT:
                by_expert.setdefault((role.layer, role.expert), []).append(name)
            elif role.kind is Kind.FUSED:
                shared.append(_gathered(source, name, rows[role.layer]))
            else:
                shared.append(_whole(source, name, name))
    yield from _cut_by_residue(shared, max_shard_bytes, "model-shared-{:05d}-of-{:05d}.safetensors")
    per_expert_layers = [layer for layer in rows if (layer, 0) in by_expert]
    if not per_expert_layers:
        return
    ranks, slots = placement.ep_size, placement.slots_per_rank
    width = max(2, len(str(ranks - 1)))
    for rank in range(ranks):
        tensors = [
            _whole(source, name, with_expert(name, classified.roles[name], slot))
            for layer in per_expert_layers
            for slot in range(rank * slots, (rank + 1) * slots)
            for name in by_expert[layer, rows[layer][slot]]
        ]
        stem = f"model-ep{rank:0{width}d}-of-{ranks:0{width}d}"
        yield from _cut_by_residue(tensors, max_shard_bytes, stem + "-{:05d}-of-{:05d}.safetensors")


def _cut(tensors: Sequence[OutputTensor], limit: int, template: str) -> list[tuple[str, list[OutputTensor]]]:
    """Cut a list of tensors into files of at most `limit` bytes, in order; a larger tensor gets a file of its own."""
    return _named(_split(tensors, limit), template)


def _cut_by_residue(tensors: Sequence[OutputTensor], limit: int, template: str) -> list[tuple[str, list[OutputTensor]]]:
    """The same, with tensors from like places in a block together, so that a file system can share their blocks.

    Only one remainder modulo the block size fits a file. Where the source's files have few of them, each gets files of
    its own; tensors that would shift those after them come last.
    """
    classes: dict[int, list[OutputTensor]] = {}
    for tensor in tensors:
        shifts = any(piece.length % CLONE_BLOCK for piece in tensor.pieces) or not tensor.pieces
        classes.setdefault(-1 if shifts else tensor.pieces[0].offset % CLONE_BLOCK, []).append(tensor)
    shifting = classes.pop(-1, [])
    total = sum(tensor.nbytes for tensor in tensors)
    if len(classes) > 1 and (len(classes) > _MOST_RESIDUES or total < len(classes) * _WORTH_A_FILE):
        classes = {0: [tensor for group in classes.values() for tensor in group]}
    groups = list(classes.values()) or [[]]
    groups[-1] = groups[-1] + shifting
    return _named([part for group in groups for part in _split(group, limit)], template)


def _split(tensors: Sequence[OutputTensor], limit: int) -> list[list[OutputTensor]]:
    groups: list[list[OutputTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    return [group for group in groups if group]


def _named(groups: Sequence[list[OutputTensor]], template: str) -> list[tuple[str, list[OutputTensor]]]:
    return [(template.format(number, len(groups)), group) for number, group in enumerate(groups, 1)]


def _whole(source: Checkpoint, name: str, new_name: str) -> OutputTensor:
    entry, header = source.tensors[name], source.shards[source.shard_of[name]]
    piece = Piece(source.shard_of[name], header.data_start + entry.begin, entry.nbytes)
    return OutputTensor(sys.intern(new_name), entry.dtype, entry.shape, (piece,), name)


def _gathered(source: Checkpoint, name: str, row: Sequence[int]) -> OutputTensor:
    """A tensor whose row p along axis 0 is the source's row `row[p]`."""
    entry = source.tensors[name]
    (whole,) = _whole(source, name, name).pieces
    length = entry.nbytes // entry.shape[0]
    pieces = _merged(Piece(whole.shard, whole.offset + expert * length, length) for expert in row)
    return OutputTensor(name, entry.dtype, (len(row), *entry.shape[1:]), tuple(pieces), name)


def _merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Join pieces that continue each other."""
    current: Piece | None = None
    for piece in pieces:
        if piece.length == 0:
            continue
        if (
            current is not None
            and current.renumber is None
            and piece.renumber is None
            and piece.shard == current.shard
            and piece.offset == current.offset + current.length
        ):
            current = replace(current, length=current.length + piece.length)
            continue
        if current is not None:
            yield current
        current = piece
    if current is not None:
        yield current


def _shard(source: Checkpoint, name: str, tensors: Sequence[OutputTensor]) -> OutputShard:
    entries, offset = [], 0
    residues: Counter[int] = Counter()
    for tensor in tensors:
        begin = offset
        for piece in tensor.pieces:
            residues[(piece.offset - offset) % CLONE_BLOCK] += piece.length
            offset += piece.length
        entries.append(TensorEntry(tensor.name, tensor.dtype, tensor.shape, begin, offset))
    pieces = tuple(_merged(piece for tensor in tensors for piece in tensor.pieces))
    origin = source.shards.get(name)
    if origin is not None and tuple(entries) == tuple(origin.tensors.values()):
        whole = Piece(name, origin.data_start, origin.file_size - origin.data_start)
        if pieces in ((whole,), ()):
            # Nothing changed, so neither does the header: the file is the source's, byte for byte.
            with (source.folder / name).open("rb") as stream:
                header = stream.read(origin.data_start)
            return OutputShard(name, header, tuple(origin.tensors), pieces, unchanged=name)
    metadata = source.shards[tensors[0].pieces[0].shard].metadata if tensors and tensors[0].pieces else {}
    # The data starts at the remainder that most bytes have in the source, so that their blocks can be shared.
    residue = min(residues, key=lambda key: (-residues[key], key)) if residues else 0
    modulus = CLONE_BLOCK if offset >= CLONE_BLOCK else 8
    header = header_bytes(entries, metadata or {"format": "pt"}, pad_to=(residue % modulus, modulus))
    return OutputShard(name, header, tuple(tensor.name for tensor in tensors), pieces)


def shard_limit(text: str) -> int:
    """Bytes of a size like `5GB`, `500MB`, `2GiB` or a plain number.

    Raises:
        ValueError: it is no such size, or below one byte.
    """
    units = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "": 1}
    digits = text.strip().upper()
    unit = digits.lstrip("0123456789.")
    number = float(digits[: len(digits) - len(unit)])
    size = math.floor(number * units[unit.strip()])
    if size < 1:
        raise ValueError(text)
    return size
