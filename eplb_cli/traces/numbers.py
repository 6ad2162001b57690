"""Counts as recorded into int64 counts per logical expert."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.untrusted import shown

__all__ = ["fold_physical", "integral_counts", "number_of_key", "whole_number"]

MOST = 1 << 62
"""Largest step, token or other number of a recording: sums of two still fit in 64 bits."""

RULE = "loads must be whole numbers, finite and >= 0"


def whole_number(value: object, what: str, file: str, *, row: int | None = None, most: int = MOST) -> int:
    """`value`, which must be a whole number 0..most.

    Raises:
        TraceError: it is of another type, or out of range.
    """
    if type(value) is not int or not 0 <= value <= most:
        raise TraceError(f"{what} is {shown(value)}", file=file, row=row, rule=f"a whole number 0..{most} is expected")
    return value


def number_of_key(key: str, what: str, file: str) -> int:
    """The layer or expert that a key of JSON is.

    Raises:
        TraceError: it is no number, or one of more than nine digits.
    """
    if not (key.isascii() and key.isdigit() and len(key) <= 9):
        raise TraceError(f"{what} is {shown(key)}", file=file, rule="a whole number of at most nine digits is expected")
    return int(key)


def integral_counts(counts: npt.NDArray[Any], layer_ids: npt.NDArray[np.int64], file: str) -> npt.NDArray[np.int64]:
    """Counts [n, layers, columns] as int64; floats are accepted when every one is integral.

    Raises:
        TraceError: NaN, infinity, a negative or fractional number, or one beyond 64 bits, with its layer and expert.
    """
    if counts.dtype.kind not in "iuf":
        raise TraceError(f"holds {counts.dtype} values", file=file, rule=RULE)
    if counts.dtype.kind == "i":
        bad = counts < 0
    elif counts.dtype.kind == "u":
        bad = counts > np.uint64(np.iinfo(np.int64).max)
    else:
        with np.errstate(invalid="ignore", over="ignore"):  # 2^63 is inf as float16
            bad = ~((counts >= 0) & (counts < 2.0**63) & (np.floor(counts) == counts))
    if bad.any():
        window, layer, column = (int(i) for i in np.argwhere(bad)[0])
        value = counts[window, layer, column].item()
        raise TraceError(
            f"load is {value}" + (f" in window {window}" if len(counts) > 1 else ""),
            file=file,
            layer=int(layer_ids[layer]) if layer_ids[layer] >= 0 else layer,
            expert=column,
            rule=RULE,
            hint="Are these frequencies? Only counts can be read."
            if counts.dtype.kind == "f" and 0 < value < 1
            else None,
        )
    return counts.astype(np.int64, copy=False)


def fold_physical(
    counts: npt.NDArray[np.int64], physical_to_logical: npt.NDArray[Any], num_experts: int
) -> npt.NDArray[np.int64]:
    """Add the slots of each logical expert: int64 [n, L, P] and a map [L, P] into int64 [n, L, E].

    Slots whose map is -1 hold no expert and are left out.
    """
    windows, layers, slots = counts.shape
    folded = np.zeros((windows, layers, num_experts + 1), np.int64)
    row = np.broadcast_to(np.arange(layers)[:, None], (layers, slots))
    target = np.where(physical_to_logical < 0, num_experts, physical_to_logical).astype(np.int64)
    for window in range(windows):
        np.add.at(folded[window], (row, target), counts[window])
    return folded[..., :num_experts]
