"""Per-token expert ids in numpy files: [tokens, layers, k], of any recorder, vLLM's `routed_experts` among them.

A .npy file holds the array alone. A .npz file holds it as `topk_ids` or `routed_experts`, and may add `layer_ids`
(absolute decoder layers of the layer axis), `seq_lens` (tokens of each sequence, in order), `prompt_lens` (how many of
them are the prompt) and `session_ids` (sequences of one conversation, each of which repeats the one before).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.traces.arrays import COUNT_NAMES, array_kind, sample_rows, stream_rows
from eplb_cli.traces.files import ArrayHeader, Container, TraceFile
from eplb_cli.traces.protocol import (
    ALL,
    DECODE,
    PREFILL,
    LayerAxis,
    Match,
    ReadOptions,
    Recording,
    TokenBlock,
    matches,
    near_miss,
    no_match,
)

__all__ = ["TokenIdsReader"]

KEYS = ("topk_ids", "routed_experts")


class TokenIdsReader:
    """.npy and .npz traces of expert ids."""

    name = "token-ids"
    looks_for = "a .npy of integers [tokens, layers, top-k], or a .npz with `topk_ids`"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """Three axes of integers, the last too short to be the experts."""
        if file.container is Container.npz:
            headers = file.npz_headers()
            key = _key(headers)
            if key is not None and key not in KEYS:
                if key in COUNT_NAMES:
                    return no_match(f"`{key}` holds counts")
                only = headers[key]
                kind = array_kind(only.shape, only.dtype, np.zeros((0, *only.shape[1:])), options)
                return matches("its one array is [tokens, layers, top-k]", 65) if kind == "ids" else no_match()
            if key is None:
                return near_miss(f"the archive holds {sorted(headers)}, not `topk_ids`")
            if len(headers[key].shape) != 3 or headers[key].dtype.kind not in "iu":
                return near_miss(f"`{key}` is {headers[key].dtype} {list(headers[key].shape)}, not [tokens, layers, k]")
            return matches(f"holds `{key}`", 95)
        if file.container is not Container.npy:
            return no_match()
        header = file.npy_header
        kind = array_kind(header.shape, header.dtype, sample_rows(file, header), options)
        if kind == "ids":
            return matches(f"{header.dtype} {list(header.shape)} is [tokens, layers, top-k]")
        return near_miss(
            f"{header.dtype} {list(header.shape)} may be [tokens, layers, top-k] or [windows, layers, experts]; "
            "pass --model or --num-experts"
            if kind == "ambiguous"
            else f"{header.dtype} {list(header.shape)} is not [tokens, layers, top-k]",
            45 if kind == "ambiguous" else 10,
        )

    def read(self, recording: Recording) -> Iterator[TokenBlock]:
        """Blocks of a few megabytes; a sequence is cut where the prompt ends or a conversation's new turn begins."""
        recording.expected_tokens = sum(_tokens_of(file) for file in recording.files)
        for file in recording.files:
            yield from _read_file(file, recording)


def _key(headers: Mapping[str, ArrayHeader]) -> str | None:
    """The array that holds the ids: of a telling name, or the only one."""
    named = next((key for key in KEYS if key in headers), None)
    return named or (next(iter(headers)) if len(headers) == 1 else None)


def _tokens_of(file: TraceFile) -> int:
    """Length of the first axis, as the header says; 0 for what is no trace, which is refused when it is read."""
    if file.container is Container.npy:
        return (*file.npy_header.shape, 0)[0]
    headers = file.npz_headers()
    key = _key(headers)
    return 0 if key is None else (*headers[key].shape, 0)[0]


def _read_file(file: TraceFile, recording: Recording) -> Iterator[TokenBlock]:
    options = recording.options
    key, extras = None, {}
    if file.container is Container.npz:
        headers = file.npz_headers()
        key = _key(headers)
        if key is None:
            raise TraceError(f"the archive holds {sorted(headers)}", file=file.name, rule="`topk_ids` is expected")
        header = headers[key]
        names = {"layer_ids", "seq_lens", "prompt_lens", "session_ids", "num_experts"} & headers.keys()
        extras = {name: file.npz_array(name) for name in names}
    else:
        header = file.npy_header
    if len(header.shape) != 3 or header.dtype.kind not in "iu":
        raise TraceError(
            f"is {header.dtype} {list(header.shape)}", file=file.name, rule="ids are integers [tokens, layers, top-k]"
        )
    total, layers, _ = header.shape
    told = extras.get("num_experts")
    if told is not None and options.num_experts is not None and int(told) != options.num_experts:
        raise TraceError(
            f"was recorded with {int(told)} experts", file=file.name, rule=f"the model has {options.num_experts}"
        )
    axis = LayerAxis(layers)
    if "layer_ids" in extras:
        if extras["layer_ids"].shape != (layers,):
            raise TraceError(
                f"names {extras['layer_ids'].size} layers", file=file.name, rule=f"its layer axis has {layers}"
            )
        axis = LayerAxis.absolute(extras["layer_ids"].tolist())
    if total == 0:
        recording.warnings.append(f"{file.label} holds no token: {list(header.shape)}")
        yield TokenBlock(np.zeros((0, *header.shape[1:]), np.int64), axis, file.name)
        return
    cuts = _cuts(total, extras, options, recording, file)
    lengths = extras.get("seq_lens", np.array([total]))
    starts = np.cumsum(lengths) - lengths
    for first_row, rows in stream_rows(file, key):
        if "session_ids" not in extras:
            here = (starts >= first_row) & (starts < first_row + len(rows))
            for start, length in zip(starts[here].tolist(), lengths[here].tolist(), strict=True):
                recording.watch_prefix(rows[start - first_row : start - first_row + length])
        for start, stop, phase in cuts.within(first_row, first_row + len(rows)):
            yield TokenBlock(rows[start - first_row : stop - first_row], axis, file.name, start, phase)


class _Cuts:
    """Stretches [start, stop) of one phase that are kept, in order."""

    def __init__(self, stretches: list[tuple[int, int, int]]) -> None:
        self._stretches = stretches
        self._next = 0

    def within(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The parts that lie in [start, stop); each call goes on where the one before stopped."""
        while self._next < len(self._stretches):
            first, last, phase = self._stretches[self._next]
            if first >= stop:
                return
            yield max(first, start), min(last, stop), phase
            if last > stop:
                return
            self._next += 1


def _cuts(
    total: int, extras: dict[str, npt.NDArray[Any]], options: ReadOptions, recording: Recording, file: TraceFile
) -> _Cuts:
    lengths = extras.get("seq_lens", np.array([total]))
    if lengths.ndim != 1 or (lengths < 0).any() or int(lengths.sum()) != total:
        raise TraceError(
            f"seq_lens add up to {int(lengths.sum())}", file=file.name, rule=f"the trace has {total} tokens"
        )
    prompts = extras.get("prompt_lens")
    if prompts is None and options.prompt_rows is not None:
        prompts = np.full(len(lengths), options.prompt_rows)
    elif prompts is not None and options.prompt_rows is not None:
        raise UsageError("the trace tells the prompts itself (prompt_lens)", file=file.name, hint="Drop --prompt-rows.")
    sessions = extras.get("session_ids")
    for name, array in (("prompt_lens", prompts), ("session_ids", sessions)):
        if array is not None and array.shape != lengths.shape:
            raise TraceError(f"{name} has {array.size} entries", file=file.name, rule=f"seq_lens has {len(lengths)}")
    if prompts is None and sessions is None:
        return _Cuts([(0, total, ALL)])
    stretches: list[tuple[int, int, int]] = []
    seen: dict[Any, int] = {}
    start = 0
    for index, length in enumerate(lengths.tolist()):
        new = start
        if sessions is not None:
            session = sessions[index].item()
            repeated = min(seen.get(session, 0), length)
            recording.drop("repeated_prefix_tokens", repeated)
            new = start + repeated
            seen[session] = max(length, seen.get(session, 0))
        end = start + length
        if prompts is None:
            stretches.append((new, end, ALL))
        else:
            boundary = min(start + int(prompts[index]), end)
            stretches += [(new, boundary, PREFILL), (max(new, boundary), end, DECODE)]
        start = end
    return _Cuts([(first, last, phase) for first, last, phase in stretches if first < last])
