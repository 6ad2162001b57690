"""Every family and quantisation, in both layouts, against the byte oracle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.checkpoint import Model
from eplb_cli.checkpoint.family import families
from tests.checkpoints import FORMS, E, deepseek, random_rows, read_checkpoint, save_plan, scattered_rows

Eplb = Callable[..., Any]


@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("form", FORMS)
def test_stock_equals_the_oracle(tmp_path: Path, eplb: Eplb, form: str, redundant: int) -> None:
    model = FORMS[form]()
    source = model.save(tmp_path / "source", shards=3, seed=1)
    rows = random_rows(model.moe_layers, redundant, seed=2)
    plan = save_plan(tmp_path / "plan.json", rows)
    run = eplb("convert", source, plan, "-o", tmp_path / "out", "--format", "json")
    assert run.code == 0, run.err
    assert read_checkpoint(tmp_path / "out") == model.expected(rows, "stock")
    assert run.json["verified_tensors"] == len(model.items)
    proof = eplb("verify", source, tmp_path / "out", "--plan", plan, "--format", "json")
    assert proof.json == {"ok": True, "level": "full", "tensors": len(model.items), "problems": []}


@pytest.mark.parametrize("form", FORMS)
def test_physical_equals_the_oracle(tmp_path: Path, eplb: Eplb, form: str) -> None:
    model = FORMS[form]()
    source = model.save(tmp_path / "source", shards=3, seed=3)
    rows = scattered_rows(model.moe_layers, 4, seed=4)
    plan = save_plan(tmp_path / "plan.json", rows)
    run = eplb("convert", source, plan, "-o", tmp_path / "out", "--layout", "physical", "--format", "json")
    assert run.code == 0, run.err
    expected = model.expected(rows, "physical")
    assert read_checkpoint(tmp_path / "out") == expected
    proof = eplb("verify", source, tmp_path / "out", "--plan", plan, "--format", "json")
    assert proof.json == {"ok": True, "level": "full", "tensors": len(expected), "problems": []}


@pytest.mark.parametrize("form", FORMS)
def test_there_and_back_is_byte_for_byte_the_source(tmp_path: Path, eplb: Eplb, form: str) -> None:
    model = FORMS[form]()
    source = model.save(tmp_path / "source", shards=2, seed=5)
    rows = random_rows(model.moe_layers, 0, seed=6)
    back = {layer: [row.index(expert) for expert in range(E)] for layer, row in rows.items()}
    there_plan, back_plan = save_plan(tmp_path / "there.json", rows), save_plan(tmp_path / "back.json", back)
    assert eplb("convert", source, there_plan, "-o", tmp_path / "there", "--format", "quiet").code == 0
    run = eplb("convert", tmp_path / "there", back_plan, "-o", tmp_path / "back", "--format", "quiet")
    assert run.code == 0, run.err
    assert "relabelled before" in run.err
    for file in source.glob("*.safetensors"):
        assert (tmp_path / "back" / file.name).read_bytes() == file.read_bytes()
    assert any(
        (tmp_path / "there" / file.name).read_bytes() != file.read_bytes() for file in source.glob("*.safetensors")
    )


def test_every_family_has_a_form_under_test() -> None:
    tested = {FORMS[form]().config["architectures"][0] for form in FORMS}
    assert [name for name, family in families().items() if not tested & set(family.architectures)] == []


def test_group_limited_routing_moves_whole_groups_or_not_at_all(tmp_path: Path, eplb: Eplb) -> None:
    model = deepseek(groups=4)
    source = model.save(tmp_path / "source")
    torn = save_plan(tmp_path / "torn.json", random_rows(model.moe_layers, 0, seed=1))
    run = eplb("convert", source, torn, "-o", tmp_path / "out")
    assert run.code == 1
    assert "whole groups must map to whole groups" in run.err
    assert not list(tmp_path.glob("out*"))
    rows = random_rows(model.moe_layers, 0, seed=1, groups=4)
    whole = save_plan(tmp_path / "whole.json", rows)
    assert eplb("convert", source, whole, "-o", tmp_path / "out", "--format", "quiet").code == 0
    assert read_checkpoint(tmp_path / "out") == model.expected(rows, "stock")


def test_physical_slots_need_not_divide_over_routing_groups(tmp_path: Path, eplb: Eplb) -> None:
    model = deepseek(groups=4)
    source = model.save(tmp_path / "source")
    rows = scattered_rows(model.moe_layers, 2, ep_size=5)
    plan = save_plan(tmp_path / "plan.json", rows, ep_size=5)
    run = eplb("convert", source, plan, "-o", tmp_path / "out", "--layout", "physical", "--format", "quiet")
    assert run.code == 0, run.err
    assert read_checkpoint(tmp_path / "out") == model.expected(rows, "physical")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["n_routed_experts"] == 10
    assert Model.open(tmp_path / "out").shape.num_experts == E


@pytest.mark.parametrize("form", ["qwen3_moe-bf16", "deepseek_v4"])
def test_every_byte_of_the_weights_is_read_once(tmp_path: Path, eplb: Eplb, form: str) -> None:
    """Tables of expert ids among them, which are mapped in memory."""
    model = FORMS[form]()
    source, rows = model.save(tmp_path / "source", shards=1), random_rows(model.moe_layers, 0)
    plan = save_plan(tmp_path / "plan.json", rows)
    told = eplb("convert", source, plan, "-o", tmp_path / "out", "--format", "json").json
    data = sum(len(tensor.data) for tensor in model.expected(rows, "stock").values())
    assert told["bytes_read"] + told["bytes_cloned"] == data
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert told["bytes_written"] + told["bytes_cloned"] == size


def test_draft_heads_are_named_and_unchanged(tmp_path: Path, eplb: Eplb) -> None:
    for form, head in (("qwen3_next", "mtp"), ("deepseek_v3", "model.layers.4"), ("mimo_v2", "model.mtp")):
        model = FORMS[form]()
        source = model.save(tmp_path / form)
        plan = save_plan(tmp_path / "plan.json", random_rows(model.moe_layers, 0))
        run = eplb("convert", source, plan, "-o", tmp_path / f"{form}-out")
        assert run.code == 0, run.err
        assert f"draft heads keep their own experts, unchanged: {head}\n" in run.err


@pytest.mark.parametrize("layout", ["stock", "physical"])
def test_configs_that_name_experts_follow_them(tmp_path: Path, eplb: Eplb, layout: str) -> None:
    model = FORMS["minimax_m3"]()
    recipe = "stage:\n  ignore: ['language_model.model.layers.2.block_sparse_moe.experts.3.w1', 're:.*gate']\n"
    if layout == "stock":
        model.side_files["recipe.yaml"] = recipe.encode()
    source = model.save(tmp_path / "source")
    rows = random_rows(model.moe_layers, 4, seed=9)
    plan = save_plan(tmp_path / "plan.json", rows)
    run = eplb("convert", source, plan, "-o", tmp_path / "out", "--layout", layout, "--format", "quiet")
    assert run.code == 0, run.err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    side = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    for listed in (config["quantization_config"]["quantized_layers"], side["quantization"]["quantized_layers"]):
        expected = {
            f"language_model.model.layers.{layer}.block_sparse_moe.experts.{slot}.{projection}": {
                "quant_algo": f"ALGO{layer}_{expert}"
            }
            for layer, row in rows.items()
            for slot, expert in enumerate(row if layout == "physical" else row[:E])
            for projection in ("w1", "w2", "w3")
        }
        assert listed == expected
    if layout == "stock":
        text = (tmp_path / "out" / "recipe.yaml").read_text()
        assert text == recipe.replace("experts.3.w1", f"experts.{rows[2].index(3)}.w1")
    assert eplb("verify", source, tmp_path / "out", "--format", "json").json["ok"]


def test_a_config_that_names_experts_by_pattern_is_refused(tmp_path: Path, eplb: Eplb) -> None:
    model = FORMS["qwen3_moe-bf16"]()
    model.config["quantization_config"] = {"ignore": ["re:.*mlp\\.experts\\.3\\..*"]}
    source = model.save(tmp_path / "source")
    plan = save_plan(tmp_path / "plan.json", random_rows(model.moe_layers, 0))
    run = eplb("convert", source, plan, "-o", tmp_path / "out")
    assert run.code == 1
    assert "names single experts" in run.err
    assert "experts" in run.err


def test_patterns_for_all_experts_and_names_of_drafts_stay(tmp_path: Path, eplb: Eplb) -> None:
    model = FORMS["qwen3_next"]()
    ignore = ["re:.*mlp.experts.*", "mtp.layers.0.mlp.experts.3", "model.layers.1.mlp.shared_expert"]
    model.config["quantization_config"] = {"ignore": ignore}
    source = model.save(tmp_path / "source")
    plan = save_plan(tmp_path / "plan.json", random_rows(model.moe_layers, 0))
    assert eplb("convert", source, plan, "-o", tmp_path / "out", "--format", "quiet").code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"] == ignore
