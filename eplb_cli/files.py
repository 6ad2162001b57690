"""Files that appear whole or not at all and never take another's place unasked, and digests."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from eplb_cli.errors import OutputError

__all__ = ["atomic_write", "exchange", "fsync_folder", "refuse_existing", "rename_exclusive", "sha256_of_file"]

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise OutputError when `path` exists and `force` was not given, is no regular file, or its folder is missing."""
    if os.path.lexists(path) and not force:
        raise OutputError("the output exists already", file=path, hint="Pass --force to replace it.")
    if path.is_dir():
        raise OutputError("the output is a folder, a file is to be written", file=path)
    if path.exists() and not path.is_file():
        raise OutputError("the output is a device or a pipe, and a file would take its place", file=path)
    if not path.absolute().parent.is_dir():
        parent = shlex.quote(str(path.absolute().parent))
        raise OutputError("the output's folder does not exist", file=path, hint=f"mkdir -p {parent}")


@contextmanager
def atomic_write(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """Write a file that appears whole or not at all.

    The content goes to a new file of a unique name beside `path`; on success it is synced and takes the name `path`, on
    failure it is removed. A link at `path` is replaced, never followed.

    Args:
        path: the file to be.
        replace: take the place of a file that is there; otherwise one that appeared meanwhile stays, and so does the
            new content, under the name that the error gives.

    Raises:
        OutputError: the file cannot be written (permissions, full device), or exists and `replace` is false.
    """
    folder = path.absolute().parent
    try:
        descriptor, name = tempfile.mkstemp(prefix=".eplb-", suffix=".partial", dir=folder)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror or error}", file=path) from error
    partial = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            # mkstemp makes private files; the output gets the permissions that any new file would.
            os.fchmod(descriptor, 0o666 & ~_umask())
            yield stream
            stream.flush()
            os.fsync(descriptor)
        if replace:
            partial.replace(path)
        else:
            rename_exclusive(partial, path)
        fsync_folder(folder)
    except FileExistsError as error:
        raise OutputError(
            "appeared while eplb was running; it was left alone",
            file=path,
            hint=f"The new content is in {partial}: look at both, then rename or remove it.",
        ) from error
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise OutputError(f"cannot be written: {error.strerror or error}", file=path) from error
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def rename_exclusive(source: Path, target: Path) -> None:
    """Rename a file or folder in one step, never onto something that exists.

    Raises:
        FileExistsError: `target` exists, as a file, a folder or a link.
        OSError: the file system refuses for another reason.
    """
    if _renameat2(source, target, _RENAME_NOREPLACE):
        return
    # The file system does not know the flag. A new link never replaces a file, and a rename of a folder never replaces
    # anything but an empty folder.
    if source.is_dir():
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
        try:
            source.rename(target)
        except OSError as error:
            if error.errno == errno.ENOTEMPTY:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
            raise
    else:
        target.hardlink_to(source)
        source.unlink()


def exchange(one: Path, two: Path) -> bool:
    """Swap the names of two files or folders in one step; False where the file system cannot.

    Raises:
        OSError: the file system refuses for another reason.
    """
    return _renameat2(one, two, _RENAME_EXCHANGE)


def _renameat2(source: Path, target: Path, flag: int) -> bool:
    """One rename with a flag; False where the kernel or the file system does not know it."""
    library = ctypes.CDLL(None, use_errno=True)
    rename = getattr(library, "renameat2", None)
    names = [os.fsencode(path.absolute()) for path in (source, target)]
    if rename is None:
        return False
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code), str(target))


def fsync_folder(folder: Path) -> None:
    """Put a folder's names on the device."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of_file(path: Path) -> str:
    """Hex SHA-256 of a file's content, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
