"""A folder that appears whole or not at all, and a run that can be killed and taken up again.

Everything is written below `OUT.partial`, which holds four things of ours and nothing else:

    checkpoint/   what is to be OUT; no name of a model's file can meet one of ours
    journal       how many bytes of each shard are on the device, a line each time after they were synced
    lock          held by the run, so that two never write to one place, and a killed run holds none
    replaced/     the older OUT, for the moment between two renames, where a file system cannot swap names

At the end one rename makes `checkpoint/` to OUT. Nothing that is in the way there is ever removed, but for the folder
that was there when the run was asked to replace it. What an earlier run left is taken as a stranger's: no link in it is
followed, and a journal line counts only when its checksum is right and the file bears it out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shlex
import shutil
import socket
import stat
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from eplb_cli.checkpoint import page_cache
from eplb_cli.checkpoint.copying import output_error
from eplb_cli.checkpoint.layout import OutputShard
from eplb_cli.checkpoint.page_cache import PAGE
from eplb_cli.checkpoint.source import PROVENANCE_FILE
from eplb_cli.errors import EplbError, OutputError
from eplb_cli.files import exchange, fsync_folder, rename_exclusive
from eplb_cli.untrusted import parse_json

__all__ = ["Claim", "Transaction", "blocks_left_before"]

FORMAT = "eplb-journal"
VERSION = 2

_CHECKPOINT, _JOURNAL, _LOCK, _REPLACED = "checkpoint", "journal", "lock", "replaced"
_MOST_JOURNAL_BYTES = 64 << 20

Tree = Mapping[str, tuple[int, ...]]
"""Path -> what tells that the file or folder there is still the same."""


class Claim:
    """What was found at OUT before the run, and so what the run may replace.

    Args:
        output: the folder to be.
        force: whether an older folder may be replaced.

    Raises:
        OutputError: something is there that must not be replaced, or OUT cannot be a folder's name.
    """

    def __init__(self, output: Path, *, force: bool) -> None:
        self.output = output
        self.tree: Tree | None = None
        if output.name in ("", ".."):
            raise OutputError("is no name for a new folder", file=output, hint="Name a folder that does not exist yet.")
        parent = output.absolute().parent
        if not parent.is_dir():
            hint = f"mkdir -p {shlex.quote(str(parent))}"
            raise OutputError("the output's folder does not exist", file=output, hint=hint)
        if output.is_symlink() or (os.path.lexists(output) and not output.is_dir()):
            raise OutputError("is in the way", file=output, rule="the output is a folder, and no link to one")
        if not output.exists():
            return
        if not force:
            raise OutputError("the output exists already", file=output, hint="Pass --force to replace it.")
        if os.path.ismount(output):
            raise OutputError("is a mount point, so nothing can take its place", file=output)
        if any(output.iterdir()) and not (output / PROVENANCE_FILE).is_file():
            raise OutputError(
                "was not written by eplb convert, so --force does not replace it",
                file=output,
                hint="Remove it by hand, or choose another output.",
            )
        self.tree = _tree(output)


class Transaction:
    """One run's hold on an output folder; a context manager.

    On leaving without `commit`, what is on the device stays in `OUT.partial` for the next run.

    Args:
        claim: the folder to be, and what may be replaced there.
        identity: everything that decides the output's bytes; a later run goes on only when it is the same.
        shards: the weight files, by name.
        resume: go on from what an earlier run left, or start afresh.
    """

    def __init__(
        self, claim: Claim, identity: Mapping[str, Any], shards: Mapping[str, OutputShard], *, resume: bool
    ) -> None:
        self.claim = claim
        self.output = claim.output
        self.work = _work_folder(claim.output)
        self.checkpoint = self.work / _CHECKPOINT
        self.identity = json.loads(json.dumps(identity))
        self.shards = shards
        self.resume = resume
        self.done: dict[str, int] = {}
        self._lock = -1
        self._journal = -1

    def __enter__(self) -> Transaction:
        try:
            self._open()
        except OSError as error:
            self._close()
            raise output_error(error, self.work) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def open_shard(self, name: str) -> int:
        """Open a shard for writing from byte `done[name]` on; without any, it is a new file.

        Raises:
            OutputError: the device refuses, or something took the file's place.
        """
        file = self.checkpoint / name
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            if self.done.get(name):
                return os.open(file, flags)
            descriptor = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o644)
            fsync_folder(self.checkpoint)
        except OSError as error:
            raise output_error(error, file) from error
        return descriptor

    def note(self, name: str, descriptor: int, count: int) -> None:
        """Put a shard's bytes on the device, then note that the first `count` are there.

        Raises:
            OutputError: the device refuses.
        """
        try:
            os.fsync(descriptor)
        except OSError as error:
            raise output_error(error, self.checkpoint / name) from error
        page_cache.drop(descriptor, 0, 0)
        self._append({"file": name, "bytes": count})
        self.done[name] = count

    def link(self, name: str, source: Path) -> bool:
        """Give a file a second name in the output; False where the file system cannot.

        Raises:
            OutputError: the device refuses.
        """
        target = self.checkpoint / name
        try:
            target.hardlink_to(source)
        except OSError as error:
            if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
                return False
            raise output_error(error, target) from error
        return True

    def write(self, name: str, blocks: Iterable[bytes]) -> None:
        """Write a file that is no shard, whole.

        Raises:
            OutputError: the device refuses.
        """
        file = self.checkpoint / name
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(file, flags, 0o644)
            try:
                for block in blocks:
                    _write_all(descriptor, block)
                os.fsync(descriptor)
            finally:
                # Network file systems and quotas report their refusal here.
                os.close(descriptor)
        except OSError as error:
            raise output_error(error, file) from error

    def commit(self) -> None:
        """Turn `OUT.partial/checkpoint` into OUT by one rename, which exchanges an older OUT; then remove that one.

        Raises:
            OutputError: something appeared at OUT, or changed there, since the claim; or the device refuses.
        """
        try:
            for parent, _, _ in os.walk(self.checkpoint, topdown=False):
                fsync_folder(Path(parent))
            older = self._take_place()
            fsync_folder(self.output.absolute().parent)
        except FileExistsError as error:
            raise self._kept("appeared while eplb was running; it was left alone") from error
        except OSError as error:
            raise output_error(error, self.output) from error
        if older is not None and _tree(older) != self.claim.tree:
            raise OutputError(
                "the older output changed in the last moment and was not removed",
                file=older,
                rule=f"the new one is whole, in {self.output}",
                hint=f"Look at the older one, then: rm -r {shlex.quote(str(self.work))}",
            )
        try:
            if older is not None:
                shutil.rmtree(older)
            # In this order: while anything of ours is left, the folder is known as ours.
            (self.work / _JOURNAL).unlink()
            (self.work / _LOCK).unlink()
            self.work.rmdir()
        except OSError as error:
            raise OutputError(
                f"cannot be removed: {error.strerror or error}",
                file=self.work,
                rule=f"the new output is whole, in {self.output}",
                hint=f"rm -r {shlex.quote(str(self.work))}",
            ) from error

    def _take_place(self) -> Path | None:
        """Rename; returns where an older output lies now."""
        if self.claim.tree is None or not os.path.lexists(self.output):
            rename_exclusive(self.checkpoint, self.output)
            return None
        if _tree(self.output) != self.claim.tree:
            raise self._kept("changed while eplb was running; it was left alone")
        if exchange(self.checkpoint, self.output):
            return self.checkpoint
        # A run that is killed between the two leaves no OUT; the next one puts the older back.
        rename_exclusive(self.output, self.work / _REPLACED)
        rename_exclusive(self.checkpoint, self.output)
        return self.work / _REPLACED

    def _kept(self, problem: str) -> OutputError:
        new = shlex.quote(str(self.checkpoint))
        return OutputError(
            problem,
            file=self.output,
            rule=f"the new checkpoint is whole, in {self.checkpoint}",
            hint="Look at both, then run the same command with --force to replace the one there, or move the new one: "
            f"mv -nT {new} OTHER",
        )

    def _open(self) -> None:
        with contextlib.suppress(FileExistsError):
            self.work.mkdir()
        self._require_ours()
        self._claim()
        header, notes, size = self._read_journal()
        self._put_back(header)
        if header is not None and self.resume and header.get("identity") != self.identity:
            raise OutputError(
                f"holds an unfinished run of {_difference(header, self.identity)}",
                file=self.work,
                rule="a run is taken up only with the same source, plan, layout and version",
                hint="Repeat that run's command, or pass --no-resume to start afresh.",
            )
        inode = self.checkpoint.lstat().st_ino if os.path.lexists(self.checkpoint) else None
        if header is None or not self.resume or inode is None or header.get("folder") != inode:
            # Of an older OUT that was exchanged before a kill, or of a run that is not wanted.
            if inode is not None:
                shutil.rmtree(self.checkpoint)
            self.checkpoint.mkdir()
            notes, size = {}, 0
        os.ftruncate(self._journal, size)
        if not size:
            record = {"format": FORMAT, "version": VERSION, "folder": self.checkpoint.stat().st_ino}
            self._append({**record, "identity": self.identity})
            fsync_folder(self.work)
            fsync_folder(self.work.absolute().parent)
        self._take_up(notes)

    def _require_ours(self) -> None:
        """Refuse a folder of the same name that holds anything but what a run of ours leaves."""
        if not stat.S_ISDIR(self.work.lstat().st_mode) or self.work.is_mount():
            raise OutputError("is in the way", file=self.work, rule="the run's own folder is to have this name")
        names = {entry.name for entry in self.work.iterdir()}
        ours = names <= {_CHECKPOINT, _JOURNAL, _LOCK, _REPLACED} and ({_JOURNAL, _LOCK} <= names or names <= {_LOCK})
        for name in names if ours else ():
            status = (self.work / name).lstat()
            single = stat.S_ISREG(status.st_mode) and status.st_nlink == 1
            ours = ours and (single if name in (_JOURNAL, _LOCK) else stat.S_ISDIR(status.st_mode))
        if not ours:
            raise OutputError(
                "exists and was not left by eplb", file=self.work, hint="Move it away, or choose another output."
            )

    def _claim(self) -> None:
        """Take the lock, and write who holds it."""
        lock = self.work / _LOCK
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        self._lock = os.open(lock, flags, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise OutputError(
                f"{holder} is writing to it", file=self.work, hint="Wait for it, or choose another output."
            ) from None
        # The other run may have finished between the opening and the locking; then the name is gone or another's.
        if not lock.exists() or lock.stat().st_ino != os.fstat(self._lock).st_ino:
            raise OutputError("another process has just finished there", file=self.work, hint="Look at the output.")
        self._journal = os.open(self.work / _JOURNAL, flags | os.O_APPEND, 0o644)
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"eplb convert, process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _put_back(self, header: Mapping[str, Any] | None) -> None:
        """Mend a run that was killed between the two renames of `_take_place`, or after them."""
        older = self.work / _REPLACED
        if not older.exists():
            return
        if not os.path.lexists(self.output):
            rename_exclusive(older, self.output)
            fsync_folder(self.output.absolute().parent)
            raise OutputError(
                "was put back: a run was stopped while replacing it",
                file=self.output,
                hint="Pass --force to replace it.",
            )
        if header is None or header.get("folder") != self.output.lstat().st_ino:
            raise OutputError(
                "is an older output that a run was stopped at replacing",
                file=older,
                hint=f"Move it away, for example: mv -nT {shlex.quote(str(older))} OTHER",
            )
        shutil.rmtree(older)

    def _read_journal(self) -> tuple[dict[str, Any] | None, dict[str, int], int]:
        """(first line, bytes by file, bytes of the lines that are whole); a damaged line ends the reading."""
        content = os.pread(self._journal, _MOST_JOURNAL_BYTES, 0)
        header: dict[str, Any] | None = None
        notes: dict[str, int] = {}
        size = 0
        for line in content.splitlines(keepends=True):
            record = _parsed(line)
            if record is None:
                break
            if header is None:
                if record.get("format") != FORMAT:
                    break
                header = record
            else:
                name, count = record.get("file"), record.get("bytes")
                if not isinstance(name, str) or type(count) is not int:
                    break
                notes[name] = count
            size += len(line)
        if header is None and self.resume and self.checkpoint.is_dir() and any(self.checkpoint.iterdir()):
            raise OutputError(
                "is damaged, so nothing beside it can be taken up",
                file=self.work / _JOURNAL,
                hint="Pass --no-resume to start afresh; what an earlier run wrote is removed then.",
            )
        return header, notes, size

    def _take_up(self, notes: Mapping[str, int]) -> None:
        """Keep the shards that journal and file agree on; everything else is removed, and written again."""
        for name, count in notes.items():
            shard = self.shards.get(name)
            if shard is not None and _bears_out(self.checkpoint / name, shard, count):
                self.done[name] = count
            elif count:
                # Or the next run would trust bytes that this one has not written yet.
                self._append({"file": name, "bytes": 0})
        for entry in list(self.checkpoint.iterdir()):
            if self.done.get(entry.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _append(self, record: Mapping[str, Any]) -> None:
        text = json.dumps(record).encode()
        try:
            _write_all(self._journal, b"%08x %s\n" % (zlib.crc32(text), text))
            os.fsync(self._journal)
        except OSError as error:
            raise output_error(error, self.work / _JOURNAL) from error

    def _close(self) -> None:
        for descriptor in (self._journal, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._journal = self._lock = -1


def blocks_left_before(output: Path) -> dict[str, int]:
    """Bytes that an unfinished run to `output` occupies, by file name."""
    try:
        entries = list((_work_folder(output) / _CHECKPOINT).iterdir())
    except OSError:
        return {}
    return {entry.name: entry.lstat().st_blocks * 512 for entry in entries if not entry.is_symlink()}


def _work_folder(output: Path) -> Path:
    return output.with_name(output.name + ".partial")


def _tree(folder: Path) -> Tree | None:
    """All files and folders below a folder, and the folder itself; None when there is no folder."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return None
    # Its own times change when it gets another name.
    marks: dict[str, tuple[int, ...]] = {"": (status.st_ino,)}
    for parent, folders, names in os.walk(folder):
        for name in folders + names:
            path = Path(parent, name)
            status = path.lstat()
            marks[str(path.relative_to(folder))] = (
                status.st_ino,
                *(() if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)),
                # A run with --link may give such a file one more name, which changes this time too.
                *(() if status.st_nlink > 1 else (status.st_ctime_ns,)),
            )
    return marks


def _bears_out(file: Path, shard: OutputShard, count: int) -> bool:
    """Whether a file can hold the first `count` bytes of a shard, and nobody else's."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(descriptor)
        return (
            stat.S_ISREG(status.st_mode)
            and status.st_nlink == 1
            and len(shard.header) <= count <= shard.size
            # Parts are taken up at a page boundary, where direct writes can go on.
            and (status.st_size == count if count == shard.size else status.st_size >= count and count % PAGE == 0)
            and os.pread(descriptor, len(shard.header), 0) == shard.header
        )
    finally:
        os.close(descriptor)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a journal line; None when it is damaged."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        record = parse_json(text, OutputError)
    except EplbError:
        return None
    return record if isinstance(record, dict) else None


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _difference(header: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """The first thing in which an earlier run differs from this one, in words."""
    earlier = header.get("identity")
    words = {
        "tool_version": "another eplb version",
        "layout": "another layout",
        "plan_sha256": "another plan",
        "source": "another or since changed source",
    }
    if not isinstance(earlier, dict):
        return "another kind"
    return next((text for key, text in words.items() if earlier.get(key) != identity.get(key)), "other options")
