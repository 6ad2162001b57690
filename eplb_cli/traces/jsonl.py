"""Large JSONL, parsed on all cores: a batch of lines a task, each into arrays."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import CHUNK_BYTES, MAX_LINE_BYTES, TraceFile
from eplb_cli.traces.protocol import Recording

__all__ = ["RouteLines", "parse_routes", "read_routes"]

PARALLEL_FROM_BYTES = 64 << 20
"""Files from this size on are worth starting processes."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class RouteLines:
    """Routes of a batch of lines.

    Args:
        lines: lines in the batch.
        layer: int32 [n]. ids: int32 [n, k].
        layers_logged: from a meta record, ascending; None when the batch holds none.
        others: records of other types.
        cut: the last line has no end and is no JSON.
    """

    lines: int
    layer: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    layers_logged: list[int] | None
    others: int
    cut: bool


class _BadLineError(Exception):
    """Line of the batch, from 0, and what is wrong with it."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(line, problem)
        self.line, self.problem = line, problem


_Number = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)]


class _Route(msgspec.Struct, gc=False):
    type: str = ""
    layer: _Number = -1
    topk_ids: tuple[_Number, ...] = ()
    layers_logged: tuple[_Number, ...] | None = None


def read_routes(file: TraceFile, recording: Recording) -> Iterator[RouteLines]:
    """Batches in the file's order. A last line without its end that is no JSON is left out with a warning.

    Raises:
        TraceError: a line is not JSON, or not a route as expected.
    """
    before = 0
    results = _parsed(file, parse_routes)
    while True:
        try:
            batch = next(results)
        except StopIteration:
            return
        except _BadLineError as bad:
            raise TraceError(bad.problem, file=file.name, row=before + bad.line + 1) from None
        before += batch.lines
        if batch.cut:
            recording.warnings.append(f"{file.label}: the last line ({before}) is cut and was left out")
        recording.drop("other_records", batch.others)
        yield batch


def parse_routes(content: bytes) -> RouteLines:
    """Routes of whole lines, except perhaps the last.

    Raises:
        _BadLineError: a line is not JSON or not a route.
    """
    decoder = msgspec.json.Decoder(_Route)
    cut = False
    lines = content.count(b"\n") + (not content.endswith(b"\n"))
    try:
        records = decoder.decode_lines(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        records, cut = _decode_slowly(decoder, content)
    routes = [record for record in records if record.type == "route"]
    logged = sorted({layer for record in records for layer in record.layers_logged or ()})
    widths = {len(route.topk_ids) for route in routes}
    if len(widths) > 1 or 0 in widths or any(route.layer < 0 for route in routes):
        _find_odd(records)
    width = widths.pop() if widths else 0
    picks = chain.from_iterable(route.topk_ids for route in routes)
    ids = np.fromiter(picks, np.int32, len(routes) * width).reshape(len(routes), width)
    layer = np.fromiter((route.layer for route in routes), np.int32, len(routes))
    others = sum(record.type not in ("route", "meta") for record in records)
    return RouteLines(lines, layer, ids, logged or None, others, cut)


def _decode_slowly(decoder: msgspec.json.Decoder[_Route], content: bytes) -> tuple[list[_Route], bool]:
    """Line by line, to say which one is wrong."""
    records = []
    lines = content.split(b"\n")
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            records.append(decoder.decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            if index == len(lines) - 1 and not isinstance(error, msgspec.ValidationError):
                return records, True
            raise _BadLineError(index, f"is no route: {error}") from None
    return records, False


def _find_odd(records: list[_Route]) -> None:
    expected = next(len(record.topk_ids) for record in records if record.type == "route")
    for index, record in enumerate(records):
        if record.type == "route" and (not record.topk_ids or record.layer < 0 or len(record.topk_ids) != expected):
            raise _BadLineError(
                index, f"layer {record.layer} with {len(record.topk_ids)} ids, others hold {expected} ids and a layer"
            )


def _batches(file: TraceFile) -> Iterator[bytes]:
    """The file in pieces that end with a line, except perhaps the last."""
    with file.stream() as stream:
        rest = b""
        while content := stream.read(CHUNK_BYTES):
            head, end, tail = content.rpartition(b"\n")
            if end:
                yield rest + head + end
                rest = tail
            else:
                rest += content
                if len(rest) > MAX_LINE_BYTES:
                    raise TraceError(f"has a line of more than {MAX_LINE_BYTES:,} bytes", file=file.name)
        if rest:
            yield rest
        file.finish(stream)


def _parsed(file: TraceFile, parse: Callable[[bytes], T]) -> Iterator[T]:
    if file.size < PARALLEL_FROM_BYTES:
        yield from map(parse, _batches(file))
        return
    workers = len(os.sched_getaffinity(0))
    # Spawned, not forked: a fork would copy this process's threads in whatever state they are.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_leave_interrupts_to_the_parent)
    pending: deque[Future[T]] = deque()
    try:
        for batch in _batches(file):
            pending.append(pool.submit(parse, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
