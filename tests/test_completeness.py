"""Completeness: a part that is missing or unlike its siblings is refused, and names layer, expert and part."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.checkpoint.classify import ClassifiedTensors, Kind, classify
from eplb_cli.checkpoint.config import ModelConfig
from eplb_cli.errors import CheckpointError
from eplb_cli.tensors import TensorEntry
from tests.checkpoints import (
    FORMS,
    QUANTISATIONS,
    E,
    H,
    Item,
    Synthetic,
    Tensor,
    W,
    qwen3_moe,
    random_rows,
    save_plan,
)

Eplb = Callable[..., Any]
ODD = 3
"""The expert that is not like the others."""


def classes_of(model: Synthetic) -> dict[str, tuple[str, list[str]]]:
    """Every tensor class of the last layer that has experts: part -> (kind, names by expert)."""
    layer = model.moe_layers[-1]
    found: dict[str, tuple[str, list[str]]] = {}
    for name, item in model.items.items():
        if item.layer == layer and item.kind == "expert":
            part = item.template.replace("{}.", "").split(".experts.")[1]
            found.setdefault(part, ("expert", []))[1].append(name)
        elif item.layer == layer or (f"layers.{layer}." in name and ".experts." in name and "mtp" not in name):
            found[name.split(f"layers.{layer}.")[1].split("experts.")[-1]] = (item.kind, [name])
    return found


MODELS = {form: build() for form, build in FORMS.items()}
CLASSES = [(form, part) for form, model in MODELS.items() for part in classes_of(model)]
PER_EXPERT = [(form, part) for form, part in CLASSES if classes_of(MODELS[form])[part][0] == "expert"]


def check(folder: Path, model: Synthetic) -> ClassifiedTensors:
    (folder / "config.json").write_text(json.dumps(model.config))
    entries = {
        name: TensorEntry(name, item.tensor.dtype, item.tensor.shape, 0, len(item.tensor.data))
        for name, item in model.items.items()
    }
    return classify(ModelConfig.load(folder / "config.json"), entries, stored_experts=E)


def without(model: Synthetic, *names: str) -> Synthetic:
    return replace(model, items={name: item for name, item in model.items.items() if name not in names})


def stored_as(model: Synthetic, name: str, **form: Any) -> Synthetic:
    item = model.items[name]
    return replace(model, items={**model.items, name: replace(item, tensor=replace(item.tensor, **form))})


def refusal(folder: Path, model: Synthetic) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        check(folder, model)
    return caught.value


def is_activation(part: str) -> bool:
    return "input_" in part


@pytest.mark.parametrize("form", FORMS)
def test_a_whole_checkpoint_is_complete(tmp_path: Path, form: str) -> None:
    for warning in check(tmp_path, MODELS[form]).warnings:
        assert "names no quantisation" in warning


@pytest.mark.parametrize(("form", "part"), CLASSES)
def test_a_tensor_class_is_missed_in_a_whole_layer(tmp_path: Path, form: str, part: str) -> None:
    model = MODELS[form]
    kind, names = classes_of(model)[part]
    if is_activation(part):
        # The config of this form gives every layer an algorithm of its own, so layers need not agree.
        if form == "minimax_m3":
            return
        warning = check(tmp_path, without(model, *names)).warnings[0]
        assert warning.startswith(f"layer {model.moe_layers[-1]}, all experts: no {part}")
        return
    error = refusal(tmp_path, without(model, *names))
    assert error.layer == model.moe_layers[-1]
    if kind != "ids":
        assert part in str(error) or part.rpartition(".")[0] in str(error) or "no router" in str(error)


@pytest.mark.parametrize(("form", "part"), PER_EXPERT)
def test_a_tensor_class_is_missed_and_told_apart_in_one_expert(tmp_path: Path, form: str, part: str) -> None:
    model = MODELS[form]
    odd = len(part) % E  # any of them, the first and the last too
    name = classes_of(model)[part][1][odd]
    tensor = model.items[name].tensor
    other = {"BF16": "F16", "F32": "BF16"}.get(tensor.dtype, "F32")
    changed = [stored_as(model, name, dtype=other), stored_as(model, name, shape=(*tensor.shape, 1))]
    if is_activation(part):
        assert (
            f"layer {model.moe_layers[-1]}, expert {odd}: no {part}"
            in check(tmp_path, without(model, name)).warnings[0]
        )
    else:
        changed.append(without(model, name))
    for wrong in changed:
        error = refusal(tmp_path, wrong)
        assert (error.layer, error.expert) == (model.moe_layers[-1], odd)
        assert part in str(error)


def test_the_experts_without_activation_scales_are_named_as_ranges(tmp_path: Path) -> None:
    model = MODELS["qwen3_moe-modelopt-nvfp4"]
    gone = [n for n in model.items if any(f"experts.{e}." in n for e in (1, 2, 5)) and n.endswith("input_scale")]
    (warning, *_) = check(tmp_path, without(model, *gone)).warnings
    parts = ", ".join(f"{matrix}.input_scale" for matrix in ("down_proj", "gate_proj", "up_proj"))
    assert warning.startswith(f"layers 1-2, experts 1-2, 5: no {parts};")


def test_a_first_layer_without_activation_scales_is_named_too(tmp_path: Path) -> None:
    model = MODELS["qwen3_moe-ct-fp8-static"]
    gone = [name for name in model.items if "layers.1." in name and name.endswith("up_proj.input_scale")]
    (warning, *_) = check(tmp_path, without(model, *gone)).warnings
    assert warning.startswith("layer 1, all experts: no up_proj.input_scale;")


def test_the_odd_expert_is_named_and_not_the_many(tmp_path: Path) -> None:
    model = qwen3_moe()
    model.expert(2, "model.layers.2.mlp.experts.{}.up_proj.weight_scale", ODD, (1,))
    error = refusal(tmp_path, model)
    assert (error.layer, error.expert) == (2, ODD)
    assert error.tensor == f"model.layers.2.mlp.experts.{ODD}.up_proj.weight_scale"


def test_a_part_that_half_of_the_experts_have_is_one_that_the_others_lack(tmp_path: Path) -> None:
    names = [f"model.layers.2.mlp.experts.{expert}.up_proj.weight_scale_inv" for expert in (0, 2, 3, 7)]
    error = refusal(tmp_path, without(MODELS["qwen3_moe-fp8-block"], *names))
    assert (error.layer, error.expert, error.problem) == (2, 0, "the expert lacks up_proj.weight_scale_inv")


def test_the_odd_layer_is_named_and_not_the_many(tmp_path: Path) -> None:
    model = replace(MODELS["deepseek_v3"], items=dict(MODELS["deepseek_v3"].items))
    for expert in range(E):
        for matrix in ("gate_proj", "up_proj", "down_proj"):
            model.expert(2, f"model.layers.2.mlp.experts.{{}}.{matrix}.bias", expert, (H,))
    error = refusal(tmp_path, model)
    assert (error.layer, error.problem) == (2, "every expert has down_proj.bias, which layer 1 has not")


# What no expert has, and what matrices of one expert disagree on.


def everywhere(model: Synthetic, change: Callable[[str, Item], Item | None]) -> Synthetic:
    """The same change to every expert of every layer."""
    items = {}
    for name, item in model.items.items():
        changed = change(name, item) if item.kind in ("expert", "fused") else item
        if changed is not None:
            items[name] = changed
    return replace(model, items=items)


@pytest.mark.parametrize(
    ("form", "suffix"),
    [(f"qwen3_moe-{name}", suffix) for name in QUANTISATIONS for suffix, *_ in QUANTISATIONS[name](W, H)]
    + [("llama4-nvidia-nvfp4", "_weight_scale"), ("gpt_oss-mxfp4", "_scales"), ("llama4-fbgemm", "_scale")],
)
def test_what_one_matrix_lacks_in_all_layers_is_missed(tmp_path: Path, form: str, suffix: str) -> None:
    ends = (f"down_proj.{suffix}", f"down_proj{suffix}")
    model = everywhere(MODELS[form], lambda name, item: None if name.endswith(ends) else item)
    if is_activation(suffix):
        check(tmp_path, model)
        return
    assert "down_proj" in str(refusal(tmp_path, model))


@pytest.mark.parametrize("quantisation", [name for name in QUANTISATIONS if name != "bf16"])
def test_weights_without_any_scale_are_refused(tmp_path: Path, quantisation: str) -> None:
    model = everywhere(MODELS[f"qwen3_moe-{quantisation}"], lambda name, item: None if "scale" in name else item)
    rounded = "fp8" in quantisation
    if rounded:
        check(tmp_path, model)  # without a quantisation config, numbers that are merely rounded
    else:
        refusal(tmp_path, model)
    model.config = {**model.config, "quantization_config": {"quant_method": "some"}}
    error = refusal(tmp_path, model)
    assert "no expert has a scale for gate_proj." in str(error) and error.layer == 1


def test_scales_without_any_weight_are_refused(tmp_path: Path) -> None:
    model = everywhere(
        MODELS["qwen3_moe-fp8-block"], lambda name, item: None if name.endswith("up_proj.weight") else item
    )
    assert "every expert lacks up_proj.weight" in str(refusal(tmp_path, model))


def test_a_matrix_that_no_expert_has_is_missed(tmp_path: Path) -> None:
    for form, matrix in (("mixtral", "w2"), ("deepseek_v4", "w3"), ("qwen3_moe-awq", "up_proj")):
        model = everywhere(MODELS[form], lambda name, item, m=matrix: None if f".{m}." in name else item)  # type: ignore[misc]
        assert f"every expert lacks {matrix};" in str(refusal(tmp_path, model))


def test_a_familys_second_naming_is_complete_in_itself(tmp_path: Path) -> None:
    model = MODELS["deepseek_v4"]
    names = {".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}
    renamed = {}
    for name, item in model.items.items():
        new = next((name.replace(old, to) for old, to in names.items() if old in name), name)
        renamed[new] = item
    check(tmp_path, replace(model, items=renamed))
    lacking = {name: item for name, item in renamed.items() if ".up_proj." not in name}
    assert "every expert lacks up_proj" in str(refusal(tmp_path, replace(model, items=lacking)))


def test_a_number_for_each_expert_of_fused_tensors_moves_with_it(tmp_path: Path) -> None:
    model = replace(MODELS["qwen3_moe-fused"], items=dict(MODELS["qwen3_moe-fused"].items))
    for layer in (1, 2):
        for matrix in ("gate_up_proj", "down_proj"):
            model.fused(layer, f"model.layers.{layer}.mlp.experts.{matrix}_scale", (), "F32")
            model.copy(f"model.layers.{layer}.mlp.experts.{matrix}_input_scale", (), "F32")
    roles = check(tmp_path, model).roles
    assert roles["model.layers.2.mlp.experts.down_proj_scale"].kind is Kind.FUSED
    assert roles["model.layers.2.mlp.experts.down_proj_input_scale"].kind is Kind.COPY


def test_a_number_for_all_experts_beside_experts_of_their_own_is_in_every_layer(tmp_path: Path) -> None:
    model = replace(MODELS["qwen3_moe-ct-fp8-dynamic"], items=dict(MODELS["qwen3_moe-ct-fp8-dynamic"].items))
    for layer in (1, 2):
        model.copy(f"model.layers.{layer}.mlp.experts.down_proj_scale", (), "F32")
    check(tmp_path, model)
    error = refusal(tmp_path, without(model, "model.layers.2.mlp.experts.down_proj_scale"))
    assert (error.layer, error.problem) == (2, "the layer lacks down_proj_scale")


@pytest.mark.parametrize(
    ("form", "extra"),
    [("qwen3_moe-ct-w4a16", "weight"), ("qwen3_moe-gptq", "weight"), ("qwen3_moe-bf16", "weight_packed"),
     ("qwen3_moe-bf16", "qweight")],
)  # fmt: skip
def test_a_weight_in_two_forms_is_refused(tmp_path: Path, form: str, extra: str) -> None:
    model = replace(MODELS[form], items=dict(MODELS[form].items))
    for layer in (1, 2):
        for expert in range(E):
            model.expert(layer, f"model.layers.{layer}.mlp.experts.{{}}.up_proj.{extra}", expert, (W, H))
    text = str(refusal(tmp_path, model))
    assert "in two forms" in text and f"up_proj.{extra}" in text


def test_fused_blocks_beside_the_matrix_itself_are_refused(tmp_path: Path) -> None:
    model = replace(MODELS["gpt_oss-mxfp4"], items=dict(MODELS["gpt_oss-mxfp4"].items))
    for layer in range(4):
        model.fused(layer, f"model.layers.{layer}.mlp.experts.down_proj", (W, H))
    assert "in two forms: down_proj_blocks and down_proj" in str(refusal(tmp_path, model))


def test_gate_and_up_are_stored_alike(tmp_path: Path) -> None:
    for form, matrix in (("qwen3_moe-fp8-block", "up_proj"), ("mixtral", "w3")):
        for changed in ({"dtype": "I8"}, {"shape": (W // 2, H)}):
            model = everywhere(
                MODELS[form],
                lambda name, item, m=matrix, c=changed: (  # type: ignore[misc]
                    replace(item, tensor=replace(item.tensor, **c)) if name.endswith(f"{m}.weight") else item
                ),
            )
            text = str(refusal(tmp_path, model))
            assert f"{matrix}.weight is" in text or f"but {matrix}.weight" in text or "has a scale" in text


def test_block_scales_have_the_declared_blocks(tmp_path: Path) -> None:
    model = replace(MODELS["qwen3_moe-fp8-block"])
    fp8 = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    # 24 rows leave a second block that is not full.
    for block in ([16, 16], [24, 31]):
        model.config = {**model.config, "quantization_config": {**fp8, "weight_block_size": block}}
        check(tmp_path, model)
    for block in ([128, 128], [16, 32], [8, 16]):
        model.config = {**model.config, "quantization_config": {**fp8, "weight_block_size": block}}
        text = str(refusal(tmp_path, model))
        assert "layer 1: " in text and "weight_scale_inv is F32 [2, 2]" in text and str(block) in text


# Precision that the quantisation config declares layer by layer.


def mixed_precision(config: dict[str, Any] | None) -> Synthetic:
    """Experts of layer 1 in FP8, of layer 2 in bfloat16."""
    model = replace(MODELS["qwen3_moe-fp8-block"])
    plain = {name: item for name, item in MODELS["qwen3_moe-bf16"].items.items() if item.layer == 2}
    model.items = {**{name: item for name, item in model.items.items() if item.layer != 2}, **plain}
    model.config = {**model.config, **({} if config is None else {"quantization_config": config})}
    return model


EXPERTS = "model.layers.{}.mlp.experts.{}.{}"
NAMES = [EXPERTS.format(2, e, p) for e in range(E) for p in ("gate_proj", "up_proj", "down_proj")]
DECLARED: dict[str, dict[str, Any]] = {
    "names of experts": {"ignore": NAMES},
    "a name of a layer": {"modules_to_not_convert": ["lm_head", "model.layers.2"]},
    "a name with dots": {"modules_to_not_convert": ["layers.2."]},
    "a module": {"modules_to_not_convert": ["model.layers.2.mlp.experts"]},
    "a glob": {"exclude_modules": ["lm_head", "model.layers.2.*"]},
    "a regular expression": {"ignore": ["lm_head", r"re:.*layers\.2\.mlp\.experts\..*"]},
    "several layers at once": {"ignore": [r"re:model\.layers\.(?:2|5|7)\.mlp\.experts\.\d+\.(?:gate|up|down)_proj$"]},
    "a GPTQ exception": {"dynamic": {r"-:.*\.layers\.2\..*": {}}},
    "GPTQ bits": {"dynamic": {r"+:.*\.layers\.2\..*": {"bits": 16}}},
    "algorithms by name": {"quantized_layers": {n.replace("rs.2", "rs.1"): {"quant_algo": "FP8"} for n in NAMES}},
    "algorithms of both": {
        "quantized_layers": {
            **{n.replace("rs.2", "rs.1"): {"quant_algo": "FP8"} for n in NAMES},
            **{n: {"quant_algo": "NONE"} for n in NAMES},
        }
    },
    "groups": {"config_groups": {"a": {"targets": ["re:.*layers.1.mlp.experts.*"], "weights": {"num_bits": 8}}}},
    "bits by name": {"extra_config": {name: {"bits": 16} for name in NAMES}},
    "layers' own configs": {"layer_quant_config": {"model.layers.1.mlp.experts.*": {"weight": {"dtype": "fp8_e4m3"}}}},
}


@pytest.mark.parametrize("declared", DECLARED)
def test_mixed_precision_that_the_config_declares_is_legal(tmp_path: Path, declared: str) -> None:
    assert check(tmp_path, mixed_precision(DECLARED[declared])).warnings == ()


@pytest.mark.parametrize(
    "config",
    [
        None,
        {"quant_method": "fp8"},
        {"modules_to_not_convert": ["model.layers.20", "layers.2.self_attn", "gate", "model.layers.2.mlp.gate"]},
        {"ignore": ["re:.*layers.*mlp.gate$", "re:.*self_attn.*"]},
        {"exclude_modules": ["model.layers.2?.*"]},
        {
            "ignore": [
                "re:(",
                "re:(.+)+!",
                "re:" + "(.*)*" * 9 + "!",
                "re:" + "(.|.)" * 40 + "!",
                "re:" + ".*" * 30 + "!",
            ]
        },
        {"quantized_layers": {n: {"quant_algo": "FP8"} for m in NAMES for n in (m, m.replace("rs.2", "rs.1"))}},
    ],
    ids=["nothing", "no list", "other modules", "other patterns", "another glob", "patterns that hurt", "all alike"],
)
def test_mixed_precision_that_nothing_declares_is_refused(tmp_path: Path, config: dict[str, Any] | None) -> None:
    error = refusal(tmp_path, mixed_precision(config))
    assert error.layer in (1, 2)
    assert "quantisation config tells them apart" in str(error)


def test_one_matrix_may_be_declared_apart(tmp_path: Path) -> None:
    model = everywhere(
        MODELS["qwen3_moe-ct-fp8-dynamic"],
        lambda name, item: None if name.endswith("down_proj.weight_scale") else
        replace(item, tensor=Tensor("BF16", (H, W), b"")) if "down_proj" in name else item,
    )  # fmt: skip
    model.config = {**model.config, "quantization_config": {"ignore": ["re:.*experts.*down_proj"]}}
    check(tmp_path, model)
    model.config = {**model.config, "quantization_config": {"ignore": ["re:.*shared_expert.*down_proj"]}}
    refusal(tmp_path, model)


def test_weights_and_config_that_tell_different_things_are_warned_about(tmp_path: Path) -> None:
    model = replace(MODELS["qwen3_moe-bf16"])
    assert check(tmp_path, model).warnings == ()
    model.config = {**model.config, "quantization_config": {"quant_method": "fp8"}}
    assert (
        "config.json names fp8, but the experts of layers 1-2 are plain numbers" in check(tmp_path, model).warnings[0]
    )
    model.config = {**model.config, "quantization_config": {"quant_method": "fp8", "ignore": ["re:.*experts.*"]}}
    assert check(tmp_path, model).warnings == ()


# The commands.


def test_convert_and_verify_refuse_an_incomplete_source(tmp_path: Path, eplb: Eplb) -> None:
    model = qwen3_moe("modelopt-nvfp4")
    whole = model.save(tmp_path / "whole", shards=2)
    plan = save_plan(tmp_path / "plan.json", random_rows(model.moe_layers, 0))
    assert eplb("convert", whole, plan, "-o", tmp_path / "out", "--format", "quiet").code == 0
    model.items = without(model, "model.layers.2.mlp.experts.3.up_proj.weight_scale_2").items
    broken = model.save(tmp_path / "broken", shards=2)
    for command in (("convert", broken, plan, "-o", tmp_path / "other"), ("verify", broken, tmp_path / "out")):
        run = eplb(*command)
        assert run.code == 1
        assert "layer 2, expert 3: the expert lacks up_proj.weight_scale_2" in " ".join((run.out + run.err).split())
    assert not list(tmp_path.glob("other*"))


def test_convert_and_verify_warn_of_missing_activation_scales(tmp_path: Path, eplb: Eplb) -> None:
    model = qwen3_moe("modelopt-nvfp4")
    model.items = without(model, "model.layers.2.mlp.experts.3.up_proj.input_scale").items
    source = model.save(tmp_path / "source")
    plan = save_plan(tmp_path / "plan.json", random_rows(model.moe_layers, 0))
    for command in (("convert", source, plan, "-o", tmp_path / "out"), ("verify", source, tmp_path / "out")):
        run = eplb(*command)
        assert run.code == 0, run.err
        assert "layer 2, expert 3: no up_proj.input_scale" in " ".join(run.err.split())
