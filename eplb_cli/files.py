"""Files that appear whole or not at all, and their digests."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from eplb_cli.errors import OutputError

__all__ = ["atomic_write", "refuse_existing", "sha256_of_file"]


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise OutputError when `path` exists and `force` was not given, or when its parent folder is missing."""
    if path.exists() and not force:
        raise OutputError("the output exists already", file=path, hint="Pass --force to replace it.")
    if path.is_dir():
        raise OutputError("the output is a folder, a file is to be written", file=path)
    if not path.absolute().parent.is_dir():
        raise OutputError("the output's folder does not exist", file=path, hint=f"mkdir -p {path.absolute().parent}")


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Open `<path>.partial` for writing; on success fsync it and rename it to `path`, on failure remove it.

    Raises:
        OutputError: the file cannot be written (permissions, full device).
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        _fsync_folder(path.absolute().parent)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", file=path) from error
    finally:
        partial.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
