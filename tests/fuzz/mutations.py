"""Mutations of files: bytes, numbers, JSON values, and what lies inside archives and behind headers."""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

__all__ = ["mutate"]

SIZES = (0, 1, -1, 2, 7, 8, 255, 256, 65_536, 2**31 - 1, 2**31, 2**32, 2**53, 10**12, 2**62, 2**63 - 1, 2**63, 2**64)
NUMBERS: tuple[bytes, ...] = (
    *(str(size).encode() for size in SIZES),
    *(b"-9223372036854775808", b"-1", b"1.5", b"-0.0", b"1e308", b"1e999", b"NaN", b"Infinity", b"0x10", b"1_000"),
    b"9" * 5_000,
    b"1" * 65,
)
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
TEXTS = ("", "a", "0", "-1", "\ud800", "\x00", "\x1b[2J", "é" * 300, "x" * 100_000, "../../etc/passwd", "nul\x00")


class Pairs(list[tuple[str, Any]]):
    """A JSON object whose keys may repeat."""


class Raw(bytes):
    """Text that stands in the JSON as it is."""


NO_LONGER_SO = (zipfile.BadZipFile, zlib.error, struct.error)
"""What reading a mutated container ends in."""


def mutate(content: bytes, rng: random.Random) -> bytes:
    """One mutation that suits the content, or one of plain bytes."""
    kinds: list[Callable[[bytes, random.Random], bytes]] = [_bytes, _numbers]
    if content.startswith(b"PK\x03\x04"):
        kinds = [_archive] * 4 + [_bytes]
    elif content.startswith(b"\x93NUMPY"):
        kinds = [_npy] * 3 + [_bytes]
    elif content[8:9] == b"{":
        kinds = [_safetensors] * 4 + [_bytes]
    elif content.lstrip()[:1] in (b"{", b"["):
        kinds = [_json] * 4 + [_numbers, _lines, _bytes]
    elif b"\n" in content[:10_000] and b"\0" not in content[:100]:
        kinds = [_numbers, _lines, _cells, _bytes]
    try:
        return rng.choice(kinds)(content, rng)
    except (
        ValueError,
        RecursionError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        OverflowError,
        NotImplementedError,
    ):
        return _bytes(content, rng)  # a second mutation of what no longer is what it was


def _bytes(content: bytes, rng: random.Random) -> bytes:
    if not content:
        return rng.randbytes(rng.randrange(1, 40))
    start = rng.randrange(len(content))
    # Headers are short and decide the most.
    if rng.random() < 0.5:
        start = rng.randrange(min(len(content), 128))
    stop = min(len(content), start + rng.choice((1, 2, 4, 8, 64, 1024)))
    piece = content[start:stop]
    number = rng.choice(SIZES) % 2**64
    new = rng.choice(
        (
            bytes(byte ^ (1 << rng.randrange(8)) for byte in piece[:1]) + piece[1:],
            rng.randbytes(len(piece)),
            b"\0" * len(piece),
            b"\xff" * len(piece),
            b"",
            piece * rng.choice((2, 3, 100)),
            struct.pack("<Q", number),
            struct.pack("<I", number % 2**32),
            struct.pack(">Q", number),
        )
    )
    if rng.random() < 0.15:
        return content[:start]
    return content[:start] + new + content[stop:]


def _numbers(content: bytes, rng: random.Random) -> bytes:
    found = list(NUMBER.finditer(content))
    if not found:
        return _bytes(content, rng)
    place = rng.choice(found)
    return content[: place.start()] + rng.choice(NUMBERS) + content[place.end() :]


def _lines(content: bytes, rng: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    index = rng.randrange(len(lines))
    choice = rng.randrange(6)
    if choice == 0:
        del lines[index]
    elif choice == 1:
        lines.insert(rng.randrange(len(lines)), lines[index])
    elif choice == 2:
        other = rng.randrange(len(lines))
        lines[index], lines[other] = lines[other], lines[index]
    elif choice == 3:
        lines[index] = lines[index][: rng.randrange(len(lines[index]) + 1)]
    elif choice == 4:
        lines[index] = b" " * 2_000_000 + lines[index]
    else:
        lines[index] = _json(lines[index], rng)
    return b"".join(lines)


def _cells(content: bytes, rng: random.Random) -> bytes:
    separator = rng.choice([mark for mark in (b",", b"\t", b" ", b":") if mark in content] or [b"\n"])
    cells = content.split(separator)
    index = rng.randrange(len(cells))
    cells[index] = rng.choice((b"", b'"', b"\xff\xfe", b"x" * 3_000_000, b"1", b"nan", b"\n", *NUMBERS, cells[-1]))
    return separator.join(cells)


def _json(content: bytes, rng: random.Random) -> bytes:
    tree = json.loads(content, object_pairs_hook=Pairs)
    places: list[tuple[Any, int]] = []

    def walk(node: Any) -> None:
        for index, item in enumerate(node):
            places.append((node, index))
            value = item[1] if isinstance(node, Pairs) else item
            if isinstance(value, list):
                walk(value)

    walk([tree])
    holder, index = rng.choice(places)
    if rng.random() < 0.3:  # objects are few among many numbers, and hold what decides
        holder, index = rng.choice([place for place in places if isinstance(place[0], Pairs)] or places)
    kind = rng.randrange(8)
    root = places[0][0]
    value = holder[index][1] if isinstance(holder, Pairs) else holder[index]
    if kind == 0 and len(holder) > 1:
        del holder[index]
    elif kind == 1:
        holder.insert(rng.randrange(len(holder) + 1), holder[index])
        if holder is root:
            holder.pop()
    elif kind == 2 and isinstance(holder, Pairs):
        holder[index] = (rng.choice([*TEXTS, *(key for key, _ in holder)]), value)
    else:
        new: Any = rng.choice(
            (
                *SIZES,
                *map(Raw, NUMBERS),
                *TEXTS,
                *(None, True, False, [], Pairs(), [[]], [value], [None], Pairs([("a", value)])),
                *(value * 2 if isinstance(value, list) else [value] * 3, value[:1] if isinstance(value, list) else 1.5),
                Raw(b"[" * 20_000 + b"]" * 20_000),
                Raw(b"[" * 70 + b"]" * 70),
                Raw(b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
            )
        )
        holder[index] = (holder[index][0], new) if isinstance(holder, Pairs) else new
    ending = b"\n" if content.endswith(b"\n") else b""
    return _dump(root[0]) + ending


def _dump(value: Any) -> bytes:
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, Pairs):
        return b"{" + b", ".join(json.dumps(key).encode() + b": " + _dump(item) for key, item in value) + b"}"
    if isinstance(value, list):
        return b"[" + b", ".join(map(_dump, value)) + b"]"
    return json.dumps(value).encode()


def _safetensors(content: bytes, rng: random.Random) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length]
    header = rng.choice((_json, _json, _numbers, _metadata))(header, rng)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def _metadata(header: bytes, rng: random.Random) -> bytes:
    """The JSON inside the metadata's text."""
    document = json.loads(header)
    metadata = document.get("__metadata__") or {"format": "pt"}
    if not isinstance(metadata, dict):  # damaged by an earlier mutation
        return header
    key = rng.choice(list(metadata))
    metadata[key] = _json(str(metadata[key]).encode(), rng).decode()
    return json.dumps(document | {"__metadata__": metadata}).encode()


DTYPES = (
    b"'|O'",
    b"'<f8'",
    b"'>i4'",
    b"'|V8'",
    b"'<U4'",
    b"'|b1'",
    b"'<c16'",
    b"'<M8[ns]'",
    b"[('a', '<i4')]",
    b"'|V0'",
    b"5",
)


def _npy(content: bytes, rng: random.Random) -> bytes:
    wide = content[6] > 1
    start = 12 if wide else 10
    length = int.from_bytes(content[8:start], "little")
    header, data = content[start : start + length], content[start + length :]
    choice = rng.randrange(7)
    if choice == 0:
        header = re.sub(rb"'descr': [^,]+", b"'descr': " + rng.choice(DTYPES), header)
    elif choice == 1:
        header = header.replace(b"False", b"True")
    elif choice == 2:
        numbers = b", ".join(rng.choice(NUMBERS) for _ in range(rng.randrange(5)))
        header = re.sub(rb"\(.*?\)", b"(" + numbers + b",)", header)
    elif choice == 3:
        header = _numbers(header, rng)
    elif choice == 4:
        header = b"(" * 5_000 + header
    elif choice == 5:
        header = _bytes(header, rng)
    else:
        data = _bytes(data, rng)
    return content[:8] + (len(header) % 2 ** (8 * (start - 8))).to_bytes(start - 8, "little") + header + data


def _archive(content: bytes, rng: random.Random) -> bytes:
    """A member mutated, lost, repeated or renamed, with its checksum made right; or one that expands to gigabytes."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    index = rng.randrange(len(members))
    name, data = members[index]
    choice = rng.randrange(8)
    if choice == 0:
        del members[index]
    elif choice == 1:
        members.append((name, data))
    elif choice == 2:
        members[index] = (rng.choice(("", "a", "../a.npy", "é.npy", "data.pkl", "x/data.pkl", name + "/")), data)
    elif choice == 3:
        members[index] = (name, _npy_bomb(rng))
    else:
        members[index] = (name, mutate(data, rng) if data else b"x")
    stream = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.3 or choice == 3 else zipfile.ZIP_STORED
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, data in members:
            archive.writestr(zipfile.ZipInfo(name or "x"), data, method)
    return stream.getvalue()


def _npy_bomb(rng: random.Random) -> bytes:
    """Zeros that deflate a thousandfold; the header claims more still."""
    from numpy.lib import format as npy

    stream = io.BytesIO()
    rows = rng.choice((40_000, 400_000, 10**9))
    npy.write_array_header_1_0(stream, {"descr": "<i8", "fortran_order": rng.random() < 0.5, "shape": (rows, 3, 8)})
    return stream.getvalue() + bytes(8_000_000)
