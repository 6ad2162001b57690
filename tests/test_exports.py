"""Plans to other engines' files and back: every rule of the consumer, re-stated and checked on the file itself."""

from __future__ import annotations

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors

from eplb_cli.dispatch import RULES
from eplb_cli.errors import PlacementError, UsageError
from eplb_cli.exports import (
    ENGINES,
    Facts,
    export_placement,
    import_file,
    import_placement,
    same_placement,
    sidecar_of,
    sidecar_path,
)
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.metrics import initial_map
from eplb_cli.placement import Placement, Provenance
from tests.conftest import Run

Eplb = Callable[..., Run]


def plan_of(
    layer_ids: list[int], experts: int, redundant: int, ep_size: int, seed: int, *, twins: bool = False
) -> Placement:
    """A random plan; without twins, copies of an expert are on different ranks."""
    rng = np.random.default_rng(seed)
    slots = experts + redundant
    rows = []
    for _ in layer_ids:
        if twins:
            row = np.concatenate([np.arange(experts), rng.integers(0, experts, redundant)])
            rows.append(rng.permutation(row))
            continue
        ranks: list[list[int]] = [[] for _ in range(ep_size)]
        copies = np.concatenate([rng.permutation(experts), rng.permutation(experts)[:redundant]])
        # Dealing experts round robin, those with a copy side by side, never gives a rank the same one twice.
        order = sorted(copies.tolist(), key=lambda e: (-(copies == e).sum(), int(np.argmax(copies == e)), e))
        for index, expert in enumerate(order):
            ranks[index % ep_size].append(int(expert))
        rows.append(np.concatenate([rng.permutation(rank) for rank in ranks]))
    assert slots % ep_size == 0
    return Placement(np.array(rows, np.int32), np.array(layer_ids, np.int32), experts, ep_size)


LAYERS = [1, 2, 4]
MODEL = ModelShape("M", 8, 2, 6, (1, 2, 4))
PLAN = plan_of(LAYERS, 8, 4, 4, 0)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Placement, ModelShape]:
    ep_size = draw(st.integers(2, 6))
    experts = draw(st.integers(ep_size, 20))
    redundant = -experts % ep_size + ep_size * draw(st.integers(0, 2))
    if redundant > experts:
        redundant = -experts % ep_size
    hidden = draw(st.integers(1, 9))
    layers = sorted(draw(st.sets(st.integers(0, hidden - 1), min_size=1)))
    plan = plan_of(layers, experts, redundant, ep_size, draw(st.integers(0, 999)))
    return plan, ModelShape("M", experts, 2, hidden, tuple(layers))


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=20)
@given(case=plans())
def test_what_comes_back_is_the_plan(name: str, case: tuple[Placement, ModelShape]) -> None:
    plan, model = case
    engine = ENGINES[name]
    content = export_placement(plan, engine, model).content
    back = import_placement(content, engine, Facts(model, ep_size=plan.ep_size)).placement
    assert same_placement(back, plan, engine)
    if engine.keeps_slot_order:
        assert back.map_sha256 == plan.map_sha256
    by_flags = Facts(None, tuple(plan.layer_ids.tolist()), plan.num_experts, plan.ep_size)
    assert same_placement(import_placement(content, engine, by_flags).placement, plan, engine)


@pytest.mark.parametrize("name", ENGINES)
def test_the_same_plan_gives_the_same_bytes(name: str) -> None:
    first, second = (export_placement(PLAN, ENGINES[name], MODEL).content for _ in range(2))
    assert first == second


def written(name: str, plan: Placement = PLAN, model: ModelShape | None = MODEL) -> bytes:
    return export_placement(plan, ENGINES[name], model).content


def is_plain(value: Any) -> bool:
    """Only plain ints in nested lists: no floats, no bools."""
    return all(is_plain(item) for item in value) if isinstance(value, list) else type(value) is int


class TestSglang:
    def test_the_consumers_rules(self) -> None:
        document = json.loads(written("sglang"))
        assert set(document) == {"physical_to_logical_map"}  # one more key is an unexpected argument
        rows = document["physical_to_logical_map"]
        assert len(rows) == 6 and is_plain(rows)
        assert all(len(row) == 12 and set(row) == set(range(8)) for row in rows)
        assert 12 % PLAN.ep_size == 0
        assert [rows[layer] for layer in LAYERS] == PLAN.physical_to_logical.tolist()
        assert rows[0] == initial_map(8, 4).tolist()

    def test_dense_layers_need_the_model(self) -> None:
        with pytest.raises(UsageError, match="wants a row for every hidden layer"):
            written("sglang", model=None)

    def test_loads_are_not_a_placement(self) -> None:
        with pytest.raises(PlacementError, match="holds loads") as caught:
            import_placement(b'{"logical_count": [[1, 2]]}', ENGINES["sglang"], Facts(ep_size=2))
        assert "eplb profile" in str(caught.value.hint)

    def test_an_extra_key_is_refused(self) -> None:
        with pytest.raises(PlacementError, match="unknown keys"):
            import_placement(b'{"physical_to_logical_map": [[0]], "x": 1}', ENGINES["sglang"], Facts(ep_size=1))


class TestTensorrtLlm:
    def test_the_consumers_rules(self) -> None:
        document = yaml.safe_load(written("tensorrt-llm"))
        assert set(document) == {"initial_global_assignments", "num_slots", "layer_updates_per_iter"}
        assert document["layer_updates_per_iter"] == 0
        assert document["num_slots"] == 12 >= 8 and 12 % PLAN.ep_size == 0
        assignments = document["initial_global_assignments"]
        assert list(assignments) == LAYERS and all(type(layer) is int for layer in assignments)
        for row in assignments.values():
            assert len(row) == 12 and is_plain(row) and set(row) == set(range(8))

    def test_a_copy_for_the_report_script_tells_the_ranks(self) -> None:
        content = written("tensorrt-llm") + b"ep_size: 4\n"
        assert import_placement(content, ENGINES["tensorrt-llm"], Facts()).placement.ep_size == 4

    def test_slots_must_agree(self) -> None:
        content = written("tensorrt-llm").replace(b"num_slots: 12", b"num_slots: 16")
        with pytest.raises(PlacementError, match="12 slots; num_slots is 16"):
            import_placement(content, ENGINES["tensorrt-llm"], Facts(ep_size=4))

    def test_yaml_never_builds_objects(self) -> None:
        with pytest.raises(PlacementError, match="holds an anchor, an alias or a tag"):
            import_placement(b"!!python/object/apply:os.getcwd []", ENGINES["tensorrt-llm"], Facts(ep_size=4))


@pytest.mark.parametrize("name", ["vllm-ascend", "mindie"])
class TestExpertMap:
    def test_the_consumers_rules(self, name: str) -> None:
        document = json.loads(written(name))
        layers = document["layer_list"]
        assert document["moe_layer_count"] == len(layers) == 3
        for position, layer in enumerate(layers):
            assert (layer["layer_id"], layer["device_count"]) == (position, 4)
            assert [device["device_id"] for device in layer["device_list"]] == [0, 1, 2, 3]
            lists = [device["device_expert"] for device in layer["device_list"]]
            assert is_plain(lists) and {len(experts) for experts in lists} == {3}
            assert all(len(set(experts)) == len(experts) for experts in lists)  # else silently wrong
            assert {expert for experts in lists for expert in experts} == set(range(8))  # else silently wrong

    def test_twins_are_refused(self, name: str) -> None:
        rows = np.array([[3, 3, 0, 1, 2, 0]], np.int32)
        plan = Placement(rows, np.array([0], np.int32), 4, 3)
        with pytest.raises(PlacementError, match="the rank holds the expert twice") as caught:
            written(name, plan, None)
        assert (caught.value.layer, caught.value.rank, caught.value.expert) == (0, 0, 3)

    def test_a_twin_in_a_file_is_refused(self, name: str) -> None:
        content = written(name, Placement(np.array([[0, 1, 2, 0]], np.int32), np.array([0], np.int32), 3, 2), None)
        content = content.replace(b"[2, 0]", b"[2, 2]")
        with pytest.raises(PlacementError, match="holds the expert twice"):
            import_placement(content, ENGINES[name], Facts())

    def test_devices_that_differ_are_named(self, name: str) -> None:
        document = json.loads(written(name))
        document["layer_list"][1]["device_list"][2]["device_expert"].append(0)
        with pytest.raises(PlacementError, match="layer_list entry 1: device 2 of 4 holds 4 slots"):
            import_placement(json.dumps(document).encode(), ENGINES[name], Facts(layer_ids=(1, 2, 4)))

    def test_layers_out_of_order_are_refused(self, name: str) -> None:
        document = json.loads(written(name))
        document["layer_list"].reverse()
        with pytest.raises(PlacementError, match="layer_id is 2; engines read by position"):
            import_placement(json.dumps(document).encode(), ENGINES[name], Facts())

    def test_ordinals_are_told_apart_from_decoder_layers(self, name: str) -> None:
        imported = import_placement(written(name), ENGINES[name], Facts())
        assert imported.placement.layer_ids.tolist() == [0, 1, 2]
        assert "taken as decoder layers 0..2" in imported.warnings[0]

    def test_a_number_of_experts_that_nobody_told_is_said(self, name: str) -> None:
        guess = "8 experts were taken from the highest id; pass --model or --num-experts to check"
        assert guess in import_placement(written(name), ENGINES[name], Facts()).warnings
        assert guess not in import_placement(written(name), ENGINES[name], Facts(num_experts=8)).warnings


class TestVllmProposals:
    def test_the_jsonl_rules(self) -> None:
        lines = written("vllm-jsonl").splitlines()
        assert len(lines) == 1
        record = json.loads(lines[0])
        assert (record["record_type"], record["version"]) == ("eplb_initial_mapping", 1)
        assert (record["num_redundant_experts"], record["num_slots"]) == (4, 12)
        assert list(record["initial_global_assignments"]) == ["0", "1", "2"]
        assert is_plain(list(record["initial_global_assignments"].values()))

    def test_the_list_rules(self) -> None:
        rows = json.loads(written("vllm-list"))
        assert is_plain(rows) and np.array(rows).shape == (3, 12)
        assert all(set(row) == set(range(8)) for row in rows)

    def test_one_row_stands_for_all_layers(self) -> None:
        content = b"[0, 1, 2, 3, 0, 1]"
        imported = import_placement(content, ENGINES["vllm-list"], Facts(layer_ids=(1, 3), ep_size=2))
        assert imported.placement.physical_to_logical.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
        with pytest.raises(UsageError, match="one row for all layers"):
            import_placement(content, ENGINES["vllm-list"], Facts(ep_size=2))

    @pytest.mark.vllm
    def test_vllm_reads_the_rows_as_the_same_placement(self) -> None:
        """vLLM's own derivation of the inverse map and the copies, from the exported rows."""
        state = pytest.importorskip("vllm.distributed.eplb.eplb_state")
        for name in ("vllm-jsonl", "vllm-list"):
            document = json.loads(written(name))
            rows = document if isinstance(document, list) else list(document["initial_global_assignments"].values())
            inverse, copies = state.compute_logical_maps(torch.tensor(rows), PLAN.num_experts)
            assert (copies.numpy() == PLAN.replica_counts()).all()
            assert (inverse.numpy()[..., : PLAN.logical_to_physical().shape[2]] == PLAN.logical_to_physical()).all()


class TestOmniInfer:
    def test_the_consumers_rules(self) -> None:
        pattern = np.load(io.BytesIO(written("omni-infer")))
        assert (pattern.shape, pattern.dtype) == ((4, 3, 8), np.int32)
        assert set(np.unique(pattern)) == {0, 1}
        assert (pattern.sum(0) >= 1).all()
        assert len(np.unique(pattern.sum(2))) == 1

    def test_what_the_format_cannot_tell_comes_back_in_order(self) -> None:
        back = import_placement(written("omni-infer"), ENGINES["omni-infer"], Facts(MODEL)).placement
        by_rank = np.sort(PLAN.physical_to_logical.reshape(3, 4, 3), -1).reshape(3, 12)
        assert (back.physical_to_logical == by_rank).all()

    def test_twins_are_refused(self) -> None:
        with pytest.raises(PlacementError, match="holds the expert twice"):
            written("omni-infer", plan_of([0], 4, 8, 2, 3, twins=True), None)

    def test_ranks_that_differ_are_refused(self) -> None:
        pattern = np.load(io.BytesIO(written("omni-infer")))
        pattern[2, 1] = 1
        stream = io.BytesIO()
        np.save(stream, pattern)
        with pytest.raises(PlacementError, match="MoE layer 1 has 8 slots; rank 0 has 3"):
            import_placement(stream.getvalue(), ENGINES["omni-infer"], Facts(MODEL))

    def test_an_expert_nowhere_is_refused(self) -> None:
        pattern = np.load(io.BytesIO(written("omni-infer")))
        pattern = np.concatenate([pattern, np.zeros((4, 3, 1), np.int32)], 2)
        stream = io.BytesIO()
        np.save(stream, pattern)
        with pytest.raises(PlacementError, match="the expert has no slot"):
            import_placement(stream.getvalue(), ENGINES["omni-infer"], Facts(layer_ids=(1, 2, 4)))


class TestRtpLlm:
    def test_the_consumers_rules(self) -> None:
        rows = json.loads(written("rtp-llm"))
        assert len(rows) == 6 and is_plain(rows) and {len(row) for row in rows} == {12}
        assert 12 % PLAN.ep_size == 0 and PLAN.num_redundant_experts <= 8

    def test_more_spare_slots_than_experts_are_refused(self) -> None:
        plan = plan_of([0], 4, 8, 6, 0, twins=True)
        with pytest.raises(PlacementError, match="8 redundant experts; rtp-llm takes at most"):
            written("rtp-llm", plan, ModelShape("M", 4, 2, 1, (0,)))


class TestDeepSeek:
    def test_the_tensors_say_the_same(self) -> None:
        tensors = load_tensors(written("deepseek"))
        assert {name: tensor.dtype for name, tensor in tensors.items()} == dict.fromkeys(
            ("phy2log", "log2phy", "logcnt"), torch.int64
        )
        for layer, row in enumerate(tensors["phy2log"].tolist()):
            for expert in range(8):
                slots = [slot for slot, held in enumerate(row) if held == expert]
                assert tensors["logcnt"][layer, expert] == len(slots)
                assert [s for s in tensors["log2phy"][layer, expert].tolist() if s >= 0] == slots

    def test_tensors_that_disagree_are_refused(self) -> None:
        from safetensors.torch import save

        tensors = load_tensors(written("deepseek"))
        tensors["logcnt"][0, 0] += 1
        with pytest.raises(PlacementError, match="logcnt does not follow from phy2log"):
            import_placement(save(tensors), ENGINES["deepseek"], Facts(MODEL, ep_size=4))


def test_twins_are_a_warning_where_the_engine_takes_them() -> None:
    plan = plan_of([0], 4, 8, 3, 1, twins=True)
    exported = export_placement(plan, ENGINES["vllm-list"])
    assert "times a rank holds two copies" in exported.warnings[0]


def test_layers_the_plan_lacks_get_the_start_layout_and_are_named() -> None:
    model = ModelShape("M", 8, 2, 6, (1, 2, 4, 5))
    exported = export_placement(PLAN, ENGINES["tensorrt-llm"], model)
    assert exported.warnings == ("layers [5] are not in the plan and get the engine's own start layout",)
    assert yaml.safe_load(exported.content)["initial_global_assignments"][5] == initial_map(8, 4).tolist()


def test_layers_the_model_lacks_are_an_error() -> None:
    with pytest.raises(PlacementError, match=r"the plan has layers \[4\]; the model's MoE layers are \[1, 2\]"):
        export_placement(PLAN, ENGINES["vllm-list"], ModelShape("M", 8, 2, 6, (1, 2)))


def test_another_models_experts_are_an_error() -> None:
    with pytest.raises(PlacementError, match="the plan is for 8 experts; the model has 16"):
        export_placement(PLAN, ENGINES["vllm-list"], ModelShape("M", 16, 2, 6, (1, 2, 4)))


@pytest.mark.parametrize("name", ["sglang", "tensorrt-llm", "vllm-jsonl", "vllm-list", "rtp-llm", "deepseek"])
def test_what_the_format_does_not_carry_is_asked_for(name: str) -> None:
    with pytest.raises(UsageError, match="over how many ranks") as caught:
        import_placement(written(name), ENGINES[name], Facts(MODEL))
    assert "--ep-size" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[[0, 1], [0]]", "row 1 has 1 slots"),
        (b"[[0, 1.0]]", "no list of whole numbers"),
        (b"[[0, true]]", "no list of whole numbers"),
        (b"[[0, NaN]]", "holds NaN"),
        (b"[[0, 0], [0, 1]]", "the expert has no slot"),
        (b"[[0, -1]]", "slot 1 holds expert -1"),
        (b"[]", "no list of rows"),
        (b"{", "is not JSON"),
        (b"[[0, 99999999999]]", "ids fit in 32 bits"),
    ],
)
def test_a_broken_file_is_named(content: bytes, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        import_placement(content, ENGINES["vllm-list"], Facts(ep_size=1))


def test_facts_that_contradict_the_file_are_refused() -> None:
    content = written("vllm-ascend")
    with pytest.raises(PlacementError, match="the file is for 4 ranks; --ep-size says 2"):
        import_placement(content, ENGINES["vllm-ascend"], Facts(MODEL, ep_size=2))
    with pytest.raises(PlacementError, match="holds 3 layers; 2 MoE layers are expected"):
        import_placement(content, ENGINES["vllm-ascend"], Facts(layer_ids=(1, 2)))


def npy(header: str, data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    text = header.encode() + b"\n"
    width = 2 if version[:1] == b"\x01" else 4
    return b"\x93NUMPY" + version + len(text).to_bytes(width, "little") + text + data


NPY = "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 1, 2), }"
YAML = "num_slots: 2\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("omni-infer", npy(NPY.replace("2, 1, 2", "999999999, 999999999, 999999999")), "holds 0 bytes of int32"),
        ("omni-infer", npy(NPY, bytes(12)), "holds 12 bytes"),
        ("omni-infer", npy(NPY, bytes(20)), "holds 20 bytes"),
        ("omni-infer", npy(NPY.replace("2, 1, 2", "0, 1, 2")), "holds 0 bytes"),
        ("omni-infer", npy(NPY.replace("2, 1, 2", "2, 2"), bytes(16)), "is no .npy file of an integer array"),
        ("omni-infer", npy(NPY.replace("<i4", "|O"), bytes(16)), "is no .npy file of an integer array"),
        ("omni-infer", npy(NPY.replace("<i4", "<f4"), bytes(16)), "is no .npy file of an integer array"),
        ("omni-infer", npy("{" * 5000), "is no .npy file"),
        ("omni-infer", b"PK\x03\x04", "is no .npy file"),
        ("omni-infer", b"", "is no .npy file"),
        ("omni-infer", npy(NPY, np.array([1, 0, 0, 2], "<i4").tobytes()), "holds 2; a pattern is zeros and ones"),
        ("omni-infer", npy(NPY, np.array([1, 0, -1, 1], "<i4").tobytes()), "holds -1; a pattern is zeros and ones"),
        ("omni-infer", npy(NPY, bytes(16)), "MoE layer 0 has 0 slots"),
        ("tensorrt-llm", f"{YAML} 1: &a [0, 1]\n 2: *a\n", "row 4: holds an anchor, an alias or a tag"),
        ("tensorrt-llm", f"{YAML} 1: !!set {{0, 1}}\n", "holds an anchor, an alias or a tag"),
        ("tensorrt-llm", f"{YAML} 1: [0, 1]\n 1: [1, 0]\n", "has the key 1 twice"),
        ("tensorrt-llm", f"{YAML} [1]: [0, 1]\n", "has the key"),
        ("tensorrt-llm", f"{YAML} x: [0, 1]\n", "no mapping of layer numbers"),
        ("tensorrt-llm", f"{YAML} 1000000000000: [0, 1]\n", "a layer is 1000000000000"),
        ("tensorrt-llm", f"{YAML} -1: [0, 1]\n", "a layer is -1"),
        ("tensorrt-llm", f"{YAML} 1: [0, 0x1]\n", "no list of whole numbers"),
        ("tensorrt-llm", f"{YAML} 1: [0, '1']\n", "no list of whole numbers"),
        ("tensorrt-llm", f"{YAML} 1: [0, {'9' * 5000}]\n", "no list of whole numbers"),
        ("tensorrt-llm", f"{YAML} 1: [0, 1]\n3: 1\nx: 2\n", r"unknown keys \[3, 'x'\]"),
        ("tensorrt-llm", f"{YAML} 1: [0, 1]\n---\na\n", "holds 2 YAML documents"),
        ("tensorrt-llm", "[" * 9999, "is not YAML|nested too deep"),  # which of the two is the YAML library's choice
        ("tensorrt-llm", "[" * 99 + "]" * 99, "nested too deep"),
        ("tensorrt-llm", b"\xff\x00", "is not YAML"),
        ("tensorrt-llm", "", "holds 0 YAML documents"),
        ("vllm-list", "[[0, 4294967296]]", "row 0 holds 4294967296; ids fit in 32 bits"),
        ("vllm-list", "[[0, 2147483648]]", "row 0 holds 2147483648; ids fit in 32 bits"),
        ("vllm-list", "[" * 9999, "nested too deep"),
        ("vllm-list", f"[[{'9' * 5000}]]", "5,000 digits"),
        ("sglang", "[]", "not an object"),
        ("sglang", '{"physical_to_logical_map": {}}', "no list of rows"),
        ("vllm-jsonl", '{"record_type": []}', "lacks"),
        ("deepseek", b"\xff" * 9, "is not a safetensors file"),
        ("deepseek", b"", "is not a safetensors file"),
    ],
    ids=lambda value: ascii(value)[:30],
)
def test_files_that_lie_are_refused(name: str, content: bytes | str, message: str) -> None:
    raw = content if isinstance(content, bytes) else content.encode()
    with pytest.raises(PlacementError, match=message):
        import_placement(raw, ENGINES[name], Facts(ep_size=2))


@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00", b"\x03\x00"])
def test_every_version_and_order_of_npy_is_read(version: bytes) -> None:
    pattern = np.array([[[1, 0, 1], [1, 1, 0]], [[0, 1, 1], [0, 1, 1]]], "<i4")
    facts = Facts(layer_ids=(3, 8))
    wanted = [[0, 2, 1, 2], [0, 1, 1, 2]]
    header = NPY.replace("2, 1, 2", "2, 2, 3")
    for order in "CF":
        content = npy(header.replace("False", str(order == "F")), pattern.tobytes(order), version)  # type: ignore[arg-type]
        placed = import_placement(content, ENGINES["omni-infer"], facts).placement
        assert placed.physical_to_logical.tolist() == wanted


def test_rows_follow_their_layers_in_whatever_order_the_file_has_them() -> None:
    content = f"{YAML} 7: [0, 1]\n 2: [1, 0]\n".encode()
    imported = import_placement(content, ENGINES["tensorrt-llm"], Facts(ep_size=2)).placement
    assert imported.layer_ids.tolist() == [2, 7]
    assert imported.physical_to_logical.tolist() == [[1, 0], [0, 1]]


def test_layers_told_in_another_order_take_their_rows_along() -> None:
    told = Facts(layer_ids=(7, 2), ep_size=2)
    imported = import_placement(b"[[0, 1], [1, 0]]", ENGINES["vllm-list"], told).placement
    assert (imported.layer_ids.tolist(), imported.physical_to_logical.tolist()) == ([2, 7], [[1, 0], [0, 1]])


@pytest.mark.parametrize("name", ["vllm-ascend", "mindie"])
def test_the_count_of_layers_is_the_files(name: str) -> None:
    document = json.loads(written(name))
    for count in (2, 4):
        document["moe_layer_count"] = count
        with pytest.raises(PlacementError, match=f"moe_layer_count is {count}; layer_list has 3 layers"):
            import_placement(json.dumps(document).encode(), ENGINES[name], Facts())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sglang", "--init-expert-location 'a b;c.json' --ep-num-redundant-experts 4"),
        ("rtp-llm", "phy2log_path = 'a b;c.json', 4 redundant experts"),
        ("omni-infer", "pattern_path: 'a b;c.json', max_moe_layer_num: 3"),
        ("tensorrt-llm", 'moe_config: {load_balancer: "a b;c.json"}  # with ep_size 4'),
        (
            "vllm-ascend",
            """--additional-config '{"eplb_config": {"expert_map_path": "a b;c.json"}}'  """
            "# an absolute path, at 4 EP ranks",
        ),
        ("mindie", '"eplb": {"level": 1, "expert_map_file": "a b;c.json"}  # an absolute path, at 4 ranks'),
        (
            "vllm-jsonl",
            """--enable-eplb --eplb-config '{"num_redundant_experts": 4, "initial_mapping_path": "a b;c.json"}'  """
            "# a vLLM with pull request 41141",
        ),
        (
            "vllm-list",
            """--enable-eplb --eplb-config '{"num_redundant_experts": 4, "initial_expert_map_path": "a b;c.json"}'  """
            "# a vLLM with pull request 49572",
        ),
        ("deepseek", "safetensors.torch.load_file('a b;c.json')  # for 4 ranks"),
    ],
)
def test_the_launch_line(name: str, line: str) -> None:
    assert ENGINES[name].launch(PLAN, "a b;c.json") == line


@pytest.mark.parametrize("name", ["vllm-ascend", "vllm-jsonl", "vllm-list"])
def test_a_quote_in_a_name_stays_inside_the_argument(name: str) -> None:
    line = ENGINES[name].launch(PLAN, "it's.json")
    assert any("it's.json" in word and word.startswith("{") for word in shlex.split(line.split("  #")[0]))


# -- the command line ------------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 3, 5],
        "hidden_size": 64,
        "moe_intermediate_size": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


SUFFIX = {"omni-infer": ".npy", "tensorrt-llm": ".yaml", "deepseek": ".safetensors"}


@pytest.mark.parametrize("name", ENGINES)
def test_the_sidecar_brings_the_whole_plan_back(eplb: Eplb, tmp_path: Path, model: Path, name: str) -> None:
    PLAN.save(tmp_path / "plan.json")
    out = tmp_path / f"map{SUFFIX.get(name, '.json')}"
    run = eplb("export", tmp_path / "plan.json", "--to", name, "--model", model, "-o", out, "--format", "json")
    assert run.code == 0, run.err
    assert run.json["engine"] == name and str(out) in run.json["launch"]
    assert eplb("import", out, "--from", name, "-o", tmp_path / "back.json").code == 0
    assert (tmp_path / "back.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_without_the_sidecar_the_flags_tell_the_rest(eplb: Eplb, tmp_path: Path, model: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    out = tmp_path / "map.json"
    assert eplb("export", tmp_path / "plan.json", "--to", "sglang", "--model", model, "-o", out).code == 0
    (tmp_path / "map.json.eplb.json").unlink()
    run = eplb("import", out, "--from", "sglang", "-o", tmp_path / "back.json")
    assert run.code == 2 and "--ep-size" in run.err
    flags = ("--ep-size", 4, "--layer-ids", "1-2,4", "--format", "json")
    run = eplb("import", out, "--from", "sglang", "-o", tmp_path / "back.json", *flags)
    assert run.json["layer_ids"] == LAYERS and run.json["map_sha256"] == PLAN.map_sha256
    assert Placement.load(tmp_path / "back.json").map_sha256 == PLAN.map_sha256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_ids": 5}, "layer_ids are 5; a list is expected"),
        ({"layer_ids": [10**12]}, "layer_ids is 1000000000000"),
        ({"version": True}, "version is True"),
        ({"version": 2}, "version 2; eplb-export 1 is known"),
        ({"format": ["x"]}, "version 1; eplb-export 1 is known"),
        ({"plan": 5}, "is not a plan"),
        ({"extra": 5}, "unknown keys"),
    ],
)
def test_a_damaged_sidecar_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    content = written("vllm-list")
    (tmp_path / "map.json").write_bytes(content)
    sidecar = json.loads(sidecar_of(content, "vllm-list", PLAN, (1, 2, 4)))
    sidecar_path(tmp_path / "map.json").write_text(json.dumps({**sidecar, **changes}))
    with pytest.raises(PlacementError, match=message):
        import_file(tmp_path / "map.json", ENGINES["vllm-list"], Facts())


def test_another_engines_sidecar_is_not_believed(tmp_path: Path) -> None:
    """The two map files of Ascend engines are the same bytes; a sidecar speaks for the one it was written for."""
    content = written("mindie")
    (tmp_path / "map.json").write_bytes(content)
    sidecar_path(tmp_path / "map.json").write_bytes(sidecar_of(content, "vllm-ascend", PLAN, (1, 2, 4)))
    imported = import_file(tmp_path / "map.json", ENGINES["mindie"], Facts())
    assert imported.placement.layer_ids.tolist() == [0, 1, 2]
    assert "its sidecar is not used" in imported.warnings[-1]


@pytest.mark.parametrize("ids", ["0-1000000000000", "²", "3-", "a", "2,1", "1,1", "", "-1"])
def test_layer_ids_that_are_none_are_refused(eplb: Eplb, tmp_path: Path, ids: str) -> None:
    (tmp_path / "map.json").write_text("[[0, 1]]")
    run = eplb("import", tmp_path / "map.json", "--from", "vllm-list", "-o", tmp_path / "o", f"--layer-ids={ids}")
    assert run.code == 2 and "--layer-ids" in run.err


def test_a_plan_beyond_the_models_layers_is_refused() -> None:
    with pytest.raises(PlacementError, match="the plan has layer 4; the model has 3 hidden layers"):
        export_placement(PLAN, ENGINES["sglang"], ModelShape("M", 8, 2, 3, None))


def test_a_changed_file_is_read_without_its_sidecar(eplb: Eplb, tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    out = tmp_path / "map.json"
    assert eplb("export", tmp_path / "plan.json", "--to", "vllm-ascend", "-o", out).code == 0
    out.write_text(out.read_text() + "\n")
    run = eplb("import", out, "--from", "vllm-ascend", "-o", tmp_path / "back.json", "--layer-ids", "1,2,4")
    assert run.code == 0 and "changed since its export" in run.err
    assert Placement.load(tmp_path / "back.json").map_sha256 == PLAN.map_sha256


def test_options_that_contradict_the_sidecar_are_refused(eplb: Eplb, tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    out = tmp_path / "map.json"
    assert eplb("export", tmp_path / "plan.json", "--to", "vllm-list", "-o", out).code == 0
    run = eplb("import", out, "--from", "vllm-list", "-o", tmp_path / "back.json", "--ep-size", 2)
    assert run.code == 1 and "does not say what its sidecar" in run.err
    assert not (tmp_path / "back.json").exists()


def test_layers_added_for_the_engine_do_not_come_back(eplb: Eplb, tmp_path: Path, model: Path) -> None:
    part = Placement(PLAN.physical_to_logical[:2], PLAN.layer_ids[:2], 8, 4)
    part.save(tmp_path / "plan.json")
    out = tmp_path / "map.json"
    run = eplb("export", tmp_path / "plan.json", "--to", "vllm-ascend", "--model", model, "-o", out)
    assert run.code == 0 and "layers [4] are not in the plan" in run.err
    assert eplb("import", out, "--from", "vllm-ascend", "-o", tmp_path / "back.json").code == 0
    assert (tmp_path / "back.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_a_suffix_the_engine_would_misread_is_refused(eplb: Eplb, tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    run = eplb("export", tmp_path / "plan.json", "--to", "vllm-ascend", "-o", tmp_path / "map.txt")
    assert run.code == 2 and "map.json" in run.err


def test_nothing_is_written_over_without_force(eplb: Eplb, tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    out = tmp_path / "map.json"
    out.write_text("precious")
    assert eplb("export", tmp_path / "plan.json", "--to", "vllm-list", "-o", out).code == 1
    assert out.read_text() == "precious" and not (tmp_path / "map.json.eplb.json").exists()
    assert eplb("export", tmp_path / "plan.json", "--to", "vllm-list", "-o", out, "--force").code == 0


def test_a_missing_file_is_named(eplb: Eplb, tmp_path: Path) -> None:
    run = eplb("import", tmp_path / "no.json", "--from", "vllm-list", "-o", tmp_path / "back.json")
    assert run.code == 1 and "no such file" in run.err


# SGLang's ranks 0, 1 | 2, 3 of two slots; experts 0 and 1 have copies. Evenly split, ranks have 3.67, 4.67, 4.67, 5;
# SGLang sends 3, 4, 6, 5 (test_dispatch_engines).
SPREAD = np.array([[2, 0, 0, 1, 3, 0, 1, 4]], np.int32)
SPREAD_LOADS = ExpertLoads(np.array([[[8, 4, 1, 2, 3]]]), np.array([18]), np.array([0], np.int32))


def spread(**provenance: Any) -> Placement:
    return Placement(SPREAD, np.array([0], np.int32), 5, 4, 2, Provenance(**provenance))


def reach_of(eplb: Eplb, folder: Path, placement: Placement, engine: str, *options: object) -> Run:
    placement.save(folder / "spread.json")
    config = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 1}
    config |= {"num_experts": 5, "num_experts_per_tok": 1, "hidden_size": 4, "moe_intermediate_size": 4}
    (folder / "m").mkdir(exist_ok=True)
    (folder / "m" / "config.json").write_text(json.dumps(config))
    out = folder / f"out{SUFFIX.get(engine, '.json')}"
    run = eplb("export", folder / "spread.json", "--to", engine, "--model", folder / "m", "-o", out, *options,
               "--force", "--format", "json")  # fmt: skip
    assert run.code == 0, run.err
    return run


def test_an_export_says_what_the_engine_will_reach_and_warns_where_the_plan_says_more(
    eplb: Eplb, tmp_path: Path
) -> None:
    SPREAD_LOADS.save(tmp_path / "l.safetensors")
    run = reach_of(eplb, tmp_path, spread(), "sglang", "--loads", tmp_path / "l.safetensors")
    assert run.json["reach"] == {"dispatch": "sglang", "planned_for": "even", "balancedness": 0.75, "promised": 0.9}
    assert "reaches a balancedness of 0.750 with this plan, not 0.900" in run.json["warnings"][0]
    assert "--dispatch sglang --num-nodes 2" in run.json["warnings"][0]
    run = reach_of(eplb, tmp_path, spread(dispatch="sglang"), "sglang", "--loads", tmp_path / "l.safetensors")
    assert run.json["reach"]["promised"] == 0.75
    assert not run.json["warnings"]


@pytest.mark.parametrize(
    ("engine", "planned", "recorded", "reached"),
    [
        ("sglang", "sglang", {"after": 0.75, "even": 0.9}, 0.75),
        ("sglang", None, {"after": 0.9}, None),
        ("vllm-ascend", None, {"after": 0.9}, None),
        ("tensorrt-llm", None, {"after": 0.9}, 0.9),
        ("vllm-list", None, {"after": 0.9}, 0.9),
        ("rtp-llm", "hash", {"after": 0.9}, 0.9),
        ("vllm-list", "sglang", {"after": 0.9, "even": 0.6}, 0.6),
        ("vllm-list", None, {}, None),
    ],
)
def test_without_loads_the_plans_own_record_tells_as_far_as_it_goes(
    eplb: Eplb, tmp_path: Path, engine: str, planned: str | None, recorded: dict[str, float], reached: float | None
) -> None:
    run = reach_of(eplb, tmp_path, spread(dispatch=planned, balancedness=recorded), engine)
    assert run.json["reach"]["balancedness"] == reached
    assert bool(run.json["warnings"]) == (reached == 0.6)


@pytest.mark.parametrize("engine", ["deepseek", "omni-infer"])
def test_an_engine_whose_rule_is_not_known_promises_nothing(eplb: Eplb, tmp_path: Path, engine: str) -> None:
    assert reach_of(eplb, tmp_path, spread(), engine).json["reach"] is None


def test_every_known_rule_of_an_engine_is_one_that_score_takes() -> None:
    assert {engine.dispatch for engine in ENGINES.values()} <= {*RULES, None}
