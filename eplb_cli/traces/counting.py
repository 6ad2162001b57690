"""Per-token expert ids into counts, at the speed of memory, on all cores."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eplb_cli.traces.bit_counting import count_sets

__all__ = ["BadExpertIdError", "Loop", "OrderedPool", "Ranges", "Tally", "count_token_ids", "within"]

PADDING = -1

Ranges = tuple[tuple[int, int], ...]
"""Ids by first and last, both among them."""

T = TypeVar("T")


class Loop(StrEnum):
    """How ids are counted."""

    numpy = "numpy"
    """At once, without compiling anything."""
    compiled = "compiled"
    """A second to compile, then some fifteen times as fast."""
    sets = "sets"
    """Three seconds to compile, then twice as fast again for one-byte ids where it applies; else as `compiled`."""


class BadExpertIdError(Exception):
    """An id that no expert has, with its place inside the piece that was counted."""

    def __init__(self, row: int, layer: int, column: int, value: int) -> None:
        super().__init__(value)
        self.row, self.layer, self.column, self.value = row, layer, column, value


@dataclass(frozen=True, eq=False)
class Tally:
    """Counts of a piece of a trace.

    Args:
        counts: int64 [layers, E].
        tokens: rows with at least one pick.
        padding_rows: rows without any pick.
        padding_ids: -1 in rows that do have picks.
        ignored_ids: placeholder ids left out.
    """

    counts: npt.NDArray[np.int64]
    tokens: int
    padding_rows: int
    padding_ids: int
    ignored_ids: int


def within(ids: npt.NDArray[np.integer], ranges: Ranges) -> npt.NDArray[np.bool_]:
    """True where an id lies in one of the ranges."""
    found = np.zeros(ids.shape, bool)
    for first, last in ranges:
        found |= (ids >= first) & (ids <= last)
    return found


def count_token_ids(
    ids: npt.NDArray[np.integer],
    layers: npt.NDArray[np.int64],
    num_experts: int,
    ignore: Ranges = (),
    loop: Loop = Loop.numpy,
) -> Tally:
    """Count the picks of each expert in each of some layers.

    Args:
        ids: integers [tokens, all layers, k]; -1 is padding.
        layers: int64 [L], positions on the layer axis that are counted.
        num_experts: E; every id must be below.
        ignore: placeholder ids that are left out.
        loop: how; all give the same.

    Raises:
        BadExpertIdError: an id is below -1, or E and above, in one of the layers.
    """
    if loop is Loop.numpy:
        table = _numpy_columns(ids, layers, num_experts, ignore)
    else:
        table = _compiled_columns(ids, layers, num_experts, ignore, sets=loop is Loop.sets)
    if table[:, -1].any():
        _raise_bad(ids, layers, num_experts, ignore)
    padding, ignored = int(table[:, 0].sum()), int(table[:, 1].sum())
    empty_rows = 0
    if padding or ignored:
        absent = ids[:, layers] == PADDING
        absent |= within(ids[:, layers], ignore)
        empty_rows = int(absent.all(axis=(1, 2)).sum())
        row_padding = int((ids[:, layers] == PADDING).all(axis=(1, 2)).sum()) * len(layers) * ids.shape[2]
        padding -= row_padding
    return Tally(table[:, 2:-1], len(ids) - empty_rows, empty_rows, padding, ignored)


def _numpy_columns(
    ids: npt.NDArray[np.integer], layers: npt.NDArray[np.int64], num_experts: int, ignore: Ranges
) -> npt.NDArray[np.int64]:
    """int64 [L, E + 3]: padding, ignored, the experts, ids out of range."""
    width = num_experts + 3
    values = ids[:, layers].astype(np.int64)
    code = np.where((values < PADDING) | (values >= num_experts), num_experts + 2, values + 2)
    code[values == PADDING] = 0
    code[within(values, ignore)] = 1
    code += width * np.arange(len(layers))[None, :, None]
    return np.bincount(code.ravel(), minlength=width * len(layers)).reshape(len(layers), width)


def _compiled_columns(
    ids: npt.NDArray[np.integer], layers: npt.NDArray[np.int64], num_experts: int, ignore: Ranges, *, sets: bool
) -> npt.NDArray[np.int64]:
    table = np.zeros((len(layers), num_experts + 3), np.int64)
    if ids.dtype == np.uint8:
        raw = np.zeros((len(layers), 256), np.uint32)
        counted = count_sets(ids.view(np.uint8), layers) if sets and num_experts <= 128 else None
        if counted is None:
            byte_loop()(ids, layers, raw)
        else:
            raw[:, :128] = counted
        ignored = within(np.arange(256), ignore)
        table[:, 1] = raw[:, ignored].sum(1)
        raw[:, ignored] = 0
        known = min(num_experts, 256)
        table[:, 2 : 2 + known] = raw[:, :known]
        table[:, -1] = raw[:, known:].sum(1)
    else:
        wide_loop()(ids, layers, np.array(ignore, np.int64).reshape(-1, 2), num_experts, table)
    return table


@cache
def byte_loop() -> Callable[..., None]:
    """The loop over one-byte ids: no comparison inside, all 256 values have a counter."""
    from numba import njit  # type: ignore[import-untyped, unused-ignore]

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def loop(ids: Any, layers: Any, table: Any) -> None:
        for token in range(ids.shape[0]):
            for row in range(layers.shape[0]):
                counters = table[row]
                picks = ids[token, layers[row]]
                for j in range(picks.shape[0]):
                    counters[picks[j]] += np.uint32(1)

    return loop  # type: ignore[no-any-return, unused-ignore]


@cache
def wide_loop() -> Callable[..., None]:
    """The loop over ids of two bytes and more."""
    from numba import njit  # type: ignore[import-untyped, unused-ignore]

    @njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
    def loop(ids: Any, layers: Any, ignore: Any, num_experts: Any, table: Any) -> None:
        for token in range(ids.shape[0]):
            for row in range(layers.shape[0]):
                for j in range(ids.shape[2]):
                    value = np.int64(ids[token, layers[row], j])
                    ignored = False
                    for i in range(ignore.shape[0]):
                        ignored |= ignore[i, 0] <= value <= ignore[i, 1]
                    if ignored:
                        table[row, 1] += 1
                    elif 0 <= value < num_experts:
                        table[row, value + 2] += 1
                    elif value == -1:
                        table[row, 0] += 1
                    else:
                        table[row, num_experts + 2] += 1

    return loop  # type: ignore[no-any-return, unused-ignore]


def _raise_bad(ids: npt.NDArray[np.integer], layers: npt.NDArray[np.int64], num_experts: int, ignore: Ranges) -> None:
    values = ids[:, layers].astype(np.int64)
    bad = (values < PADDING) | (values >= num_experts)
    bad &= ~within(values, ignore)
    row, layer, column = (int(i) for i in np.argwhere(bad)[0])
    raise BadExpertIdError(row, int(layers[layer]), column, int(values[row, layer, column]))


class OrderedPool:
    """Threads that work ahead while results are taken in the order of the tasks.

    The work must release the interpreter lock. At most two tasks a thread wait, so memory stays constant.
    """

    def __init__(self, workers: int | None = None) -> None:
        self.workers = workers or len(os.sched_getaffinity(0))
        self._pool = ThreadPoolExecutor(self.workers)
        self._pending: deque[tuple[Future[Any], Callable[[Any], None]]] = deque()

    def submit(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run `work` in a thread, and `then` on its result in this one, after those of all earlier tasks."""
        if len(self._pending) >= 2 * self.workers:
            self._take()
        self._pending.append((self._pool.submit(work), then))

    def _take(self) -> None:
        future, then = self._pending.popleft()
        then(future.result())

    def drain(self) -> None:
        """Wait for all tasks."""
        while self._pending:
            self._take()

    def __enter__(self) -> OrderedPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pending.clear()
        self._pool.shutdown(cancel_futures=True)


def pieces(length: int, size: int) -> Iterator[tuple[int, int]]:
    """Consecutive [start, stop) of at most `size` that cover `length`."""
    for start in range(0, length, size):
        yield start, min(start + size, length)
