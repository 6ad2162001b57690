"""Checkpoint: a Hugging Face folder whose index, headers and config have been checked against each other.

Loaders forgive what is wrong here (stale copies in a second shard, holes, missing files), so nothing is read further
until all of it agrees.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint.config import ModelConfig, load_json
from eplb_cli.checkpoint.hub import locate
from eplb_cli.checkpoint.safetensors_file import read_header
from eplb_cli.errors import CheckpointError
from eplb_cli.placement import PLAN_FILE
from eplb_cli.tensors import SafetensorsHeader, TensorEntry
from eplb_cli.untrusted import open_file, shown

__all__ = ["INDEX_FILE", "PROVENANCE_FILE", "Checkpoint", "Fingerprint", "natural_key"]

INDEX_FILE = "model.safetensors.index.json"
PROVENANCE_FILE = "eplb_provenance.json"

_OTHER_WEIGHTS = (
    "consolidated*.safetensors",
    "consolidated*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "*.pth",
    "*.gguf",
    "tf_model*.h5",
    "flax_model*.msgpack",
)
"""The same weights in forms that are not converted; left out, since a loader that preferred them would see old labels
(engines switch to another loader when consolidated*.safetensors exist)."""

_MOST_INDEX_BYTES = 256 << 20
"""Largest index that is read; that of a model with 900 experts in each of 60 layers has some 60 MB."""

_LEFT_OUT_FOLDERS = (".cache", ".git", "original")


@dataclass(frozen=True)
class Fingerprint:
    """What tells that a file is still the one that was checked.

    The time of the last change of the inode cannot be set back, as that of the content can. But it also moves when the
    file gets or loses a name, so it counts only between two looks that saw as many names.

    Args:
        size: bytes.
        mtime_ns, ctime_ns: when the content and the inode were last changed.
        inode: the file's number.
        links: names that the file has.
    """

    size: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    links: int

    @classmethod
    def of(cls, file: Path) -> Fingerprint:
        """Fingerprint of a file, symbolic links followed."""
        status = file.stat()
        return cls(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns, status.st_nlink)

    def is_unchanged(self, later: Fingerprint) -> bool:
        """Whether a later look shows no change of the content."""
        same = (self.size, self.mtime_ns, self.inode) == (later.size, later.mtime_ns, later.inode)
        return same and (self.ctime_ns == later.ctime_ns or self.links != later.links)

    def identity(self, *, link: bool) -> list[int]:
        """What a later run must find again to go on; a run that links files changes the time of their inodes itself."""
        counts = not link and self.links == 1
        return [self.size, self.mtime_ns, self.inode, *([self.ctime_ns] if counts else [])]


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint.

    Args:
        folder: where it lies.
        config: its config.json.
        shards: parsed headers by file name, in natural order.
        tensors: entries by tensor name, of all shards.
        shard_of: file name by tensor name.
        index_name: name of the index file; None for a single file without one.
        index_metadata: the index's `metadata`.
        side_files: paths, relative to the folder, of the files that are not weights, config.json or index.
        left_out: paths of files that are not carried over: the same weights in other formats, caches, our own records.
        fingerprints: of every file that was read, by name.
    """

    folder: Path
    config: ModelConfig
    shards: Mapping[str, SafetensorsHeader]
    tensors: Mapping[str, TensorEntry]
    shard_of: Mapping[str, str]
    index_name: str | None
    index_metadata: Mapping[str, Any]
    side_files: tuple[str, ...]
    left_out: tuple[str, ...]
    fingerprints: Mapping[str, Fingerprint]

    @classmethod
    def open(cls, model: str | Path) -> Checkpoint:
        """Check every file of MODEL, a folder or a repository in the local cache.

        Raises:
            CheckpointError: a file is missing, truncated, a pointer or a web page; the index disagrees with the
                headers; a tensor is stored twice; the model is of no supported family.
        """
        folder = locate(model)
        config = ModelConfig.load(folder / "config.json")
        files = _all_files(folder)
        index_name = _index_name(folder, files)
        names, index = _shard_names(folder, files, index_name)
        shards = {name: read_header(folder / name) for name in sorted(names, key=natural_key)}
        shard_of = _assign(folder, shards)
        if index_name is not None:
            _compare_with_index(folder / index_name, index["weight_map"], shard_of)
        side_files = [
            name
            for name in files
            if name not in shards and name not in ("config.json", index_name, PLAN_FILE, PROVENANCE_FILE)
        ]
        left_out = [name for name in side_files if _is_left_out(name)]
        side_files = [name for name in side_files if name not in set(left_out)]
        for name in side_files:
            _require_own(folder, name)
        left_out += [name for name in (PLAN_FILE, PROVENANCE_FILE) if name in files]
        read = [*shards, "config.json", *side_files, *([index_name] if index_name else [])]
        metadata = index.get("metadata")
        return cls(
            folder=folder,
            config=config,
            shards=shards,
            tensors={name: shards[shard].tensors[name] for name, shard in shard_of.items()},
            shard_of=shard_of,
            index_name=index_name,
            index_metadata=metadata if isinstance(metadata, dict) else {},
            side_files=tuple(side_files),
            left_out=tuple(left_out),
            fingerprints={name: Fingerprint.of(folder / name) for name in read},
        )

    @property
    def placement(self) -> Mapping[str, Any] | None:
        """What config.json says of an earlier conversion; None for a checkpoint as it was published."""
        return self.config.placement

    @property
    def revision(self) -> str | None:
        """The repository's commit, when the folder is a snapshot in the hub's cache."""
        resolved = self.folder.absolute()
        return resolved.name if resolved.parent.name == "snapshots" else None

    def require_unchanged(self) -> None:
        """Check that no file has changed since it was opened.

        Raises:
            CheckpointError: one has.
        """
        for name, before in self.fingerprints.items():
            try:
                after = Fingerprint.of(self.folder / name)
            except OSError as error:
                raise CheckpointError(f"went away meanwhile: {error.strerror}", file=self.folder / name) from error
            if not before.is_unchanged(after):
                raise CheckpointError(
                    "changed while it was being read",
                    file=self.folder / name,
                    rule="the source must not change during a run",
                    hint="Wait until the download or the other writer has finished, then run again.",
                )


def natural_key(name: str) -> list[tuple[int, str]]:
    """Sort key that orders numbers by value: model-2 before model-10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _all_files(folder: Path) -> list[str]:
    """Relative paths of all files, links included, sorted; version control and caches are not entered.

    Raises:
        CheckpointError: a symbolic link leads nowhere, a folder cannot be read, or a name is no text.
    """
    found = []

    def refuse(error: OSError) -> None:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=error.filename) from error

    entered: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        # A linked folder may lead back to where the walk came from.
        entered.add(os.path.realpath(parent))
        folders[:] = sorted(
            name
            for name in folders
            if name not in (".cache", ".git") and os.path.realpath(Path(parent, name)) not in entered
        )
        for name in names:
            path = Path(parent, name)
            if not path.exists():
                raise CheckpointError(
                    f"is a link to {path.readlink()}, which does not exist",
                    file=path,
                    hint="The cache was pruned or the download was interrupted; fetch it again: hf download REPOSITORY",
                )
            name = path.relative_to(folder).as_posix()
            try:
                name.encode()
            except UnicodeEncodeError:
                raise CheckpointError(
                    f"holds a file called {shown(name)}", file=folder, rule="names must be UTF-8",
                    hint="Rename the file, or leave it out of the folder.",
                ) from None  # fmt: skip
            found.append(name)
    return sorted(found, key=natural_key)


def _require_own(folder: Path, name: str) -> None:
    """Check that a file to be carried over is a regular one of the model's own.

    A link in a downloaded folder may lead to any file of the user's; in the hub's cache it leads to the repository's
    blobs.

    Raises:
        CheckpointError: it is something else, or lies elsewhere.
    """
    open_file(folder / name, CheckpointError).close()
    home, target = folder.resolve(), (folder / name).resolve()
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(own) for own in homes):
        raise CheckpointError(
            f"is a link to {target}, outside the model's folder", file=folder / name,
            rule="a link out of the model could lead to any file; only what lies in it is carried over",
            hint="If the file belongs to the model, put a copy in the link's place.",
        )  # fmt: skip


def _index_name(folder: Path, files: Iterable[str]) -> str | None:
    indices = [
        name
        for name in files
        if name.endswith(".safetensors.index.json") and "/" not in name and not _is_left_out(name)
    ]
    if INDEX_FILE in indices:
        return INDEX_FILE
    if len(indices) > 1:
        raise CheckpointError(f"has {len(indices)} indices: {', '.join(indices)}", file=folder, rule="one is needed")
    return indices[0] if indices else None


def _shard_names(folder: Path, files: list[str], index_name: str | None) -> tuple[list[str], dict[str, Any]]:
    """Names of the shards, and the index's content ({} without one)."""
    present = [name for name in files if name.endswith(".safetensors") and "/" not in name and not _is_left_out(name)]
    if index_name is None:
        if not present:
            others = [name for name in files if any(fnmatch(name, pattern) for pattern in _OTHER_WEIGHTS)]
            raise CheckpointError(
                f"has no safetensors weights, only {others[0]}" if others else "has no safetensors weights",
                file=folder,
                rule="weights must be *.safetensors, as `save_pretrained` writes them",
            )
        if len(present) > 1:
            raise CheckpointError(
                f"has {len(present)} safetensors files but no index ({INDEX_FILE})",
                file=folder,
                hint="The index was not downloaded; fetch it from where the weights came.",
            )
        return present, {}
    file = folder / index_name
    index = load_json(file, most_bytes=_MOST_INDEX_BYTES)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError("has no weight_map", file=file)
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors") or "/" in name or name.startswith("."):
            raise CheckpointError(
                f"maps to {shown(name)}", file=file, tensor=tensor, rule="shards lie beside the index"
            )
    # The headers bring the same names; interned, they are held once.
    index["weight_map"] = weight_map = {sys.intern(tensor): sys.intern(name) for tensor, name in weight_map.items()}
    listed = sorted(set(weight_map.values()), key=natural_key)
    missing = [name for name in listed if name not in present]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{missing[0]}{more} is in the index but not on disk (interrupted download?)",
            file=folder,
            hint=f"Fetch it: {shlex.join(['hf', 'download', 'REPOSITORY', *missing[:4], '--local-dir', str(folder)])}",
        )
    stray = [name for name in present if name not in set(listed)]
    if stray:
        tensors = list(read_header(folder / stray[0]).tensors)
        raise CheckpointError(
            f"{stray[0]} is on disk but not in the index; it holds {_some(tensors)}",
            file=folder,
            rule="some loaders read every file, so none may be left over",
            hint="Remove the file if it is stale, or fetch the right index.",
        )
    return listed, index


def _assign(folder: Path, shards: Mapping[str, SafetensorsHeader]) -> dict[str, str]:
    shard_of: dict[str, str] = {}
    for shard, header in shards.items():
        for name in header.tensors:
            if name in shard_of:
                raise CheckpointError(
                    f"is in {shard_of[name]} and again in {shard}",
                    file=folder,
                    tensor=name,
                    rule="a tensor is stored once; loaders would take whichever comes last",
                )
            shard_of[name] = shard
    return shard_of


def _compare_with_index(file: Path, weight_map: Mapping[str, str], shard_of: Mapping[str, str]) -> None:
    unlisted = [name for name in shard_of if name not in weight_map]
    absent = [name for name in weight_map if name not in shard_of]
    moved = [name for name, shard in weight_map.items() if shard_of.get(name, shard) != shard]
    parts = []
    if absent:
        parts.append(f"in the index but in no file: {_some(absent)}")
    if unlisted:
        parts.append(f"on disk but not in the index: {_some(unlisted)}")
    if moved:
        parts.append(f"in another file than the index says: {_some(moved)}")
    if parts:
        raise CheckpointError(
            f"disagrees with the files; {'; '.join(parts)}",
            file=file,
            rule="index and headers must name the same tensors",
            hint="The index is stale or the download was interrupted; fetch both again.",
        )


def _some(names: list[str]) -> str:
    """The first three names, and how many there are."""
    return ", ".join(names[:3]) + (f", ... ({len(names)} tensors)" if len(names) > 3 else "")


def _is_left_out(name: str) -> bool:
    parts = name.split("/")
    return parts[0] in _LEFT_OUT_FOLDERS or any(fnmatch(parts[-1], pattern) for pattern in _OTHER_WEIGHTS)
