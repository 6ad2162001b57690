"""A trace file: what kind of container it is, seen from its first bytes, and safe ways to read it."""

from __future__ import annotations

import hashlib
import io
import lzma
import math
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.files import sha256_of_file
from eplb_cli.tensors import SafetensorsHeader, parse_header, read_array
from eplb_cli.untrusted import open_file, parse_json, read_file, shown

if TYPE_CHECKING:
    import torch

__all__ = ["ArrayHeader", "Container", "TraceFile", "array_of", "natural_key", "read_array_header", "tensor_to_numpy"]

HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 30
"""A JSONL record longer than this is refused: no recorder writes one."""
CHUNK_BYTES = 4 << 20
MAX_ARRAY_BYTES = 4 << 30
"""What is read as a whole is no larger: a thousand windows of the largest models are an eighth of it."""
MAX_ARRAY_HEADER_BYTES = 10_000
MAX_EXPANSION = 256
EXPANSION_FREE_BYTES = 64 << 20
"""A member of an archive that expands to more than this, and by more than MAX_EXPANSION, is no recording."""
SAMPLED_FROM_BYTES = 4 << 30
"""Files from this size on are digested in samples: a digest of all would take longer than the reading."""
SAMPLES = 256
SAMPLE_BYTES = 1 << 20


class Container(StrEnum):
    """How the bytes are packed."""

    npy = "npy"
    npz = "npz"
    torch = "torch"
    safetensors = "safetensors"
    gguf = "gguf"
    json = "json"
    jsonl = "jsonl"
    text = "text"
    unknown = "unknown"


def natural_key(path: Path) -> list[tuple[int, int | str]]:
    """Sort key under which rank 2 comes before rank 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


class ArrayHeader:
    """Shape, type and order of an array in numpy's format."""

    def __init__(self, shape: tuple[int, ...], fortran_order: bool, dtype: np.dtype[Any], offset: int) -> None:
        self.shape = shape
        self.fortran_order = fortran_order
        self.dtype = dtype
        self.offset = offset

    @property
    def nbytes(self) -> int:
        """Bytes of the array behind the header."""
        total = self.dtype.itemsize
        for length in self.shape:
            total *= length
        return total


def read_array_header(stream: BinaryIO, name: str) -> ArrayHeader:
    """Read the header of an array in numpy's format; `stream` is left at the first byte of the data.

    Raises:
        TraceError: the header is damaged, or the array is none of plain numbers.
    """
    start = stream.read(12)
    major = start[6] if len(start) == 12 else 0
    length = int.from_bytes(start[8:10] if major == 1 else start[8:12], "little")
    if not start.startswith(b"\x93NUMPY") or major not in (1, 2, 3) or length > MAX_ARRAY_HEADER_BYTES:
        raise TraceError("has a damaged .npy header", file=name)
    offset = 10 if major == 1 else 12
    header = io.BytesIO(start + stream.read(max(0, offset + length - 12)))
    try:
        np.lib.format.read_magic(header)  # type: ignore[no-untyped-call]
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(header)  # type: ignore[no-untyped-call]
    except Exception as error:  # the header is a Python expression: its parser has errors of every kind
        raise TraceError(f"has a damaged .npy header ({shown(str(error))})", file=name) from None
    if dtype.hasobject:
        raise TraceError("holds pickled Python objects", file=name, rule="only plain arrays are read")
    if (
        dtype.kind in "VmM"
        or not dtype.itemsize
        or any(size < 0 for size in shape)
        # An axis of no length must not hide another that is beyond all arrays.
        or math.prod(max(size, 1) for size in shape) * dtype.itemsize >= 2**62
    ):
        raise TraceError(f"is {shown(str(dtype))} {shown(list(shape))}", file=name, rule="only plain arrays are read")
    return ArrayHeader(shape, fortran_order, dtype, offset + length)


class _HashingReader(io.RawIOBase):
    """Reads a file from its start to its end, digesting and reporting what passes."""

    def __init__(self, path: Path, advance: Callable[[int], None], *, digest: bool) -> None:
        self._stream = open_file(path, TraceError).detach()  # type: ignore[attr-defined]
        self._advance = advance
        self.digest = hashlib.sha256() if digest else None
        self.position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = self._stream.readinto(view) or 0
        if self.digest is not None:
            self.digest.update(view[:count])
        self.position += count
        self._advance(count)
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()


def _ignore(_: int) -> None:
    pass


class TraceFile:
    """A file somebody gave us.

    Args:
        path: where it is.
        advance: told of every byte that was read, for a progress display.
    """

    def __init__(self, path: Path, advance: Callable[[int], None] = _ignore) -> None:
        self.path = path
        self.name = str(path)
        self.label = path.name
        """How the profile names it: the same wherever the file lies, so that the same traces give the same bytes."""
        self._advance = advance
        self._sha256: str | None = None

    @cached_property
    def size(self) -> int:
        """Bytes."""
        with self.open() as stream:
            return os.fstat(stream.fileno()).st_size

    def open(self) -> BinaryIO:
        """Open for reading; what is no regular file is refused."""
        return open_file(self.path, TraceError)

    @cached_property
    def head(self) -> bytes:
        """The first bytes."""
        with self.open() as stream:
            return stream.read(HEAD_BYTES)

    @cached_property
    def container(self) -> Container:
        """How the bytes are packed, told from the bytes alone."""
        head = self.head
        if head.startswith(b"\x93NUMPY"):
            return Container.npy
        if head.startswith(b"GGUF"):
            return Container.gguf
        if head.startswith(b"PK\x03\x04"):
            return self._zip_kind()
        if len(head) > 8 and head[8:9] == b"{" and struct.unpack("<Q", head[:8])[0] <= self.size - 8:
            return Container.safetensors
        if head[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"):
            return Container.torch
        if b"\0" in head:
            return Container.unknown
        start = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        if start not in (b"{", b"["):
            return Container.text
        return Container.jsonl if self._is_jsonl() else Container.json

    @contextmanager
    def archive(self) -> Iterator[zipfile.ZipFile]:
        """The file as an archive.

        Raises:
            TraceError: it is damaged, or a member would expand beyond reason.
        """
        try:
            with self.open() as stream, zipfile.ZipFile(stream) as archive:
                for member in archive.infolist():
                    if member.file_size > max(EXPANSION_FREE_BYTES, MAX_EXPANSION * member.compress_size):
                        raise TraceError(
                            f"{shown(member.filename)} expands {member.compress_size:,} bytes to {member.file_size:,}",
                            file=self.name,
                            rule=f"recordings shrink by less than a factor of {MAX_EXPANSION}",
                        )
                yield archive
        # zipfile raises NotImplementedError for methods it lacks and RuntimeError for encrypted members.
        except (zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, RuntimeError, ValueError) as error:
            raise self._damaged(error) from None
        except (struct.error, IndexError, KeyError, OverflowError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> TraceError:
        return TraceError(
            f"is a damaged or cut archive ({shown(str(error))})", file=self.name, hint="Copy it again (.npz or .pt)."
        )

    def _zip_kind(self) -> Container:
        with self.archive() as archive:
            names = archive.namelist()
        if any(name.endswith("data.pkl") for name in names):
            return Container.torch
        return Container.npz if names and all(name.endswith(".npy") for name in names) else Container.unknown

    def _is_jsonl(self) -> bool:
        """True when the first line is a document of its own and something follows it."""
        with self.open() as stream:
            line = stream.readline(MAX_LINE_BYTES)
            while line and not line.strip():
                line = stream.readline(MAX_LINE_BYTES)
            if not _is_document(line):
                return False
            rest = stream.read(HEAD_BYTES)
            while rest and not rest.strip():
                rest = stream.read(HEAD_BYTES)
            return bool(rest)

    def refuse_non_traces(self) -> None:
        """Raise TraceError for what can be no trace at all: nothing, a git-LFS pointer, a web page."""
        start = self.head.lstrip()[:200].lower()
        if not start:
            raise TraceError("is empty", file=self.name, hint="Was the recorder stopped before it wrote?")
        if start.startswith(b"version https://git-lfs"):
            raise TraceError(
                "is a git-LFS pointer, not the file itself", file=self.name, hint="Fetch it with: git lfs pull"
            )
        if start.startswith((b"<!doctype html", b"<html")):
            raise TraceError("is a web page, not a trace", file=self.name, hint="The download went wrong; repeat it.")

    @property
    def sha256(self) -> str:
        """Hex digest of the whole content; for huge files of samples, and then it says so."""
        if self._sha256 is None:
            self._sha256 = _sampled_digest(self.path, self.size) if self._is_huge else sha256_of_file(self.path)
        return self._sha256

    @property
    def identity(self) -> str:
        """A digest that two files share only when all their bytes are the same."""
        return sha256_of_file(self.path) if self._is_huge else self.sha256

    @property
    def _is_huge(self) -> bool:
        return self.size >= SAMPLED_FROM_BYTES

    def stream(self) -> _HashingReader:
        """Open for reading from start to end, once; `finish` keeps the digest."""
        return _HashingReader(self.path, self._advance, digest=not self._is_huge)

    def finish(self, stream: _HashingReader) -> None:
        """Keep the digest of a stream that was read to its end."""
        buffer = bytearray(HEAD_BYTES)
        while stream.readinto(buffer):
            pass
        self._keep_digest(stream)

    def _keep_digest(self, stream: _HashingReader) -> None:
        if stream.digest is not None:
            self._sha256 = stream.digest.hexdigest()

    def read_bytes(self, most_bytes: int = MAX_LINE_BYTES) -> bytes:
        """The whole content, digested."""
        content = read_file(self.path, TraceError, most_bytes=most_bytes)
        self._sha256 = hashlib.sha256(content).hexdigest()
        self._advance(len(content))
        return content

    @cached_property
    def document(self) -> Any:
        """The content of a JSON file. NaN and Infinity become floats, so that whoever meets them can say where.

        Raises:
            TraceError: it is not JSON.
        """
        return parse_json(self.read_bytes().removeprefix(b"\xef\xbb\xbf"), TraceError, file=self.name, finite=False)

    @cached_property
    def first_record(self) -> Any:
        """The JSON document, or the first line's document of a JSONL file; None for anything else."""
        if self.container is Container.json:
            return self.document
        if self.container is not Container.jsonl:
            return None
        with self.open() as stream:
            line = stream.readline(MAX_LINE_BYTES)
            while not line.strip():
                line = stream.readline(MAX_LINE_BYTES)
        return self._record(line)

    def records(self) -> Iterator[tuple[int, Any, bool]]:
        """Each record of a JSONL file with its line number from 1, and whether it is the cut last line (then None).

        A JSON file counts as one record.

        Raises:
            TraceError: a line that is not the last is not JSON, or one is longer than any recorder's.
        """
        if self.container is Container.json:
            yield 1, self.document, False
            return
        number = 0
        broken: tuple[int, str] | None = None
        stream = self.stream()
        lines = io.BufferedReader(stream, CHUNK_BYTES)
        while line := lines.readline(MAX_LINE_BYTES):
            number += 1
            if len(line) == MAX_LINE_BYTES:
                raise TraceError("is longer than any recorder's line", file=self.name, row=number)
            if not line.strip():
                continue
            if broken:
                raise TraceError(f"line {broken[0]} {broken[1]}", file=self.name)
            try:
                record = self._record(line)
            except TraceError as error:
                broken = (number, error.problem)
            else:
                yield number, record, False
        self._keep_digest(stream)
        if broken:
            yield broken[0], None, True

    def _record(self, line: bytes) -> Any:
        """A line's document, fast; what the fast parser refuses (NaN, huge integers, depth) goes to the strict one."""
        import msgspec

        try:
            return msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, ValueError):
            return parse_json(line, TraceError, file=self.name, finite=False)

    def npz_headers(self) -> Mapping[str, ArrayHeader]:
        """Name -> header of each array in an archive.

        Raises:
            TraceError: it is damaged, or an array is longer or shorter than its header says.
        """
        headers = {}
        with self.archive() as archive:
            for member in archive.infolist():
                with archive.open(member) as stream:
                    header = read_array_header(stream, f"{self.name}[{shown(member.filename)}]")  # type: ignore[arg-type]
                if header.offset + header.nbytes != member.file_size:
                    raise TraceError(
                        f"{shown(member.filename)} has {member.file_size:,} bytes",
                        file=self.name,
                        rule=f"its header promises {header.offset + header.nbytes:,}",
                    )
                headers[member.filename.removesuffix(".npy")] = header
        return headers

    def npz_array(self, key: str) -> npt.NDArray[Any]:
        """One array of an archive, whole."""
        with self.archive() as archive, archive.open(f"{key}.npy") as stream:
            header = read_array_header(stream, f"{self.name}[{key}]")  # type: ignore[arg-type]
            if header.nbytes > MAX_ARRAY_BYTES:
                raise TraceError(
                    f"{key} has {header.nbytes:,} bytes", file=self.name, rule=f"at most {MAX_ARRAY_BYTES:,}"
                )
            return array_of(header, stream.read(header.nbytes), self.name)

    @cached_property
    def npy_header(self) -> ArrayHeader:
        """Header of a .npy file.

        Raises:
            TraceError: it is damaged, or the file is shorter than it says.
        """
        with self.open() as stream:
            header = read_array_header(stream, self.name)
        present = self.size - header.offset
        if present < header.nbytes:
            raise TraceError(
                f"is cut: its header promises {header.nbytes} bytes of data, {present} are there", file=self.name
            )
        return header

    def npy_array(self) -> npt.NDArray[Any]:
        """The whole array of a .npy file."""
        header = self.npy_header
        return array_of(header, self.read_bytes(MAX_ARRAY_BYTES)[header.offset :], self.name)

    @cached_property
    def safetensors_header(self) -> SafetensorsHeader:
        """The header of a safetensors file.

        Raises:
            TraceError: it is damaged, or the tensors do not fill the file.
        """
        with self.open() as stream:
            return parse_header(stream, TraceError, self.name)

    def safetensors_array(self, name: str) -> npt.NDArray[Any]:
        """One tensor of numbers, whole."""
        entry = self.safetensors_header.tensors[name]
        if entry.nbytes > MAX_ARRAY_BYTES:
            raise TraceError(
                f"has {entry.nbytes:,} bytes", file=self.name, tensor=name, rule=f"at most {MAX_ARRAY_BYTES:,}"
            )
        try:
            with self.open() as stream:
                return read_array(stream, self.safetensors_header, entry, TraceError)
        except TraceError as error:
            error.file = self.name
            raise

    @cached_property
    def torch_object(self) -> Any:
        """The content of a torch file, loaded without running any code of it, onto the CPU.

        Raises:
            TraceError: it holds anything but tensors and plain containers, is damaged, or claims more than it holds.
        """
        import pickle
        import warnings

        import torch

        if self.head.startswith(b"PK"):
            with self.archive() as archive:
                if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                    raise TraceError("is a compressed archive", file=self.name, rule="torch.save compresses nothing")
        try:
            with warnings.catch_warnings(), self.open() as stream:
                warnings.simplefilter("ignore")  # on pickle protocols: what cannot be read raises
                content = torch.load(stream, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0] if str(error) else "unknown"
            raise TraceError(
                "holds pickled Python objects beyond tensors, numbers and containers",
                file=self.name,
                rule="unpickling runs whatever code the file names, so it is refused",
                hint=f"torch says: {shown(reason, most=300)}",
            ) from None
        except Exception as error:  # a pickle is a program: what it does wrong raises errors of every kind
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TraceError(f"cannot be read as a torch file ({shown(reason, most=200)})", file=self.name) from None
        _refuse_odd_tensors(content, self.name)
        return content

    def forget(self) -> None:
        """Let go of parsed content; it can be read again."""
        for name in ("document", "first_record", "torch_object"):
            self.__dict__.pop(name, None)


def _sampled_digest(path: Path, size: int) -> str:
    """`sampled-` and the SHA-256 of the size and of evenly spaced pieces, the first and the last among them."""
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - SAMPLE_BYTES)
    with path.open("rb", buffering=0) as stream:
        for index in range(SAMPLES):
            stream.seek(last * index // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
    return f"sampled-{digest.hexdigest()}"


def tensor_to_numpy(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A CPU tensor as a numpy array; bfloat16 and other types numpy lacks become float32."""
    import torch

    if tensor.is_floating_point() and tensor.dtype not in (torch.float16, torch.float32, torch.float64):
        tensor = tensor.float()
    array: npt.NDArray[Any] = tensor.detach().numpy()
    return array


def _refuse_odd_tensors(content: Any, name: str) -> None:
    """Raise TraceError for a tensor that is no plain array of the file's own bytes.

    A view with stride 0 has as many elements as it likes, and the first sum over it would take their memory. Containers
    may hold each other many times over, so each is looked into once.
    """
    import torch

    seen: set[int] = set()
    below = [content]
    while below:
        value = below.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            below += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            below += value
        elif isinstance(value, torch.Tensor):
            plain = value.layout is torch.strided and value.device.type == "cpu" and not value.is_quantized
            if not plain or value.is_complex() or value.is_conj() or value.is_neg():
                raise TraceError(f"holds a tensor {shown(str(value.dtype))} {value.layout}", file=name, rule=_PLAIN)
            held = value.untyped_storage().nbytes() - value.storage_offset() * value.element_size()
            if value.numel() * value.element_size() > held:
                raise TraceError(
                    f"holds a tensor {list(value.shape)} of strides {list(value.stride())}",
                    file=name,
                    rule=f"{held:,} bytes are there for its {value.numel():,} elements",
                )


_PLAIN = "plain tensors of numbers are read"


def array_of(header: ArrayHeader, content: bytes, name: str) -> npt.NDArray[Any]:
    """The array of a header from the bytes behind it, in the machine's own byte order.

    Raises:
        TraceError: they are too few.
    """
    if len(content) < header.nbytes:
        raise TraceError(f"is cut: {header.nbytes:,} bytes are promised, {len(content):,} are there", file=name)
    flat = np.frombuffer(content, header.dtype, math.prod(header.shape))
    flat = flat if flat.dtype.isnative else flat.astype(flat.dtype.newbyteorder("="))
    return flat.reshape(header.shape, order="F" if header.fortran_order else "C")


def _is_document(line: bytes) -> bool:
    try:
        parse_json(line, TraceError, finite=False)
    except TraceError:
        return False
    return True
