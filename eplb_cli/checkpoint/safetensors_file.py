"""Files of weights: a shard's header as `tensors.parse_header` reads it, and header bytes for a new shard."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from eplb_cli.errors import CheckpointError
from eplb_cli.tensors import MOST_HEADER_BYTES, SafetensorsHeader, TensorEntry, parse_header
from eplb_cli.untrusted import open_file

__all__ = ["header_bytes", "read_header"]


def read_header(file: Path) -> SafetensorsHeader:
    """Parse and check a file's header; the data is not read.

    Raises:
        CheckpointError: the file is missing, truncated, a git-LFS pointer, a web page, or breaks a rule of the format.
    """
    with open_file(file, CheckpointError) as stream:
        try:
            _refuse_impostors(file, os.fstat(stream.fileno()).st_size, stream.read(8 + 1024))
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error
        return parse_header(stream, CheckpointError, file)


def header_bytes(entries: Iterable[TensorEntry], metadata: Mapping[str, str], *, pad_to: tuple[int, int]) -> bytes:
    """Bytes of a header, padded with spaces until the data starts at remainder `pad_to[0]` modulo `pad_to[1]`.

    Raises:
        CheckpointError: a name occurs twice, or the header would exceed the format's limit.
    """
    document: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        if entry.name in document:
            raise CheckpointError("would be written twice", tensor=entry.name, rule="a name occurs once")
        document[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [entry.begin, entry.end],
        }
    raw = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    remainder, modulus = pad_to
    raw += b" " * ((remainder - 8 - len(raw)) % modulus)
    if len(raw) > MOST_HEADER_BYTES:
        raise CheckpointError(f"the header would have {len(raw):,} bytes", rule=f"at most {MOST_HEADER_BYTES:,}")
    return len(raw).to_bytes(8, "little") + raw


def _refuse_impostors(file: Path, size: int, start: bytes) -> None:
    if size == 0:
        raise CheckpointError("is empty", file=file, hint="The download was interrupted; fetch the file again.")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError("is a git-LFS pointer, not the weights", file=file, hint="Run: git lfs pull")
    if (start.lstrip()[:1] == b"<" and b"<html" in start.lower()) or start.lstrip().lower().startswith(b"<!doctype"):
        raise CheckpointError(
            "is an HTML page, not the weights",
            file=file,
            hint="The download saved an error or login page; fetch the file again.",
        )
    if len(start) > 8 and start[8:].lstrip()[:1] not in (b"{", b""):
        raise CheckpointError("is not a safetensors file: its header is not JSON", file=file)
    if size < 10:
        raise CheckpointError(f"is truncated: {size} bytes", file=file, hint="Fetch the file again.")
