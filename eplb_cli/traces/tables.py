"""Text tables: delimited rows of whole numbers, with a header or without."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.untrusted import shown

__all__ = ["csv_header", "csv_rows", "number", "number_matrix"]


def csv_header(file: TraceFile) -> list[str]:
    """Column names of a text file's first line, or the cells themselves when there are none; [] for other files."""
    if file.container is not Container.text:
        return []
    line = file.head.split(b"\n", 1)[0].decode("utf-8", "replace").strip().lstrip("\ufeff")
    return [cell.strip() for cell in line.split(",")]


def csv_rows(file: TraceFile, columns: int, *, header: bool) -> Iterator[tuple[int, list[str]]]:
    """Line number from 1 and cells of each row; every row must have `columns` cells.

    Raises:
        TraceError: a row has another number of cells.
    """
    for line, text in enumerate(file.read_bytes().decode("utf-8", "replace").splitlines(), 1):
        if not text.strip() or (header and line == 1):
            continue
        cells = [cell.strip() for cell in text.split(",")]
        if len(cells) != columns:
            raise TraceError(f"has {len(cells)} cells", file=file.name, row=line, rule=f"{columns} are expected")
        yield line, cells


def number(cell: str, file: TraceFile, line: int, column: str) -> int:
    """A cell as a whole number >= 0; an integral float is accepted.

    Raises:
        TraceError: it is none.
    """
    try:
        value = int(cell) if cell.isdigit() else _integral(float(cell))
        if value >= 2**62:
            raise ValueError(value)
    except (ValueError, OverflowError):
        raise TraceError(
            f"{column} is {shown(cell)}", file=file.name, row=line, rule="loads must be whole numbers, finite and >= 0"
        ) from None
    return value


def _integral(value: float) -> int:
    if value < 0 or value != int(value):
        raise ValueError(value)
    return int(value)


def number_matrix(file: TraceFile, delimiter: str | None) -> npt.NDArray[np.int64]:
    """All lines as rows of whole numbers, int64 [rows, columns]; None splits at white space.

    Raises:
        TraceError: a cell is no whole number >= 0, or rows differ in length.
    """
    rows: list[list[int]] = []
    for line, text in enumerate(file.read_bytes().decode("utf-8", "replace").splitlines(), 1):
        cells = [cell.strip() for cell in text.strip().strip(delimiter or " ").split(delimiter)]
        if cells in ([], [""]):
            continue
        rows.append([number(cell, file, line, f"column {i}") for i, cell in enumerate(cells)])
        if len(rows[-1]) != len(rows[0]):
            raise TraceError(
                f"has {len(rows[-1])} cells", file=file.name, row=line, rule=f"the first row has {len(rows[0])}"
            )
    return np.array(rows, np.int64).reshape(len(rows), len(rows[0]) if rows else 0)
