"""Families: what real configs say of experts and layers, and who is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.checkpoint import Model
from eplb_cli.errors import CheckpointError

# (experts, top_k, decoder layers, MoE layers): published facts of the models.
PUBLISHED = {
    "MiniMaxAI--MiniMax-M2.5": (256, 8, 62, range(62)),
    "Qwen--Qwen3-235B-A22B-FP8": (128, 8, 94, range(94)),
    "Qwen--Qwen3-235B-A22B": (128, 8, 94, range(94)),
    "Qwen--Qwen3-30B-A3B-FP8": (128, 8, 48, range(48)),
    "Qwen--Qwen3-30B-A3B": (128, 8, 48, range(48)),
    "Qwen--Qwen3-Coder-480B-A35B-Instruct": (160, 8, 62, range(62)),
    "Qwen--Qwen3-VL-235B-A22B-Instruct": (128, 8, 94, range(94)),
    "Qwen--Qwen3.5-397B-A17B": (512, 10, 60, range(60)),
    "XiaomiMiMo--MiMo-V2-Flash": (256, 8, 48, range(1, 48)),
    "deepseek-ai--DeepSeek-V3": (256, 8, 61, range(3, 61)),
    "deepseek-ai--DeepSeek-V4-Flash": (256, 6, 43, range(43)),
    "google--gemma-4-26B-A4B": (128, 8, 30, range(30)),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (128, 1, 48, range(1, 48, 2)),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (16, 1, 48, range(48)),
    "mistralai--Mixtral-8x7B-v0.1": (8, 2, 32, range(32)),
    "moonshotai--Kimi-K2-Instruct": (384, 8, 61, range(1, 61)),
    "moonshotai--Kimi-K2.5": (384, 8, 61, range(1, 61)),
    "nvidia--MiniMax-M3-NVFP4": (128, 4, 60, range(3, 60)),
    "nvidia--Qwen3-235B-A22B-NVFP4": (128, 8, 94, range(94)),
    "openai--gpt-oss-20b": (32, 4, 24, range(24)),
    "zai-org--GLM-5": (256, 8, 78, range(3, 78)),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_real_config_gives_the_published_shape(shared_data: Path, name: str) -> None:
    shape = Model.open(shared_data / "configs" / f"{name}_config.json").shape
    experts, top_k, layers, moe_layers = PUBLISHED[name]
    assert (shape.num_experts, shape.top_k, shape.num_hidden_layers) == (experts, top_k, layers)
    assert shape.moe_layer_ids == tuple(moe_layers)


def test_every_stored_config_is_covered_by_the_table_or_refused(shared_data: Path) -> None:
    for file in (shared_data / "configs").glob("*_config.json"):
        if file.name.removesuffix("_config.json") not in PUBLISHED:
            with pytest.raises(CheckpointError, match=r"no MoE layers|has no `architectures`"):
                Model.open(file)


def refusal(tmp_path: Path, **config: Any) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        Model.open(file)
    return str(caught.value)


QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
}
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 6,
}


def moe_layers(tmp_path: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    return Model.open(file).shape.moe_layer_ids


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 3}, (2, 5)),
        ({"mlp_only_layers": [0, 5]}, (1, 2, 3, 4)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"decoder_sparse_step": 4}, (3,)),
    ],
)
def test_qwen3_moe_layers(tmp_path: Path, keys: dict[str, Any], expected: tuple[int, ...]) -> None:
    assert moe_layers(tmp_path, QWEN3 | keys) == expected


@pytest.mark.parametrize("section", [None, "text_config"])
@pytest.mark.parametrize(("step", "expected"), [(1, (0, 1, 2, 3, 4, 5)), (2, (1, 3, 5)), (4, (3,))])
def test_llama4_moe_layers_flat_and_nested(
    tmp_path: Path, section: str | None, step: int, expected: tuple[int, ...]
) -> None:
    config = LLAMA4 | {"interleave_moe_layer_step": step}
    if section:
        architectures = config.pop("architectures")
        config = {"architectures": architectures, section: config}
    assert moe_layers(tmp_path, config) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"first_k_dense_replace": 2}, (2, 3, 4, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 0]}, (1, 2, 4)),
    ],
)
def test_deepseek_moe_layers(tmp_path: Path, keys: dict[str, Any], expected: tuple[int, ...]) -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "num_hidden_layers": 6}
    assert moe_layers(tmp_path, config | keys) == expected


def test_either_key_of_the_expert_count_is_read_and_both_must_agree(tmp_path: Path) -> None:
    renamed = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {"num_local_experts": 8}
    assert moe_layers(tmp_path, renamed) == tuple(range(6))
    assert "must agree" in refusal(tmp_path, **renamed, num_experts=4)


def test_a_moe_layers_list_that_disagrees_with_the_step_is_refused(tmp_path: Path) -> None:
    for listed in ([1, 3, 5], [5, 1, 3]):
        assert moe_layers(tmp_path, LLAMA4 | {"interleave_moe_layer_step": 2, "moe_layers": listed}) == (1, 3, 5)
    text = refusal(tmp_path, **LLAMA4, interleave_moe_layer_step=2, moe_layers=[1, 3])
    assert "[1, 3]" in text
    assert "[1, 3, 5]" in text


def test_an_unknown_family_is_named_with_the_known_ones(tmp_path: Path) -> None:
    text = refusal(tmp_path, architectures=["PhiMoEForCausalLM"])
    assert "PhiMoEForCausalLM: not a supported family (" in text
    assert "qwen3_moe" in text
    assert "llama4" in text


def test_a_dense_model_is_named_as_such(tmp_path: Path) -> None:
    assert "no MoE layers in config.json" in refusal(tmp_path, architectures=["Qwen3ForCausalLM"], num_hidden_layers=4)
    assert "no MoE layers in config.json" in refusal(tmp_path, **QWEN3, mlp_only_layers=[0, 1, 2, 3, 4, 5])


@pytest.mark.parametrize("missing", ["num_experts", "num_hidden_layers"])
def test_a_missing_size_is_named(tmp_path: Path, missing: str) -> None:
    assert missing in refusal(tmp_path, **{key: value for key, value in QWEN3.items() if key != missing})


def test_a_config_without_architectures_is_refused(tmp_path: Path) -> None:
    assert "architectures" in refusal(tmp_path, model_type="qwen3_moe")


def test_a_missing_and_a_damaged_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        Model.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not JSON"):
        Model.open(tmp_path)
    with pytest.raises(CheckpointError, match="no such folder"):
        Model.open(tmp_path / "absent")
