"""Conversion from end to end: all checks, then copying, then proof, then one rename."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from eplb_cli import __version__
from eplb_cli.checkpoint.classify import ClassifiedTensors, classify
from eplb_cli.checkpoint.copying import Copier, can_clone, output_error, renumbered
from eplb_cli.checkpoint.expert_names import MOST_SEARCHED_BYTES, config_json, may_name_experts, renamed_side_file
from eplb_cli.checkpoint.layout import (
    CLONE_BLOCK,
    Layout,
    OutputShard,
    Rewrite,
    complete_placement,
    require_convertible,
    rewrite,
)
from eplb_cli.checkpoint.source import PROVENANCE_FILE, Checkpoint
from eplb_cli.checkpoint.transaction import Claim, Transaction, blocks_left_before
from eplb_cli.checkpoint.verify import Level, verify
from eplb_cli.errors import CheckpointError, OutputError
from eplb_cli.files import sha256_of_file
from eplb_cli.placement import PLAN_FILE, Placement
from eplb_cli.untrusted import open_file, read_file

__all__ = ["Conversion", "ConvertResult", "Estimate", "prepare"]

_MARGIN_BYTES = 16 << 20
"""Room for directories, journals and the file system's own records."""


@dataclass(frozen=True)
class Estimate:
    """What a conversion will do.

    Args:
        files: files in the output.
        bytes_total: bytes of all of them.
        bytes_cloned: bytes that can be shared with the source on this file system (or linked); an upper estimate.
        bytes_needed: bytes of new blocks, what is left to write of an interrupted run.
        bytes_free: bytes that the target has.
        bytes_missing: bytes that it lacks, a margin for the file system's own records included; 0 when it has enough.
        extra_bytes: growth of the weights by copies of experts.
    """

    files: int
    bytes_total: int
    bytes_cloned: int
    bytes_needed: int
    bytes_free: int
    bytes_missing: int
    extra_bytes: int


@dataclass(frozen=True)
class ConvertResult:
    """What a conversion did; bytes of weights, except `files`."""

    layout: Layout
    files: int
    bytes_read: int
    bytes_written: int
    bytes_cloned: int
    extra_bytes: int
    seconds: float
    verified_tensors: int


@dataclass(frozen=True)
class Conversion:
    """A checked conversion, ready to run.

    Args:
        source, classified: the checkpoint and the roles of its tensors.
        placement: a row for every MoE layer.
        given: the plan as it was given.
        layout: how to store experts.
        claim: the folder to write, and what may be replaced there.
        rewrite: the weight files.
        small_files: content of the files that are written from memory, by name.
        identity_layers: MoE layers that the plan lacked.
        clone: whether the output's file system can share blocks with the source's.
        link: reuse unchanged shards by hard link.
        notes, warnings: remarks for the user.
    """

    source: Checkpoint
    classified: ClassifiedTensors
    placement: Placement
    given: Placement
    layout: Layout
    claim: Claim
    rewrite: Rewrite
    small_files: Mapping[str, bytes]
    identity_layers: tuple[int, ...]
    clone: bool
    link: bool
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def copied_side_files(self) -> list[str]:
        """Side files that are copied as they are."""
        return [name for name in self.source.side_files if name not in self.small_files]

    def estimate(self) -> Estimate:
        """Bytes and files, and the space there is."""
        cloned, left = 0, 0
        done = blocks_left_before(self.claim.output)
        for shard in self.rewrite.shards:
            shared = _shareable(shard) if self.clone else shard.size if self._links(shard) else 0
            cloned += shared
            left += max(0, shard.size - shared - done.get(shard.name, 0))
        side = sum(self.source.fingerprints[name].size for name in self.copied_side_files)
        small = sum(map(len, self.small_files.values())) + 200 * len(self.rewrite.origins)
        extra = 0 if self.rewrite.index_name is None else 100 * len(self.rewrite.origins)
        status = os.statvfs(self.claim.output.absolute().parent)
        needed, free = left + side + small + extra, status.f_bavail * status.f_frsize
        return Estimate(
            files=len(self.names),
            bytes_total=sum(shard.size for shard in self.rewrite.shards) + side + small + extra,
            bytes_cloned=cloned,
            bytes_needed=needed,
            bytes_free=free,
            bytes_missing=max(0, needed + _MARGIN_BYTES - free),
            extra_bytes=self.extra_bytes,
        )

    @property
    def names(self) -> list[str]:
        """Files of the output: shards, index, side files, config, plan, provenance."""
        index = [] if self.rewrite.index_name is None else [self.rewrite.index_name]
        shards = [shard.name for shard in self.rewrite.shards]
        return [*shards, *index, *self.copied_side_files, *self.small_files, PROVENANCE_FILE]

    @property
    def extra_bytes(self) -> int:
        """Growth of the weights by copies of experts."""
        return self.rewrite.data_bytes - sum(entry.nbytes for entry in self.source.tensors.values())

    def require_space(self) -> None:
        """Check bytes and inodes of the target.

        Raises:
            OutputError: there are too few.
        """
        estimate = self.estimate()
        parent = self.claim.output.absolute().parent
        if estimate.bytes_missing:
            raise OutputError(
                f"needs {estimate.bytes_needed:,} bytes, and {estimate.bytes_free:,} are free",
                file=parent,
                rule=f"{estimate.bytes_missing:,} are missing, {_MARGIN_BYTES:,} of them as a margin",
                hint="Make room or choose another file system; one that shares blocks (XFS, btrfs) with the source "
                "needs next to none.",
            )
        status = os.statvfs(parent)
        if status.f_files and status.f_favail < len(self.names) + 3:
            raise OutputError(
                f"needs {len(self.names) + 3} files, and the file system has {status.f_favail} inodes left", file=parent
            )

    def identity(self) -> dict[str, Any]:
        """Everything that decides the output's bytes; the journal's key."""
        digest = hashlib.sha256()
        for shard in self.rewrite.shards:
            digest.update(shard.name.encode())
            digest.update(shard.header)
            digest.update(repr([(p.shard, p.offset, p.length, p.renumber) for p in shard.pieces]).encode())
        return {
            "tool_version": __version__,
            "layout": self.layout.value,
            "plan_sha256": self.placement.map_sha256,
            "source": {name: mark.identity(link=self.link) for name, mark in self.source.fingerprints.items()},
            "shards_sha256": digest.hexdigest(),
            "small_files": {name: hashlib.sha256(data).hexdigest() for name, data in self.small_files.items()},
            "link": self.link,
        }

    def run(self, *, resume: bool = True, progress: Callable[[int], None] = lambda count: None) -> ConvertResult:
        """Write the output, prove it, and give it its name.

        Args:
            resume: go on from what an interrupted run left.
            progress: called with the number of bytes of weights done since the last call.

        Raises:
            OutputError: the output cannot be written, or something else has taken its place meanwhile.
            CheckpointError: the source changed or cannot be read, or the result does not prove right.
        """
        begin = time.monotonic()
        shards = {shard.name: shard for shard in self.rewrite.shards}
        with Transaction(self.claim, self.identity(), shards, resume=resume) as transaction:
            copier = Copier(self.source.folder, clone=self.clone, progress=progress)
            linked = sum(self._write_shard(transaction, copier, shard) for shard in self.rewrite.shards)
            self._write_other_files(transaction)
            self.source.require_unchanged()
            report = verify(self.source, transaction.checkpoint, self.given, Level.sample, classified=self.classified)
            if not report.ok:
                raise CheckpointError(
                    f"the result does not prove right: {report.problems[0]}",
                    file=transaction.checkpoint,
                    hint="Nothing was removed. The device or the memory is not to be trusted, or this is a defect of "
                    "eplb: report it. --no-resume writes everything anew.",
                )
            transaction.commit()
        return ConvertResult(
            layout=self.layout,
            files=len(self.names),
            bytes_read=copier.traffic.read,
            bytes_written=copier.traffic.written,
            bytes_cloned=copier.traffic.cloned + linked,
            extra_bytes=self.extra_bytes,
            seconds=round(time.monotonic() - begin, 3),
            verified_tensors=report.tensors,
        )

    def _write_shard(self, transaction: Transaction, copier: Copier, shard: OutputShard) -> int:
        """Copy what is not on the device yet; returns the bytes that were linked."""
        start = transaction.done.get(shard.name, 0)
        copier.progress(start)
        if start == shard.size:
            return 0
        links = self._links(shard) and not copier.clone and not start
        if links and transaction.link(shard.name, (self.source.folder / shard.name).resolve()):
            copier.progress(shard.size)
            return shard.size
        descriptor = transaction.open_shard(shard.name)
        try:
            try:
                copier.write(shard, descriptor, start=start, step=partial(transaction.note, shard.name, descriptor))
                transaction.note(shard.name, descriptor, shard.size)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise output_error(error, transaction.checkpoint / shard.name) from error
        return 0

    def _write_other_files(self, transaction: Transaction) -> None:
        for name in self.copied_side_files:
            transaction.write(name, _blocks(self.source.folder / name))
        for name, content in self.small_files.items():
            if name != "config.json":
                transaction.write(name, [content])
        transaction.write(PROVENANCE_FILE, _json(self._provenance()))
        transaction.write("config.json", [self.small_files["config.json"]])
        # The index comes last: without it no loader takes the folder for complete.
        if self.rewrite.index_name is not None:
            transaction.write(self.rewrite.index_name, _json(self._index()))

    def _index(self) -> dict[str, Any]:
        metadata = {**self.source.index_metadata, "total_size": self.rewrite.data_bytes}
        if self.extra_bytes:
            # Counts that the copies make untrue.
            metadata.pop("total_parameters", None)
        weight_map = {name: shard.name for shard in self.rewrite.shards for name in shard.tensors}
        return {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}

    def _provenance(self) -> dict[str, Any]:
        source = self.source
        return {
            "format": "eplb-provenance",
            "version": 1,
            "tool_version": __version__,
            "layout": self.layout.value,
            "source": {
                "folder": source.folder.name,
                "revision": source.revision,
                "config_sha256": sha256_of_file(source.folder / "config.json"),
                "earlier_placement": source.placement,
                "shards": {
                    name: {"size": header.file_size, "header_sha256": header.sha256}
                    for name, header in source.shards.items()
                },
            },
            "plan_sha256": self.placement.map_sha256,
            "plan_file_sha256": hashlib.sha256(self.small_files[PLAN_FILE]).hexdigest(),
            "identity_layers": list(self.identity_layers),
            "unchanged_drafts": list(self.classified.drafts),
            "side_files": list(source.side_files),
            "left_out": list(source.left_out),
            "tensors": {
                name: origin if origin != name else None for name, origin in sorted(self.rewrite.origins.items())
            },
        }

    def _links(self, shard: OutputShard) -> bool:
        return self.link and shard.unchanged is not None


def prepare(
    model: str,
    plan: Path,
    output: Path,
    layout: Layout,
    *,
    force: bool = False,
    link: bool = False,
    max_shard_bytes: int | None = None,
) -> Conversion:
    """Check everything that can be checked before the first byte is written.

    Raises:
        CheckpointError, PlacementError, OutputError: what is wrong, and where.
    """
    placement = Placement.load(plan)
    source = Checkpoint.open(model)
    _require_separate(source, output)
    claim = Claim(output, force=force)
    warnings = list(_require_ordinary(source))
    shape = source.config.shape
    layer_ids = shape.moe_layer_ids or ()
    if placement.num_experts == shape.num_experts:
        complete, missing = complete_placement(placement, layer_ids)
    else:
        complete, missing = placement, ()
    require_convertible(
        layout, complete, num_experts=shape.num_experts, num_expert_groups=source.config.num_expert_groups
    )
    placement.require_distinct_copies(plan)
    if missing:
        warnings.append(
            f"the plan lacks the MoE layers {', '.join(map(str, missing))}; they keep the engine's start layout"
        )
    architecture = placement.provenance.architecture
    if architecture is not None and architecture != shape.architecture:
        warnings.append(f"the plan was made for {architecture}, the model is {shape.architecture}")
    classified = classify(source.config, source.tensors, stored_experts=shape.num_experts)
    warnings += classified.warnings
    files = rewrite(source, classified, complete, layout, max_shard_bytes=max_shard_bytes)
    for shard in files.shards:
        for piece in shard.pieces:
            if piece.renumber is not None:
                renumbered(source.folder, piece)
    small_files = _small_files(source, classified, complete, layout)
    notes = []
    if classified.drafts:
        notes.append(f"draft heads keep their own experts, unchanged: {', '.join(classified.drafts)}")
    if layout is Layout.stock and classified.fused_layers and complete.num_redundant_experts:
        notes.append(
            f"fused experts store the {complete.num_redundant_experts} copies too: start the engine with exactly that "
            "many redundant experts"
        )
    if source.left_out:
        notes.append(f"left out: {', '.join(source.left_out)}")
    conversion = Conversion(
        source=source,
        classified=classified,
        placement=complete,
        given=placement,
        layout=layout,
        claim=claim,
        rewrite=files,
        small_files=small_files,
        identity_layers=missing,
        clone=can_clone(_largest_shard(source), output.absolute().parent),
        link=link,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )
    _require_distinct(source, conversion.names)
    return conversion


def _largest_shard(source: Checkpoint) -> Path:
    return source.folder / max(source.shards, key=lambda name: source.shards[name].file_size)


def _require_distinct(source: Checkpoint, names: Sequence[str]) -> None:
    """Refuse side files whose path is also that of a file to be written, or leads through one."""
    taken: set[str] = set()
    for name in sorted(names, key=len):
        clash = next((str(path) for path in (Path(name), *Path(name).parents) if str(path) in taken), None)
        if clash is not None:
            raise CheckpointError(
                f"cannot be carried over: the output has a file {clash}",
                file=source.folder / name,
                hint="Rename or remove it.",
            )
        taken.add(name)


def _require_separate(source: Checkpoint, output: Path) -> None:
    """Refuse outputs that would lie in the source or around it; so does the folder that the run works in."""
    here, there = source.folder.resolve(), output.absolute().parent.resolve() / output.name
    work = there.with_name(there.name + ".partial")
    for path in (there, there.resolve(), work, work.resolve()):
        if path.is_relative_to(here):
            raise OutputError("the output lies in the source", file=output, rule="the source is never touched")
        if here.is_relative_to(path):
            raise OutputError("the source lies in the output", file=output, rule="the source is never touched")


def _require_ordinary(source: Checkpoint) -> list[str]:
    """Warnings about a source that was converted before; some such sources are refused."""
    placement = source.placement
    if placement is None:
        return []
    file = source.config.file
    stored = placement.get("num_stored_experts")
    if placement.get("layout") != Layout.stock.value or stored != source.config.shape.num_experts:
        raise CheckpointError(
            f"is a converted checkpoint already ({placement.get('layout')} layout, {stored} experts stored)",
            file=file,
            rule="its experts are no longer one of each",
            hint="Convert the original model.",
        )
    return ["the model was relabelled before; the plan's expert ids are taken as this checkpoint's, not the original's"]


def _small_files(
    source: Checkpoint, classified: ClassifiedTensors, placement: Placement, layout: Layout
) -> dict[str, bytes]:
    """Files that are written from memory: config.json, the plan, and side files that name experts."""
    num_experts = placement.num_experts
    used = num_experts if layout is Layout.stock else placement.num_slots
    slots: dict[int, dict[int, list[int]]] = {}
    for layer, row in placement.rows().items():
        places = slots.setdefault(layer, {})
        for slot, expert in enumerate(row[:used]):
            places.setdefault(expert, []).append(slot)
    stored = placement.num_slots if layout is Layout.physical or classified.fused_layers else num_experts
    files = {
        "config.json": config_json(source.config, placement, layout, stored_experts=stored, slots=slots),
        PLAN_FILE: placement.to_json(),
    }
    for name in source.side_files:
        if may_name_experts(name, source.fingerprints[name].size):
            before = read_file(source.folder / name, CheckpointError, most_bytes=MOST_SEARCHED_BYTES)
            content = renamed_side_file(source.config, name, before, slots)
            if content is not None:
                files[name] = content
    return files


def _shareable(shard: OutputShard) -> int:
    """Bytes of a shard that lie in whole blocks at the same remainder as in the source."""
    offset, shared = len(shard.header), 0
    for piece in shard.pieces:
        if piece.renumber is None and (piece.offset - offset) % CLONE_BLOCK == 0:
            shared += max(0, piece.length - -piece.offset % CLONE_BLOCK) // CLONE_BLOCK * CLONE_BLOCK
        offset += piece.length
    return shared


def _blocks(file: Path) -> Iterator[bytes]:
    with open_file(file, CheckpointError) as stream:
        try:
            while block := stream.read(1 << 20):
                yield block
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error


def _json(document: Any) -> Iterator[bytes]:
    """JSON text in small pieces: the list of tensors of a large model has tens of megabytes."""
    pieces = json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(document)
    while batch := "".join(islice(pieces, 10_000)):
        yield batch.encode()
    yield b"\n"
