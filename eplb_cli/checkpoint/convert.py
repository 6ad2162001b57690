"""Conversion from end to end: all checks, then copying, then proof, then one rename."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_cli import __version__
from eplb_cli.checkpoint.classify import ClassifiedTensors, classify
from eplb_cli.checkpoint.copier import Copier, can_clone, output_error, renumbered
from eplb_cli.checkpoint.expert_names import config_json, may_name_experts, renamed_side_file
from eplb_cli.checkpoint.rewrite import (
    CLONE_BLOCK,
    Layout,
    OutputShard,
    Rewrite,
    complete_placement,
    require_convertible,
    rewrite,
)
from eplb_cli.checkpoint.source import PROVENANCE_FILE, Checkpoint
from eplb_cli.checkpoint.transaction import JOURNAL, LOCK, Transaction
from eplb_cli.checkpoint.verify import Level, verify
from eplb_cli.errors import CheckpointError, OutputError
from eplb_cli.files import sha256_of_file
from eplb_cli.placement import PLAN_FILE, Placement

__all__ = ["Conversion", "ConvertResult", "Estimate", "prepare"]

_MARGIN_BYTES = 16 << 20
"""Room for directories, journals and the file system's own records."""
_MOST_WAITING = 2
"""Syncs that may lag behind the copying, each of 256 MiB or the rest of a shard."""


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
        output: the folder to write.
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
    output: Path
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
        done = self._done_before()
        for shard in self.rewrite.shards:
            shared = _shareable(shard) if self.clone else shard.size if self._links(shard) else 0
            cloned += shared
            left += max(0, shard.size - shared - done.get(shard.name, 0))
        side = sum(self.source.fingerprints[name].size for name in self.copied_side_files)
        small = sum(map(len, self.small_files.values())) + 200 * len(self.rewrite.origins)
        extra = 0 if self.rewrite.index_name is None else 100 * len(self.rewrite.origins)
        status = os.statvfs(self.output.absolute().parent)
        needed, free = left + side + small + extra, status.f_bavail * status.f_frsize
        return Estimate(
            files=self.num_files,
            bytes_total=sum(shard.size for shard in self.rewrite.shards) + side + small + extra,
            bytes_cloned=cloned,
            bytes_needed=needed,
            bytes_free=free,
            bytes_missing=max(0, needed + _MARGIN_BYTES - free),
            extra_bytes=self.extra_bytes,
        )

    @property
    def num_files(self) -> int:
        """Files in the output: shards, index, side files, config, plan, provenance."""
        return (
            len(self.rewrite.shards)
            + (self.rewrite.index_name is not None)
            + len(self.copied_side_files)
            + len(self.small_files)
            + 1
        )

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
        parent = self.output.absolute().parent
        if estimate.bytes_missing:
            raise OutputError(
                f"needs {estimate.bytes_needed:,} bytes, and {estimate.bytes_free:,} are free",
                file=parent,
                rule=f"{estimate.bytes_missing:,} are missing, {_MARGIN_BYTES:,} of them as a margin",
                hint="Make room or choose another file system; one that shares blocks (XFS, btrfs) with the source "
                "needs next to none.",
            )
        status = os.statvfs(parent)
        if status.f_files and status.f_favail < self.num_files + 3:
            raise OutputError(
                f"needs {self.num_files + 3} files, and the file system has {status.f_favail} inodes left", file=parent
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
            OutputError: the output cannot be written.
            CheckpointError: the source changed or cannot be read, or the result does not prove right.
        """
        begin = time.monotonic()
        with Transaction(self.output, self.identity(), resume=resume) as transaction:
            copier = Copier(self.source.folder, clone=self.clone, progress=progress)
            try:
                linked = self._write_shards(transaction, copier)
                self._write_other_files(transaction)
                self.source.require_unchanged()
                report = verify(
                    self.source,
                    transaction.partial,
                    self.given,
                    Level.sample,
                    classified=self.classified,
                    unfinished=(JOURNAL, LOCK),
                )
                if not report.ok:
                    transaction.discard()
                    raise CheckpointError(
                        f"the result does not prove right: {report.problems[0]}",
                        file=transaction.partial,
                        hint="The device or the memory is not to be trusted, or this is a defect of eplb; report it.",
                    )
            except CheckpointError:
                # Of a source that changed nothing can be kept; after a failed read the finished shards are still right.
                self._discard_if_changed(transaction)
                raise
            transaction.commit()
        traffic = copier.traffic
        return ConvertResult(
            layout=self.layout,
            files=self.num_files,
            bytes_read=traffic.read,
            bytes_written=traffic.written,
            bytes_cloned=traffic.cloned + linked,
            extra_bytes=self.extra_bytes,
            seconds=round(time.monotonic() - begin, 3),
            verified_tensors=report.tensors,
        )

    def _discard_if_changed(self, transaction: Transaction) -> None:
        try:
            self.source.require_unchanged()
        except CheckpointError:
            transaction.discard()
            raise

    def _write_shards(self, transaction: Transaction, copier: Copier) -> int:
        """Copy what is not finished yet; returns the bytes that were linked."""
        linked = 0
        waiting: list[Future[None]] = []
        # One thread syncs and renames, in order, while the next bytes are copied.
        with ThreadPoolExecutor(1) as background:
            for shard in self.rewrite.shards:
                for future in [future for future in waiting if future.done()]:
                    waiting.remove(future)
                    future.result()
                if _is_finished(transaction, shard):
                    copier.progress(shard.size)
                    continue
                if self._links(shard) and not copier.clone and self._link(transaction, shard):
                    linked += shard.size
                    copier.progress(shard.size)
                    continue
                start = self._start(transaction, shard)
                copier.progress(start)

                def step(descriptor: int, offset: int, name: str = shard.name) -> None:
                    # A descriptor of its own: if the copy fails, the file is closed before the sync's turn comes.
                    waiting.append(background.submit(transaction.sync_part, name, os.dup(descriptor), offset))
                    if len(waiting) > _MOST_WAITING:
                        waiting.pop(0).result()

                try:
                    descriptor = copier.write(shard, transaction.part(shard.name), start=start, step=step)
                except OutputError:
                    transaction.discard_part(shard.name)
                    raise
                waiting.append(background.submit(transaction.finish, shard.name, descriptor, shard.size))
                if len(waiting) > _MOST_WAITING:
                    waiting.pop(0).result()
            for future in waiting:
                future.result()
        return linked

    def _write_other_files(self, transaction: Transaction) -> None:
        for name in self.copied_side_files:
            transaction.copy_file(name, self.source.folder / name)
        for name, content in self.small_files.items():
            if name != "config.json":
                transaction.write_small(name, content)
        transaction.write_text(PROVENANCE_FILE, _json(self._provenance()))
        transaction.write_small("config.json", self.small_files["config.json"])
        # The index comes last: without it no loader takes the folder for complete.
        if self.rewrite.index_name is not None:
            transaction.write_text(self.rewrite.index_name, _json(self._index()))

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

    def _link(self, transaction: Transaction, shard: OutputShard) -> bool:
        """Give an unchanged shard a second name; False where the file system cannot."""
        source = (self.source.folder / shard.name).resolve()
        target = transaction.partial / shard.name
        try:
            target.unlink(missing_ok=True)
            target.hardlink_to(source)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                return False
            raise output_error(error, target) from error
        return True

    def _start(self, transaction: Transaction, shard: OutputShard) -> int:
        """Bytes of a shard's part that an earlier run vouches for."""
        offset = transaction.offsets.get(shard.name, 0)
        part = transaction.part(shard.name)
        try:
            whole = part.stat().st_size >= offset > len(shard.header)
            with part.open("rb") as stream:
                same = stream.read(len(shard.header)) == shard.header
        except OSError:
            return 0
        return offset if whole and same else 0

    def _done_before(self) -> dict[str, int]:
        """Bytes that an interrupted run has left in place, by shard."""
        partial = self.output.with_name(self.output.name + ".partial")
        done = {}
        for shard in self.rewrite.shards:
            for path in (partial / shard.name, partial / f"{shard.name}.part"):
                if path.is_file():
                    done[shard.name] = path.stat().st_blocks * 512
                    break
        return done


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
    _require_separate(source, output, force=force)
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
    return Conversion(
        source=source,
        classified=classified,
        placement=complete,
        given=placement,
        layout=layout,
        output=output,
        rewrite=files,
        small_files=small_files,
        identity_layers=missing,
        clone=can_clone(max(source.shards.values(), key=lambda h: h.file_size).file, output.absolute().parent),
        link=link,
        notes=tuple(notes),
        warnings=tuple(warnings),
    )


def _require_separate(source: Checkpoint, output: Path, *, force: bool) -> None:
    """Refuse outputs that would overwrite something, or lie in the source or around it."""
    parent = output.absolute().parent
    if not parent.is_dir():
        raise OutputError("the output's folder does not exist", file=output, hint=f"mkdir -p {parent}")
    here, there = source.folder.resolve(), parent.resolve() / output.name
    for path in (there, there.resolve()):
        if path == here or path.is_relative_to(here):
            raise OutputError("the output lies in the source", file=output, rule="the source is never touched")
        if here.is_relative_to(path):
            raise OutputError("the source lies in the output", file=output, rule="the source is never touched")
    if output.is_symlink() or (output.exists() and not output.is_dir()):
        raise OutputError("is in the way", file=output, rule="the output is a folder")
    if output.is_dir():
        if not force:
            raise OutputError("the output exists already", file=output, hint="Pass --force to replace it.")
        if any(output.iterdir()) and not (output / "config.json").exists():
            raise OutputError(
                "is not a checkpoint, so --force does not replace it", file=output, hint="Remove it by hand."
            )


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
    for layer, row in zip(placement.layer_ids, placement.physical_to_logical, strict=True):
        places: dict[int, list[int]] = {}
        for slot, expert in enumerate(row[:used].tolist()):
            places.setdefault(expert, []).append(slot)
        slots[int(layer)] = places
    stored = placement.num_slots if layout is Layout.physical or classified.fused_layers else num_experts
    files = {
        "config.json": config_json(source.config, placement, layout, stored_experts=stored, slots=slots),
        PLAN_FILE: placement.to_json(),
    }
    for name in source.side_files:
        if may_name_experts(name, source.fingerprints[name].size):
            try:
                before = (source.folder / name).read_bytes()
            except OSError as error:
                raise CheckpointError(f"cannot be read: {error.strerror}", file=source.folder / name) from error
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


def _is_finished(transaction: Transaction, shard: OutputShard) -> bool:
    """Whether an earlier run finished a shard, by the journal and by the file itself."""
    path = transaction.partial / shard.name
    if transaction.finished.get(shard.name) != shard.size or not path.is_file() or path.stat().st_size != shard.size:
        return False
    with path.open("rb") as stream:
        return stream.read(len(shard.header)) == shard.header


def _json(document: Any) -> Iterator[str]:
    """JSON text in small pieces: the list of tensors of a large model has tens of megabytes."""
    yield from json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(document)
    yield "\n"
