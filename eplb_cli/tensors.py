"""Small safetensors files as arrays: read strictly, written straight from memory to the same bytes.

Shards of checkpoints are another matter: their weights never become arrays (see `checkpoint.safetensors_file`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import EplbError
from eplb_cli.untrusted import parse_json, shown

__all__ = ["read_tensors", "write_tensors"]

MOST_HEADER_BYTES = 16 << 20
"""Longest header that is read; that of a profile names its sources, some hundred bytes each."""
_DTYPES = {f"{kind.upper()}{8 * size}": f"<{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)}


def read_tensors(stream: BinaryIO, error: type[EplbError]) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Integer arrays and metadata of a safetensors file whose tensors fill it without holes.

    Args:
        stream: a regular file, or bytes in memory; nothing is allocated that its size does not bear out.
        error: what to raise.

    Raises:
        EplbError: of the given kind, without a file name.
    """
    size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    length = int.from_bytes(stream.read(8), "little")
    if size < 8 or length > min(MOST_HEADER_BYTES, size - 8):
        raise error(f"is not safetensors: {size:,} bytes with a header of {length:,}")
    document = parse_json(stream.read(length), error)
    metadata = document.pop("__metadata__", {}) if isinstance(document, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise error("is not safetensors: its header is no object with text as metadata")
    entries = sorted((_entry(name, fields, error) for name, fields in document.items()), key=lambda entry: entry[3:])
    end = 0
    for name, _, _, begin, stop in entries:
        if begin != end:
            raise error(f"bytes {begin} to {stop} overlap or leave a hole", tensor=name, rule="tensors tile the data")
        end = stop
    if 8 + length + end != size:
        raise error(f"has {size:,} bytes, its header speaks of {8 + length + end:,}")
    arrays = {}
    for name, dtype, shape, _, _ in entries:
        try:
            arrays[name] = np.empty(shape, dtype)
        except (MemoryError, ValueError) as problem:
            raise error(f"{list(shape)} does not fit into memory", tensor=name) from problem
        if arrays[name].size:
            stream.readinto(arrays[name].reshape(-1).view(np.uint8).data)  # type: ignore[attr-defined]
    return arrays, metadata


def _entry(name: str, fields: Any, error: type[EplbError]) -> tuple[str, str, tuple[int, ...], int, int]:
    """Name, NumPy dtype, shape, begin and end of a header's entry."""
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise error("has an entry without dtype, shape and data_offsets", tensor=shown(name))
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise error(f"has the dtype {shown(dtype)}", tensor=shown(name), rule=f"known are {', '.join(_DTYPES)}")
    for values in (shape, offsets):
        if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
            raise error(f"has the shape {shown(shape)} and offsets {shown(offsets)}", tensor=shown(name))
    size = math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize
    if len(shape) > 8 or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise error(
            f"{dtype} {shown(shape)} does not fill bytes {shown(offsets)}",
            tensor=shown(name),
            rule="size is shape x dtype",
        )
    return name, _DTYPES[dtype], tuple(shape), offsets[0], offsets[1]


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
