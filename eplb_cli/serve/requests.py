"""Prompts from a file to a server, and the comparison of two servers' greedy answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eplb_cli.errors import ServeError, UsageError
from eplb_cli.serve.server import Server
from eplb_cli.untrusted import parse_json, read_file

__all__ = ["Answer", "Comparison", "answer_all", "compare", "read_prompts"]

MOST_PROMPT_BYTES = 1 << 30
NEAR_TIE = 0.25
"""Two candidates whose log probabilities differ by no more than this may change places by rounding in bf16."""


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Args:
        tokens: "token_id:N" each.
        alternatives: log probabilities of the likeliest tokens at each position.
    """

    tokens: tuple[str, ...]
    alternatives: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class Comparison:
    """How many answers agree; `differing` lists the prompts whose answers part at no near tie."""

    identical: int
    near_ties: int
    differing: tuple[int, ...]


def read_prompts(file: Path) -> list[dict[str, Any]]:
    """Requests from a file: one prompt a line, or JSON lines with `prompt` (text) or `messages` (a chat).

    Raises:
        UsageError: there is no such file, it is empty, or a line is neither.
    """
    content = read_file(file, UsageError, most_bytes=MOST_PROMPT_BYTES)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"cannot be read: {error}", file=file) from None
    requests: list[dict[str, Any]] = []
    # JSON text may hold other characters that end a line elsewhere.
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), start=1):
        if not line.strip():
            continue
        if not line.startswith("{"):
            requests.append({"prompt": line})
            continue
        try:
            document = parse_json(line, UsageError)
        except UsageError as error:
            raise UsageError(error.problem, file=file, row=number, rule=error.rule) from None
        if isinstance(document.get("messages"), list):
            requests.append({"messages": document["messages"]})
        elif isinstance(document.get("prompt"), str):
            requests.append({"prompt": document["prompt"]})
        else:
            raise UsageError("has neither `prompt` nor `messages`", file=file, row=number)
    if not requests:
        raise UsageError("holds no prompts", file=file)
    return requests


def answer_all(
    server: Server,
    requests: Sequence[Mapping[str, Any]],
    *,
    max_tokens: int,
    concurrency: int = 1,
    advance: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Send all requests, greedily decoded to exactly `max_tokens` tokens; answers in the order of the requests.

    Raises:
        ServeError: the server refuses a request or is gone.
    """
    try:
        model = server.request("GET", "/v1/models")["data"][0]["id"]
    except (OSError, LookupError, TypeError) as error:
        raise ServeError(f"the server names no model: {error!r}") from error

    def answer(request: Mapping[str, Any]) -> Answer:
        chat = "messages" in request
        body = {
            **request,
            "model": model,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_tokens_as_token_ids": True,
            **({"logprobs": True, "top_logprobs": 5} if chat else {"logprobs": 5}),
        }
        path = "/v1/chat/completions" if chat else "/v1/completions"
        try:
            return _answer(server.request("POST", path, body)["choices"][0]["logprobs"], chat)
        except (OSError, LookupError, TypeError, ValueError) as error:
            raise ServeError(f"the server does not answer a prompt: {error!r}") from error
        finally:
            advance()

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(answer, requests))


def _answer(found: Mapping[str, Any], chat: bool) -> Answer:
    """The answer from the `logprobs` of a completion, or of a chat, which has another form.

    Raises:
        LookupError, TypeError, ValueError: a part is missing or of another kind.
    """
    if chat:
        tokens = [step["token"] for step in found["content"]]
        tops = [{top["token"]: top["logprob"] for top in step["top_logprobs"]} for step in found["content"]]
    else:
        tokens, tops = found["tokens"], [dict(top) for top in found["top_logprobs"]]
    return Answer(
        tuple(map(str, tokens)),
        tuple({token: float(top[token]) for token in top} for _, top in zip(tokens, tops, strict=True)),
    )


def compare(reference: Sequence[Answer], served: Sequence[Answer]) -> Comparison:
    """Compare answers token by token.

    Where they part, the two tokens may have been so close that rounding decides (sums over experts run in the order of
    the slots); both servers must then have seen the other's token within NEAR_TIE of its own.
    """
    identical = near_ties = 0
    differing = []
    for index, (left, right) in enumerate(zip(reference, served, strict=True)):
        parting = next((i for i, (a, b) in enumerate(zip(left.tokens, right.tokens, strict=False)) if a != b), None)
        if parting is None and len(left.tokens) == len(right.tokens):
            identical += 1
        elif parting is not None and _is_near_tie(left, right, parting):
            near_ties += 1
        else:
            differing.append(index)
    return Comparison(identical, near_ties, tuple(differing))


def _is_near_tie(left: Answer, right: Answer, position: int) -> bool:
    pair = (left.tokens[position], right.tokens[position])
    gaps = [
        abs(answer.alternatives[position].get(pair[0], float("inf")) - answer.alternatives[position].get(pair[1], 0.0))
        for answer in (left, right)
    ]
    return all(gap <= NEAR_TIE for gap in gaps)
