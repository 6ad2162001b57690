"""The safetensors container: headers read strictly, small files as arrays, arrays written straight from memory.

A file is a little-endian u64 header length, a JSON header, and the data. The header maps names to dtype, shape and a
byte range; ranges must tile the data exactly. Trailing spaces after the JSON are allowed in any number. Weights of
checkpoints never become arrays: of them only headers are read here.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import EplbError
from eplb_cli.untrusted import parse_json, shown

__all__ = [
    "MOST_HEADER_BYTES",
    "SafetensorsHeader",
    "TensorEntry",
    "parse_header",
    "read_array",
    "read_tensors",
    "write_tensors",
]

MOST_HEADER_BYTES = 100_000_000
"""The format's own limit; the public loaders refuse more."""

_MOST_AXES = 64
"""Longest shape; PyTorch's own limit."""
_MOST_NAME = 4096
"""Longest name of a tensor, so that a message about one stays readable."""

_DTYPE_BITS = {
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

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """What `read_array` makes of it: of numbers that NumPy lacks nothing (V1), except that BF16 become float32."""
        if self.dtype == "BF16":
            return np.dtype(np.float32)
        plain = self.dtype[1:].isdigit() and self.dtype[0] in "IUF" and _DTYPE_BITS[self.dtype] >= 8
        return np.dtype(f"<{self.dtype[0].lower()}{_DTYPE_BITS[self.dtype] // 8}" if plain else "V1")


@dataclass(frozen=True)
class SafetensorsHeader:
    """A parsed header.

    Args:
        data_start: offset of the data in the file.
        file_size: bytes of the whole file.
        tensors: entries by name, in the order of their data.
        metadata: the header's free strings.
        sha256: digest of the header's bytes, length field included.
    """

    data_start: int
    file_size: int
    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    sha256: str


def parse_header(stream: BinaryIO, error: type[EplbError], file: str | Path | None = None) -> SafetensorsHeader:
    """Parse and check a header; the data is not read.

    Args:
        stream: a regular file, or bytes in memory; nothing is allocated that its size does not bear out.
        error: what to raise.
        file: whom to name.

    Raises:
        EplbError: of the given kind; the file is truncated, or breaks a rule of the format.
    """
    try:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        start = stream.read(8)
        length = int.from_bytes(start, "little")
        if size < 8 or length > MOST_HEADER_BYTES:
            raise error(
                f"is not a safetensors file: {size:,} bytes that claim a header of {length:,}",
                file=file,
                rule=f"a header has at most {MOST_HEADER_BYTES:,} bytes",
            )
        if 8 + length > size:
            raise error(
                f"is truncated: {size:,} bytes, but the header alone ends at {8 + length:,}",
                file=file,
                hint=_INTERRUPTED,
            )
        raw = stream.read(length)
    except OSError as problem:
        raise error(f"cannot be read: {problem.strerror}", file=file) from problem
    digest = hashlib.sha256(start + raw).hexdigest()
    try:
        document = parse_json(raw, error, file=file)
    except EplbError as problem:
        problem.problem = f"is not a safetensors file: its header {problem.problem}"
        raise
    del raw
    if not isinstance(document, dict):
        raise error("is not a safetensors file: its header is not a JSON object", file=file)
    metadata = document.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(value) is not str for value in metadata.values()):
        raise error("has header metadata that is not strings", file=file)
    # Shapes repeat a hundred thousand times in large models, and a tensor ends where the next begins; one copy of each
    # is enough.
    once: dict[Any, Any] = {}
    try:
        entries = [_entry(name, document[name], once, error) for name in list(document)]
    except EplbError as problem:
        problem.file = None if file is None else str(file)
        raise
    del document, once
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    end = 0
    for entry in entries:
        if entry.begin != end:
            what = "overlaps the tensor before it" if entry.begin < end else "leaves a hole before it"
            raise error(
                f"bytes {entry.begin}..{entry.end}: {what}", file=file, tensor=entry.name, rule="ranges tile the data"
            )
        end = entry.end
    expected = 8 + length + end
    if size != expected:
        truncated = size < expected
        raise error(
            f"is truncated: {size:,} of {expected:,} bytes" if truncated else f"has {size - expected:,} extra bytes",
            file=file,
            hint=_INTERRUPTED if truncated else None,
        )
    return SafetensorsHeader(8 + length, size, {entry.name: entry for entry in entries}, metadata, digest)


_INTERRUPTED = "The download was interrupted; fetch the file again."


def _entry(name: str, fields: Any, once: dict[Any, Any], error: type[EplbError]) -> TensorEntry:
    if len(name) > _MOST_NAME:
        raise error(f"has a tensor called {shown(name)}", rule=f"names have at most {_MOST_NAME}")
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise error("has a header entry without dtype, shape and data_offsets", tensor=name)
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPE_BITS:
        raise error(f"has the unknown dtype {shown(dtype)}", tensor=name)
    for values in (shape, offsets):
        if (
            not isinstance(values, list)
            or len(values) > _MOST_AXES
            or any(type(value) is not int or not 0 <= value < 1 << 63 for value in values)
        ):
            raise error(f"has the shape {shown(shape)} and offsets {shown(offsets)}", tensor=name)
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * _DTYPE_BITS[dtype]:
        raise error(f"{dtype} {shape} does not fill bytes {offsets}", tensor=name, rule="size is shape x dtype")
    # Source, output and index hold the same names; interning keeps one copy of each.
    sizes, begin, end = (once.setdefault(value, value) for value in (tuple(shape), *offsets))
    return TensorEntry(sys.intern(name), sys.intern(dtype), sizes, begin, end)


def read_array(
    stream: BinaryIO, header: SafetensorsHeader, entry: TensorEntry, error: type[EplbError]
) -> npt.NDArray[Any]:
    """The numbers of one tensor, of `entry.numpy_dtype`.

    Raises:
        EplbError: of the given kind, without a file name: they do not fit into memory, or the file shrank.
    """
    halves = entry.dtype == "BF16"
    try:
        array = np.empty(entry.shape, "<u2" if halves else entry.numpy_dtype)
    except (MemoryError, ValueError) as problem:
        raise error(f"{list(entry.shape)} does not fit into memory", tensor=entry.name) from problem
    if array.size:
        stream.seek(header.data_start + entry.begin)
        read = stream.readinto(array.reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
        if read != entry.nbytes:
            raise error("is cut: the file shrank while it was read", tensor=entry.name)
    return (array.astype("<u4") << 16).view("<f4") if halves else array


def read_tensors(stream: BinaryIO, error: type[EplbError]) -> tuple[dict[str, npt.NDArray[Any]], Mapping[str, str]]:
    """Integer arrays and metadata of a whole file.

    Raises:
        EplbError: of the given kind, without a file name; as `parse_header`, or a tensor is not of integers.
    """
    header = parse_header(stream, error)
    for entry in header.tensors.values():
        if entry.numpy_dtype.kind not in "iu":
            raise error(f"has the dtype {entry.dtype}", tensor=entry.name, rule="integers are expected")
    arrays = {name: read_array(stream, header, entry, error) for name, entry in header.tensors.items()}
    return arrays, header.metadata


def write_tensors(stream: BinaryIO, tensors: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> None:
    """Write arrays straight from memory: the library's own writer would hold two more copies of them."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # each starts at a multiple of its size
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        array = tensors[name]
        dtype = {"i": "I", "u": "U"}[array.dtype.kind] + str(8 * array.itemsize)
        entries[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    stream.write(len(header).to_bytes(8, "little") + header)
    for name in names:
        array = np.ascontiguousarray(tensors[name], tensors[name].dtype.newbyteorder("<"))
        stream.write(array.reshape(-1).view(np.uint8).data)
