"""The parts of recording and of the smoke comparison that need no engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eplb_cli.errors import UsageError
from eplb_cli.serve.requests import Answer, compare, read_prompts
from eplb_cli.vllm_plugin.recorder import token_phases
from tests.conftest import Run

ALL, PREFILL, DECODE = 0, 1, 2


def step(new: dict[str, tuple[int, int]], cached: dict[str, int], tokens: dict[str, int], finished: set[str]) -> Any:
    """What vLLM's scheduler hands over: new requests (prompt length, computed), cached ones (computed), tokens."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, prompt_token_ids=[0] * length, num_computed_tokens=computed)
            for name, (length, computed) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(req_ids=list(cached), num_computed_tokens=list(cached.values())),
        num_scheduled_tokens=tokens,
        finished_req_ids=finished,
    )


def test_phases_of_a_chunked_prompt_beside_a_decoding_request() -> None:
    lengths: dict[str, int] = {}
    assert token_phases(step({"a": (3, 0)}, {}, {"a": 3}, set()), ["a"], lengths) == [PREFILL] * 3
    mixed = step({"b": (5, 0)}, {"a": 3}, {"b": 4, "a": 1}, set())
    # the batch holds the decoding request first
    assert token_phases(mixed, ["a", "b"], lengths) == [DECODE] + [PREFILL] * 4
    last_chunk = step({}, {"a": 4, "b": 4}, {"a": 1, "b": 1}, set())
    assert token_phases(last_chunk, ["b", "a"], lengths) == [PREFILL, DECODE]
    assert token_phases(step({}, {"b": 5}, {"b": 1}, {"a"}), None, lengths) == [DECODE]
    assert lengths == {"b": 5}


def test_phases_that_cannot_be_told_apart_are_called_all() -> None:
    mixed = step({"b": (5, 0)}, {"a": 3}, {"b": 4, "a": 1}, set())
    assert token_phases(mixed, None, {"a": 3}) == [ALL] * 5
    assert token_phases(mixed, ["b"], {"a": 3}) == [ALL] * 5


def test_a_cached_prefix_is_not_counted_as_prefill_again() -> None:
    assert token_phases(step({"a": (8, 6)}, {}, {"a": 2}, set()), ["a"], {}) == [PREFILL] * 2


def test_speculated_tokens_are_decode() -> None:
    lengths = {"a": 4}
    assert token_phases(step({}, {"a": 4}, {"a": 3}, set()), ["a"], lengths) == [DECODE] * 3


def answer(*tokens: str, **alternatives: float) -> Answer:
    table = alternatives or dict.fromkeys(tokens, -1.0)
    return Answer(tokens, tuple(table for _ in tokens))


def test_equal_answers_are_identical() -> None:
    assert compare([answer("a", "b")], [answer("a", "b")]).identical == 1


def test_a_near_tie_is_not_a_difference() -> None:
    found = compare([answer("a", a=-1.0, b=-1.1)], [answer("b", a=-1.05, b=-1.0)])
    assert (found.identical, found.near_ties, found.differing) == (0, 1, ())


@pytest.mark.parametrize(
    "served",
    [answer("b", a=-3.0, b=-1.0), answer("b", b=-1.0), answer("a", "a", a=-1.0)],
    ids=["far apart", "not among the likeliest", "longer"],
)
def test_a_real_difference_is_found(served: Answer) -> None:
    found = compare([answer("x", "y"), answer("a", a=-1.0, b=-1.1)], [answer("x", "y"), served])
    assert (found.identical, found.differing) == (1, (1,))


def test_prompts_are_lines_or_json_lines(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "p").write_text(f"plain text\n\n{json.dumps({'prompt': 'a', 'id': 7})}\n{json.dumps(chat)}\n")
    assert read_prompts(tmp_path / "p") == [{"prompt": "plain text"}, {"prompt": "a"}, chat]


@pytest.mark.parametrize(
    "content, message",
    [("", "holds no prompts"), ('{"text": "x"}', "row 1: has neither"), ('ok\n{"prompt": ', "row 2: is not JSON")],
)
def test_unusable_prompts_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "p").write_text(content)
    with pytest.raises(UsageError, match=message):
        read_prompts(tmp_path / "p")


def test_record_checks_its_files_before_anything_starts(eplb: Callable[..., Run], tmp_path: Path) -> None:
    missing = eplb("record", "model", "--prompts", tmp_path / "none", "-o", tmp_path / "out")
    assert (missing.code, "no such file" in missing.err) == (2, True)
    (tmp_path / "p").write_text("hello")
    (tmp_path / "out").mkdir()
    existing = eplb("record", "model", "--prompts", tmp_path / "p", "-o", tmp_path / "out")
    assert (existing.code, "exists already" in existing.err) == (1, True)


def test_smoke_of_a_converted_model_wants_the_reference(
    eplb: Callable[..., Run], tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    assert eplb("serve", tiny_qwen3_moe, "--reference", "x", "--record", tmp_path).code == 2
    assert eplb("serve", tiny_qwen3_moe, "--static", "--runtime-policy", "eplb", "--plan", "p").code == 2
    assert eplb("serve", tiny_qwen3_moe, "--max-moves", "3", "--plan", "p").code == 2
