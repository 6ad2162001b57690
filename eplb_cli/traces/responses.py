"""Per-request routing inside saved responses: finding each choice, its tokens and its phases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import Container, TraceFile
from eplb_cli.traces.protocol import ALL, DECODE, PREFILL, LayerAxis, Recording, TokenBlock
from eplb_cli.untrusted import parse_json, shown

__all__ = ["FIELD", "Choice", "blocks_of_choice", "choices_of_file", "first_payload"]

FIELD = "routed_experts"
MAX_DEPTH = 12


@dataclass(frozen=True)
class Choice:
    """The routing of one choice of one response.

    Args:
        payload: what the field holds: base64 text, or a nested list.
        line: line of the file, from 1.
        index: the choice's place in its response.
        siblings: choices in the response.
        prompt_tokens, completion_tokens, cached_tokens: of the response; None where it does not tell.
    """

    payload: Any
    line: int
    index: int
    siblings: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int


def choices_of_file(file: TraceFile, recording: Recording | None = None) -> Iterator[Choice]:
    """Every choice with routing, in the file's order. A cut last line is left out with a warning."""
    for line, record, cut in _records(file):
        if cut:
            if recording is not None:
                recording.warnings.append(f"{file.label}: the last line ({line}) is cut and was left out")
            continue
        for group in _responses(record, 0, f"{file.name} (line {line})"):
            payloads = [(index, payload) for index, payload in group.payloads if payload is not None]
            if recording is not None:
                recording.drop("choices_without_routing", len(group.payloads) - len(payloads))
            for index, payload in payloads:
                yield Choice(payload, line, index, len(group.payloads), group.prompt, group.completion, group.cached)


def first_payload(file: TraceFile) -> Any:
    """The first choice's routing, or None when the first record has none."""
    if file.container in (Container.json, Container.jsonl):
        record = file.first_record
    elif file.container is Container.text and file.head.lstrip().startswith(b"data:"):
        record = [item for _, item, cut in _records(file) if not cut]
    else:
        return None
    return next((p for group in _responses(record, 0, file.name) for _, p in group.payloads if p is not None), None)


def blocks_of_choice(
    ids: npt.NDArray[np.integer],
    choice: Choice,
    axis: LayerAxis,
    file: TraceFile,
    recording: Recording,
    start: int | None,
) -> Iterator[TokenBlock]:
    """Prompt and completion apart, without the tokens whose keys and values came from the prefix cache.

    Args:
        ids: [rows, layers, k]; row r routed the token at position start + r.
        start: position of the first row; None when the response does not tell, and the phase is then unknown.
    """
    name = f"{file.name} (line {choice.line}, choice {choice.index})"
    prompt = choice.prompt_tokens
    told = recording.options.prompt_rows
    if start is None or prompt is None:
        prompt, start, cached = told, 0, 0
    else:
        cached = min(max(choice.cached_tokens - start, 0), len(ids))
    recording.drop("cached_prefix_tokens", cached)
    if not start and not cached and not choice.index:
        recording.watch_prefix(ids)
    if prompt is None:
        yield TokenBlock(ids[cached:], axis, name, cached, ALL)
        return
    boundary = min(max(prompt - start, cached), len(ids))
    yield TokenBlock(ids[cached:boundary], axis, name, cached, PREFILL)
    yield TokenBlock(ids[boundary:], axis, name, boundary, DECODE)


@dataclass(frozen=True)
class _Response:
    payloads: list[tuple[int, Any]]
    prompt: int | None
    completion: int | None
    cached: int


def _responses(record: Any, depth: int, where: str) -> Iterator[_Response]:
    """Responses anywhere inside a record: OpenAI's `choices`, SGLang's `meta_info`, or a bare `routed_experts`."""
    if depth > MAX_DEPTH:
        return
    if isinstance(record, list):
        for item in record:
            yield from _responses(item, depth + 1, where)
        return
    if not isinstance(record, dict):
        return
    choices = record.get("choices")
    if isinstance(choices, list) and any(isinstance(c, dict) and _payload(c) is not None for c in choices):
        usage = _told(record, "usage", dict, where) or {}
        details = _told(usage, "prompt_tokens_details", dict, where) or {}
        yield _Response(
            [(i, _payload(choice)) for i, choice in enumerate(choices) if isinstance(choice, dict)],
            _told(usage, "prompt_tokens", int, where),
            _told(usage, "completion_tokens", int, where),
            _told(details, "cached_tokens", int, where) or 0,
        )
    elif FIELD in record:
        yield _Response(
            [(0, record[FIELD])],
            _told(record, "prompt_tokens", int, where),
            _told(record, "completion_tokens", int, where),
            _told(record, "cached_tokens", int, where) or 0,
        )
    else:
        for value in record.values():
            if isinstance(value, dict | list):
                yield from _responses(value, depth + 1, where)


def _told(holder: dict[str, Any], key: str, kind: type[Any], where: str) -> Any:
    """What a response says, of the type that it must have; None when it does not say."""
    value = holder.get(key)
    if value is None or (type(value) is kind and not (kind is int and not 0 <= value < 2**48)):
        return value
    noun = "a number of tokens" if kind is int else "an object"
    raise TraceError(f"{key} is {shown(value)}", file=where, rule=f"{noun} is expected")


def _payload(choice: dict[str, Any]) -> Any:
    if FIELD in choice:
        return choice[FIELD]
    for inner in ("meta_info", "sglext", "message"):
        if isinstance(choice.get(inner), dict) and FIELD in choice[inner]:
            return choice[inner][FIELD]
    return None


def _records(file: TraceFile) -> Iterator[tuple[int, Any, bool]]:
    if file.container is not Container.text:
        yield from file.records()
        return
    # A saved stream of server-sent events: the routing is in the last chunk of each choice.
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        payload = line.strip().removeprefix(b"data:").strip()
        if not payload or payload == b"[DONE]":
            continue
        yield number, parse_json(payload, TraceError, file=f"{file.name} (line {number})", finite=False), False
