"""Bare arrays: are they per-token expert ids, or counts? And reading large ones piece by piece."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import ArrayHeader, Container, TraceFile, read_array_header
from eplb_cli.traces.protocol import ReadOptions

__all__ = ["COUNT_NAMES", "array_kind", "sample_rows", "stream_rows"]

COUNT_NAMES = ("counts", "expert_counts", "expert_load", "expert_loads", "loads", "load", "moe_load")
"""Names by which an array in a container says that it holds counts."""

MAX_TOP_K = 64
MAX_UNKNOWN_TOP_K = 16
MAX_EXPERTS = 1024
SAMPLE_ROWS = 64
TELLING_ROWS = 128
ROWS_BYTES = 8 << 20
MAX_ROW_BYTES = 4 << 20

Kind = Literal["ids", "counts", "ambiguous", "neither"]


def array_kind(shape: tuple[int, ...], dtype: np.dtype[Any], sample: npt.NDArray[Any], options: ReadOptions) -> Kind:
    """What a bare array of numbers is.

    Args:
        shape, dtype: of the array.
        sample: some of its first rows.
        options: E, top-k and the plan in force, when known, settle most cases.
    """
    if dtype.kind not in "iuf" or len(shape) not in (2, 3):
        return "neither"
    if len(shape) == 2:
        return "counts"
    last, experts = shape[2], options.num_experts
    plan = options.physical_to_logical
    if last in (experts, None if plan is None else plan.num_slots):
        return "counts"
    if last > MAX_TOP_K:
        return "counts"
    known = experts is not None or plan is not None
    if dtype.kind != "f" and (known or options.top_k == last or dtype.itemsize < 4):
        return "ids"
    return "ambiguous" if not known and _may_be_ids(sample) else "counts"


def _may_be_ids(sample: npt.NDArray[Any]) -> bool:
    """Many rows of small whole numbers, none of which is there twice, with sums that differ between layers.

    Counts of that many windows would repeat a number somewhere, or have the same total in every layer of a window.
    """
    if not sample.size or not np.isfinite(sample).all() or sample.shape[-1] > MAX_UNKNOWN_TOP_K:
        return False
    ordered = np.sort(sample.astype(np.int64), axis=-1).reshape(-1, sample.shape[-1])
    told = ordered[ordered[:, 0] != ordered[:, -1]]  # rows of padding or zeros tell nothing
    repeated = (told[:, 1:] == told[:, :-1]) & (told[:, 1:] >= 0)
    totals = sample.sum(2)
    return bool(
        len(told) >= TELLING_ROWS
        and told.max() < MAX_EXPERTS
        and not repeated.any()
        and (totals != totals[:, :1]).any()
    )


def sample_rows(file: TraceFile, header: ArrayHeader) -> npt.NDArray[Any]:
    """Some of the first rows of a .npy file; none when it is empty, column-major or no numbers."""
    if header.fortran_order or not header.shape or 0 in header.shape or header.dtype.kind not in "iuf":
        return np.zeros((0, *header.shape[1:]))
    row = header.nbytes // header.shape[0]
    rows = max(1, min(header.shape[0], SAMPLE_ROWS, (1 << 22) // max(1, row)))
    with file.open() as stream:
        stream.seek(header.offset)
        content = stream.read(rows * row)
    return np.frombuffer(content, header.dtype).reshape(rows, *header.shape[1:])


def stream_rows(file: TraceFile, key: str | None = None) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """Consecutive (first row, rows) of a .npy file, or of one array of a .npz, a few megabytes at a time.

    Raises:
        TraceError: the array is cut or damaged.
    """
    if file.container is Container.npy:
        header = file.npy_header
        if header.fortran_order:
            yield from _column_major(file, header)
            return
        with file.stream() as stream:
            header = read_array_header(stream, file.name)  # type: ignore[arg-type]
            yield from _rows(stream, header, file.name)
            file.finish(stream)
        return
    with file.archive() as archive, archive.open(f"{key}.npy") as member:
        header = read_array_header(member, f"{file.name}[{key}]")  # type: ignore[arg-type]
        if header.fortran_order:
            array = file.npz_array(str(key))
            yield from ((start, array[start : start + 4096]) for start in range(0, len(array), 4096))
            return
        yield from _rows(member, header, f"{file.name}[{key}]")  # type: ignore[arg-type]


def _column_major(file: TraceFile, header: ArrayHeader) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    mapped = np.load(file.path, mmap_mode="r")
    rows = max(1, ROWS_BYTES // max(1, header.nbytes // max(1, header.shape[0])))
    for start in range(0, header.shape[0], rows):
        yield start, np.ascontiguousarray(mapped[start : start + rows])


def _rows(
    stream: io.RawIOBase | io.BufferedIOBase, header: ArrayHeader, name: str
) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    total, *rest = header.shape
    row_bytes = header.nbytes // total if total else 0
    if row_bytes > MAX_ROW_BYTES:
        raise TraceError(f"has rows of {row_bytes:,} bytes", file=name, rule=f"a token has at most {MAX_ROW_BYTES:,}")
    rows = max(1, ROWS_BYTES // max(1, row_bytes))
    for start in range(0, total, rows):
        count = min(rows, total - start)
        buffer = np.empty(count * row_bytes, np.uint8)
        view, filled = memoryview(buffer.data), 0
        while filled < len(view):
            got = stream.readinto(view[filled:])
            if not got:
                raise TraceError(f"is cut: row {start + filled // max(1, row_bytes)} of {total} is missing", file=name)
            filled += got
        array: npt.NDArray[Any] = buffer.view(header.dtype).reshape(count, *rest)
        yield start, array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
