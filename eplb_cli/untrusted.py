"""Reading files that others made: regular files of a bounded size, and strict JSON.

A checkpoint, a recording or a plan comes from the net. A named pipe or a device in its place would hang or fill the
memory; JSON that Python's reader accepts may still exhaust the stack, repeat a key, or hold text that no file system
and no terminal can take. Whatever is wrong is raised as the caller's kind of EplbError, with the file's name.
"""

from __future__ import annotations

import json
import math
import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from eplb_cli.errors import EplbError

__all__ = ["MOST_DEPTH", "open_file", "parse_json", "read_file", "read_json", "shown"]

MOST_DEPTH = 64
"""Deepest nesting of JSON that is read; configs and plans need five levels."""

_MOST_DIGITS = 64
"""Longest whole number that is read; tokenizer configs hold 10^30 for "no limit"."""


def open_file(path: str | PathLike[str], error: type[EplbError], *, most_bytes: int | None = None) -> BinaryIO:
    """Open a regular file for reading, links followed.

    Args:
        path: the file.
        error: what to raise.
        most_bytes: largest size.

    Raises:
        EplbError: of the given kind; there is no such file, it cannot be read, it is not a regular file, or it is
            larger than `most_bytes`.
    """
    file = Path(path)
    try:
        # Without O_NONBLOCK, opening a named pipe waits for a writer.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise error("no such file", file=file) from None
    except (OSError, ValueError) as problem:
        raise error(f"cannot be read: {getattr(problem, 'strerror', None) or problem}", file=file) from problem
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise error(f"is {_kind(status.st_mode)}", file=file, rule="a regular file is needed")
    if most_bytes is not None and status.st_size > most_bytes:
        os.close(descriptor)
        raise error(f"has {status.st_size:,} bytes", file=file, rule=f"a file of this kind has at most {most_bytes:,}")
    return os.fdopen(descriptor, "rb")


def read_file(path: str | PathLike[str], error: type[EplbError], *, most_bytes: int) -> bytes:
    """The content of a regular file of at most `most_bytes`.

    Raises:
        EplbError: as `open_file`.
    """
    with open_file(path, error, most_bytes=most_bytes) as stream:
        try:
            # Asked for more than is there, it would first take the memory for it.
            return stream.read(os.fstat(stream.fileno()).st_size)
        except OSError as problem:
            raise error(f"cannot be read: {problem.strerror}", file=Path(path)) from problem


def read_json(path: str | PathLike[str], error: type[EplbError], *, most_bytes: int, finite: bool = True) -> Any:
    """The JSON document in a file.

    Raises:
        EplbError: as `open_file` and `parse_json`.
    """
    return parse_json(read_file(path, error, most_bytes=most_bytes), error, file=path, finite=finite)


def parse_json(
    content: bytes | str, error: type[EplbError], *, file: str | PathLike[str] | None = None, finite: bool = True
) -> Any:
    """A JSON document that is UTF-8, at most MOST_DEPTH deep, and without repeated keys, lone surrogates or endless
    numbers.

    Args:
        content: the text.
        error: what to raise.
        file: where it is from, for the message.
        finite: refuse NaN and infinities; some published configs hold them.

    Raises:
        EplbError: of the given kind.
    """

    def refuse(problem: str, rule: str | None = None) -> NoReturn:
        raise error(problem, file=None if file is None else Path(file), rule=rule) from None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            for key, _ in pairs:
                if key in seen:
                    refuse(f"has the key {shown(key)} twice", "keys of an object are unique")
                seen.add(key)
        return result

    def integer(digits: str) -> int:
        if len(digits) > _MOST_DIGITS:
            refuse(f"holds a number of {len(digits):,} digits", f"at most {_MOST_DIGITS} are read")
        return int(digits)

    try:
        text = content if isinstance(content, str) else content.decode()
        document = json.loads(text, object_pairs_hook=unique, parse_int=integer)
    except RecursionError:
        refuse("is nested too deep", f"at most {MOST_DEPTH} levels are read")
    except (json.JSONDecodeError, UnicodeDecodeError) as problem:
        refuse(f"is not JSON: {problem}")
    # A lone surrogate can only come from an escape.
    escaped = "\\u" in text
    level, depth = [document], 0
    while level:
        depth += 1
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict | list) and depth > MOST_DEPTH:
                refuse("is nested too deep", f"at most {MOST_DEPTH} levels are read")
            if isinstance(value, dict):
                below += value.values()
                if escaped:
                    below += value.keys()
            elif isinstance(value, list):
                below += value
            elif isinstance(value, float):
                if finite and not math.isfinite(value):
                    refuse(f"holds {json.dumps(value)}", "numbers must be finite")
            elif escaped and isinstance(value, str) and not value.isascii():
                try:
                    value.encode()
                except UnicodeEncodeError:
                    refuse(f"holds {shown(value)}", "text must be valid Unicode, without lone surrogates")
        level = below
    return document


def shown(value: object, *, most: int = 80) -> str:
    """`value` as it may stand in a message: its repr in ASCII, cut to `most` characters."""
    try:
        text = ascii(value)
    except (ValueError, RecursionError):  # an integer of thousands of digits; a list that holds itself
        text = f"<{type(value).__name__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _kind(mode: int) -> str:
    kinds = {
        stat.S_IFDIR: "a folder",
        stat.S_IFIFO: "a named pipe",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a device",
        stat.S_IFBLK: "a device",
    }
    return kinds.get(stat.S_IFMT(mode), "no regular file")
