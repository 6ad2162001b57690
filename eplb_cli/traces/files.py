"""A trace file: what kind of container it is, seen from its first bytes, and safe ways to read it."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.files import sha256_of_file

if TYPE_CHECKING:
    import torch

__all__ = ["ArrayHeader", "Container", "TraceFile", "natural_key", "read_array_header"]

HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 30
"""A JSONL record longer than this is refused: no recorder writes one."""
CHUNK_BYTES = 4 << 20
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
        TraceError: the header is damaged, or the array holds Python objects.
    """
    try:
        version = np.lib.format.read_magic(stream)  # type: ignore[no-untyped-call]
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(stream)  # type: ignore[no-untyped-call]
    except (ValueError, EOFError, KeyError, SyntaxError) as error:
        raise TraceError(f"has a damaged .npy header ({error})", file=name) from error
    if dtype.hasobject:
        raise TraceError("holds pickled Python objects", file=name, rule="only plain arrays are read")
    return ArrayHeader(shape, fortran_order, dtype, stream.tell())


class _HashingReader(io.RawIOBase):
    """Reads a file from its start to its end, digesting and reporting what passes."""

    def __init__(self, path: Path, advance: Callable[[int], None], *, digest: bool) -> None:
        self._stream = path.open("rb", buffering=0)
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
        return self.path.stat().st_size

    @cached_property
    def head(self) -> bytes:
        """The first bytes."""
        with self.path.open("rb") as stream:
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

    def _zip_kind(self) -> Container:
        try:
            with zipfile.ZipFile(self.path) as archive:
                names = archive.namelist()
        except (zipfile.BadZipFile, OSError):
            raise TraceError(
                "is a damaged or cut archive (.npz or .pt)", file=self.name, hint="Copy it again."
            ) from None
        if any(name.endswith("data.pkl") for name in names):
            return Container.torch
        return Container.npz if names and all(name.endswith(".npy") for name in names) else Container.unknown

    def _is_jsonl(self) -> bool:
        """True when the first line is a document of its own and something follows it."""
        with self.path.open("rb") as stream:
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

    def read_bytes(self) -> bytes:
        """The whole content, digested."""
        content = self.path.read_bytes()
        self._sha256 = hashlib.sha256(content).hexdigest()
        self._advance(len(content))
        return content

    @cached_property
    def document(self) -> Any:
        """The content of a JSON file. NaN and Infinity become floats, so that whoever meets them can say where.

        Raises:
            TraceError: it is not JSON.
        """
        return _parse_json(self.read_bytes(), self.name)

    @cached_property
    def first_record(self) -> Any:
        """The JSON document, or the first line's document of a JSONL file; None for anything else."""
        if self.container is Container.json:
            return self.document
        if self.container is not Container.jsonl:
            return None
        with self.path.open("rb") as stream:
            line = stream.readline(MAX_LINE_BYTES)
            while not line.strip():
                line = stream.readline(MAX_LINE_BYTES)
        return json.loads(line)

    def records(self) -> Iterator[tuple[int, Any, bool]]:
        """Each record of a JSONL file with its line number from 1, and whether it is the cut last line (then None).

        A JSON file counts as one record.

        Raises:
            TraceError: a line that is not the last is not JSON.
        """
        if self.container is Container.json:
            yield 1, self.document, False
            return
        number = 0
        broken: tuple[int, str] | None = None
        stream = self.stream()
        for line in io.BufferedReader(stream, CHUNK_BYTES):
            number += 1
            if not line.strip():
                continue
            if broken:
                raise TraceError(f"line {broken[0]} is not JSON: {broken[1]}", file=self.name)
            try:
                yield number, _loads(line), False
            except ValueError as error:
                broken = (number, str(error))
        self._keep_digest(stream)
        if broken:
            yield broken[0], None, True

    def npz_headers(self) -> Mapping[str, ArrayHeader]:
        """Name -> header of each array in an archive."""
        headers = {}
        with zipfile.ZipFile(self.path) as archive:
            for member in archive.namelist():
                with archive.open(member) as stream:
                    headers[member.removesuffix(".npy")] = read_array_header(stream, f"{self.name}[{member}]")  # type: ignore[arg-type]
        return headers

    def npz_array(self, key: str) -> npt.NDArray[Any]:
        """One array of an archive, whole."""
        with zipfile.ZipFile(self.path) as archive, archive.open(f"{key}.npy") as stream:
            try:
                array: npt.NDArray[Any] = np.lib.format.read_array(stream, allow_pickle=False)  # type: ignore[no-untyped-call]
            except (ValueError, EOFError, zipfile.BadZipFile) as error:
                raise TraceError(f"array {key} cannot be read ({error})", file=self.name) from error
        return array

    @cached_property
    def npy_header(self) -> ArrayHeader:
        """Header of a .npy file.

        Raises:
            TraceError: it is damaged, or the file is shorter than it says.
        """
        with self.path.open("rb") as stream:
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
        content = self.read_bytes()
        flat = np.frombuffer(content, header.dtype, header.nbytes // header.dtype.itemsize, header.offset)
        return flat.reshape(header.shape, order="F" if header.fortran_order else "C")

    def safetensors_header(self) -> Mapping[str, Any]:
        """Name -> {dtype, shape, data_offsets}, and `__metadata__`."""
        length = struct.unpack("<Q", self.head[:8])[0]
        with self.path.open("rb") as stream:
            stream.seek(8)
            try:
                header = json.loads(stream.read(length))
            except ValueError as error:
                raise TraceError(f"has a damaged safetensors header ({error})", file=self.name) from error
        if not isinstance(header, dict):
            raise TraceError("has a damaged safetensors header", file=self.name)
        return header

    @cached_property
    def torch_object(self) -> Any:
        """The content of a torch file, loaded without running any code of it, onto the CPU.

        Raises:
            TraceError: it holds anything but tensors and plain containers, or is damaged.
        """
        import pickle
        import warnings

        import torch

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # on pickle protocols: what cannot be read raises
                return torch.load(self.path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0] if str(error) else "unknown"
            raise TraceError(
                "holds pickled Python objects beyond tensors, numbers and containers",
                file=self.name,
                rule="unpickling runs whatever code the file names, so it is refused",
                hint=f"torch says: {reason}",
            ) from None
        except (RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise TraceError(f"cannot be read as a torch file ({reason})", file=self.name) from error

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


def _is_document(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _loads(content: bytes) -> Any:
    """Parse JSON fast; what the fast parser refuses (NaN, Infinity, huge integers) goes to the standard one."""
    import msgspec

    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return json.loads(content)


def _parse_json(content: bytes, name: str) -> Any:
    try:
        return _loads(content.removeprefix(b"\xef\xbb\xbf"))
    except (ValueError, UnicodeDecodeError) as error:
        raise TraceError(f"is not JSON: {error}", file=name) from None
    except RecursionError:
        raise TraceError("is JSON nested too deep to be a trace", file=name) from None
