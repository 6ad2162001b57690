"""Model: MODEL opened once answers for shape, sizes, precision and cache, whatever of it is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.checkpoint import KvCache, Model
from eplb_cli.errors import CheckpointError
from eplb_cli.loads import ExpertLoads, ModelShape
from tests.checkpoints import FORMS, H, W, deepseek, llama4, qwen3_moe, random_rows, save_plan

Eplb = Callable[..., Any]

CACHE = {"num_key_value_heads": 2, "num_attention_heads": 4, "head_dim": 8}


def test_all_that_a_model_says_of_itself(tmp_path: Path) -> None:
    model = deepseek(groups=4, quantization_config={"quant_method": "FP8"}, **CACHE)
    opened = Model.open(model.save(tmp_path / "m", shards=2))
    assert opened.shape == ModelShape("DeepseekV3ForCausalLM", 8, 2, 4, (1, 2, 3))
    assert (opened.num_expert_groups, opened.count_keys) == (4, ("n_routed_experts",))
    assert (opened.quantisation_method, opened.placement) == ("fp8", None)
    assert opened.kv_cache(2) == KvCache(4 * 2 * 8 * 1 * 2, 4, 2)
    # Three matrices of one byte a weight, each with 2 x 2 scales in float32.
    assert opened.expert_bytes.by_layer == dict.fromkeys((1, 2, 3), 3 * (H * W + 4 * 4))
    assert opened.expert_bytes.note is None


def test_layers_of_unequal_experts_have_their_own_sizes(tmp_path: Path) -> None:
    sizes = Model.open(FORMS["qwen3_moe-layouts-by-layer"]().save(tmp_path / "m")).expert_bytes
    assert sizes.by_layer == {1: 3 * H * W * 2, 2: 3 * H * W * 2}
    assert sizes.note is None


def test_the_largest_expert_counts_where_one_lacks_an_activation_scale(tmp_path: Path) -> None:
    model = qwen3_moe("ct-fp8-static")
    del model.items["model.layers.2.mlp.experts.3.up_proj.input_scale"]
    assert Model.open(model.save(tmp_path / "m")).expert_bytes.by_layer == dict.fromkeys((1, 2), 3 * (H * W + 2 * 4))


@pytest.mark.parametrize("given", ["config", "no weights", "a shard missing"])
def test_without_whole_weights_sizes_are_estimated_and_it_is_said(tmp_path: Path, given: str) -> None:
    model = qwen3_moe("fp8-block")
    model.config["quantization_config"] = {"quant_method": "fp8"}
    folder = model.save(tmp_path / "m", shards=2)
    for shard in sorted(folder.glob("*.safetensors"))[{"a shard missing": 1, "no weights": 0}.get(given, 9) :]:
        shard.unlink()
    sizes = Model.open(folder / "config.json" if given == "config" else folder).expert_bytes
    assert sizes.by_layer == {1: 3 * H * W, 2: 3 * H * W}
    assert sizes.note is not None and "estimated from config.json" in sizes.note
    assert ("model-00002-of-00002.safetensors" in sizes.note) == (given == "a shard missing")


def test_planning_needs_no_weights(tmp_path: Path, eplb: Eplb) -> None:
    folder = qwen3_moe().save(tmp_path / "m", shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    counts = np.random.default_rng(0).integers(1, 90, (4, 2, 8))
    loads = tmp_path / "loads.safetensors"
    ExpertLoads(counts, np.full(4, 900), np.array([1, 2], np.int32)).save(loads)
    run = eplb("plan", loads, "--ep-size", 4, "--model", folder, "-o", tmp_path / "plan.json")
    assert run.code == 0, run.err
    assert "estimated from config.json" in run.err and "model-00001-of-00002.safetensors" in run.err


@pytest.mark.parametrize("name", ["hf_quant_config.json", "quantize_config.json", "quant_config.json"])
def test_a_quantisers_own_file_counts_where_the_config_says_nothing(tmp_path: Path, name: str) -> None:
    model = qwen3_moe()
    model.side_files[name] = json.dumps({"quantization": {"quant_algo": "FP8"}, "bits": 4}).encode()
    folder = model.save(tmp_path / "m")
    methods = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
    assert Model.open(folder).quantisation_method == methods[name]
    model.config["quantization_config"] = {"quant_method": "fp8"}
    assert Model.open(model.save(folder)).quantisation_method == "fp8"


def test_a_converted_model_has_its_record_and_its_own_expert_count(tmp_path: Path, eplb: Eplb) -> None:
    model = llama4("ct-fp8-dynamic", multimodal=True)
    source = model.save(tmp_path / "source")
    plan = save_plan(tmp_path / "plan.json", random_rows(model.moe_layers, 4))
    out = tmp_path / "out"
    assert eplb("convert", source, plan, "-o", out, "--layout", "physical", "--format", "quiet").code == 0
    opened = Model.open(out)
    assert opened.placement is not None and opened.placement["layout"] == "physical"
    assert opened.shape.num_experts == 8
    assert opened.expert_bytes.by_layer == Model.open(source).expert_bytes.by_layer


# Every value that is read has a type and a bound.

SIZES = {
    "num_experts": [[8], "8", 8.0, True, 0, -1, 10**30, {"n": 8}],
    "num_experts_per_tok": [[2], "2", 0, 10**9],
    "num_hidden_layers": [10**8, [4], "4", 0],
    "decoder_sparse_step": ["1", [1], -1, 1.5],
    "mlp_only_layers": [3, "0", ["0"], [[0]], {"0": 1}],
    "mlp_layer_types": [["sparse", 3], "sparse"],
    "n_group": [[1], "1", -1],
    "hidden_size": [[32], "32", 10**12],
    "moe_intermediate_size": [[32], "32", 10**12],
    "dtype": [["bfloat16"], 16, {"a": 1}],
    "torch_dtype": [["bfloat16"]],
    "text_config": [[], 3, "text"],
    "architectures": ["Qwen3MoeForCausalLM", [["Qwen3MoeForCausalLM"]], [3], {"a": 1}],
    "head_dim": ["8", [8]],
    "num_key_value_heads": ["2", 10**12],
    "layer_types": ["full_attention", [3]],
    "kv_lora_rank": ["512"],
    "eplb_placement": [[], 3, "stock", {"layout": "other"}, {"layout": ["stock"]}, {"layout": "physical"}],
    "quantization_config": [[], "fp8", {"quant_method": ["fp8"]}, {"bits": "4"}, {"config_groups": [1]},
                            {"config_groups": {"a": 1}}, {"config_groups": {"a": {"weights": 1}}}, {"quant_algo": 8}],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in SIZES.items() for value in values])
def test_a_value_of_a_wrong_type_or_size_is_named(tmp_path: Path, key: str, value: Any) -> None:
    file = tmp_path / "config.json"
    config = {**qwen3_moe().config, **CACHE}
    file.write_text(json.dumps(config))
    control = Model.open(file)
    assert control.expert_bytes.by_layer == {1: 3 * H * W * 2, 2: 3 * H * W * 2} and control.kv_cache() is not None
    file.write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError) as caught:
        model = Model.open(file)
        assert model.expert_bytes and model.kv_cache()
    assert str(file) in str(caught.value)
    assert caught.value.rule


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("Llama4ForCausalLM", "interleave_moe_layer_step", [2]),
        ("Llama4ForCausalLM", "moe_layers", [[1], 3]),
        ("Llama4ForCausalLM", "moe_layers", ["1", 3]),
        ("DeepseekV3ForCausalLM", "first_k_dense_replace", "1"),
        ("DeepseekV3ForCausalLM", "moe_layer_freq", [0, 1, 1, 2]),
        ("DeepseekV3ForCausalLM", "moe_layer_freq", [0, 1, 1]),
        ("DeepseekV3ForCausalLM", "moe_layer_freq", "1"),
        ("Gemma4ForCausalLM", "enable_moe_block", "false"),
    ],
)
def test_keys_that_tell_the_moe_layers_are_typed_too(
    tmp_path: Path, architecture: str, key: str, value: object
) -> None:
    count = {"num_local_experts": 8} if "Llama" in architecture else {"num_experts": 8}
    file = tmp_path / "config.json"
    config = {"architectures": [architecture], "num_hidden_layers": 4, "enable_moe_block": True, **count}
    file.write_text(json.dumps(config))
    assert Model.open(file).shape.moe_layer_ids
    file.write_text(json.dumps({**config, key: value}))
    with pytest.raises(CheckpointError, match=key):
        Model.open(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a":' * 20_000 + b"1" + b"}" * 20_000, "nested too deep"),
        (b'{"num_experts": ' + b"9" * 5_000 + b"}", "5,000 digits"),
        (b'{"architectures": ["\\ud800"]}', "lone surrogates"),
        (b'{"num_experts": 8, "num_experts": 16}', "twice"),
        (b"[1]", "not a JSON object"),
        (b"\xff\xfe{}", "not JSON"),
    ],
    ids=["deep", "digits", "surrogate", "twice", "list", "bytes"],
)
def test_json_that_hurts_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        Model.open(tmp_path)
    assert caught.value.file == str(tmp_path / "config.json")
