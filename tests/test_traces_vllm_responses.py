"""vLLM's routing inside saved responses: phases, cached prefixes, several choices, cut files."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.errors import TraceError
from eplb_cli.loads import ModelShape
from eplb_cli.traces import ReadOptions, read_traces
from tests.test_traces_token_ids import random_ids, reference

MODEL = ModelShape("Qwen3MoeForCausalLM", 8, 2, 3, (1, 2))


def routing(rows: int, seed: int = 0) -> np.ndarray:
    """Ids of three hidden layers, the first dense and zero."""
    ids = np.zeros((rows, 3, 2), np.uint8)
    ids[:, 1:] = random_ids(rows, 2, 2, 8, seed)
    return ids


def encode(ids: np.ndarray) -> str:
    stream = io.BytesIO()
    np.save(stream, ids)
    return base64.b64encode(stream.getvalue()).decode()


def response(*choices: np.ndarray, prompt: int | None = None, completion: int = 0, cached: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = {
        "id": "chatcmpl-1",
        "choices": [{"index": i, "message": {}, "routed_experts": encode(ids)} for i, ids in enumerate(choices)],
    }
    if prompt is not None:
        details = {"cached_tokens": cached} if cached else None
        document["usage"] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": details,
        }
    return document


def test_a_saved_response_splits_into_prefill_and_decode(tmp_path: Path) -> None:
    ids = routing(10 + 5 - 1)
    (tmp_path / "a.json").write_text(json.dumps(response(ids, prompt=10, completion=5)))
    loads = read_traces([tmp_path / "a.json"], ReadOptions(MODEL)).loads
    assert loads.window_phase.tolist() == [1, 2]
    assert (loads.counts[0] == reference(ids[:10, 1:], 8)).all()
    assert (loads.counts[1] == reference(ids[10:, 1:], 8)).all()
    assert loads.sources[0].reader == "vllm-response"


@pytest.mark.parametrize("row", [6, 13])
def test_a_bad_id_names_its_row_of_the_choice(tmp_path: Path, row: int) -> None:
    ids = routing(14)
    ids[row, 2, 1] = 8
    (tmp_path / "a.json").write_text(json.dumps(response(ids, prompt=10, completion=5, cached=3)))
    with pytest.raises(TraceError, match="id 8 >= num_experts 8 at column 1") as caught:
        read_traces([tmp_path / "a.json"], ReadOptions(MODEL))
    assert (caught.value.row, caught.value.layer) == (row, 2)


def test_rows_of_a_cached_prefix_loaded_no_expert(tmp_path: Path) -> None:
    ids = routing(14)
    (tmp_path / "a.json").write_text(json.dumps(response(ids, prompt=10, completion=5, cached=6)))
    loads = read_traces([tmp_path / "a.json"], ReadOptions(MODEL)).loads
    assert loads.dropped == {"cached_prefix_tokens": 6}
    assert loads.tokens.tolist() == [4, 4]


def test_a_prefix_left_out_by_the_request_is_not_subtracted_twice(tmp_path: Path) -> None:
    """routed_experts_prompt_start = 6 returned rows from position 6 on."""
    ids = routing(8)
    (tmp_path / "a.json").write_text(json.dumps(response(ids, prompt=10, completion=5, cached=6)))
    loads = read_traces([tmp_path / "a.json"], ReadOptions(MODEL)).loads
    assert (loads.dropped, loads.tokens.tolist()) == ({}, [4, 4])


def test_several_choices_in_one_file_share_the_start(tmp_path: Path) -> None:
    first, second = routing(10 + 5 - 1), routing(10 + 3 - 1, 1)
    (tmp_path / "a.json").write_text(json.dumps(response(first, second, prompt=10, completion=8)))
    loads = read_traces([tmp_path / "a.json"], ReadOptions(MODEL)).loads
    assert loads.tokens.tolist() == [20, 6]
    expected = reference(first[:10, 1:], 8) + reference(second[:10, 1:], 8)
    assert (loads.counts[0] == expected).all()
    assert any("1 choices share a prompt" in warning for warning in loads.warnings)


def test_choices_of_one_response_are_no_repeated_prompts(tmp_path: Path) -> None:
    first, second = routing(24), routing(24, 1)
    second[:20] = first[:20]
    document = response(first, second, prompt=20, completion=10)
    (tmp_path / "a.json").write_text(json.dumps(document))
    assert not any(
        "begin as an earlier" in w for w in read_traces([tmp_path / "a.json"], ReadOptions(MODEL)).loads.warnings
    )
    (tmp_path / "a.jsonl").write_text(f"{json.dumps(document)}\n{json.dumps(document)}\n")
    loads = read_traces([tmp_path / "a.jsonl"], ReadOptions(MODEL)).loads
    assert any("1 sequences begin as an earlier one does" in warning for warning in loads.warnings)
    assert any("2 choices share a prompt" in warning for warning in loads.warnings)


def test_jsonl_holds_many_responses(tmp_path: Path) -> None:
    traces = [routing(20, seed) for seed in range(3)]
    lines = [json.dumps(response(ids)) for ids in traces]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    loads = read_traces([tmp_path / "a.jsonl"], ReadOptions(MODEL)).loads
    assert (loads.counts.sum(0) == sum(reference(ids[:, 1:], 8) for ids in traces)).all()


def test_a_cut_last_line_is_left_out_with_a_warning(tmp_path: Path) -> None:
    line = json.dumps(response(routing(20)))
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line[: len(line) // 2]}")
    loads = read_traces([tmp_path / "a.jsonl"], ReadOptions(MODEL)).loads
    assert loads.tokens.sum() == 20
    assert any("the last line (2) is cut" in warning for warning in loads.warnings)


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    line = json.dumps(response(routing(20)))
    (tmp_path / "a.jsonl").write_text(f"{line}\n{line[:50]}\n{line}\n")
    with pytest.raises(TraceError, match="line 2 is not JSON"):
        read_traces([tmp_path / "a.jsonl"], ReadOptions(MODEL))


def test_a_saved_stream_has_the_routing_in_its_last_chunk(tmp_path: Path) -> None:
    last = response(routing(20))
    text = f'data: {{"choices": [{{"delta": {{}}}}]}}\n\ndata: {json.dumps(last)}\n\ndata: [DONE]\n'
    (tmp_path / "a.txt").write_text(text)
    assert read_traces([tmp_path / "a.txt"], ReadOptions(MODEL)).loads.tokens.sum() == 20


def test_a_batch_output_nests_the_response(tmp_path: Path) -> None:
    record = {"custom_id": "1", "response": {"status_code": 200, "body": response(routing(20))}}
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n" + json.dumps(record | {"custom_id": "2"}) + "\n")
    assert read_traces([tmp_path / "a.jsonl"], ReadOptions(MODEL)).loads.tokens.sum() == 40


def test_choices_aborted_before_a_forward_pass_are_counted(tmp_path: Path) -> None:
    document = response(routing(20), routing(20))
    document["choices"][1]["routed_experts"] = None
    (tmp_path / "a.json").write_text(json.dumps(document))
    loads = read_traces([tmp_path / "a.json"], ReadOptions(MODEL)).loads
    assert (loads.tokens.sum(), loads.dropped) == (20, {"choices_without_routing": 1})


def test_a_response_without_routing_names_the_flag(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"choices": [{"message": {}}]}')
    with pytest.raises(TraceError, match="--enable-return-routed-experts"):
        read_traces([tmp_path / "a.json"], ReadOptions(MODEL))


def test_a_cut_payload_says_which_choice(tmp_path: Path) -> None:
    document = response(routing(20))
    document["choices"][0]["routed_experts"] = document["choices"][0]["routed_experts"][:-8]
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(TraceError, match=r"a.json \(line 1, choice 0\): is cut"):
        read_traces([tmp_path / "a.json"], ReadOptions(MODEL))
