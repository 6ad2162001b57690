"""Copies byte ranges from file to file: shared blocks where the file system can, large aligned transfers elsewhere.

Weights never become tensors; memory is a few buffers whatever the size. Errors of the device (EIO, ENOSPC, EDQUOT) end
the run: after a failed write-back another way of copying may read stale bytes, so there is no second try.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from eplb_cli.checkpoint import page_cache
from eplb_cli.checkpoint.page_cache import PAGE
from eplb_cli.checkpoint.rewrite import CLONE_BLOCK, OutputShard, Piece
from eplb_cli.errors import CheckpointError, EplbError, OutputError

__all__ = ["Copier", "Traffic", "can_clone", "output_error", "renumbered"]

FICLONERANGE = 0x4020940D
"""ioctl of linux/fs.h: share a range of another file; its argument is fd, offset, length, target offset."""

_CANNOT_CLONE = {
    errno.EOPNOTSUPP,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOTTY,
    errno.ETXTBSY,
    errno.EAGAIN,
    errno.EPERM,
    errno.ENOSYS,
}
"""Answers that mean "not here", not "the device failed"."""

_BUFFER = 1 << 20
_BUFFERS = 4
_READ_AHEAD = 16 << 20
_ADVICE = 4 << 20
_CLONE_AT_LEAST = 64 << 10
"""Below this a clone costs more than a copy."""
_CLONE_AT_MOST = 1 << 30
_STEP = 256 << 20
"""Bytes between two points from which a killed run can go on inside a large shard."""


@dataclass
class Traffic:
    """Bytes moved so far."""

    read: int = 0
    written: int = 0
    cloned: int = 0


@dataclass
class Copier:
    """Writes shards from pieces of source files.

    Args:
        folder: the source's folder.
        clone: whether to try to share blocks; turned off by the first file system that cannot.
        progress: called with the number of bytes done since the last call.
        traffic: what was moved.
    """

    folder: Path
    clone: bool = True
    progress: Callable[[int], None] = lambda count: None
    traffic: Traffic = field(default_factory=Traffic)

    def write(
        self, shard: OutputShard, target: Path, *, start: int = 0, step: Callable[[int, int], None] | None = None
    ) -> int:
        """Write a shard, or the rest of it from byte `start` on, and return the open descriptor, not yet synced.

        Args:
            shard: what to write.
            target: file to write; created, or cut to `start` bytes.
            start: bytes that an earlier run has written and synced.
            step: called with (descriptor, offset) each time another 256 MiB are written.

        Raises:
            OutputError: the target cannot be written.
            CheckpointError: a source file cannot be read, or is shorter than it was.
        """
        try:
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise output_error(error, target) from error
        try:
            os.ftruncate(descriptor, start)
            with _Sources(self.folder) as sources:
                _Stream(self, sources, shard, descriptor, target, step).run(start)
        except OSError as error:
            os.close(descriptor)
            raise output_error(error, target) from error
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor


class _Sources:
    """Open source files of one shard, read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.descriptors: dict[str, int] = {}

    def __enter__(self) -> _Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)

    def __getitem__(self, name: str) -> int:
        if name not in self.descriptors:
            try:
                self.descriptors[name] = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"cannot be read: {error.strerror}", file=self.folder / name) from error
        return self.descriptors[name]

    def read(self, name: str, view: memoryview, offset: int) -> None:
        """Fill `view` from `offset`."""
        descriptor, done = self[name], 0
        while done < len(view):
            try:
                count = os.preadv(descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"cannot be read at byte {offset + done}: {error.strerror}", file=self.folder / name
                ) from error
            if count == 0:
                raise CheckpointError(
                    f"ended at byte {offset + done}, which it did not before",
                    file=self.folder / name,
                    rule="the source must not change during a run",
                )
            done += count


class _Stream:
    """The bytes of one shard on their way to its file."""

    def __init__(
        self,
        copier: Copier,
        sources: _Sources,
        shard: OutputShard,
        descriptor: int,
        target: Path,
        step: Callable[[int, int], None] | None,
    ) -> None:
        self.copier = copier
        self.sources = sources
        self.shard = shard
        self.descriptor = descriptor
        self.target = target
        self.step = step
        self.next_step = _STEP
        self.writer = _Writer(descriptor, copier)

    def run(self, start: int) -> None:
        """Write everything from byte `start` on."""
        header = self.shard.header
        self.next_step = start // _STEP * _STEP + _STEP
        with self.writer:
            self.writer.offset = start
            if start < len(header):
                self.writer.put(header[start:])
            pieces = list(_after(self.shard.pieces, start - len(header)))
            position = max(start, len(header))
            ahead = _Ahead(self.sources, self._copied(pieces, position))
            for piece in pieces:
                self._piece(piece, position, ahead)
                position += piece.length
            self.writer.flush()
            ahead.finish()

    def _copied(self, pieces: Sequence[Piece], position: int) -> list[Piece]:
        """The pieces that will be read, not shared."""
        copied = []
        for piece in pieces:
            if piece.renumber is None and not (self.copier.clone and _interior(piece, position)[1]):
                copied.append(piece)
            position += piece.length
        return copied

    def _piece(self, piece: Piece, position: int, ahead: _Ahead) -> None:
        if piece.renumber is not None:
            self.writer.put(renumbered(self.sources.folder, piece))
            self.copier.traffic.read += piece.length
            return
        offset, end = piece.offset, piece.offset + piece.length
        head, interior = _interior(piece, position)
        if self.copier.clone and interior:
            self._copy(piece.shard, offset, head)
            offset += head
            offset += self._clone(piece.shard, offset, interior)
            self._copy(piece.shard, offset, end - offset)
        else:
            self._copy(piece.shard, offset, end - offset, ahead)

    def _copy(self, name: str, offset: int, length: int, ahead: _Ahead | None = None) -> None:
        while length:
            view = self.writer.room()[:length]
            if ahead is not None:
                ahead.passed(len(view))
            self.sources.read(name, view, offset)
            self.copier.traffic.read += len(view)
            self.writer.filled_by(len(view))
            offset += len(view)
            length -= len(view)
            self._maybe_step()

    def _clone(self, name: str, offset: int, length: int) -> int:
        """Share a block-aligned range; returns the bytes done, fewer where the file system turns out unable."""
        self.writer.flush()
        done = 0
        while done < length:
            count = min(length - done, _CLONE_AT_MOST)
            argument = struct.pack("qQQQ", self.sources[name], offset + done, count, self.writer.offset)
            try:
                fcntl.ioctl(self.descriptor, FICLONERANGE, argument)
            except OSError as error:
                if error.errno not in _CANNOT_CLONE:
                    raise
                self.copier.clone = False
                break
            self.writer.offset += count
            self.copier.traffic.cloned += count
            self.copier.progress(count)
            done += count
            self._maybe_step()
        return done

    def _maybe_step(self) -> None:
        if self.step is not None and self.writer.offset >= self.next_step:
            self.writer.flush()
            self.step(self.descriptor, self.writer.offset)
            self.next_step += _STEP


def _interior(piece: Piece, position: int) -> tuple[int, int]:
    """(bytes before the first block boundary, bytes of whole blocks) of a piece that is to lie at `position`; the
    second is 0 where blocks do not coincide or are too few to be worth sharing."""
    if (piece.offset - position) % CLONE_BLOCK:
        return 0, 0
    head = min(-piece.offset % CLONE_BLOCK, piece.length)
    interior = (piece.length - head) // CLONE_BLOCK * CLONE_BLOCK
    return (head, interior) if interior >= _CLONE_AT_LEAST else (0, 0)


class _Writer:
    """A few buffers: one fills while a thread writes those before it, so that reading and writing overlap."""

    def __init__(self, descriptor: int, copier: Copier) -> None:
        self.descriptor = descriptor
        self.copier = copier
        self.offset = 0
        self.used = 0
        self.buffer: memoryview | None = None
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        self.filled: SimpleQueue[tuple[memoryview, int, int] | threading.Event | None] = SimpleQueue()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._loop, daemon=True)
        for _ in range(_BUFFERS):
            self.free.put(memoryview(bytearray(_BUFFER)))

    def __enter__(self) -> _Writer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.filled.put(None)
        self.thread.join()

    def room(self) -> memoryview:
        """Free part of the buffer, up to the next write; writes end at page boundaries of the target."""
        if self.buffer is None:
            self.buffer = self.free.get()
        return self.buffer[self.used : _BUFFER - self.offset % PAGE]

    def filled_by(self, count: int) -> None:
        """Count bytes that were put into `room()`."""
        self.used += count
        if self.used >= _BUFFER - self.offset % PAGE:
            self._hand_over()

    def put(self, content: bytes) -> None:
        """Write bytes from memory."""
        rest = memoryview(content)
        while rest:
            room = self.room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            self.filled_by(count)

    def flush(self) -> None:
        """Wait until everything is handed to the kernel."""
        if self.used:
            self._hand_over()
        done = threading.Event()
        self.filled.put(done)
        done.wait()
        self._raise()

    def _hand_over(self) -> None:
        self._raise()
        if self.buffer is not None:
            self.filled.put((self.buffer, self.used, self.offset))
        self.offset += self.used
        self.buffer, self.used = None, 0

    def _raise(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _loop(self) -> None:
        while (item := self.filled.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            buffer, length, offset = item
            try:
                # After a failure nothing more is written: what follows would lie behind a hole.
                if self.failure is None:
                    self._write(buffer[:length], offset)
            except BaseException as error:
                self.failure = error
            self.free.put(buffer)

    def _write(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            done += os.pwritev(self.descriptor, [view[done:]], offset + done)
        self.copier.traffic.written += len(view)
        self.copier.progress(len(view))


class _Ahead:
    """Read-ahead for a list of pieces, and giving back what was read, unless it was in the cache before."""

    def __init__(self, sources: _Sources, pieces: Sequence[Piece]) -> None:
        self.sources = sources
        self.ranges = _ranges(pieces)
        self.ahead = 0
        self.behind: list[tuple[str, int, int]] = []

    def passed(self, count: int) -> None:
        """Tell that `count` more bytes are about to be read; keep the distance ahead of them."""
        self.ahead -= count
        while self.ahead < _READ_AHEAD // 2:
            following = next(self.ranges, None)
            if following is None:
                return
            name, offset, length = following
            descriptor = self.sources[name]
            if not page_cache.is_resident(descriptor, offset):
                page_cache.read_ahead(descriptor, offset, length)
                self.behind.append(following)
            self.ahead += length
        while len(self.behind) > 2 * _READ_AHEAD // _ADVICE:
            self._drop(self.behind.pop(0))

    def finish(self) -> None:
        """Give back the rest."""
        for item in self.behind:
            self._drop(item)
        self.behind.clear()

    def _drop(self, item: tuple[str, int, int]) -> None:
        name, offset, length = item
        page_cache.drop(self.sources[name], offset, length)


def _ranges(pieces: Sequence[Piece]) -> Iterator[tuple[str, int, int]]:
    for piece in pieces:
        for begin in range(0, piece.length, _ADVICE):
            yield piece.shard, piece.offset + begin, min(_ADVICE, piece.length - begin)


def _after(pieces: Sequence[Piece], skip: int) -> Iterator[Piece]:
    """The pieces without their first `skip` bytes."""
    for piece in pieces:
        if skip >= piece.length:
            skip -= piece.length
        elif skip > 0 and piece.renumber is None:
            yield Piece(piece.shard, piece.offset + skip, piece.length - skip)
            skip = 0
        elif skip > 0:
            raise AssertionError("a step never ends inside a table of expert ids")
        else:
            yield piece


def renumbered(folder: Path, piece: Piece) -> bytes:
    """The bytes of a table of expert ids, each id mapped.

    Raises:
        CheckpointError: it is not of an integer type, or holds a value that is no expert.
    """
    kinds = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
    if piece.renumber is None or piece.dtype not in kinds:
        raise CheckpointError(f"expert ids of type {piece.dtype}", file=folder / piece.shard, rule="must be integers")
    with (folder / piece.shard).open("rb") as stream:
        stream.seek(piece.offset)
        values = np.frombuffer(stream.read(piece.length), kinds[piece.dtype])
    if values.nbytes != piece.length:
        raise CheckpointError("is shorter than its header says", file=folder / piece.shard)
    experts = len(piece.renumber)
    outside = values[(values < 0) | (values >= experts)]
    if outside.size:
        raise CheckpointError(
            f"a table of expert ids holds {outside[0]}", file=folder / piece.shard, rule=f"experts are 0..{experts - 1}"
        )
    mapped: bytes = np.asarray(piece.renumber, values.dtype)[values].tobytes()
    return mapped


def can_clone(source: Path, folder: Path) -> bool:
    """Whether a file in `folder` can share blocks with `source`; tried on an unnamed file."""
    try:
        target = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        origin = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(origin).st_size < CLONE_BLOCK:
                return False
            fcntl.ioctl(target, FICLONERANGE, struct.pack("qQQQ", origin, 0, CLONE_BLOCK, 0))
        finally:
            os.close(origin)
    except OSError:
        return False
    finally:
        os.close(target)
    return True


def output_error(error: OSError, file: Path) -> EplbError:
    """What a failed write means, and what to do."""
    again = "Finished shards are kept; make room and run the same command again."
    if error.errno == errno.ENOSPC:
        return OutputError(_full(file), file=file, hint=again)
    if error.errno == errno.EDQUOT:
        return OutputError("the disk quota is used up", file=file, hint=again)
    if error.errno == errno.EROFS:
        return OutputError("the file system is read-only", file=file)
    if error.errno in (errno.EACCES, errno.EPERM):
        return OutputError("permission denied", file=file)
    if error.errno == errno.EFBIG:
        return OutputError(
            "the file would exceed the size limit (ulimit -f, or the file system's)", file=file, hint=again
        )
    if error.errno == errno.EIO:
        return OutputError(
            "the device reports an input/output error", file=file, rule="nothing written there can be trusted",
            hint="Check the device (dmesg), then convert to a fresh place.",
        )  # fmt: skip
    return OutputError(f"cannot be written: {error.strerror or error}", file=file)


def _full(file: Path) -> str:
    try:
        status = os.statvfs(file.parent)
    except OSError:
        return "no space left on the device"
    if status.f_files and status.f_favail == 0:
        return "no free inodes on the device (too many files)"
    return f"no space left on the device ({status.f_bavail * status.f_frsize:,} bytes free)"
