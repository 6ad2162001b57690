"""A folder that appears whole or not at all, and a run that can be killed and taken up again.

Everything is written below `OUT.partial/`. A file gets its final name there only when it is complete and synced, and a
journal line follows. At the end one rename makes `OUT.partial` to `OUT`. The lock is held on a file inside, so that two
runs never write to one place, and a killed run holds none.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from eplb_cli.checkpoint.copier import output_error
from eplb_cli.checkpoint.source import PROVENANCE_FILE
from eplb_cli.errors import CheckpointError, OutputError
from eplb_cli.files import fsync_folder

__all__ = ["Transaction"]

JOURNAL = "eplb_journal.jsonl"
LOCK = "eplb_lock"
FORMAT = "eplb-journal"
VERSION = 1

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class Transaction:
    """One run's claim on an output folder; a context manager.

    On leaving without `commit`, finished files stay in `OUT.partial` for the next run, unless `discard` was called.

    Args:
        output: the folder to be.
        identity: everything that decides the output's bytes; a later run goes on only when it is the same.
        resume: go on from what an earlier run left, or start afresh.
    """

    def __init__(self, output: Path, identity: Mapping[str, Any], *, resume: bool) -> None:
        self.output = output
        self.partial = output.with_name(output.name + ".partial")
        self.identity = json.loads(json.dumps(identity))
        self.resume = resume
        self.finished: dict[str, int] = {}
        self.offsets: dict[str, int] = {}
        self._lock = -1
        self._journal = -1

    def __enter__(self) -> Transaction:
        try:
            self._open()
        except OSError as error:
            self._close()
            raise output_error(error, self.partial) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def part(self, name: str) -> Path:
        """Where a file is written before it is complete."""
        return self.partial / f"{name}.part"

    def sync_part(self, name: str, descriptor: int, offset: int) -> None:
        """Sync a part, then note that its first `offset` bytes are on the device. Closes the descriptor.

        Raises:
            OutputError: the device refuses.
        """
        try:
            try:
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, 0, offset, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise output_error(error, self.part(name)) from error
        self._append({"part": name, "offset": offset})

    def finish(self, name: str, descriptor: int, size: int) -> None:
        """Sync a part, give it its final name, and note it. Closes the descriptor.

        Raises:
            OutputError: the device refuses.
        """
        try:
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                # Network file systems and quotas report their refusal here.
                os.close(descriptor)
            self.part(name).rename(self.partial / name)
            fsync_folder((self.partial / name).parent)
            self._append({"file": name, "size": size})
        except OSError as error:
            raise output_error(error, self.partial / name) from error

    def write_small(self, name: str, content: bytes) -> None:
        """Write a small file whole.

        Raises:
            OutputError: the device refuses.
        """
        self._write_file(name, [content])

    def write_text(self, name: str, pieces: Iterable[str]) -> None:
        """Write a text that comes in small pieces.

        Raises:
            OutputError: the device refuses.
        """
        self._write_file(name, _encoded(pieces))

    def copy_file(self, name: str, source: Path) -> None:
        """Copy a file that is not weights, whole.

        Raises:
            CheckpointError: the source cannot be read.
            OutputError: the device refuses.
        """
        self._write_file(name, _blocks(source))

    def _write_file(self, name: str, blocks: Iterable[bytes]) -> None:
        part = self.part(name)
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
            try:
                for block in blocks:
                    rest = memoryview(block)
                    while rest:
                        rest = rest[os.write(descriptor, rest) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            part.rename(self.partial / name)
        except OSError as error:
            raise output_error(error, self.partial / name) from error

    def discard_part(self, name: str) -> None:
        """Remove a part that ran out of space, down to the bytes that an earlier note vouches for."""
        part, offset = self.part(name), self.offsets.get(name, 0)
        try:
            if offset:
                os.truncate(part, offset)
            else:
                part.unlink(missing_ok=True)
        except OSError:
            # The device is in trouble already; the next run cuts the part to what the journal says anyway.
            return

    def commit(self) -> None:
        """Turn `OUT.partial` into `OUT` by one rename; an older OUT is exchanged in the same step, then removed.

        Raises:
            OutputError: the device refuses.
        """
        try:
            for parent, _, _ in os.walk(self.partial, topdown=False):
                fsync_folder(Path(parent))
            (self.partial / JOURNAL).unlink()
            (self.partial / LOCK).unlink()
            fsync_folder(self.partial)
            if self.output.exists():
                _exchange(self.partial, self.output)
                fsync_folder(self.output.absolute().parent)
                shutil.rmtree(self.partial)
            else:
                self.partial.rename(self.output)
            fsync_folder(self.output.absolute().parent)
        except OSError as error:
            raise output_error(error, self.output) from error

    def discard(self) -> None:
        """Remove everything that was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def _open(self) -> None:
        journal = self.partial / JOURNAL
        if self.partial.exists() and not self.partial.is_dir():
            raise OutputError("is in the way", file=self.partial)
        ours = any((self.partial / name).exists() for name in (LOCK, JOURNAL, PROVENANCE_FILE))
        if self.partial.is_dir() and any(self.partial.iterdir()) and not ours:
            raise OutputError(
                "exists and was not left by eplb", file=self.partial, hint="Move it away, or choose another output."
            )
        self.partial.mkdir(exist_ok=True)
        self._claim()
        header, self.finished, self.offsets = _read_journal(journal)
        if header is not None and self.resume and header.get("identity") != self.identity:
            raise OutputError(
                f"holds an unfinished run of {_difference(header, self.identity)}",
                file=self.partial,
                rule="a run is taken up only with the same source, plan, layout and version",
                hint="Repeat that run's command, or pass --no-resume to start afresh.",
            )
        if header is None or not self.resume:
            self._clear()
            self.finished, self.offsets = {}, {}
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if header is None or not self.resume:
            self._append({"format": FORMAT, "version": VERSION, "identity": self.identity})
            fsync_folder(self.partial)
            fsync_folder(self.partial.absolute().parent)

    def _claim(self) -> None:
        """Take the lock, and write who holds it."""
        lock = self.partial / LOCK
        self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise OutputError(
                f"{holder} is writing to it", file=self.partial, hint="Wait for it, or choose another output."
            ) from None
        # The other run may have finished between the opening and the locking; then the name is gone or another's.
        if not lock.exists() or lock.stat().st_ino != os.fstat(self._lock).st_ino:
            raise OutputError("another process has just finished there", file=self.partial, hint="Look at the output.")
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"eplb convert, process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def _clear(self) -> None:
        for entry in self.partial.iterdir():
            if entry.name == LOCK:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            os.write(self._journal, json.dumps(record).encode() + b"\n")
            os.fdatasync(self._journal)
        except OSError as error:
            raise output_error(error, self.partial / JOURNAL) from error

    def _close(self) -> None:
        for descriptor in (self._journal, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._journal = self._lock = -1


def _encoded(pieces: Iterable[str]) -> Iterator[bytes]:
    batch: list[str] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) >= 10_000:
            yield "".join(batch).encode()
            batch = []
    yield "".join(batch).encode()


def _blocks(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                yield block
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error


def _read_journal(file: Path) -> tuple[dict[str, Any] | None, dict[str, int], dict[str, int]]:
    """(first line, sizes of finished files, offsets of parts); a line cut short by a kill ends the reading."""
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return None, {}, {}
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    if not records or records[0].get("format") != FORMAT:
        return None, {}, {}
    if records[0].get("version") != VERSION:
        raise OutputError(
            f"has journal version {records[0].get('version')}",
            file=file,
            rule=f"this eplb reads version {VERSION}",
            hint="Pass --no-resume to start afresh.",
        )
    finished = {record["file"]: record["size"] for record in records if "file" in record}
    offsets = {record["part"]: record["offset"] for record in records if "part" in record}
    return records[0], finished, {name: offset for name, offset in offsets.items() if name not in finished}


def _difference(header: Mapping[str, Any], identity: Mapping[str, Any]) -> str:
    """The first thing in which an earlier run differs from this one, in words."""
    earlier = header.get("identity", {})
    words = {
        "tool_version": "another eplb version",
        "layout": "another layout",
        "plan_sha256": "another plan",
        "source": "another or since changed source",
    }
    return next((text for key, text in words.items() if earlier.get(key) != identity.get(key)), "other options")


def _exchange(first: Path, second: Path) -> None:
    """Swap two names in one step; by two renames where the file system cannot."""
    library = ctypes.CDLL(None, use_errno=True)
    names = [os.fsencode(path.absolute()) for path in (first, second)]
    rename = getattr(library, "renameat2", None)
    if rename is not None and rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return
    code = ctypes.get_errno() if rename is not None else errno.ENOSYS
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code))
    aside = second.with_name(second.name + ".old")
    second.rename(aside)
    first.rename(second)
    aside.rename(first)
