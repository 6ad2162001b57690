"""vLLM's `routed_experts` inside saved responses of its OpenAI server (`--enable-return-routed-experts`).

Each choice holds base64 of a complete .npy, uint8 or uint16 [tokens - 1, hidden layers, k], of logical ids; dense
layers read as zeros and the last sampled token has no row. Rows of a cached prefix are returned although those tokens
loaded no expert this time; they are left out where the response tells how many they are.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.files import TraceFile, array_of, read_array_header
from eplb_cli.traces.protocol import LayerAxis, Match, ReadOptions, Recording, TokenBlock, matches, near_miss, no_match
from eplb_cli.traces.responses import Choice, blocks_of_choice, choices_of_file, first_payload

__all__ = ["VllmResponseReader", "first_position"]

NPY_BASE64 = base64.b64encode(b"\x93NUMP")[:6].decode()


class VllmResponseReader:
    """Responses saved as JSON, JSONL, or a stream of events."""

    name = "vllm-response"
    looks_for = "JSON or JSONL responses whose choices hold `routed_experts`, base64 of a .npy"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The first routing found decodes to numpy's magic bytes."""
        payload = first_payload(file)
        if isinstance(payload, str) and payload.startswith(NPY_BASE64):
            return matches("`routed_experts` is base64 of a .npy", 95)
        if payload is not None:
            return near_miss("`routed_experts` is not base64 of a .npy", 30)
        record = file.first_record
        if isinstance(record, dict) and "choices" in record:
            return near_miss(
                "the response's choices hold no `routed_experts`; start vLLM with --enable-return-routed-experts", 40
            )
        return no_match()

    def read(self, recording: Recording) -> Iterator[TokenBlock]:
        """Prompt and completion of each choice."""
        shared = 0
        for file in recording.files:
            response: list[tuple[Choice, npt.NDArray[np.integer]]] = []
            for choice in choices_of_file(file, recording):
                shared += choice.index > 0
                response.append((choice, _decode(choice, file)))
                if len(response) == choice.siblings:
                    yield from _blocks(response, file, recording)
                    response = []
            yield from _blocks(response, file, recording)
        if shared:
            recording.warnings.append(
                f"{shared} choices share a prompt with another choice of their response; each counts the prompt again"
            )


def _blocks(
    response: list[tuple[Choice, npt.NDArray[np.integer]]], file: TraceFile, recording: Recording
) -> Iterator[TokenBlock]:
    if not response:
        return
    start = first_position(response[0][0], [len(ids) for _, ids in response])
    for choice, ids in response:
        yield from blocks_of_choice(ids, choice, LayerAxis(ids.shape[1]), file, recording, start)


def first_position(choice: Choice, rows: list[int]) -> int | None:
    """Position of the first returned row; the same for all choices of a response.

    A choice of c completion tokens has prompt + c - 1 - start rows, so the rows of n choices tell start even though the
    response tells only the sum of their completion tokens. None when the numbers do not add up.
    """
    if choice.prompt_tokens is None or choice.completion_tokens is None:
        return None
    prompt_rows, odd = divmod(sum(rows) - choice.completion_tokens, len(rows))
    start = choice.prompt_tokens - 1 - prompt_rows
    return None if odd or not 0 <= start <= choice.prompt_tokens else start


def _decode(choice: Choice, file: TraceFile) -> npt.NDArray[np.integer]:
    where = f"{file.name} (line {choice.line}, choice {choice.index})"
    try:
        content = base64.b64decode(choice.payload, validate=True)
    except (binascii.Error, TypeError, ValueError):
        raise TraceError("routed_experts is not base64", file=where, hint="Was the response cut?") from None
    stream = io.BytesIO(content)
    header = read_array_header(stream, where)
    if len(header.shape) != 3 or header.dtype.kind not in "iu":
        raise TraceError(
            f"routed_experts is {header.dtype} {list(header.shape)}",
            file=where,
            rule="integers [tokens, hidden layers, top-k] are expected",
        )
    return array_of(header, content[header.offset :], where)
