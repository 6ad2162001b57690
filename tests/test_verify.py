"""`eplb verify` sees each way in which a converted checkpoint can be wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import (
    FORMS,
    E,
    Synthetic,
    Tensor,
    qwen3_moe,
    random_rows,
    read_checkpoint,
    read_safetensors,
    save_plan,
    scattered_rows,
    write_safetensors,
)

Eplb = Callable[..., Any]
ROUTER = "model.layers.1.mlp.gate.weight"


class Converted:
    """A source and its converted checkpoint, right until a test breaks it."""

    def __init__(self, folder: Path, eplb: Eplb, model: Synthetic, layout: str) -> None:
        self.folder, self.eplb, self.model, self.layout = folder, eplb, model, layout
        self.source = model.save(folder / "source", shards=2)
        rows = (random_rows if layout == "stock" else scattered_rows)(model.moe_layers, 4, seed=1)
        self.plan = save_plan(folder / "plan.json", rows)
        self.out = folder / "out"
        run = eplb("convert", self.source, self.plan, "-o", self.out, "--layout", layout, "--format", "quiet")
        assert run.code == 0, run.err

    def problems(self, level: str = "full", *options: object) -> list[str]:
        run = self.eplb("verify", self.source, self.out, "--level", level, "--format", "json", *options)
        assert run.json["ok"] == (not run.json["problems"])
        assert run.code == (0 if run.json["ok"] else 1)
        assert run.json["level"] == level
        return list(run.json["problems"])

    def file_of(self, name: str) -> Path:
        for file in self.out.glob("*.safetensors"):
            if name in read_safetensors(file):
                return file
        raise KeyError(name)

    def change(self, name: str, data: Callable[[bytes], bytes]) -> None:
        """Change a tensor's bytes where they lie, leaving the header as it is."""
        file = self.file_of(name)
        before = read_safetensors(file)[name].data
        after = data(before)
        assert len(after) == len(before)
        assert after != before
        content = file.read_bytes()
        assert content.count(before) == 1
        file.write_bytes(content.replace(before, after))


@pytest.fixture(params=["stock", "physical"])
def converted(request: pytest.FixtureRequest, tmp_path: Path, eplb: Eplb) -> Converted:
    return Converted(tmp_path, eplb, qwen3_moe(), request.param)


@pytest.mark.parametrize("level", ["headers", "sample", "full"])
def test_what_is_right_is_proven_at_every_level(converted: Converted, level: str) -> None:
    run = converted.eplb("verify", converted.source, converted.out, "--level", level, "--format", "json")
    assert run.json == {"ok": True, "level": level, "tensors": len(read_checkpoint(converted.out)), "problems": []}


def test_full_is_the_default(converted: Converted) -> None:
    assert converted.eplb("verify", converted.source, converted.out, "--format", "json").json["level"] == "full"


@pytest.mark.parametrize("level", ["sample", "full"])
def test_a_swapped_pair_of_experts(converted: Converted, level: str) -> None:
    names = [f"model.layers.2.mlp.experts.{expert}.up_proj.weight" for expert in (1, 2)]
    one, two = (read_checkpoint(converted.out)[name].data for name in names)
    converted.change(names[0], lambda _: b"\x00" * len(one))
    converted.change(names[1], lambda _: one)
    converted.change(names[0], lambda _: two)
    problems = converted.problems(level)
    assert len(problems) == 2
    assert all(any(name in problem for problem in problems) for name in names)


@pytest.mark.parametrize("level", ["sample", "full"])
def test_a_router_row_out_of_place(converted: Converted, level: str) -> None:
    length = 32 * 2
    converted.change(ROUTER, lambda data: data[length : 2 * length] + data[:length] + data[2 * length :])
    (problem,) = converted.problems(level)
    assert ROUTER in problem


def test_one_flipped_bit_in_any_kind_of_tensor(converted: Converted) -> None:
    for name in (ROUTER, "lm_head.weight", "model.layers.2.mlp.experts.7.down_proj.weight"):
        converted.change(name, lambda data: data[:-1] + bytes([data[-1] ^ 1]))
        problems = converted.problems()
        assert any(f"tensor {name}" in problem for problem in problems)
        assert any("at byte" in problem for problem in problems)


def test_a_truncated_shard(converted: Converted) -> None:
    file = converted.file_of("lm_head.weight")
    os.truncate(file, file.stat().st_size - 8)
    (problem,) = converted.problems("headers")
    assert file.name in problem
    assert "truncated" in problem


def test_a_stale_tensor_in_a_second_shard(converted: Converted) -> None:
    other = next(file for file in converted.out.glob("*.safetensors") if ROUTER not in read_safetensors(file))
    stale = read_checkpoint(converted.source)[ROUTER]
    write_safetensors(other, {**read_safetensors(other), ROUTER: stale})
    (problem,) = converted.problems("headers")
    assert ROUTER in problem
    assert "again in" in problem


def test_a_stale_tensor_under_a_name_of_its_own(converted: Converted) -> None:
    file = converted.file_of("lm_head.weight")
    name = "model.layers.1.mlp.experts.99.up_proj.weight"
    write_safetensors(file, {**read_safetensors(file), name: Tensor("BF16", (1,), b"ab")})
    index = converted.out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"][name] = file.name
    index.write_text(json.dumps(document))
    assert any("must not be there" in problem and name in problem for problem in converted.problems("headers"))


def test_a_missing_tensor(converted: Converted) -> None:
    file = converted.file_of("lm_head.weight")
    tensors = read_safetensors(file)
    del tensors["lm_head.weight"]
    write_safetensors(file, tensors)
    index = converted.out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(document))
    assert any("tensor lm_head.weight is missing" in problem for problem in converted.problems("headers"))


def test_a_wrong_shape_of_the_right_size(converted: Converted) -> None:
    file = converted.file_of(ROUTER)
    tensors = read_safetensors(file)
    tensors[ROUTER] = Tensor("BF16", (16, 16), tensors[ROUTER].data)
    write_safetensors(file, tensors)
    assert any("must be BF16 [8, 32]" in problem for problem in converted.problems("headers"))


def test_a_missing_and_a_changed_side_file(converted: Converted) -> None:
    (converted.out / "tokenizer.json").unlink()
    (converted.out / "LICENSE").write_text("changed")
    problems = converted.problems("headers")
    assert len(problems) == 2
    assert any("tokenizer.json: the side file is missing" in problem for problem in problems)
    assert any("LICENSE: differs" in problem for problem in problems)


def test_other_weights_laid_beside(converted: Converted) -> None:
    (converted.out / "consolidated.safetensors").write_bytes(b"old weights")
    assert "weights that must not be there" in converted.problems("headers")[0]


def test_a_plan_file_that_the_weights_do_not_follow(converted: Converted) -> None:
    layers = converted.model.moe_layers
    rows = random_rows(layers, 4, seed=77)
    save_plan(converted.out / "eplb_plan.json", rows)
    assert any("is not the plan that config.json names" in problem for problem in converted.problems("headers"))
    # Even with the digest in config.json forged along, the bytes tell.
    config = json.loads((converted.out / "config.json").read_text())
    from eplb_cli.placement import Placement

    config["eplb_placement"]["plan_sha256"] = Placement.load(converted.out).map_sha256
    (converted.out / "config.json").write_text(json.dumps(config))
    assert converted.problems("headers") == []
    assert converted.problems("full")
    assert converted.problems("sample")


def test_another_plan_than_the_one_asked_for(converted: Converted) -> None:
    other = save_plan(converted.folder / "other.json", random_rows(converted.model.moe_layers, 4, seed=78))
    assert any("is not the plan asked for" in problem for problem in converted.problems("full", "--plan", other))


def test_a_missing_plan(converted: Converted) -> None:
    (converted.out / "eplb_plan.json").unlink()
    assert "holds no eplb_plan.json" in converted.problems("headers")[0]
    assert converted.problems("headers", "--plan", converted.plan)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: config.update(num_experts_per_tok=3), "differs from the source's"),
        (lambda config: config.update(num_experts=9), "the expert count num_experts is 9"),
        (lambda config: config.pop("eplb_placement"), "no converted checkpoint"),
        (lambda config: config["eplb_placement"].update(num_physical_experts=3), "num_physical_experts is 3"),
    ],
)
def test_a_changed_config(converted: Converted, change: Callable[[dict[str, Any]], None], said: str) -> None:
    file = converted.out / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    assert any(said in problem for problem in converted.problems("headers"))


def test_a_wrong_total_size(converted: Converted) -> None:
    index = converted.out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["metadata"]["total_size"] += 1
    index.write_text(json.dumps(document))
    assert any("total_size" in problem for problem in converted.problems("headers"))


def test_a_missing_shard(converted: Converted) -> None:
    converted.file_of("lm_head.weight").unlink()
    assert "is in the index but not on disk" in converted.problems("headers")[0]


@pytest.mark.parametrize("form", ["qwen3_moe-fused", "llama4-text"])
def test_a_copied_row_that_is_not_its_experts(tmp_path: Path, eplb: Eplb, form: str) -> None:
    made = Converted(tmp_path, eplb, FORMS[form](), "stock")
    name = next(name for name, item in made.model.items.items() if item.kind == "fused")
    rows = E + 4

    def spoil_the_last_row(data: bytes) -> bytes:
        length = len(data) // rows
        return data[: -2 * length] + data[-length:] + data[-2 * length : -length]

    made.change(name, spoil_the_last_row)
    for level in ("sample", "full"):
        (problem,) = made.problems(level)
        assert f"tensor {name}, row {rows - 2}" in problem


def test_expert_ids_that_were_not_renumbered(tmp_path: Path, eplb: Eplb) -> None:
    made = Converted(tmp_path, eplb, FORMS["deepseek_v4"](), "stock")
    name = "layers.0.ffn.gate.tid2eid"
    made.change(name, lambda _: made.model.items[name].tensor.data)
    for level in ("sample", "full"):
        (problem,) = made.problems(level)
        assert name in problem
        assert "expert ids do not follow the plan" in problem


@pytest.mark.parametrize(("form", "part"), [("gpt_oss-mxfp4", "router.bias"), ("deepseek_v3", "correction_bias")])
def test_a_forgotten_bias(tmp_path: Path, eplb: Eplb, form: str, part: str) -> None:
    made = Converted(tmp_path, eplb, FORMS[form](), "stock")
    name = next(name for name, item in made.model.items.items() if part in name and item.kind == "logical")
    made.change(name, lambda _: made.model.items[name].tensor.data)
    assert any(name in problem for problem in made.problems("sample"))


def test_quantised_names_that_do_not_follow(tmp_path: Path, eplb: Eplb) -> None:
    made = Converted(tmp_path, eplb, FORMS["minimax_m3"](), "stock")
    for name in ("config.json", "hf_quant_config.json"):
        file = made.out / name
        right = file.read_text()
        document = json.loads(right)
        section = document["quantization_config" if name == "config.json" else "quantization"]
        original = json.loads((made.source / name).read_text())
        section["quantized_layers"] = original.get("quantization_config", original.get("quantization"))[
            "quantized_layers"
        ]
        file.write_text(json.dumps(document))
        assert any(name in problem for problem in made.problems("headers"))
        file.write_text(right)
    assert made.problems("headers") == []


def test_an_output_that_is_not_there(converted: Converted) -> None:
    run = converted.eplb("verify", converted.source, "some/where", "--format", "json")
    assert run.code == 1
    assert run.json["problems"] == ["some/where: no such folder"]


def test_a_damaged_source_is_an_error_of_its_own(converted: Converted) -> None:
    file = next(converted.source.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 8)
    run = converted.eplb("verify", converted.source, converted.out)
    assert run.code == 1
    assert "source" in run.err
    assert "truncated" in run.err


def test_people_see_the_problems_and_the_verdict(converted: Converted) -> None:
    right = converted.eplb("verify", converted.source, converted.out)
    assert "right" in right.out
    converted.change(ROUTER, lambda data: bytes(len(data)))
    wrong = converted.eplb("verify", converted.source, converted.out)
    assert wrong.code == 1
    assert ROUTER in wrong.out
    assert "WRONG" in wrong.out
