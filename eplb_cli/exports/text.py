"""JSON of placement files: strict on the way in, stable to the byte on the way out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import PlacementError

__all__ = ["integer", "row_lines", "rows_of", "section"]


def section(document: Any, keys: set[str], what: str, *, optional: frozenset[str] = frozenset()) -> Mapping[str, Any]:
    """`document` as an object with exactly these keys.

    Raises:
        PlacementError: it is none, lacks a key, or has one more.
    """
    if not isinstance(document, dict):
        raise PlacementError(f"{what} is not an object")
    missing, unknown = keys - document.keys(), document.keys() - keys - optional
    if missing or unknown:
        raise PlacementError(
            f"{what} lacks {sorted(missing)}" if missing else f"{what} has the unknown keys {sorted(unknown)}",
            rule=f"its keys must be {sorted(keys)}",
        )
    return document


def integer(value: Any, what: str) -> int:
    """A whole number >= 0.

    Raises:
        PlacementError: it is none.
    """
    if type(value) is not int or value < 0:
        raise PlacementError(f"{what} is {value!r}", rule="a whole number >= 0 is expected")
    return value


def rows_of(value: Any, what: str) -> npt.NDArray[np.int64]:
    """A list of equally long lists of whole numbers, int64 [n, P].

    Raises:
        PlacementError: it is none, with the row that is not.
    """
    if not isinstance(value, list) or not value:
        raise PlacementError(f"{what} is no list of rows")
    for index, row in enumerate(value):
        if not isinstance(row, list) or not row or any(type(expert) is not int for expert in row):
            raise PlacementError(f"{what}: row {index} is no list of whole numbers")
        if len(row) != len(value[0]):
            raise PlacementError(
                f"{what}: row {index} has {len(row)} slots", rule=f"row 0 has {len(value[0])}; all layers have as many"
            )
        if max(row) >= 2**31 or min(row) < -(2**31):
            raise PlacementError(f"{what}: row {index} holds {max(row, key=abs)}", rule="ids fit in 32 bits")
    return np.array(value, np.int64)


def row_lines(rows: npt.NDArray[np.int32]) -> str:
    """Rows as JSON, one a line."""
    return ",\n".join(json.dumps(row.tolist()) for row in rows)
