"""Copying byte ranges past the page cache: every length around a page, on real file systems of several kinds."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from eplb_cli.checkpoint import copying
from eplb_cli.checkpoint.copying import Copier
from eplb_cli.checkpoint.layout import OutputShard, Piece
from eplb_cli.errors import CheckpointError

PAGE = 4096
AROUND = [
    count
    for pages in range(4)
    for count in (pages * PAGE - 513, pages * PAGE - 1, pages * PAGE, pages * PAGE + 1, pages * PAGE + 512)
    if count > 0
]


@contextmanager
def file_system(folder: Path, kind: str) -> Iterator[Path]:
    """A folder on a file system of this kind; skips where it cannot be mounted."""
    with ExitStack() as stack:

        def run(*command: str) -> str:
            if shutil.which(command[0]) is None:
                pytest.skip(f"{command[0]} is not installed")
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
            return done.stdout.strip()

        if kind == "here":
            yield folder
            return
        mount = folder / "mount"
        mount.mkdir()
        if kind == "tmpfs":
            run("mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(mount))
        else:
            image = folder / "image"
            with image.open("wb") as stream:
                stream.truncate(64 << 20)
            device = run("losetup", "--find", "--show", "--sector-size", "4096", str(image))
            stack.callback(subprocess.run, ["losetup", "--detach", device], check=True)
            run("mkfs.ext4", "-q", device)
            run("mount", device, str(mount))
        stack.callback(subprocess.run, ["umount", str(mount)], check=True)
        yield mount


class Job:
    """A shard of several pieces whose lengths and places are no multiples of anything."""

    def __init__(self, folder: Path, size: int, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.folder = folder
        self.size = size
        content = rng.randbytes(3 * size + 7)
        (folder / "source.safetensors").write_bytes(content)
        header = b"h" * min(8, size)
        pieces, left = [], size - len(header)
        while left:
            length = min(left, rng.randint(1, PAGE + 700))
            pieces.append(Piece("source.safetensors", rng.randint(0, 2 * size), length))
            left -= length
        self.shard = OutputShard("shard", header, ("tensor",), tuple(pieces))
        self.wanted = header + b"".join(content[piece.offset : piece.offset + piece.length] for piece in pieces)

    def write(self, file: Path, *, start: int = 0) -> list[int]:
        """Write the shard, or the rest of it; returns the offsets at which it could be taken up."""
        steps: list[int] = []
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
        try:
            Copier(self.folder, clone=False).write(self.shard, descriptor, start=start, step=steps.append)
        finally:
            os.close(descriptor)
        return steps


@pytest.fixture
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_BUFFER", PAGE)
    monkeypatch.setattr(copying, "_STEP", 1)


@pytest.fixture
def flags(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    """(past the page cache?, offset, length) of each write."""
    seen: list[tuple[bool, int, int]] = []
    real = os.pwritev

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        direct = bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        seen.append((direct, offset, len(views[0])))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    return seen


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("kind", ["here", "tmpfs", "4096-byte sectors"])
def test_every_length_around_a_page_is_written_and_taken_up_exactly(
    tmp_path: Path, kind: str, flags: list[tuple[bool, int, int]]
) -> None:
    with file_system(tmp_path, kind) as folder:
        for size in AROUND:
            job = Job(tmp_path, size, seed=size)
            file = folder / f"{size}"
            flags.clear()
            steps = job.write(file)
            assert file.read_bytes() == job.wanted
            assert steps == [*range(PAGE, size + 1, PAGE)]
            assert all(offset % PAGE == length % PAGE == 0 for direct, offset, length in flags if direct)
            if kind != "tmpfs":
                assert [direct for direct, _, _ in flags] == [True] * (size // PAGE) + [False] * (size % PAGE > 0)
            for start in steps:
                # Whatever lies behind the last step was never synced.
                content = file.read_bytes()
                file.write_bytes(content[:start] + bytes(size - start + 5000))
                job.write(file, start=start)
                assert file.read_bytes() == job.wanted


def test_without_direct_writes_all_go_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[tuple[bool, int, int]]
) -> None:
    """As on tmpfs before Linux 6.6 and some network file systems, which refuse the flag itself."""
    real = fcntl.fcntl

    def refusing(descriptor: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(descriptor, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    job = Job(tmp_path, 3 * PAGE + 1)
    job.write(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == job.wanted
    assert [direct for direct, _, _ in flags] == [False]


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("count", [1, 511, 4095])
def test_a_write_that_the_kernel_cuts_short_goes_on_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """As before a device fills up, or at a signal; the rest no longer begins at a page."""
    real, cut = os.pwritev, [True]

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        if cut.pop() if cut else False:
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)
            done = real(descriptor, [views[0][:count]], offset)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
            return done
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    job = Job(tmp_path, 3 * PAGE + 5)
    job.write(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == job.wanted


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize(
    ("number", "code"),
    [(2, errno.EIO), (2, errno.ENOSPC), (4, errno.EINVAL)],
    ids=["EIO", "ENOSPC", "EINVAL at the end"],
)
def test_a_write_that_fails_is_not_tried_another_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: int
) -> None:
    """And nothing is written behind the hole; the last one goes through the page cache, where EINVAL is no excuse."""
    real, offsets = os.pwritev, []

    def pwritev(descriptor: int, views: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        if len(offsets) == number:
            raise OSError(code, os.strerror(code))
        return real(descriptor, views, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    job = Job(tmp_path, 3 * PAGE + 5)
    with pytest.raises(OSError, match=os.strerror(code)) as caught:
        job.write(tmp_path / "out")
    assert caught.value.errno == code
    assert offsets == [*range(0, number * PAGE, PAGE)]


def test_the_blocks_of_a_file_are_reserved_before_its_first_byte(tmp_path: Path) -> None:
    """So a device that is too full is known at once, and nothing that was written is lost to it."""
    with file_system(tmp_path, "tmpfs") as folder:
        job = Job(tmp_path, 12 << 20)
        job.write(folder / "one")
        with pytest.raises(OSError, match="No space left") as caught:
            job.write(folder / "two")
        assert caught.value.errno == errno.ENOSPC
        assert (folder / "two").stat().st_size == 0
        assert (folder / "one").read_bytes() == job.wanted


@pytest.mark.usefixtures("small_buffers")
def test_a_source_that_ends_too_soon_is_named(tmp_path: Path) -> None:
    job = Job(tmp_path, 3 * PAGE)
    os.truncate(tmp_path / "source.safetensors", PAGE)
    with pytest.raises(CheckpointError, match=r"ended at byte \d+, which it did not before"):
        job.write(tmp_path / "out")
