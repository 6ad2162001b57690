"""The safetensors container, without tensors: strict header parsing, and header bytes for a new file.

A file is a little-endian u64 header length, a JSON header, and the data. The header maps names to dtype, shape and a
byte range; ranges must tile the data exactly. Trailing spaces after the JSON are allowed in any number.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_cli.errors import CheckpointError
from eplb_cli.untrusted import open_file, parse_json, shown

__all__ = ["DTYPE_BITS", "SafetensorsHeader", "TensorEntry", "header_bytes", "read_header"]

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; the public loaders refuse more."""

_MOST_AXES = 64
"""Longest shape; PyTorch's own limit."""
_MOST_NAME = 4096
"""Longest name of a tensor, so that a message about one stays readable."""

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file: name, dtype as the format spells it, shape, and its byte range within the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length of the byte range."""
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    """A parsed header.

    Args:
        file: the file it was read from.
        data_start: offset of the data in the file.
        file_size: bytes of the whole file.
        tensors: entries by name, in the order of their data.
        metadata: the header's free strings.
        sha256: digest of the header's bytes, length field included.
    """

    file: Path
    data_start: int
    file_size: int
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    sha256: str


def read_header(file: Path) -> SafetensorsHeader:
    """Parse and check a file's header; the data is not read.

    Raises:
        CheckpointError: the file is missing, truncated, a git-LFS pointer, a web page, or breaks a rule of the format.
    """
    with open_file(file, CheckpointError) as stream:
        size = os.fstat(stream.fileno()).st_size
        try:
            start = stream.read(8)
            _refuse_impostors(file, size, start + stream.read(1024))
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"is not a safetensors file: it claims a header of {length:,} bytes",
                    file=file,
                    rule=f"a header has at most {MAX_HEADER_BYTES:,} bytes",
                )
            if 8 + length > size:
                raise CheckpointError(
                    f"is truncated: {size:,} bytes, but the header alone ends at {8 + length:,}",
                    file=file,
                    hint="The download was interrupted; fetch the file again.",
                )
            stream.seek(8)
            raw = stream.read(length)
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error.strerror}", file=file) from error
    digest = hashlib.sha256(start + raw).hexdigest()
    try:
        document = parse_json(raw, CheckpointError)
    except CheckpointError as error:
        error.problem = f"is not a safetensors file: its header {error.problem}"
        error.file = str(file)
        raise
    del raw
    if not isinstance(document, dict):
        raise CheckpointError("is not a safetensors file: its header is not a JSON object", file=file)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(value) is not str for value in metadata.values()):
        raise CheckpointError("has header metadata that is not strings", file=file)
    # Shapes repeat a hundred thousand times in large models, and a tensor ends where the next begins; one copy of each
    # is enough.
    once: dict[Any, Any] = {}
    entries = [_entry(file, name, document[name], once) for name in list(document)]
    del document, once
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            what = "overlaps the tensor before it" if entry.begin < end else "leaves a hole before it"
            raise CheckpointError(
                f"bytes {entry.begin}..{entry.end}: {what}", file=file, tensor=entry.name, rule="ranges tile the data"
            )
        end = entry.end
    expected = 8 + length + end
    if size != expected:
        truncated = size < expected
        raise CheckpointError(
            f"is truncated: {size:,} of {expected:,} bytes" if truncated else f"has {size - expected:,} extra bytes",
            file=file,
            hint="The download was interrupted; fetch the file again." if truncated else None,
        )
    return SafetensorsHeader(
        file=file,
        data_start=8 + length,
        file_size=size,
        tensors={entry.name: entry for entry in entries},
        metadata=metadata,
        sha256=digest,
    )


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
    if len(raw) > MAX_HEADER_BYTES:
        raise CheckpointError(f"the header would have {len(raw):,} bytes", rule=f"at most {MAX_HEADER_BYTES:,}")
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


def _entry(file: Path, name: str, fields: Any, once: dict[Any, Any]) -> TensorEntry:
    if len(name) > _MOST_NAME:
        raise CheckpointError(f"has a tensor called {shown(name)}", file=file, rule=f"names have at most {_MOST_NAME}")
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError("has a header entry without dtype, shape and data_offsets", file=file, tensor=name)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"has the unknown dtype {shown(dtype)}", file=file, tensor=name)
    for values in (shape, offsets):
        if (
            not isinstance(values, list)
            or len(values) > _MOST_AXES
            or any(type(value) is not int or not 0 <= value < 1 << 63 for value in values)
        ):
            raise CheckpointError(f"has the shape {shown(shape)} and offsets {shown(offsets)}", file=file, tensor=name)
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * DTYPE_BITS[dtype]:
        raise CheckpointError(
            f"{dtype} {shape} does not fill bytes {offsets}", file=file, tensor=name, rule="size is shape x dtype"
        )
    # Source, output and index hold the same names; interning keeps one copy of each.
    sizes, begin, end = (once.setdefault(value, value) for value in (tuple(shape), *offsets))
    return TensorEntry(sys.intern(name), sys.intern(dtype), sizes, begin, end)
