"""Per-request routing of SGLang and lmdeploy (`return_routed_experts`).

SGLang: base64 of bare int32, [sequence - 1 - start, hidden layers, k] once shaped, which takes the model's own numbers.
lmdeploy: a nested list [tokens][layers][k]. Dense layers hold meaningless values in both.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.traces.files import TraceFile
from eplb_cli.traces.protocol import LayerAxis, Match, ReadOptions, Recording, TokenBlock, matches, no_match
from eplb_cli.traces.responses import Choice, blocks_of_choice, choices_of_file, first_payload
from eplb_cli.traces.vllm_responses import NPY_BASE64, first_position

__all__ = ["SglangResponseReader"]


class SglangResponseReader:
    """Responses saved as JSON or JSONL."""

    name = "sglang-response"
    looks_for = "JSON or JSONL responses with `routed_experts`, base64 of int32 or a nested list"
    replicas_possible = True

    def recognise(self, file: TraceFile, options: ReadOptions) -> Match:
        """The routing is a nested list, or base64 that is no .npy."""
        payload = first_payload(file)
        if isinstance(payload, list):
            return matches("`routed_experts` is a nested list", 90)
        if isinstance(payload, str) and not payload.startswith(NPY_BASE64):
            return matches("`routed_experts` is base64 without a header", 90)
        return no_match()

    def read(self, recording: Recording) -> Iterator[TokenBlock]:
        """Prompt and completion of each response."""
        for file in recording.files:
            for choice in choices_of_file(file, recording):
                where = f"{file.name} (line {choice.line}, choice {choice.index})"
                nested = isinstance(choice.payload, list)
                ids = _nested(choice, where) if nested else _bare(choice, recording.options, where)
                start = first_position(choice, [len(ids)]) if choice.siblings == 1 else None
                yield from blocks_of_choice(ids, choice, LayerAxis(ids.shape[1]), file, recording, start)


def _nested(choice: Choice, where: str) -> npt.NDArray[np.integer]:
    try:
        ids = np.array(choice.payload)
    except ValueError:
        ids = np.zeros(0)
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise TraceError("routed_experts is not a list [tokens][layers][top-k] of integers", file=where)
    return ids.astype(np.int64)


def _bare(choice: Choice, options: ReadOptions, where: str) -> npt.NDArray[np.integer]:
    model = options.model
    if model is None or model.num_hidden_layers is None or model.top_k is None:
        raise UsageError(
            "routed_experts is int32 without a shape",
            file=where,
            rule="the model's hidden layers and top-k give it",
            hint="Pass --model MODEL.",
        )
    try:
        content = base64.b64decode(choice.payload, validate=True)
    except (binascii.Error, ValueError, TypeError):
        raise TraceError("routed_experts is not base64", file=where, hint="Was the response cut?") from None
    row = 4 * model.num_hidden_layers * model.top_k
    if len(content) % row:
        raise TraceError(
            f"routed_experts has {len(content)} bytes",
            file=where,
            rule=f"{model.num_hidden_layers} hidden layers x top-k {model.top_k} make {row} bytes a token",
            hint="Is --model the model that was served?",
        )
    return np.frombuffer(content, "<i4").reshape(-1, model.num_hidden_layers, model.top_k)
