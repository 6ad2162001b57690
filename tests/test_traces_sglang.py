"""SGLang's recorder: `stat` dumps with their traps, and the JSON that people share."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from eplb_cli.errors import TraceError
from eplb_cli.loads import ModelShape
from eplb_cli.traces import ReadOptions, read_traces

MODEL = ModelShape("DeepseekV3ForCausalLM", 8, 2, 4, (1, 2, 3))


def dump(path: Path, rows: int = 3, buffer: int = 20, **more: object) -> np.ndarray:
    """A dump as rank 0 writes it: dense layer 0 reads as zeros, later rows of the buffer were never filled."""
    counts = np.zeros((buffer, 4, 8), np.int32)
    counts[:rows, 1:] = np.random.default_rng(0).poisson(300, (rows, 3, 8))
    content = {"rank": 0, "logical_count": torch.from_numpy(counts), "average_utilization_rate_over_window": None}
    torch.save(content | more, path)
    return counts


def test_filled_rows_are_windows_of_the_moe_layers(tmp_path: Path) -> None:
    counts = dump(tmp_path / "expert_distribution_recorder_1764400000.25.pt")
    loads = read_traces([tmp_path / "expert_distribution_recorder_1764400000.25.pt"], ReadOptions(MODEL)).loads
    assert (loads.counts == counts[:3, 1:]).all()
    assert loads.layer_ids.tolist() == [1, 2, 3]
    assert loads.dropped == {"unfilled_buffer_rows": 17}
    assert loads.sources[0].reader == "sglang-stat"


def test_rows_keep_their_place_in_a_buffer_whose_start_is_empty(tmp_path: Path) -> None:
    counts = np.zeros((9, 4, 8), np.int32)
    counts[[2, 3, 7], 1:] = np.random.default_rng(0).poisson(300, (3, 3, 8))
    torch.save({"logical_count": torch.from_numpy(counts)}, tmp_path / "a.pt")
    loads = read_traces([tmp_path / "a.pt"], ReadOptions(MODEL)).loads
    assert (loads.counts == counts[[2, 3, 7], 1:]).all()
    assert (loads.window_ids.tolist(), loads.dropped) == ([2, 3, 7], {"unfilled_buffer_rows": 6})


@pytest.mark.parametrize("counts", [torch.ones(8), torch.ones(2, 2, 4, 8), [[1, 2]]], ids=["row", "four axes", "list"])
def test_counts_of_other_axes_are_refused(tmp_path: Path, counts: object) -> None:
    torch.save({"logical_count": counts}, tmp_path / "a.pt")
    with pytest.raises(TraceError, match="`logical_count` is not a tensor of two or three axes"):
        read_traces([tmp_path / "a.pt"], ReadOptions(MODEL))


def test_without_a_model_the_rows_of_zeros_stay_and_are_named(tmp_path: Path) -> None:
    dump(tmp_path / "a.pt")
    loads = read_traces([tmp_path / "a.pt"], ReadOptions()).loads
    assert loads.layer_ids.tolist() == [0, 1, 2, 3]
    assert any("layer 0 has no load at all; --model tells dense" in warning for warning in loads.warnings)


def test_a_full_buffer_may_have_wrapped(tmp_path: Path) -> None:
    dump(tmp_path / "a.pt", rows=5, buffer=5)
    loads = read_traces([tmp_path / "a.pt"], ReadOptions(MODEL)).loads
    assert any("all 5 rows of the recorder's buffer are filled; it wraps around" in w for w in loads.warnings)


def test_the_rank_layout_is_added_over_ranks(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(300, (4, 4, 8))
    counts[:, 0] = 0
    content = {"logical_count": torch.from_numpy(counts), "logical_count_layout": "rank_layer_expert"}
    torch.save(content, tmp_path / "a.pt")
    result = read_traces([tmp_path / "a.pt"], ReadOptions(MODEL))
    assert (result.loads.counts == counts[:, 1:].sum(0)[None]).all()
    assert "4 ranks were added" in result.notes[0]


def test_ranks_add_up_beyond_32_bits(tmp_path: Path) -> None:
    counts = np.full((4, 3, 8), 2**30, np.int32) + np.arange(8, dtype=np.int32)
    content = {"logical_count": torch.from_numpy(counts), "logical_count_layout": "rank_layer_expert"}
    torch.save(content, tmp_path / "a.pt")
    loads = read_traces([tmp_path / "a.pt"], ReadOptions(MODEL)).loads
    assert loads.counts[0].tolist() == [[2**32 + 4 * expert for expert in range(8)]] * 3


def test_an_unknown_layout_is_refused(tmp_path: Path) -> None:
    dump(tmp_path / "a.pt", logical_count_layout="expert_layer_rank")
    with pytest.raises(TraceError, match="logical_count_layout is 'expert_layer_rank'"):
        read_traces([tmp_path / "a.pt"], ReadOptions(MODEL))


def test_fused_shared_experts_are_extra_columns(tmp_path: Path) -> None:
    dump(tmp_path / "a.pt")
    with pytest.raises(TraceError, match="8 columns a layer, expected 7 experts") as caught:
        read_traces([tmp_path / "a.pt"], ReadOptions(ModelShape("M", 7, 2, 4, (1, 2, 3))))
    assert "fused shared experts" in str(caught.value.hint)


def test_the_shared_json_has_floats_and_all_hidden_layers(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(300, (4, 8)).astype(float)
    counts[0] = 0
    (tmp_path / "a.json").write_text(json.dumps({"logical_count": counts.tolist()}))
    loads = read_traces([tmp_path / "a.json"], ReadOptions(MODEL)).loads
    assert (loads.counts[0] == counts[1:]).all()
    assert loads.sources[0].reader == "sglang-json"


def test_the_json_may_hold_passes_and_name_its_layers(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(300, (2, 2, 8))
    document = {"logical_count": counts.tolist(), "layer_ids": [1, 3], "top_k": 2, "tokens": [1200, 1100]}
    (tmp_path / "a.json").write_text(json.dumps(document))
    loads = read_traces([tmp_path / "a.json"], ReadOptions()).loads
    assert (loads.counts == counts).all()
    assert (loads.layer_ids.tolist(), loads.top_k, loads.tokens.tolist()) == ([1, 3], 2, [1200, 1100])


def test_totals_that_are_not_tokens_times_top_k_are_told(tmp_path: Path) -> None:
    document = {"logical_count": [[400] * 8], "top_k": 2, "tokens": 800}
    (tmp_path / "a.json").write_text(json.dumps(document))
    loads = read_traces([tmp_path / "a.json"], ReadOptions()).loads
    assert any("tokens x top-k = 1600 assignments; layer 0 holds 3200 (2 times)" in w for w in loads.warnings)


@pytest.mark.parametrize("bad", ["NaN", "Infinity", "-1"])
def test_json_that_holds_no_number_is_refused_by_place(tmp_path: Path, bad: str) -> None:
    (tmp_path / "a.json").write_text(f'{{"logical_count": [[1, 2], [0, 3], [{bad}, 4]]}}')
    with pytest.raises(TraceError, match=r"load is .*loads must be whole numbers") as caught:
        read_traces([tmp_path / "a.json"], ReadOptions())
    assert (caught.value.layer, caught.value.expert) == (2, 0)
