"""ExpertLoads: its rules and its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from eplb_cli.errors import LoadsError, OutputError, TraceError
from eplb_cli.loads import ExpertLoads, Source, concatenate, mix, refuse_constant_routing


def loads(counts: list[list[list[int]]], **fields: object) -> ExpertLoads:
    array = np.array(counts, np.int64)
    windows, layers, _ = array.shape
    defaults = {"tokens": np.full(windows, 4, np.int64), "layer_ids": np.arange(layers, dtype=np.int32)}
    return ExpertLoads(array, **{**defaults, **fields})  # type: ignore[arg-type]


def test_the_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = loads(
        [[[1, 2], [3, 4]], [[5, 6], [7, 8]]],
        layer_ids=np.array([1, 3], np.int32),
        window_ids=np.array([10, 12], np.int64),
        window_phase=np.array([1, 2], np.uint8),
        model="Qwen3MoeForCausalLM",
        top_k=2,
        sources=(Source("a.npy", "00", "npy"),),
        dropped={"padding": 3},
        warnings=("one step is missing",),
    )
    saved.save(tmp_path / "loads.safetensors")
    read = ExpertLoads.load(tmp_path / "loads.safetensors")
    for name in ("counts", "tokens", "layer_ids", "window_ids", "window_phase"):
        np.testing.assert_array_equal(getattr(read, name), getattr(saved, name))
    for name in ("model", "top_k", "sources", "dropped", "warnings", "phase"):
        assert getattr(read, name) == getattr(saved, name)


def test_layers_are_taken_by_id() -> None:
    three = loads([[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]], layer_ids=np.array([2, 5, 9], np.int32))
    part = three.for_layers([2, 9])
    assert part.counts.tolist() == [[[1, 2], [5, 6]], [[7, 8], [11, 12]]]
    assert part.layer_ids.tolist() == [2, 9]
    with pytest.raises(LoadsError, match=r"the loads lack layers 0, 3-4; they have layers 2, 5, 9"):
        three.for_layers([0, 2, 3, 4])
    with pytest.raises(LoadsError, match="not ascending"):
        three.for_layers([9, 2])


class TestConstantRouting:
    """A recording that was never filled in reads as one expert in every layer."""

    def test_all_layers_on_one_expert_are_refused(self) -> None:
        dead = loads([[[0, 0, 0], [3, 0, 0], [0, 5, 0]]] * 2, layer_ids=np.array([2, 4, 5], np.int32))
        with pytest.raises(LoadsError, match="layers 4-5 send everything to a single expert") as caught:
            refuse_constant_routing(dead)
        assert (caught.value.layer, caught.value.expert) == (4, 0)
        assert "monolithic" in str(caught.value)
        with pytest.raises(TraceError):
            refuse_constant_routing(dead, TraceError)

    def test_one_such_layer_gets_a_remark(self) -> None:
        one = loads([[[1, 2], [0, 4]]], layer_ids=np.array([3, 45], np.int32))
        assert refuse_constant_routing(one) == ["layer 45: all load is on one expert, which no placement can spread"]

    def test_a_window_elsewhere_is_enough(self) -> None:
        assert refuse_constant_routing(loads([[[4, 0], [4, 0]], [[0, 1], [0, 1]]])) == []

    def test_a_layer_alone_cannot_send_several_ids_to_one_expert(self) -> None:
        assert len(refuse_constant_routing(loads([[[7, 0]]], top_k=1))) == 1
        with pytest.raises(LoadsError, match="layer 0 sends everything"):
            refuse_constant_routing(loads([[[7, 0]]], top_k=2))

    @pytest.mark.parametrize("counts", [[[[0, 0], [0, 0]]], [[[1, 0], [0, 1]]], [[[5], [5]]]])
    def test_too_little_to_tell_is_let_through(self, counts: list[list[list[int]]]) -> None:
        refuse_constant_routing(loads(counts))


def test_files_may_be_named_by_strings(tmp_path: Path) -> None:
    name = str(tmp_path / "loads.safetensors")
    loads([[[1, 2]]]).save(name)
    assert ExpertLoads.load(name).counts.tolist() == [[[1, 2]]]


def test_the_same_loads_are_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        loads([[[1, 2]]], dropped={"x": 1, "b": 2}).save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_the_file_holds_the_documented_tensors(tmp_path: Path) -> None:
    from safetensors import safe_open

    loads([[[1, 2]]]).save(tmp_path / "loads.safetensors")
    with safe_open(tmp_path / "loads.safetensors", framework="numpy") as reader:
        dtypes = {name: str(reader.get_tensor(name).dtype) for name in ("counts", "tokens", "layer_ids")}
        header = json.loads(reader.metadata()["eplb_profile"])
    assert dtypes == {"counts": "int64", "tokens": "int64", "layer_ids": "int32"}
    assert header["format"] == "eplb-profile"
    assert header["version"] == 1


def test_a_negative_load_is_named_by_layer_and_expert() -> None:
    with pytest.raises(LoadsError, match=r"layer 7, expert 1: load is -5 in window 0; loads must be finite and >= 0"):
        loads([[[1, -5]]], layer_ids=np.array([7], np.int32))


@pytest.mark.parametrize(
    "fields",
    [
        {"tokens": np.zeros(2, np.int64)},
        {"layer_ids": np.zeros(1, np.int64)},
        {"window_phase": np.array([3], np.uint8)},
        {"window_ids": np.zeros(3, np.int64)},
    ],
)
def test_shapes_and_dtypes_must_agree(fields: dict[str, object]) -> None:
    with pytest.raises(LoadsError):
        loads([[[1, 2]]], **fields)


def test_sums_that_would_overflow_are_refused() -> None:
    with pytest.raises(LoadsError, match=r"counts add up to 9.22e\+18; sums must stay below 2\^62"):
        loads([[[2**62, 0]], [[2**62, 0]]])
    with pytest.raises(LoadsError, match=r"tokens add up to 4.61e\+18"):
        loads([[[1, 2]]], tokens=np.array([2**62], np.int64))


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(LoadsError, match="window 0 has -4 tokens; tokens must be >= 0"):
        loads([[[1, 2]]], tokens=np.array([-4], np.int64))


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(LoadsError, match="is a folder, not an eplb profile"):
        ExpertLoads.load(tmp_path)


def test_layers_must_ascend() -> None:
    with pytest.raises(LoadsError, match="not ascending"):
        loads([[[1], [2]]], layer_ids=np.array([3, 3], np.int32))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is not an eplb profile"), (b"<!DOCTYPE html>" * 9, "is not an eplb profile")],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(LoadsError, match=message):
        ExpertLoads.load(tmp_path / "x")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadsError, match="no such file"):
        ExpertLoads.load(tmp_path / "nope.json")


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": "eplb-profile", "version": 2}, "profile version 2; this eplb reads version 1"),
        ({"format": "eplb-profile", "version": 1, "topk": 3}, r"unknown header keys \['topk'\]"),
        ({"format": "other"}, "is not an eplb profile"),
        ({"format": "eplb-profile", "version": 1, "sources": [{"name": 1}]}, "damaged header"),
    ],
)
def test_a_header_of_another_kind_is_refused(tmp_path: Path, header: dict[str, object], message: str) -> None:
    tensors = {
        "counts": np.zeros((1, 1, 1), np.int64),
        "tokens": np.zeros(1, np.int64),
        "layer_ids": np.zeros(1, np.int32),
    }
    save_file(tensors, tmp_path / "x", {"eplb_profile": json.dumps(header)})
    with pytest.raises(LoadsError, match=message):
        ExpertLoads.load(tmp_path / "x")


def test_a_tensor_is_missing(tmp_path: Path) -> None:
    header = {"eplb_profile": json.dumps({"format": "eplb-profile", "version": 1})}
    save_file({"counts": np.zeros((1, 1, 1), np.int64)}, tmp_path / "x", header)
    with pytest.raises(LoadsError, match=r"lacks the tensors \['layer_ids', 'tokens'\]"):
        ExpertLoads.load(tmp_path / "x")


def test_saving_into_a_missing_folder_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        loads([[[1]]]).save(tmp_path / "no" / "x")
    assert list(tmp_path.iterdir()) == []


def test_joining_keeps_windows_in_order_and_sums_what_was_dropped() -> None:
    a = loads([[[1, 2]]], dropped={"padding": 1}, model="A", top_k=2, window_phase=np.array([1], np.uint8))
    b = loads([[[3, 4]]], dropped={"padding": 2}, model="A", top_k=2, window_phase=np.array([2], np.uint8))
    joined = concatenate([a, b])
    assert joined.counts.tolist() == [[[1, 2]], [[3, 4]]]
    assert joined.dropped == {"padding": 3}
    assert (joined.model, joined.top_k, joined.phase) == ("A", 2, "all")


def test_loads_of_two_models_do_not_join() -> None:
    with pytest.raises(LoadsError, match="1 layers x 3 experts do not join with 1 x 2"):
        concatenate([loads([[[1, 2]]]), loads([[[1, 2, 3]]])])


def test_selecting_windows_selects_all_that_is_per_window() -> None:
    part = loads([[[1]], [[2]], [[3]]], tokens=np.array([1, 2, 3])).select_windows(slice(1, None))
    assert part.counts.ravel().tolist() == [2, 3]
    assert part.tokens.tolist() == [2, 3]
    assert part.window_ids.tolist() == [1, 2]


def mixable(total: int, windows: int, seed: int) -> ExpertLoads:
    counts = np.random.default_rng(seed).multinomial(total, np.full(8, 1 / 8), (windows, 2)).astype(np.int64)
    return ExpertLoads(counts, np.full(windows, total // 2), np.array([1, 3], np.int32), top_k=2)


def test_a_mix_gives_each_part_its_share() -> None:
    chat, code = mixable(1000, 3, 0), mixable(50_000, 2, 1)
    mixed = mix([chat, code], [0.7, 0.3])
    assert mixed.num_windows == 5
    share = mixed.counts[:3].sum() / mixed.counts.sum()
    assert share == pytest.approx(0.7, abs=1e-3)
    assert mixed.tokens[:3].sum() / mixed.tokens.sum() == pytest.approx(0.7, abs=1e-3)


def test_a_mix_never_scales_down() -> None:
    chat, code = mixable(1000, 3, 0), mixable(50_000, 2, 1)
    mixed = mix([chat, code], [1, 1])
    assert (mixed.counts[3:] == code.counts).all()
    assert (mixed.counts[:3] >= chat.counts).all()


def test_weights_are_relative() -> None:
    parts = [mixable(1000, 3, 0), mixable(50_000, 2, 1)]
    assert (mix(parts, [7, 3]).counts == mix(parts, [70, 30]).counts).all()


def test_one_part_alone_stays_as_it_is() -> None:
    chat = mixable(1000, 3, 0)
    assert (mix([chat], [0.2]).counts == chat.counts).all()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_that_is_no_share_is_refused(weight: float) -> None:
    with pytest.raises(LoadsError, match="weights are finite and > 0"):
        mix([mixable(10, 1, 0)], [weight])


def test_weights_and_profiles_must_pair() -> None:
    with pytest.raises(LoadsError, match="1 weights for 2 profiles"):
        mix([mixable(10, 1, 0)] * 2, [1.0])


def test_nothing_has_no_share() -> None:
    empty = ExpertLoads(np.zeros((1, 2, 8), np.int64), np.zeros(1, np.int64), np.array([1, 3], np.int32))
    with pytest.raises(LoadsError, match="profile 1 of the mix holds no assignments"):
        mix([mixable(10, 1, 0), empty], [1, 1])
