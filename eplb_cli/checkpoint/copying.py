"""Copies byte ranges from file to file: shared blocks where the file system can, direct writes elsewhere.

Weights never become tensors; memory is a few buffers whatever the size. Bytes go from the source's page cache into a
buffer, and from there straight to the device. Errors of the device (EIO, ENOSPC, EDQUOT) end the run: after a failed
write another way of copying may read stale bytes, so there is no second try.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from eplb_cli.checkpoint import page_cache
from eplb_cli.checkpoint.layout import CLONE_BLOCK, OutputShard, Piece
from eplb_cli.checkpoint.page_cache import PAGE
from eplb_cli.errors import CheckpointError, EplbError, OutputError
from eplb_cli.untrusted import open_file

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

_BUFFER = 8 << 20
_BUFFERS = 3
_READ_AHEAD = 16 << 20
_ADVICE = 4 << 20
_ADVISE_AT_LEAST = 64 << 10
"""Below this, asking for a range costs more than it saves; what lies around it is asked for anyway."""
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

    def write(self, shard: OutputShard, descriptor: int, *, start: int, step: Callable[[int], None]) -> None:
        """Write a shard, or the rest of it; the last bytes are not yet synced.

        Args:
            shard: what to write.
            descriptor: open file to write to; cut to `start` bytes.
            start: bytes that are right already, a multiple of the page size.
            step: called with the offset each time another 256 MiB are written.

        Raises:
            OSError: the target cannot be written.
            CheckpointError: a source file cannot be read, or is shorter than it was.
        """
        os.ftruncate(descriptor, start)
        if not self.clone:
            _reserve(descriptor, shard.size)
        with _Sources(self.folder) as sources, _Writer(descriptor, self, start, step) as writer:
            _copy_shard(self, sources, writer, shard, start)
            writer.flush()


def _copy_shard(copier: Copier, sources: _Sources, writer: _Writer, shard: OutputShard, start: int) -> None:
    """Put the bytes of a shard from `start` on into the writer."""
    header = shard.header
    if start < len(header):
        writer.put(header[start:])
    position = len(header)
    todo: list[tuple[Piece, int, int]] = []
    for piece in shard.pieces:
        skip = min(max(0, start - position), piece.length)
        if skip < piece.length:
            todo.append((piece, skip, position + skip))
        position += piece.length
    ahead = _Ahead(sources, _copied(copier, todo))
    for piece, skip, position in todo:
        if piece.renumber is not None:
            writer.put(renumbered(sources.folder, piece)[skip:])
            copier.traffic.read += piece.length
            continue
        offset, length = piece.offset + skip, piece.length - skip
        if copier.clone:
            head, interior = _interior(offset, length, position)
            if interior:
                writer.copy(sources, piece.shard, offset, head)
                head += writer.share(sources, piece.shard, offset + head, interior)
                offset, length = offset + head, length - head
        writer.copy(sources, piece.shard, offset, length, ahead)
    ahead.finish()


def _copied(copier: Copier, todo: Sequence[tuple[Piece, int, int]]) -> Iterator[tuple[str, int, int]]:
    """Ranges that will be read, not shared, and are long enough to be asked for ahead."""
    for piece, skip, position in todo:
        offset, length = piece.offset + skip, piece.length - skip
        if piece.renumber is None and length >= _ADVISE_AT_LEAST:
            if copier.clone and _interior(offset, length, position)[1]:
                continue
            for begin in range(0, length, _ADVICE):
                yield piece.shard, offset + begin, min(_ADVICE, length - begin)


def _interior(offset: int, length: int, position: int) -> tuple[int, int]:
    """(bytes before the first block boundary, bytes of whole blocks) of a range that is to lie at `position`; the
    second is 0 where blocks do not coincide or are too few to be worth sharing."""
    if (offset - position) % CLONE_BLOCK:
        return 0, 0
    head = min(-offset % CLONE_BLOCK, length)
    interior = (length - head) // CLONE_BLOCK * CLONE_BLOCK
    return (head, interior) if interior >= _CLONE_AT_LEAST else (0, 0)


class _Sources(ExitStack):
    """Open source files of one shard, read-only."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.descriptors: dict[str, int] = {}

    def __getitem__(self, name: str) -> int:
        if name not in self.descriptors:
            stream = self.enter_context(open_file(self.folder / name, CheckpointError))
            self.descriptors[name] = stream.fileno()
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


class _Writer:
    """A few buffers: one fills while a thread writes those before it, so that reading and writing overlap.

    Every write starts at a page boundary and, but for the last, ends at one: so they can go to the device directly.
    """

    def __init__(self, descriptor: int, copier: Copier, start: int, step: Callable[[int], None]) -> None:
        self.descriptor = descriptor
        self.copier = copier
        self.offset = start
        self.step = step
        self.next_step = start + _STEP
        self.used = 0
        self.buffer: memoryview | None = None
        self.free: SimpleQueue[memoryview] = SimpleQueue()
        self.filled: SimpleQueue[tuple[memoryview, int, int] | threading.Event | None] = SimpleQueue()
        self.failure: BaseException | None = None
        self.direct = _set_direct(descriptor, True)
        self.thread = threading.Thread(target=self._loop, daemon=True)
        for _ in range(_BUFFERS):
            self.free.put(memoryview(mmap.mmap(-1, _BUFFER)))

    def __enter__(self) -> _Writer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.filled.put(None)
        self.thread.join()

    def put(self, content: bytes) -> None:
        """Write bytes from memory."""
        rest = memoryview(content)
        while rest:
            room = self._room()
            count = min(len(room), len(rest))
            room[:count] = rest[:count]
            rest = rest[count:]
            self._filled_by(count)

    def copy(self, sources: _Sources, name: str, offset: int, length: int, ahead: _Ahead | None = None) -> None:
        """Write a range of a source file."""
        while length:
            view = self._room()[:length]
            if ahead is not None:
                ahead.passed(len(view))
            sources.read(name, view, offset)
            self.copier.traffic.read += len(view)
            self._filled_by(len(view))
            offset += len(view)
            length -= len(view)

    def share(self, sources: _Sources, name: str, offset: int, length: int) -> int:
        """Share a block-aligned range; returns the bytes done, fewer where the file system turns out unable."""
        self.flush()
        done = 0
        while done < length:
            count = min(length - done, _CLONE_AT_MOST)
            argument = struct.pack("qQQQ", sources[name], offset + done, count, self.offset)
            try:
                fcntl.ioctl(self.descriptor, FICLONERANGE, argument)
            except OSError as error:
                if error.errno not in _CANNOT_CLONE:
                    raise
                self.copier.clone = False
                break
            self.offset += count
            self.copier.traffic.cloned += count
            self.copier.progress(count)
            done += count
            self._note(self.offset)
        return done

    def flush(self) -> None:
        """Wait until everything is handed to the kernel."""
        if self.used:
            self._hand_over()
        done = threading.Event()
        self.filled.put(done)
        done.wait()
        self._raise()

    def _room(self) -> memoryview:
        """Free part of the buffer."""
        if self.buffer is None:
            self.buffer = self.free.get()
        return self.buffer[self.used :]

    def _filled_by(self, count: int) -> None:
        """Count bytes that were put into the room."""
        self.used += count
        if self.used == _BUFFER:
            self._hand_over()

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
                    self._note(offset + length)
            except BaseException as error:
                self.failure = error
            self.free.put(buffer)

    def _note(self, offset: int) -> None:
        if offset >= self.next_step and offset % PAGE == 0:
            self.step(offset)
            self.next_step = offset + _STEP

    def _write(self, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            rest = view[done:]
            pages = len(rest) // PAGE * PAGE
            if self.direct and (not pages or (offset + done) % PAGE):
                # The end of the file, or the rest of a write that the kernel cut short.
                self.direct = _set_direct(self.descriptor, False)
            try:
                done += os.pwritev(self.descriptor, [rest[:pages] if self.direct else rest], offset + done)
            except OSError as error:
                if not self.direct or error.errno != errno.EINVAL:
                    raise
                # A device with blocks larger than a page.
                self.direct = _set_direct(self.descriptor, False)
        self.copier.traffic.written += len(view)
        self.copier.progress(len(view))


class _Ahead:
    """Read-ahead for a list of ranges, and giving back what was read, unless it was in the cache before."""

    def __init__(self, sources: _Sources, ranges: Iterator[tuple[str, int, int]]) -> None:
        self.sources = sources
        self.ranges = ranges
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


def _set_direct(descriptor: int, direct: bool) -> bool:
    """Let writes go past the page cache, or not; returns whether they do, which some file systems cannot."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | (os.O_DIRECT if direct else 0))
    except OSError:
        return False
    return direct


def _reserve(descriptor: int, size: int) -> None:
    """Ask for the blocks of a whole file at once: no write has to grow it, and a full device is known before."""
    library = ctypes.CDLL(None, use_errno=True)
    offset, length = ctypes.c_int64(0), ctypes.c_int64(size)
    # posix_fallocate would write zeros where the file system cannot reserve.
    if library.fallocate(descriptor, 0, offset, length) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINTR):
        raise OSError(code, os.strerror(code))


def renumbered(folder: Path, piece: Piece) -> bytes:
    """The bytes of a table of expert ids, each id mapped.

    Raises:
        CheckpointError: it is not of an integer type, or holds a value that is no expert.
    """
    kinds = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"}
    if piece.renumber is None or piece.dtype not in kinds:
        raise CheckpointError(f"expert ids of type {piece.dtype}", file=folder / piece.shard, rule="must be integers")
    with open_file(folder / piece.shard, CheckpointError) as stream:
        content = os.pread(stream.fileno(), piece.length, piece.offset)
    if len(content) != piece.length:
        raise CheckpointError("is shorter than its header says", file=folder / piece.shard)
    values = np.frombuffer(content, kinds[piece.dtype])
    experts = len(piece.renumber)
    if experts - 1 > np.iinfo(values.dtype).max:
        raise CheckpointError(
            f"expert ids of type {piece.dtype}", file=folder / piece.shard, rule=f"must hold 0..{experts - 1}"
        )
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
