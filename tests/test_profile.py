"""`eplb profile` as scripts and people call it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.loads import ExpertLoads
from tests.conftest import Run
from tests.test_traces_token_ids import random_ids, reference

Eplb = Callable[..., Run]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    np.save(tmp_path / "trace.npy", random_ids(3000, 3, 4, 16))
    return tmp_path / "trace.npy"


def test_json_has_the_contracts_keys(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    run = eplb("profile", trace, "--num-experts", 16, "-o", tmp_path / "loads", "--format", "json")
    assert run.code == 0
    figures = run.json
    assert list(figures) == [
        "windows",
        "layers",
        "layer_ids",
        "num_experts",
        "top_k",
        "tokens",
        "assignments",
        "dropped",
        "sources",
        "warnings",
        "max_over_mean",
    ]
    assert figures["windows"] == 3
    assert (figures["layers"], figures["layer_ids"], figures["num_experts"]) == (3, [0, 1, 2], 16)
    assert (figures["top_k"], figures["tokens"], figures["assignments"]) == (4, 3000, 36000)
    assert figures["sources"][0]["name"] == "trace.npy"
    totals = reference(np.load(trace), 16)
    ratio = totals.max(1) / totals.mean(1)
    assert figures["max_over_mean"] == {
        "mean": pytest.approx(ratio.mean()),
        "worst": pytest.approx(ratio.max()),
        "worst_layer": int(ratio.argmax()),
    }


def test_the_profile_holds_what_was_counted(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    assert eplb("profile", trace, "--num-experts", 16, "-o", tmp_path / "loads").code == 0
    loads = ExpertLoads.load(tmp_path / "loads")
    assert (loads.counts.sum(0) == reference(np.load(trace), 16)).all()
    assert loads.sources[0].reader == "token-ids"


def test_the_same_input_gives_the_same_bytes(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert eplb("profile", trace, "--num-experts", 16, "-o", tmp_path / name).code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_people_get_a_table_that_fits_80_columns(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    run = eplb("profile", trace, "--num-experts", 16, "-o", tmp_path / "loads")
    assert "Max/mean expert load" in run.out and "Windows" in run.out
    assert max(map(len, run.out.splitlines())) <= 80


def test_quiet_prints_nothing_on_stdout(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    run = eplb("profile", trace, "--num-experts", 16, "-o", tmp_path / "loads", "--format", "quiet")
    assert (run.code, run.out) == (0, "")


def test_placeholders_are_given_one_by_one_and_as_ranges(eplb: Eplb, tmp_path: Path) -> None:
    ids = random_ids(300, 2, 4, 16).astype(np.int32)
    ids[:50, :, 0], ids[50:80, :, 1], ids[80:90, 1, 2], ids[90:, 0, 3] = 255, 300, 511, -1
    np.save(tmp_path / "a.npy", ids)
    arguments = ["profile", tmp_path / "a.npy", "--num-experts", 16, "-o", tmp_path / "loads", "--format", "json"]
    ignored = ["--ignore-expert-id", "300-511", "--ignore-expert-id", 255]
    assert eplb(*arguments, *ignored).json["dropped"] == {"ignored_expert_ids": 170, "padding_ids": 210}
    kept = np.where(ids < 16, ids, -1)
    assert (ExpertLoads.load(tmp_path / "loads").counts.sum(0) == reference(kept, 16)).all()
    for text in ("511-300", "-1", "255-", "x"):
        run = eplb(*arguments, "--force", f"--ignore-expert-id={text}")
        assert run.code == 2 and "an id or a range is expected" in run.err
    assert eplb(*arguments, "--force", "--ignore-expert-id", "300-510", *ignored[2:]).code == 1


def test_an_existing_output_needs_force(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "loads"
    out.write_text("precious")
    run = eplb("profile", trace, "--num-experts", 16, "-o", out)
    assert (run.code, out.read_text()) == (1, "precious")
    assert eplb("profile", trace, "--num-experts", 16, "-o", out, "--force").code == 0


def test_a_refused_trace_writes_nothing(eplb: Eplb, tmp_path: Path) -> None:
    np.save(tmp_path / "trace.npy", random_ids(3000, 3, 4, 16))
    run = eplb("profile", tmp_path / "trace.npy", "--num-experts", 12, "-o", tmp_path / "loads")
    assert run.code == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.npy"]


def test_a_question_of_usage_exits_2(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    assert eplb("profile", trace, "-o", tmp_path / "loads").code == 2
    assert eplb("profile", trace, "-o", tmp_path / "loads", "--trace-format", "nonsense").code == 2
    assert eplb("profile", trace, "-o", tmp_path / "loads", "--phase", "middle").code == 2


def config(tmp_path: Path) -> Path:
    """A Qwen3-MoE of 6 layers, MoE every second, the last dense by name."""
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "architectures": ["Qwen3MoeForCausalLM"],
                "model_type": "qwen3_moe",
                "num_hidden_layers": 6,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "decoder_sparse_step": 2,
                "mlp_only_layers": [5],
                "hidden_size": 64,
                "moe_intermediate_size": 32,
            }
        )
    )
    return path


def test_the_model_tells_experts_and_layers(eplb: Eplb, tmp_path: Path) -> None:
    ids = np.zeros((3000, 6, 4), np.uint8)
    ids[:, [1, 3]] = random_ids(3000, 2, 4, 16)
    np.save(tmp_path / "trace.npy", ids)
    run = eplb(
        "profile", tmp_path / "trace.npy", "--model", config(tmp_path), "-o", tmp_path / "loads", "--format", "json"
    )
    assert (run.json["layer_ids"], run.json["tokens"]) == ([1, 3], 3000)


def test_two_expert_counts_that_disagree_are_refused(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    run = eplb("profile", trace, "--model", config(tmp_path), "--num-experts", 8, "-o", tmp_path / "loads")
    assert run.code == 2 and "--num-experts 8 contradicts" in run.err


def test_a_profile_reads_back_as_a_trace(eplb: Eplb, trace: Path, tmp_path: Path) -> None:
    assert eplb("profile", trace, "--num-experts", 16, "-o", tmp_path / "one").code == 0
    run = eplb("profile", tmp_path / "one", tmp_path / "one", "-o", tmp_path / "two", "--format", "json")
    assert run.json["windows"] == 3
    first, again = ExpertLoads.load(tmp_path / "one"), ExpertLoads.load(tmp_path / "two")
    assert (first.counts == again.counts).all() and (first.tokens == again.tokens).all()


def test_a_profile_reads_back_with_its_phases_and_what_was_dropped(eplb: Eplb, tmp_path: Path) -> None:
    for name, top_k in (("b", 4), ("a", 2)):
        ids = random_ids(400, 2, top_k, 16).astype(np.int16)
        ids[395:] = -1
        np.savez(tmp_path / f"{name}.npz", topk_ids=ids, seq_lens=[300, 100], prompt_lens=[120, 70])
        run = eplb("profile", tmp_path / f"{name}.npz", "--num-experts", 16, "-o", tmp_path / f"{name}.loads")
        assert run.code == 0
    one = ExpertLoads.load(tmp_path / "b.loads")
    assert eplb("profile", tmp_path / "b.loads", "-o", tmp_path / "again").code == 0
    again = ExpertLoads.load(tmp_path / "again")
    assert (again.window_phase.tolist(), again.dropped, again.top_k) == ([1, 2], {"padding_rows": 5}, 4)
    assert (again.counts == one.counts).all() and again.tokens.tolist() == [190, 205]


def test_four_identical_dumps_give_the_plan_of_one(eplb: Eplb, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    folder.mkdir()
    counts = np.random.default_rng(0).poisson(300, (6, 2, 16))
    for rank in range(4):
        np.save(folder / f"rank{rank}.npy", counts)
    for name, trace in (("four", folder), ("one", folder / "rank0.npy")):
        run = eplb("profile", trace, "-o", tmp_path / f"{name}.safetensors", "--format", "json")
        assert run.json["assignments"] == counts.sum()
        loads = tmp_path / f"{name}.safetensors"
        assert eplb("plan", loads, "--ep-size", 4, "--effort", "fast", "-o", tmp_path / f"{name}.json").code == 0
    assert (tmp_path / "four.json").read_bytes() == (tmp_path / "one.json").read_bytes()


def test_a_folder_stands_for_its_files_in_natural_order(eplb: Eplb, tmp_path: Path) -> None:
    folder = tmp_path / "traces"
    folder.mkdir()
    parts = [random_ids(10, 2, 4, 16, seed) for seed in range(11)]
    for index, part in enumerate(parts):
        np.save(folder / f"part{index}.npy", part)
    run = eplb(
        "profile", folder, "--num-experts", 16, "--window-tokens", 10, "-o", tmp_path / "loads", "--format", "json"
    )
    assert [source["name"] for source in run.json["sources"]] == [f"part{i}.npy" for i in range(11)]
    counts = ExpertLoads.load(tmp_path / "loads").counts
    assert [c.tolist() for c in counts] == [reference(part, 16).tolist() for part in parts]


@pytest.mark.parametrize("task", ["intent", "law", "summary", "translation"])
def test_real_ids_add_up_to_the_published_counts(eplb: Eplb, shared_data: Path, tmp_path: Path, task: str) -> None:
    folder = shared_data / "esft_dsv2lite"
    for kind, suffix in (("topk", "npz"), ("counts", "json")):
        run = eplb(
            "profile",
            folder / f"{task}_{kind}.{suffix}",
            "--num-experts",
            64,
            "-o",
            tmp_path / kind,
            "--format",
            "json",
        )
        assert run.code == 0 and run.json["layer_ids"] == list(range(1, 27))
    ids, counts = (ExpertLoads.load(tmp_path / kind) for kind in ("topk", "counts"))
    assert (ids.counts.sum(0) == counts.counts.sum(0)).all()
    assert ids.tokens.sum() == counts.tokens.sum() == 0 or ids.tokens.sum() == counts.tokens.sum()


def test_real_decode_traces_keep_their_windows(eplb: Eplb, shared_data: Path, tmp_path: Path) -> None:
    run = eplb(
        "profile",
        shared_data / "gptoss20b",
        "--model",
        shared_data / "configs" / "openai--gpt-oss-20b_config.json",
        "-o",
        tmp_path / "loads",
        "--format",
        "json",
    )
    assert (run.json["tokens"], run.json["windows"], run.json["top_k"]) == (74676, 73, 4)


def test_real_counts_of_three_layers_keep_their_numbers(eplb: Eplb, shared_data: Path, tmp_path: Path) -> None:
    files = sorted((shared_data / "olmoe_mixtral_routing").glob("olmoe_*.json"))
    run = eplb("profile", *files, "-o", tmp_path / "loads", "--format", "json")
    assert (run.json["layer_ids"], run.json["windows"], run.json["num_experts"]) == ([0, 7, 15], len(files), 64)
