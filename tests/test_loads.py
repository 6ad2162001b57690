"""ExpertLoads: its rules and its file."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from eplb_cli.errors import LoadsError, OutputError, TraceError
from eplb_cli.loads import ExpertLoads, Source, concatenate, mix, refuse_constant_routing
from eplb_cli.tensors import parse_header, read_array


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


def safetensors_bytes(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object, shape: object, begin: object, end: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


GOOD_HEADER = {
    "counts": entry("I64", [2, 1, 3], 0, 48),
    "tokens": entry("I64", [2], 48, 64),
    "layer_ids": entry("I32", [1], 64, 68),
    "__metadata__": {"eplb_profile": '{"format": "eplb-profile", "version": 1}'},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"counts": entry("I64", [10**12, 1, 10**12], 0, 48)}, "does not fill bytes"),
        ({"counts": entry("I64", [2, 1, 2**61], 0, 48)}, "does not fill bytes"),
        ({"counts": entry("I64", [2, 1, -3], 0, -48)}, "has the shape"),
        ({"counts": entry("I64", [2, True, 3], 0, 48)}, "has the shape"),
        ({"counts": entry("F64", [2, 1, 3], 0, 48)}, "has the dtype F64; integers are expected"),
        ({"counts": entry(["I64"], [2, 1, 3], 0, 48)}, r"has the unknown dtype \['I64'\]"),
        ({"counts": entry("U64", [2, 1, 3], 0, 48)}, r"counts are uint64 \[2, 1, 3\]; they must be int64"),
        ({"counts": entry("I64", [2, 3], 0, 48)}, r"counts are int64 \[2, 3\]|does not fill"),
        ({"counts": entry("I64", [6], 0, 48)}, r"counts are int64 \[6\]"),
        ({"counts": entry("I64", [1, 2, 3], 0, 48)}, r"tokens is int64 \[2\]; with counts \[1, 2, 3\]"),
        ({"tokens": entry("I64", [2], 40, 56)}, "overlaps"),
        ({"tokens": entry("I64", [2], 56, 72)}, "hole"),
        ({"window_ids": entry("I64", [0], 68, 68)}, "window_ids is int64 .*one entry for each window"),
        ({"window_phase": entry("U8", [0], 68, 68)}, "window_phase is uint8 .*one entry for each window"),
        ({"extra": entry("U8", [0], 68, 68)}, "unknown tensors"),
        ({"counts": 5}, "without dtype"),
        ({"__metadata__": {"eplb_profile": 5}}, "metadata that is not strings"),
        ({"__metadata__": {}}, "its metadata do not say so"),
        ({"__metadata__": {"eplb_profile": "[" * 9999}}, "nested too deep"),
        ({"__metadata__": {"eplb_profile": '{"a": 1, "a": 1}'}}, "the key 'a' twice"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    (tmp_path / "x").write_bytes(safetensors_bytes({**GOOD_HEADER, **changes}, bytes(68)))
    with pytest.raises(LoadsError, match=message) as caught:
        ExpertLoads.load(tmp_path / "x")
    assert caught.value.file == str(tmp_path / "x")


def test_a_hole_between_tensors_is_refused(tmp_path: Path) -> None:
    header = {**GOOD_HEADER, "layer_ids": entry("I32", [1], 68, 72)}
    (tmp_path / "x").write_bytes(safetensors_bytes(header, bytes(72)))
    with pytest.raises(LoadsError, match="leaves a hole"):
        ExpertLoads.load(tmp_path / "x")


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_of_another_length_is_refused(tmp_path: Path, change: int) -> None:
    (tmp_path / "x").write_bytes(safetensors_bytes(GOOD_HEADER, bytes(68)))
    assert ExpertLoads.load(tmp_path / "x").counts.shape == (2, 1, 3)
    (tmp_path / "x").write_bytes(safetensors_bytes(GOOD_HEADER, bytes(68 + change)))
    with pytest.raises(LoadsError, match=r"truncated: 371 of 372|has 1 extra bytes"):
        ExpertLoads.load(tmp_path / "x")


def test_no_windows_of_a_trillion_experts_are_refused(tmp_path: Path) -> None:
    empty = {
        "counts": entry("I64", [0, 1, 10**12], 0, 0),
        "tokens": entry("I64", [0], 0, 0),
        "layer_ids": entry("I32", [1], 0, 4),
    }
    (tmp_path / "x").write_bytes(safetensors_bytes({**GOOD_HEADER, **empty}, bytes(4)))
    with pytest.raises(LoadsError, match="1,000,000,000,000 experts; at most"):
        ExpertLoads.load(tmp_path / "x")


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("top_k", "8", "a whole number or null"),
        ("top_k", True, "a whole number or null"),
        ("top_k", 0, "it is 1 to 3"),
        ("top_k", 4, "it is 1 to 3"),
        ("model", 5, "text or null"),
        ("phase", "both", "one of all, prefill, decode"),
        ("phase", "decode", "its windows are of phase all"),
        ("phase", ["all"], "one of all"),
        ("sources", {}, "a list of"),
        ("sources", ["a.npy"], "a list of"),
        ("sources", [{"name": "a", "sha256": "b"}], "a list of"),
        ("sources", [{"name": "a", "sha256": "b", "reader": 1}], "a list of"),
        ("dropped", [], "numbers >= 0 by reason"),
        ("dropped", {"padding": -1}, "numbers >= 0 by reason"),
        ("dropped", {"padding": 1.5}, "numbers >= 0 by reason"),
        ("dropped", {"padding": 2**62}, "numbers >= 0 by reason"),
        ("warnings", "one", "a list of texts"),
        ("warnings", [1], "a list of texts"),
        ("version", 1.0, "profile version 1.0"),
        ("version", True, "profile version True"),
        ("version", 2, "profile version 2"),
        ("extra", 1, "unknown header keys"),
    ],
)
def test_every_field_of_the_header_has_its_type(tmp_path: Path, key: str, value: object, rule: str) -> None:
    profile = json.dumps({"format": "eplb-profile", "version": 1, key: value})
    header = {**GOOD_HEADER, "__metadata__": {"eplb_profile": profile}}
    (tmp_path / "x").write_bytes(safetensors_bytes(header, bytes(68)))
    with pytest.raises(LoadsError, match=rule):
        ExpertLoads.load(tmp_path / "x")


def test_a_name_in_a_hint_is_quoted(tmp_path: Path) -> None:
    path = tmp_path / "a b; rm -rf x"
    path.write_bytes(b"<html>")
    with pytest.raises(LoadsError) as caught:
        ExpertLoads.load(path)
    assert caught.value.hint == f"Make one with: eplb profile '{path}' -o loads.safetensors"


def test_the_reference_reads_the_same_from_our_file(tmp_path: Path) -> None:
    """Padded to a multiple of eight, so that arrays can be mapped in place."""
    for text in ("", "a", "ab", "abc", "abcdefg"):
        saved = loads([[[1, 2], [3, 4]]], warnings=(text,), dropped={"z": 1, "a": 2})
        saved.save(tmp_path / "x")
        content = (tmp_path / "x").read_bytes()
        assert int.from_bytes(content[:8], "little") % 8 == 0
        assert load_file(tmp_path / "x")["counts"].tolist() == [[[1, 2], [3, 4]]]
        assert list(ExpertLoads.load(tmp_path / "x").dropped) == ["a", "z"]


def test_layer_ids_are_not_negative() -> None:
    with pytest.raises(LoadsError, match="not ascending from 0 on"):
        loads([[[1], [2]]], layer_ids=np.array([-1, 0], np.int32))


def test_joined_windows_keep_their_order_ids_and_phases() -> None:
    first = loads([[[1, 2]], [[3, 4]]], window_ids=np.array([40, 12]), window_phase=np.array([2, 1], np.uint8),
                  tokens=np.array([3, 7]), top_k=1, model="A", dropped={"x": 1}, warnings=("w",))  # fmt: skip
    second = loads([[[5, 6]]], window_ids=np.array([7]), tokens=np.array([11]), top_k=1, model="A",
                   dropped={"x": 2, "y": 3}, warnings=("w", "v"))  # fmt: skip
    joined = concatenate([first, second])
    assert joined.counts[:, 0].tolist() == [[1, 2], [3, 4], [5, 6]]
    assert joined.window_ids.tolist() == [40, 12, 7]
    assert joined.window_phase.tolist() == [2, 1, 0]
    assert joined.tokens.tolist() == [3, 7, 11]
    assert (joined.top_k, joined.model) == (1, "A")
    assert (joined.dropped, joined.warnings) == ({"x": 3, "y": 3}, ("w", "v"))


def test_what_parts_contradict_each_other_in_is_not_known() -> None:
    joined = concatenate([loads([[[1, 2]]], top_k=1, model="A"), loads([[[1, 2]]], top_k=2, model="B")])
    assert (joined.top_k, joined.model) == (None, None)
    joined = concatenate([loads([[[1, 2]]], top_k=2), loads([[[1, 2]]])])
    assert joined.top_k == 2


def test_a_mix_rounds_to_the_nearest() -> None:
    mixed = mix([loads([[[10, 10]]]), loads([[[1, 5]], [[3, 5]]], tokens=np.array([3, 5]))], [20, 22])
    # The second part is scaled by (22 / 14) / (20 / 20).
    assert mixed.counts[:, 0].tolist() == [[10, 10], [2, 8], [5, 8]]
    assert mixed.tokens.tolist() == [4, 5, 8]


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
    with pytest.raises(LoadsError, match=r"layer 9, expert 1: load is -5 in window 1; loads must be finite and >= 0"):
        loads([[[0, 1], [3, 0]], [[0, 2], [0, -5]]], layer_ids=np.array([7, 9], np.int32))


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
    with pytest.raises(LoadsError, match="window 1 has -4 tokens; tokens must be >= 0"):
        loads([[[1, 2]], [[1, 2]], [[1, 2]]], tokens=np.array([0, -4, 3], np.int64))


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


def test_a_file_that_shrinks_while_it_is_read_is_refused() -> None:
    whole = safetensors_bytes({"counts": entry("I64", [3], 0, 24)}, bytes(24))
    header = parse_header(io.BytesIO(whole), LoadsError)
    assert read_array(io.BytesIO(whole), header, header.tensors["counts"], LoadsError).tolist() == [0, 0, 0]
    with pytest.raises(LoadsError, match="tensor counts: is cut"):
        read_array(io.BytesIO(whole[:-1]), header, header.tensors["counts"], LoadsError)
