"""Reading and writing large files without disturbing the page cache that other processes live from."""

from __future__ import annotations

import contextlib
import os

__all__ = ["PAGE", "drop", "is_resident", "read_ahead"]

PAGE = 4096


def read_ahead(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to start reading a range; a file system that cannot is no failure."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


def drop(descriptor: int, offset: int, length: int) -> None:
    """Give back the clean pages of a range; length 0 means to the end."""
    with contextlib.suppress(OSError):
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def is_resident(descriptor: int, offset: int) -> bool:
    """True when the page at `offset` is in the cache already; True as well where that cannot be told."""
    try:
        return bool(os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT))
    except BlockingIOError:
        return False
    except OSError:
        return True
