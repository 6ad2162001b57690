"""A converted checkpoint is the same function: fp32 logits of tiny real models before and after.

Each negative control breaks one thing that a careless converter would, and must be seen by the same comparison.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.checkpoint import Model
from eplb_cli.placement import Placement
from tests.checkpoints import Tensor, read_safetensors, write_safetensors
from tests.tiny_models import llama4_text, logits, qwen3_moe

Eplb = Callable[..., Any]

TOLERANCE = 1e-5
VISIBLE = 1e-2


def plan_for(model: Path, file: Path, *, redundant: int = 0, ep_size: int = 4, seed: int = 0) -> Placement:
    """A random plan of the stock form for a model."""
    shape = Model.open(model).shape
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(shape.num_experts) for _ in shape.moe_layer_ids or ()])
    rows = np.concatenate([rows, rows[:, :redundant]], 1).astype(np.int32)
    placement = Placement(rows, np.array(shape.moe_layer_ids, np.int32), shape.num_experts, ep_size)
    placement.save(file)
    return placement


def converted(eplb: Eplb, model: Path, folder: Path, **options: Any) -> Path:
    plan_for(model, folder / "plan.json", **options)
    run = eplb("convert", model, folder / "plan.json", "-o", folder / "out", "--format", "quiet")
    assert run.code == 0, run.err
    return folder / "out"


def difference(one: Path, two: Path) -> float:
    return float((logits(one) - logits(two)).abs().max())


@pytest.mark.parametrize("fixture", ["tiny_qwen3_moe", "tiny_qwen3_moe_fused"])
def test_qwen3_stock_is_the_same_function(
    request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb, fixture: str
) -> None:
    model = request.getfixturevalue(fixture)
    assert difference(model, converted(eplb, model, tmp_path)) < TOLERANCE


@pytest.mark.parametrize("fixture", ["tiny_qwen3_moe", "tiny_llama4_per_expert"])
def test_per_expert_stock_with_copies_keeps_one_of_each(
    request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb, fixture: str
) -> None:
    model = request.getfixturevalue(fixture)
    out = converted(eplb, model, tmp_path, redundant=4)
    shapes = [
        {name: item.shape for name, item in read_safetensors(f / "model.safetensors").items()} for f in (model, out)
    ]
    assert shapes[0] == shapes[1]
    if fixture == "tiny_qwen3_moe":  # transformers has no per-expert form of Llama 4
        assert difference(model, out) < TOLERANCE


@pytest.mark.parametrize("fixture", ["tiny_llama4_text", "tiny_llama4_multimodal"])
def test_llama4_stock_is_bit_for_bit_the_same_function(
    request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb, fixture: str
) -> None:
    model = request.getfixturevalue(fixture)
    assert difference(model, converted(eplb, model, tmp_path)) == 0


@pytest.mark.parametrize("step", [2, 3])
def test_a_sparse_step_decides_the_moe_layers(tmp_path: Path, eplb: Eplb, step: int) -> None:
    model = qwen3_moe(tmp_path / "model", layers=7, mlp_only_layers=(), decoder_sparse_step=step)
    assert Model.open(model).shape.moe_layer_ids == tuple(range(step - 1, 7, step))
    assert difference(model, converted(eplb, model, tmp_path)) < TOLERANCE


def test_experts_spread_over_many_shards(tmp_path: Path, eplb: Eplb) -> None:
    model = qwen3_moe(tmp_path / "model", max_shard_size="100KB")
    assert len(list(model.glob("*.safetensors"))) > 10
    assert difference(model, converted(eplb, model, tmp_path)) < TOLERANCE


def test_every_layer_of_llama4_scout_is_moe(tmp_path: Path, eplb: Eplb) -> None:
    model = llama4_text(tmp_path / "model", layers=4, interleave_moe_layer_step=1)
    assert difference(model, converted(eplb, model, tmp_path)) == 0


@pytest.mark.parametrize("fixture", ["tiny_qwen3_moe_fused", "tiny_llama4_text", "tiny_llama4_multimodal"])
def test_transformers_refuses_fused_stock_with_copies(
    request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb, fixture: str
) -> None:
    """The rows of the copies stand in the tensors, whose shapes no longer fit the expert count."""
    out = converted(eplb, request.getfixturevalue(fixture), tmp_path, redundant=4)
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        logits(out)


@pytest.mark.parametrize(
    "fixture", ["tiny_qwen3_moe", "tiny_qwen3_moe_fused", "tiny_llama4_text", "tiny_llama4_multimodal"]
)
def test_transformers_refuses_the_physical_layout(
    request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb, fixture: str
) -> None:
    model = request.getfixturevalue(fixture)
    plan_for(model, tmp_path / "plan.json", redundant=4)
    run = eplb("convert", model, tmp_path / "plan.json", "-o", tmp_path / "out", "--layout", "physical")
    assert run.code == 0, run.err
    with pytest.raises(RuntimeError, match=r"size mismatch|mismatched"):
        logits(tmp_path / "out")


def test_a_physical_layout_without_copies_is_refused(tiny_qwen3_moe: Path, tmp_path: Path, eplb: Eplb) -> None:
    """An engine that does not know the layout would load it, and answer wrongly."""
    plan_for(tiny_qwen3_moe, tmp_path / "plan.json")
    run = eplb("convert", tiny_qwen3_moe, tmp_path / "plan.json", "-o", tmp_path / "out", "--layout", "physical")
    assert run.code == 1
    assert "no redundant experts" in run.err
    assert not (tmp_path / "out").exists()


def test_the_config_still_loads_and_tells_its_layout(tiny_llama4_multimodal: Path, tmp_path: Path, eplb: Eplb) -> None:
    from transformers import AutoConfig

    out = converted(eplb, tiny_llama4_multimodal, tmp_path)
    config = AutoConfig.from_pretrained(out)
    plan = Placement.load(out)
    assert config.eplb_placement == {
        "version": 1,
        "layout": "stock",
        "num_logical_experts": 8,
        "num_physical_experts": 8,
        "num_stored_experts": 8,
        "ep_size": 4,
        "plan": "eplb_plan.json",
        "plan_sha256": plan.map_sha256,
    }
    assert config.text_config.num_local_experts == 8


def test_expert_bytes_are_those_of_the_files(tiny_qwen3_moe: Path, tiny_llama4_text: Path) -> None:
    one = 3 * 64 * 32 * 4
    assert Model.open(tiny_qwen3_moe).expert_bytes.by_layer == dict.fromkeys((1, 2, 3, 4), one)
    assert Model.open(tiny_llama4_text).expert_bytes.by_layer == dict.fromkeys((1, 3), one)
    assert Model.open(tiny_qwen3_moe / "config.json").expert_bytes.by_layer == dict.fromkeys((1, 2, 3, 4), one)


# Negative controls: what the comparison above must see.


def tampered(out: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """A copy of a converted checkpoint with its tensors changed."""
    copy = out.with_name("tampered")
    shutil.copytree(out, copy)
    tensors = read_safetensors(copy / "model.safetensors")
    change(tensors)
    write_safetensors(copy / "model.safetensors", tensors)
    return copy


def caught(eplb: Eplb, model: Path, wrong: Path) -> None:
    """Both the logits and `eplb verify` see that something is wrong."""
    assert difference(model, wrong) > VISIBLE
    run = eplb("verify", model, wrong, "--format", "json")
    assert run.code == 1
    assert run.json["problems"]


def routers(tensors: Iterable[str]) -> list[str]:
    return [name for name in tensors if name.endswith((".mlp.gate.weight", ".router.weight"))]


@pytest.mark.parametrize("fixture", ["tiny_qwen3_moe", "tiny_llama4_text"])
def test_a_forgotten_router_is_seen(request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb, fixture: str) -> None:
    model = request.getfixturevalue(fixture)
    source = read_safetensors(model / "model.safetensors")

    def forget(tensors: dict[str, Tensor]) -> None:
        for name in routers(tensors):
            tensors[name] = source[name]

    caught(eplb, model, tampered(converted(eplb, model, tmp_path), forget))


@pytest.mark.parametrize("fixture", ["tiny_qwen3_moe", "tiny_llama4_text"])
def test_a_reversed_permutation_is_seen(
    request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb, fixture: str
) -> None:
    model = request.getfixturevalue(fixture)
    out = converted(eplb, model, tmp_path)
    source = read_safetensors(model / "model.safetensors")
    plan = Placement.load(out)
    rows = {int(layer): row.tolist() for layer, row in zip(plan.layer_ids, plan.physical_to_logical, strict=True)}
    assert all([row.index(expert) for expert in range(len(row))] != row for row in rows.values())

    def reverse_routers(tensors: dict[str, Tensor]) -> None:
        for name in routers(tensors):
            row = rows[int(name.split("layers.")[1].split(".")[0])]
            length = len(source[name].data) // len(row)
            parts = [source[name].data[i * length : (i + 1) * length] for i in range(len(row))]
            data = b"".join(parts[row.index(i)] for i in range(len(row)))
            tensors[name] = Tensor(source[name].dtype, source[name].shape, data)

    caught(eplb, model, tampered(out, reverse_routers))


def test_one_swapped_pair_of_experts_is_seen(tiny_qwen3_moe: Path, tmp_path: Path, eplb: Eplb) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        for part in ("gate_proj", "up_proj", "down_proj"):
            one, two = (f"model.layers.4.mlp.experts.{expert}.{part}.weight" for expert in (2, 11))
            tensors[one], tensors[two] = tensors[two], tensors[one]

    caught(eplb, tiny_qwen3_moe, tampered(converted(eplb, tiny_qwen3_moe, tmp_path), swap))


def test_one_swapped_pair_of_fused_experts_is_seen(tiny_llama4_text: Path, tmp_path: Path, eplb: Eplb) -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        for part in ("gate_up_proj", "down_proj"):
            name = f"model.layers.3.feed_forward.experts.{part}"
            tensor = tensors[name]
            length = len(tensor.data) // 8
            rows = [tensor.data[i * length : (i + 1) * length] for i in range(8)]
            rows[0], rows[5] = rows[5], rows[0]
            rows[1], rows[6] = rows[6], rows[1]
            tensors[name] = Tensor(tensor.dtype, tensor.shape, b"".join(rows))

    caught(eplb, tiny_llama4_text, tampered(converted(eplb, tiny_llama4_text, tmp_path), swap))


def test_the_source_was_never_touched(tiny_qwen3_moe: Path, tmp_path: Path, eplb: Eplb) -> None:
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in tiny_qwen3_moe.iterdir()}
    converted(eplb, tiny_qwen3_moe, tmp_path)
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in tiny_qwen3_moe.iterdir()} == before
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_experts_per_tok"] == 4
