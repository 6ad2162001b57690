"""`eplb verify` sees each way in which a converted checkpoint can be wrong, and no wrong where there is none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.checkpoint.classify import classify
from eplb_cli.checkpoint.source import Checkpoint
from eplb_cli.checkpoint.verify import Level, expert_problems, verify
from eplb_cli.checkpoint.verify_claims import Demand
from eplb_cli.cli import main
from eplb_cli.errors import PlacementError
from eplb_cli.placement import Placement, Provenance
from tests.checkpoints import (
    FORMS,
    QUANTISATIONS,
    E,
    Synthetic,
    deepseek,
    qwen3_moe,
    random_rows,
    read_checkpoint,
    read_safetensors,
    save_plan,
    scattered_rows,
)
from tests.verify_mutants import INDEX, MUTANTS, QUANT, Broken, Mutant, NotApplicableError, as_markdown, put_notes

Eplb = Callable[..., Any]
ROUTER = "model.layers.1.mlp.gate.weight"
REDUNDANT = 4


def expert_names(model: Synthetic) -> dict[int, str]:
    """Full name of an expert's module by MoE layer, with {} for the id."""
    names = {}
    for name, item in model.items.items():
        if item.kind == "expert":
            names.setdefault(item.layer, item.template.rpartition(".")[0])
        elif item.kind == "fused":
            names.setdefault(item.layer, f"{name.rpartition('.')[0]}.{{}}.w1".removesuffix(".w1"))
    return names


def rich(form: str, rows: dict[int, list[int]], layout: str) -> Synthetic:
    """A form whose config and side files hold every kind of value, and names of experts."""
    model = FORMS[form]()
    names = expert_names(model)
    first, last = sorted(names)[:2]
    # An expert with several ids, where the layout gives some to any.
    lone = next(e for e in range(E) if rows[last].count(e) == 1 and rows[last].index(e) != e)
    quantisation: dict[str, Any] = {
        "quant_method": "fp8",
        "flag": True,
        "off": False,
        "none": None,
        "width": 32,
        "one": 1,
        "ratio": 1.0,
        "zero": 0.0,
        "empty": [],
        "blocks": [128, 64],
        "nested": {"deep": {"value": 3}},
        "modules_to_not_convert": [
            "model.norm",
            "lm_head",
            names[first].format(5),
            names[last].format(2),
            "model.norm",
        ],
        "ignore": [names[first].format(5)],
        "layers": {names[layer].format(e): {"bits": 4 + e} for layer in names for e in (6, 1, 3)},
    }
    if form in ("minimax_m3", "deepseek_v4", "qwen3_5-fp8"):
        # A draft head's expert, in a layer of the number of a MoE layer.
        quantisation["modules_to_not_convert"].append(f"mtp.layers.{last}.mlp.experts.3.w1")
    model.config[QUANT] = {**model.config.get(QUANT, {}), **quantisation}
    model.side_files |= {
        "hf_quant_config.json": json.dumps(
            {"bits": 8, "layers": {names[last].format(e): e for e in range(E)}}
        ).encode(),
        "recipe.yaml": f"# made by hand\nignore: ['{names[last].format(lone)}', 're:.*gate']\n".encode(),
        "tokenizer_config.json": json.dumps({"text": names[first].format(2), "n": 10**30}).encode(),
        "chat_template.jinja": b"{{ user }}",
        "modeling_rich.py": b"import torch\n",
        "broken.json": b"{'no': json}\n",
    }
    return model


@dataclass
class Case:
    """A conversion that is right, made once a form and layout."""

    source: Path
    checkpoint: Checkpoint
    out: Path
    plan: Placement
    layout: str
    rows: dict[int, list[int]]
    names: dict[int, str]

    def broken(self, folder: Path) -> Broken:
        shutil.copytree(self.out, folder / "out")
        return Broken(folder / "out", self.source, self.layout, self.rows, self.names)


CASES = [
    ("qwen3_moe-bf16", "stock"),
    ("qwen3_moe-fp8-block", "physical"),
    ("gpt_oss-mxfp4", "stock"),
    ("llama4-nvidia-nvfp4", "physical"),
    ("minimax_m3", "physical"),
    ("qwen3_moe-fused", "stock"),
    ("deepseek_v4", "stock"),
    ("qwen3_5-fp8", "physical"),
    ("qwen3_vl-modelopt", "physical"),
]
"""Per expert and fused in both layouts, then other quantisations, nested configs, id tables and draft heads."""


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return {"-".join(case): make_case(tmp_path_factory.mktemp("case"), *case) for case in CASES}


def make_case(folder: Path, form: str, layout: str) -> Case:
    layers = FORMS[form]().moe_layers
    planned = layers[:-1] if len(layers) > 2 else layers
    rows = (random_rows if layout == "stock" else scattered_rows)(planned, REDUNDANT, seed=5)
    start = [slot % E for slot in range(E + REDUNDANT)]
    every = {layer: rows.get(layer, start) for layer in layers}
    model = rich(form, every, layout)
    source = model.save(folder / "source", shards=3, seed=11)
    (source / "sub").mkdir()
    (source / "sub" / "notes.json").write_text(json.dumps({"of": expert_names(model)[layers[0]].format(2)}))
    index = json.loads((source / INDEX).read_text())
    index["metadata"] |= {"made_by": "a test", "total_parameters": 1}
    (source / INDEX).write_text(json.dumps(index))
    for file in source.glob("*.safetensors"):
        put_notes(file, lambda notes: {**notes, "made_by": "a test"})
    plan = Placement(
        np.array([rows[layer] for layer in planned], np.int32),
        np.array(planned, np.int32),
        E,
        4,
        2,
        Provenance(
            model.config["architectures"][0],
            2,
            "stock",
            "balancedness",
            7,
            "0" * 64,
            {"before": 0.5, "after": 0.75, "held_out": 0.7, "bound": 0.875},
        ),
    )
    plan.save(folder / "plan.json")
    out = folder / "out"
    assert main(["convert", str(source), str(folder / "plan.json"), "-o", str(out), "--layout", layout]) == 0
    return Case(source, Checkpoint.open(source), out, plan, layout, every, expert_names(model))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.group}: {mutant.name}")
def test_every_change_is_seen_and_named(mutant: Mutant, cases: dict[str, Case], tmp_path: Path) -> None:
    # Bytes, names and what is right differ by form; all else is the same in the first four.
    deep = mutant.said is None or mutant.group in ("shards", "names of experts")
    tried = 0
    for name, case in list(cases.items())[: None if deep else 4]:
        made = case.broken(tmp_path / name)
        try:
            mutant.change(made)
        except NotApplicableError:
            continue
        tried += 1
        for plan in (None, case.plan) if mutant.group == "plan" else (None,):
            level = Level.full if mutant.group == "shards" else Level.headers
            problems = verify(case.checkpoint, made.folder, plan, level).problems
            if mutant.said is None:
                assert problems == (), name
            else:
                assert any(mutant.said in problem for problem in problems), (name, problems)
    assert tried


def test_the_page_on_proofs_lists_every_change() -> None:
    page = (Path(__file__).parents[1] / "docs" / "proofs.md").read_text()
    listed = page.partition("<!-- mutants -->\n")[2].partition("\n<!-- end of mutants -->")[0]
    assert listed.strip() == as_markdown(), "run: python -m tests.verify_mutants"


def test_a_layer_that_the_plan_lacked_is_told_with_the_plan(cases: dict[str, Case], tmp_path: Path) -> None:
    """Without it, a planned row that happens to be the start layout looks the same."""
    case = cases["gpt_oss-mxfp4-stock"]
    made = case.broken(tmp_path)
    made.json("eplb_provenance.json", lambda document: document["identity_layers"].remove(3))
    (problem,) = verify(case.checkpoint, made.folder, case.plan, Level.headers).problems
    assert "identity_layers has 0 entries, must have 1" in problem


def test_a_plan_that_the_layout_cannot_store(tmp_path: Path) -> None:
    """A forged plan, record and provenance would agree with each other."""
    model = deepseek(groups=4)
    source = Checkpoint.open(model.save(tmp_path / "model"))
    classified = classify(source.config, source.tensors, stored_experts=E)
    layers = model.moe_layers

    def demand(rows: dict[int, list[int]], *, physical: bool) -> Demand:
        plan = Placement.load(save_plan(tmp_path / "plan.json", rows))
        return Demand.of(source, classified, plan, physical=physical, given=True)

    whole = random_rows(layers, 4, seed=1, groups=4)
    assert demand(whole, physical=False).lacking == ()
    assert demand(whole, physical=True).rows == whole
    with pytest.raises(PlacementError, match="tears the 4 groups of routing apart"):
        demand(random_rows(layers, 4, seed=1), physical=False)
    with pytest.raises(PlacementError, match="not of the stock form"):
        demand({layer: [*row[:E], *row[1:5]] for layer, row in whole.items()}, physical=False)
    with pytest.raises(PlacementError, match="has no redundant experts"):
        demand({layer: row[:E] for layer, row in whole.items()}, physical=True)
    with pytest.raises(PlacementError, match=r"the layers \[0\], which are no MoE layers"):
        demand({**whole, 0: whole[1]}, physical=True)
    lacking = demand({1: whole[1], 3: whole[3]}, physical=False)
    assert (lacking.lacking, lacking.rows[2]) == ((2,), [slot % E for slot in range(E + 4)])


PARTS = [(form, part) for form, parts in QUANTISATIONS.items() for part, _, _ in parts(32, 32)]


@pytest.mark.parametrize(("form", "part"), PARTS)
@pytest.mark.parametrize("layout", ["stock", "physical"])
def test_an_expert_unlike_its_siblings(tmp_path: Path, form: str, part: str, layout: str) -> None:
    """The proof sees it in the output alone, even where the source is as incomplete."""
    model = qwen3_moe(form)
    source = Checkpoint.open(model.save(tmp_path / "model"))
    classified = classify(source.config, source.tensors, stored_experts=E)
    rows = random_rows(model.moe_layers, 0)
    plan = Placement.load(save_plan(tmp_path / "plan.json", rows))
    demand = Demand(source, classified, plan, (), layout == "physical")
    assert list(expert_problems(demand, source)) == []
    name = f"model.layers.2.mlp.experts.3.up_proj.{part}"
    whole = source.tensors[name]
    without = {other: entry for other, entry in source.tensors.items() if other != name}
    lost = list(expert_problems(demand, replace(source, tensors=without)))
    if part.startswith("input"):
        assert lost == []
    else:
        (problem,) = lost
        assert "layer 2, expert 3: lacks model.layers.2.mlp.experts.*.up_proj." + part in problem
    for other in (replace(whole, dtype="BOOL"), replace(whole, shape=(1, *whole.shape))):
        (problem,) = expert_problems(demand, replace(source, tensors=without | {name: other}))
        assert f"layer 2, expert 3: model.layers.2.mlp.experts.*.up_proj.{part} is" in problem


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


def test_a_plan_that_the_weights_do_not_follow(converted: Converted) -> None:
    """With every claim forged along, the bytes tell."""
    plan_file = save_plan(converted.out / "eplb_plan.json", random_rows(converted.model.moe_layers, 4, seed=77))
    assert any("eplb_plan.json: is not the plan that" in problem for problem in converted.problems("headers"))
    forged = Placement.load(plan_file)
    for name, section in (("config.json", "eplb_placement"), ("eplb_provenance.json", None)):
        document = json.loads((converted.out / name).read_text())
        (document[section] if section else document)["plan_sha256"] = forged.map_sha256
        if section is None:
            document["plan_file_sha256"] = hashlib.sha256(forged.to_json()).hexdigest()
        (converted.out / name).write_text(json.dumps(document))
    for level in ("sample", "full"):
        assert any(ROUTER in problem or "experts" in problem for problem in converted.problems(level))
    assert not any("is not the plan" in problem for problem in converted.problems("headers"))


def test_another_plan_than_the_one_asked_for(converted: Converted) -> None:
    other = save_plan(converted.folder / "other.json", random_rows(converted.model.moe_layers, 4, seed=78))
    assert any("is not the plan asked for" in problem for problem in converted.problems("full", "--plan", other))


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
