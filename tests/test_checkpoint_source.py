"""What is refused before the first byte is written, and what is said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.checkpoint.convert import prepare
from eplb_cli.checkpoint.layout import Layout
from eplb_cli.checkpoint.safetensors_file import read_header
from eplb_cli.checkpoint.source import Checkpoint, natural_key
from eplb_cli.errors import CheckpointError
from tests.checkpoints import (
    FORMS,
    E,
    Synthetic,
    Tensor,
    add_experts,
    llama4,
    qwen2_moe,
    qwen3_moe,
    random_rows,
    read_checkpoint,
    read_safetensors,
    save_plan,
    write_safetensors,
)

Eplb = Callable[..., Any]
INDEX = "model.safetensors.index.json"


class Case:
    """A two-shard Qwen3-MoE, and the conversion that must fail."""

    def __init__(self, folder: Path, eplb: Eplb) -> None:
        self.folder = folder
        self.eplb = eplb
        self.model = qwen3_moe()
        self.source = folder / "source"
        self.shards = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    def save(self, **options: Any) -> None:
        self.model.save(self.source, **{"shards": 2, **options})

    def plan(self, redundant: int = 0) -> Path:
        return save_plan(self.folder / "plan.json", random_rows(self.model.moe_layers, redundant))

    def refusal(self, *options: object, code: int = 1) -> str:
        """Convert, and return what was said; nothing may be left behind."""
        run = self.eplb("convert", self.source, self.plan(), "-o", self.folder / "out", *options)
        assert run.code == code, run.err
        assert not list(self.folder.glob("out*"))
        assert run.out == ""
        return str(run.err)


@pytest.fixture
def case(tmp_path: Path, eplb: Eplb) -> Case:
    made = Case(tmp_path, eplb)
    made.save()
    return made


def edit_index(case: Case, change: Callable[[dict[str, str]], None]) -> None:
    document = json.loads((case.source / INDEX).read_text())
    change(document["weight_map"])
    (case.source / INDEX).write_text(json.dumps(document))


def test_a_shard_that_the_index_names_is_missing(case: Case) -> None:
    (case.source / case.shards[1]).unlink()
    text = case.refusal()
    assert f"{case.shards[1]} is in the index but not on disk (interrupted download?)" in text
    assert "hf download" in text


def test_a_stale_index_names_both_sides(case: Case) -> None:
    def rename(weight_map: dict[str, str]) -> None:
        weight_map["model.gone.weight"] = weight_map.pop("lm_head.weight")

    edit_index(case, rename)
    text = case.refusal()
    assert "in the index but in no file: model.gone.weight" in text
    assert "on disk but not in the index: lm_head.weight" in text


def test_an_index_that_names_the_wrong_shard(case: Case) -> None:
    edit_index(case, lambda weight_map: weight_map.update({"lm_head.weight": case.shards[1]}))
    assert "in another file than the index says: lm_head.weight" in case.refusal()


def test_a_shard_that_the_index_does_not_name(case: Case) -> None:
    write_safetensors(case.source / "extra.safetensors", {"model.stray": Tensor("U8", (1,), b"x")})
    text = case.refusal()
    assert "extra.safetensors is on disk but not in the index" in text
    assert "model.stray" in text


def test_a_stale_copy_in_a_second_shard(case: Case) -> None:
    file = case.source / case.shards[1]
    stale = read_safetensors(case.source / case.shards[0])["lm_head.weight"]
    write_safetensors(file, {**read_safetensors(file), "lm_head.weight": stale})
    assert "lm_head.weight" in case.refusal()


def test_several_files_without_an_index(case: Case) -> None:
    (case.source / INDEX).unlink()
    assert "2 safetensors files but no index" in case.refusal()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 999\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML page"),
        (b"<html><head></head></html>" + b" " * 200, "HTML page"),
        (b"PK\x03\x04" + b"\x00" * 4 + b"\xff" * 200, "not a safetensors file"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00not json at all.", "not JSON"),
        (b"\x02\x00\x00", "truncated"),
        (b"\x00\x10\x00\x00\x00\x00\x00\x00{}", "truncated"),
    ],
)
def test_files_that_are_no_weights_are_named_with_the_cause(case: Case, content: bytes, said: str) -> None:
    (case.source / case.shards[1]).write_bytes(content)
    text = case.refusal()
    assert case.shards[1] in text
    assert said in text


def test_a_page_named_in_the_metadata_makes_no_page_of_the_weights(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    file.write_bytes(header_of({"__metadata__": {"card": "<html>"}, "a": entry}, b"1234"))
    assert read_header(file).metadata == {"card": "<html>"}


@pytest.mark.parametrize("cut", [1, 8, 5000])
def test_a_truncated_file(case: Case, cut: int) -> None:
    file = case.source / case.shards[1]
    os.truncate(file, file.stat().st_size - cut)
    text = case.refusal()
    assert case.shards[1] in text
    assert "truncated" in text
    assert "interrupted" in text


def test_extra_bytes_at_the_end(case: Case) -> None:
    with (case.source / case.shards[1]).open("ab") as stream:
        stream.write(b"more")
    assert "has 4 extra bytes" in case.refusal()


def header_of(entries: dict[str, Any], data: bytes) -> bytes:
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw + data


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]}}, "hole"),
        (
            {
                "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
                "b": {"dtype": "U8", "shape": [2], "data_offsets": [2, 4]},
            },
            "overlaps",
        ),
        ({"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 4]}}, "does not fill"),
        ({"a": {"dtype": "Q8", "shape": [4], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "U8", "shape": [-4], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [4]}}, "data_offsets"),
        ({"a": {"dtype": ["U8"], "shape": [4], "data_offsets": [0, 4]}}, "unknown dtype"),
        ({"a": {"dtype": "U8", "shape": [True, 4], "data_offsets": [0, 4]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [2**63, 0], "data_offsets": [0, 0]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [1] * 65, "data_offsets": [0, 1]}}, "shape"),
        ({"a": {"dtype": "U8", "shape": [2**62] * 60, "data_offsets": [0, 4]}}, "does not fill"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2**70]}}, "offsets"),
        ({"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 2, 4]}}, "does not fill"),
        ({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, "does not fill"),
        ({"a": [4]}, "header entry"),
        ({"a" * 5000: {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "names have at most"),
        ({"__metadata__": ["pt"]}, "metadata"),
        ({"__metadata__": {"n": 1}, "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}, "metadata"),
    ],
)
def test_headers_that_break_the_format(tmp_path: Path, entries: dict[str, Any], said: str) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(header_of(entries, b"1234"))
    with pytest.raises(CheckpointError, match=said):
        read_header(file)


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"a":1}', "'a' twice"),
        (b'{"a":{"dtype":"U8","dtype":"I8","shape":[4],"data_offsets":[0,4]}}', "'dtype' twice"),
        (b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "nested too deep"),
        (b'{"a":{"dtype":"U8","shape":[' + b"9" * 5_000 + b'],"data_offsets":[0,4]}}', "5,000 digits"),
        (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', "NaN"),
        (b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', "surrogates"),
        (b'{"a\xff":{}}', "not JSON"),
        (b"[1]", "not JSON"),
        # Quadratic where every name is counted.
        (b"{" + b"".join(b'"%d":0,' % i for i in range(60_000)) + b'"59999":0}', "'59999' twice"),
    ],
    ids=["twice", "key twice", "deep", "digits", "nan", "surrogate", "bytes", "list", "60,000 names"],
)
def test_headers_whose_json_hurts(tmp_path: Path, raw: bytes, said: str) -> None:
    file = tmp_path / "bad.safetensors"
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + b"1234")
    with pytest.raises(CheckpointError, match=said) as caught:
        read_header(file)
    assert caught.value.file == str(file)


@pytest.mark.parametrize("form", ["qwen3_moe-bf16", "qwen3_moe-gptq", "llama4-meta-fp8"])
def test_headers_agree_with_the_reference_reader(tmp_path: Path, form: str) -> None:
    from safetensors import safe_open

    file = FORMS[form]().save(tmp_path / "model", shards=1) / "model.safetensors"
    header = read_header(file)
    with safe_open(file, "numpy") as reader:
        told = {name: reader.get_slice(name) for name in reader.keys()}  # noqa: SIM118 - not a mapping
        assert {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in told.items()} == {
            name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()
        }


def test_a_single_file_needs_no_index(case: Case, eplb: Eplb) -> None:
    case.model.save(case.folder / "single", shards=1)
    run = eplb("convert", case.folder / "single", case.plan(), "-o", case.folder / "out", "--format", "quiet")
    assert run.code == 0, run.err
    assert [file.name for file in (case.folder / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_odd_names_come_from_the_index(case: Case, eplb: Eplb) -> None:
    odd = {case.shards[0]: "weights_a.safetensors", case.shards[1]: "Part-B.safetensors"}
    for old, new in odd.items():
        (case.source / old).rename(case.source / new)
    edit_index(case, lambda weight_map: weight_map.update({k: odd[v] for k, v in weight_map.items()}))
    (case.source / INDEX).rename(case.source / "odd.safetensors.index.json")
    run = eplb("convert", case.source, case.plan(), "-o", case.folder / "out", "--format", "quiet")
    assert run.code == 0, run.err
    out = case.folder / "out"
    assert {file.name for file in out.glob("*.safetensors")} == set(odd.values())
    assert (out / "odd.safetensors.index.json").exists()
    expected = case.model.expected(random_rows(case.model.moe_layers, 0), "stock")
    assert read_checkpoint(out) == expected


# What the tensors must agree on with each other and with the config.


def drop(model: Synthetic, *names: str) -> None:
    for name in names:
        del model.items[name]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: drop(m, *[n for n in m.items if "layers.2.mlp.experts.3." in n]),
            "expert 3: the expert has no tensors",
        ),
        (lambda m: drop(m, "model.layers.2.mlp.experts.3.up_proj.weight"), "expert 3: the expert lacks up_proj"),
        (lambda m: drop(m, "model.layers.1.mlp.gate.weight"), "layer 1: no router"),
        (lambda m: drop(m, *[n for n in m.items if "layers.1.mlp.experts" in n]), "the files hold no experts"),
        (lambda m: m.expert(1, "model.layers.1.mlp.experts.{}.up_proj.weight", 8, (32, 32)), "such an expert"),
        (lambda m: m.copy("model.layers.1.mlp.gate.bias", (E,)), "belongs to the router"),
        (lambda m: m.copy("model.layers.1.mlp.mystery.weight", (E, 4)), "covered by no rule"),
        (lambda m: m.copy("model.layers.1.mlp.experts.scales", (E, 4)), "is no expert's and no fused tensor's"),
        (lambda m: add_experts(m, -1, "model.layers.0.mlp.experts"), "config.json makes the layer dense"),
        (
            lambda m: m.config.update(mlp_only_layers=[0]),
            "is a dense layer's, but config.json makes the layer a MoE layer",
        ),
        (lambda m: m.copy("encoder.experts.0.w1", (4,)), "outside the decoder layers"),
        (lambda m: m.fused(1, "model.layers.1.mlp.experts.down_proj", (4, 4)), "both fused and per-expert"),
        (lambda m: m.logical(1, "model.layers.1.mlp.gate.weight", (E + 1, 4)), "axis 0 must be the 8 experts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_add_up(tmp_path: Path, eplb: Eplb, change: Callable[[Synthetic], None], said: str) -> None:
    case = Case(tmp_path, eplb)
    change(case.model)
    case.save()
    case.model.items = qwen3_moe().items
    text = case.refusal()
    assert said in text
    assert "layer" in text or "outside" in text


def test_a_router_packed_by_gptq_is_refused(tmp_path: Path, eplb: Eplb) -> None:
    case = Case(tmp_path, eplb)
    for suffix, shape in (("qweight", (4, E)), ("qzeros", (2, 1)), ("scales", (2, E)), ("g_idx", (32,))):
        case.model.copy(f"model.layers.1.mlp.gate.{suffix}", shape, "I32")
    drop(case.model, "model.layers.1.mlp.gate.weight")
    case.save()
    text = case.refusal()
    assert "belongs to the router, whose rows cannot be told apart" in text
    assert "layer 1" in text


def test_whole_name_components_are_matched(tmp_path: Path, eplb: Eplb) -> None:
    """`experts.1` is not a tensor of `experts.12`, nor `shared_expert` one of `shared_expert_extra`."""
    case = Case(tmp_path, eplb)
    case.model = qwen2_moe()
    case.model.copy("model.layers.1.mlp.shared_expert_extra.weight", (1, 32))
    case.save()
    assert "shared_expert_extra.weight" in case.refusal()


def test_an_unknown_prefix_prints_what_was_seen_and_what_is_known(tmp_path: Path, eplb: Eplb) -> None:
    case = Case(tmp_path, eplb)
    case.model.items = {
        f"decoder.stack.{name}".replace("experts", "specialists"): item for name, item in case.model.items.items()
    }
    case.save()
    case.model.items = qwen3_moe().items
    text = case.refusal()
    assert "decoder.stack.lm_head.weight" in text
    assert "model.layers.<layer>.mlp.experts" in text


def test_weights_in_another_format_are_named(tmp_path: Path, eplb: Eplb) -> None:
    case = Case(tmp_path, eplb)
    case.save(shards=1)
    (case.source / "model.safetensors").rename(case.source / "pytorch_model.bin")
    assert "no safetensors weights, only pytorch_model.bin" in case.refusal()


def test_fused_and_per_expert_files_of_one_model_convert_alike(
    tiny_qwen3_moe: Path, tiny_qwen3_moe_fused: Path, tmp_path: Path, eplb: Eplb
) -> None:
    rows = {layer: [*reversed(range(16))] for layer in (1, 2, 3, 4)}
    plan = save_plan(tmp_path / "plan.json", rows, experts=16)
    for name, model in (("split", tiny_qwen3_moe), ("fused", tiny_qwen3_moe_fused)):
        assert eplb("convert", model, plan, "-o", tmp_path / name, "--format", "quiet").code == 0
    split, fused = read_checkpoint(tmp_path / "split"), read_checkpoint(tmp_path / "fused")
    for layer in rows:
        module = f"model.layers.{layer}.mlp.experts"
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            joined = b"".join(split[f"{module}.{e}.{part}.weight"].data for e in range(16) for part in parts)
            assert fused[f"{module}.{name}"].data == joined


# Side files, plans and places.


def test_every_side_file_comes_along_and_other_weights_do_not(case: Case, eplb: Eplb) -> None:
    kept = {
        "chat_template.jinja": b"{{x}}",
        "modeling_qwen.py": b"# code",
        "README.md": b"# Model",
        "merges.txt": b"a b",
    }
    for name, content in kept.items():
        (case.source / name).write_bytes(content)
    (case.source / "assets").mkdir()
    (case.source / "assets" / "logo.png").write_bytes(b"\x89PNG")
    for name in ("consolidated.safetensors", "pytorch_model.bin", "weights.gguf"):
        (case.source / name).write_bytes(b"old")
    (case.source / "original").mkdir()
    (case.source / "original" / "params.json").write_bytes(b"{}")
    (case.source / ".cache").mkdir()
    (case.source / ".cache" / "lock").write_bytes(b"")
    run = eplb("convert", case.source, case.plan(), "-o", case.folder / "out")
    assert run.code == 0, run.err
    out = case.folder / "out"
    assert {name: (out / name).read_bytes() for name in kept} == kept
    assert (out / "assets" / "logo.png").read_bytes() == b"\x89PNG"
    present = {file.name for file in out.rglob("*")}
    assert not present & {"consolidated.safetensors", "pytorch_model.bin", "weights.gguf", "params.json", "lock"}
    assert "left out: consolidated.safetensors, original/params.json, pytorch_model.bin, weights.gguf" in run.err


def test_the_output_tells_where_it_came_from(case: Case, eplb: Eplb) -> None:
    eplb("convert", case.source, case.plan(), "-o", case.folder / "out")
    record = json.loads((case.folder / "out" / "eplb_provenance.json").read_text())
    assert record["format"] == "eplb-provenance"
    assert record["layout"] == "stock"
    assert set(record["source"]["shards"]) == set(case.shards)
    assert set(record["tensors"]) == set(case.model.items)
    rows = random_rows(case.model.moe_layers, 0)
    name = "model.layers.2.mlp.experts.{}.up_proj.weight"
    assert record["tensors"][name.format(0)] == name.format(rows[2][0])
    assert record["tensors"]["lm_head.weight"] is None


# Files that are no files, and files of others.

PLACES = ("config.json", INDEX, "model-00002-of-00002.safetensors", "README.md", "assets/logo.png")


@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_file_that_is_none_is_refused_and_not_waited_for(case: Case, name: str, kind: str) -> None:
    file = case.source / name
    file.unlink(missing_ok=True)
    file.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
        if name == "README.md" or "/" in name:
            return  # an empty folder of such a name is nothing to carry over
    text = case.refusal()
    assert file.name in text or "no index" in text
    assert {"pipe": "named pipe", "device": "device", "folder": ""}[kind] in text


@pytest.mark.parametrize("name", [b"tokenizer-\xff.json", b"\xc3(/merges.txt"])
def test_a_name_that_is_no_text_is_refused_before_anything_is_written(case: Case, name: bytes) -> None:
    file = Path(os.fsdecode(os.fsencode(case.source) + b"/" + name))
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"{}")
    text = case.refusal()
    assert "names must be UTF-8" in text
    assert "\\udc" in text


@pytest.mark.parametrize("how", ["a file", "a folder", "a link to a link"])
def test_a_side_file_that_leads_out_of_the_model_is_refused(case: Case, how: str) -> None:
    outside = case.folder / "home"
    outside.mkdir()
    (outside / "id_rsa").write_text("secret")
    if how == "a file":
        (case.source / "LICENSE.md").symlink_to(outside / "id_rsa")
    elif how == "a folder":
        (case.source / "assets").symlink_to(outside)
    else:
        (case.source / "first").symlink_to(outside / "id_rsa")
        (case.source / "second").symlink_to("first")
    text = case.refusal()
    assert "outside the model's folder" in text and "home/id_rsa" in text.replace("\n", "")


def test_links_inside_the_model_and_a_link_to_it_are_legal(case: Case, eplb: Eplb) -> None:
    (case.source / "README.md").symlink_to("LICENSE")
    (case.folder / "link").symlink_to(case.source)
    run = eplb("convert", case.folder / "link", case.plan(), "-o", case.folder / "out", "--format", "quiet")
    assert run.code == 0, run.err
    copied = case.folder / "out" / "README.md"
    assert copied.read_bytes() == b"text" and not copied.is_symlink()


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "LICENSE"])
def test_bytes_that_changed_under_a_restored_time_are_noticed(case: Case, name: str) -> None:
    source = Checkpoint.open(case.source)
    source.require_unchanged()
    file = case.source / name
    before = file.stat()
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        source.require_unchanged()


def test_a_second_name_is_no_change_of_a_file(case: Case) -> None:
    source = Checkpoint.open(case.source)
    marks = {name: mark.identity(link=True) for name, mark in source.fingerprints.items()}
    for name in case.shards:
        (case.folder / name).hardlink_to(case.source / name)
    source.require_unchanged()
    linked = Checkpoint.open(case.source)
    assert {name: mark.identity(link=True) for name, mark in linked.fingerprints.items()} == marks
    # Until then, the time of the inode is part of what an interrupted run goes on from.
    mark = source.fingerprints[case.shards[0]]
    assert mark.identity(link=False) == [*mark.identity(link=True), mark.ctime_ns]


def test_a_missing_shards_name_is_quoted_for_the_shell(case: Case) -> None:
    def rename(weight_map: dict[str, str]) -> None:
        weight_map.update(dict.fromkeys(weight_map, "x; rm -rf ~.safetensors"))

    edit_index(case, rename)
    assert "hf download REPOSITORY 'x; rm -rf ~.safetensors'" in " ".join(case.refusal().split())


@pytest.mark.parametrize("where", ["source", "source/out", "."])
def test_an_output_in_or_around_the_source(case: Case, eplb: Eplb, where: str) -> None:
    run = eplb("convert", case.source, case.plan(), "-o", case.folder / where, "--force")
    assert run.code == 1
    assert "the source is never touched" in run.err


def test_an_output_that_is_the_source_by_a_link(case: Case, eplb: Eplb) -> None:
    (case.folder / "link").symlink_to(case.source)
    run = eplb("convert", case.source, case.plan(), "-o", case.folder / "link" / "out")
    assert run.code == 1
    assert "the output lies in the source" in run.err


def test_an_existing_output_needs_force_and_a_foreign_folder_is_never_replaced(case: Case, eplb: Eplb) -> None:
    out = case.folder / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    run = eplb("convert", case.source, case.plan(), "-o", out)
    assert run.code == 1
    assert "--force" in run.err
    run = eplb("convert", case.source, case.plan(), "-o", out, "--force")
    assert run.code == 1
    assert (out / "thesis.tex").read_text() == "years of work"
    (out / "thesis.tex").unlink()
    assert eplb("convert", case.source, case.plan(), "-o", out, "--force").code == 0
    before = read_checkpoint(out)
    other = save_plan(case.folder / "other.json", random_rows(case.model.moe_layers, 0, seed=5))
    assert eplb("convert", case.source, other, "-o", out, "--force").code == 0
    assert read_checkpoint(out) != before
    assert sorted(path.name for path in case.folder.iterdir()) == ["other.json", "out", "plan.json", "source"]


def test_the_output_folder_must_have_a_parent(case: Case, eplb: Eplb) -> None:
    run = eplb("convert", case.source, case.plan(), "-o", case.folder / "no" / "where")
    assert run.code == 1
    assert "mkdir -p" in run.err


def test_layers_that_the_plan_lacks_keep_their_places_with_one_warning(case: Case, eplb: Eplb) -> None:
    rows = random_rows([2], 4)
    run = eplb("convert", case.source, save_plan(case.folder / "p.json", rows), "-o", case.folder / "out")
    assert run.code == 0, run.err
    assert run.err.count("Warning:") == 1
    assert "the plan lacks the MoE layers 1;" in run.err
    complete = {**rows, 1: [*range(E), 0, 1, 2, 3]}
    assert read_checkpoint(case.folder / "out") == case.model.expected(complete, "stock")
    plan = json.loads((case.folder / "out" / "eplb_plan.json").read_text())
    assert {entry["layer_id"]: entry["physical_to_logical"] for entry in plan["layers"]} == complete
    assert eplb("verify", case.source, case.folder / "out", "--plan", case.folder / "p.json").code == 0


def test_layers_that_the_model_lacks_are_an_error(case: Case, eplb: Eplb) -> None:
    plan = save_plan(case.folder / "p.json", random_rows([1, 2, 3], 0))
    run = eplb("convert", case.source, plan, "-o", case.folder / "out")
    assert run.code == 1
    assert "the plan has layer 3" in run.err
    assert "the model's MoE layers are 1-2" in run.err


def test_a_plan_of_another_expert_count_is_an_error(case: Case, eplb: Eplb) -> None:
    plan = save_plan(case.folder / "p.json", {1: [*range(16)]}, experts=16)
    run = eplb("convert", case.source, plan, "-o", case.folder / "out")
    assert run.code == 1
    assert "the plan has 16 experts, the model 8" in run.err


def test_a_plan_not_of_the_stock_form_is_refused_with_the_command_that_makes_one(case: Case, eplb: Eplb) -> None:
    rows = {layer: [*range(E), 7, 7, 7, 7] for layer in (1, 2)}
    run = eplb("convert", case.source, save_plan(case.folder / "p.json", rows), "-o", case.folder / "out")
    assert run.code == 1
    assert "not of the stock form" in run.err
    assert "eplb plan LOADS --ep-size 4 --num-redundant-experts 4 --strategy stock" in run.err


def test_an_expert_twice_on_a_rank_is_refused(case: Case, eplb: Eplb) -> None:
    rows = {layer: [*range(E), 7, 0, 1, 7] for layer in (1, 2)}
    plan = save_plan(case.folder / "p.json", rows)
    run = eplb("convert", case.source, plan, "--layout", "physical", "-o", case.folder / "out")
    assert run.code == 1
    assert "layer 1, rank 2, expert 7: the rank holds the expert more than once" in run.err


def test_physical_without_spares_is_refused_since_no_engine_would_notice(case: Case) -> None:
    text = case.refusal("--layout", "physical")
    assert "would load it without an error and answer wrongly" in text
    assert "--layout stock" in text


def test_a_converted_source_that_no_longer_holds_one_of_each_is_refused(case: Case, eplb: Eplb) -> None:
    fused = qwen3_moe(fused=True)
    fused.save(case.folder / "fused")
    for source, layout in ((case.source, "physical"), (case.folder / "fused", "stock")):
        out = case.folder / f"out-{layout}"
        assert eplb("convert", source, case.plan(4), "-o", out, "--layout", layout, "--format", "quiet").code == 0
        run = eplb("convert", out, case.plan(), "-o", case.folder / "again")
        assert run.code == 1
        assert "is a converted checkpoint already" in run.err


def test_a_bad_plan_is_refused_before_anything_is_touched(case: Case, eplb: Eplb) -> None:
    text = case.plan().read_text().replace('"physical_to_logical": [', '"physical_to_logical": [3, ', 1)
    (case.folder / "bad.json").write_text(text)
    run = eplb("convert", case.source, case.folder / "bad.json", "-o", case.folder / "out")
    assert run.code == 1
    assert "bad.json" in run.err
    assert not (case.folder / "out").exists()


def test_a_plan_inside_a_converted_folder_is_a_plan(case: Case, eplb: Eplb) -> None:
    assert eplb("convert", case.source, case.plan(), "-o", case.folder / "one", "--format", "quiet").code == 0
    assert eplb("convert", case.source, case.folder / "one", "-o", case.folder / "two", "--format", "quiet").code == 0
    assert read_checkpoint(case.folder / "one") == read_checkpoint(case.folder / "two")


@pytest.mark.parametrize("layout", ["stock", "physical"])
def test_dry_run_writes_nothing_and_tells_what_it_would(case: Case, eplb: Eplb, layout: str) -> None:
    plan = case.plan(4)
    options = ("--layout", layout, "--format", "json")
    run = eplb("convert", case.source, plan, "-o", case.folder / "out", "--dry-run", *options)
    assert run.code == 0, run.err
    assert not list(case.folder.glob("out*"))
    told = run.json
    assert told["dry_run"] is True
    done = eplb("convert", case.source, plan, "-o", case.folder / "out", *options).json
    assert told.keys() - done.keys() == {"dry_run", "estimate", "shards"} and done.keys() <= told.keys()
    assert {key: told[key] for key in ("layout", "files", "extra_bytes")} == {
        key: done[key] for key in ("layout", "files", "extra_bytes")
    }
    assert done["files"] == sum(1 for file in (case.folder / "out").rglob("*") if file.is_file())
    sizes = {file.name: file.stat().st_size for file in (case.folder / "out").glob("*.safetensors")}
    assert {entry["file"]: entry["bytes"] for entry in told["shards"]} == sizes
    assert done["bytes_written"] + done["bytes_cloned"] == sum(sizes.values())
    assert told["estimate"]["bytes_free"] > told["estimate"]["bytes_needed"] > 0


@pytest.mark.parametrize("how", ["copied", "linked", "cloned"])
def test_an_estimate_counts_as_shared_what_the_run_would_share(case: Case, how: str) -> None:
    plan = save_plan(case.folder / "same.json", {1: [*range(E)], 2: [*range(E)]})
    given = prepare(str(case.source), plan, case.folder / "out", Layout.stock, link=how == "linked")
    told = replace(given, clone=how == "cloned").estimate()
    sizes = [(case.source / name).stat().st_size for name in case.shards]
    headers = [int.from_bytes((case.source / name).read_bytes()[:8], "little") + 8 for name in case.shards]
    blocks = [(size - -header % 4096 - header) // 4096 * 4096 for size, header in zip(sizes, headers, strict=True)]
    assert all(blocks)
    assert told.bytes_cloned == {"copied": 0, "linked": sum(sizes), "cloned": sum(blocks)}[how]
    assert told.bytes_needed == told.bytes_total - told.bytes_cloned


def test_what_an_earlier_run_left_needs_no_room_again(case: Case) -> None:
    given = replace(prepare(str(case.source), case.plan(), case.folder / "out", Layout.stock), clone=False)
    before = given.estimate().bytes_needed
    left = case.folder / "out.partial" / "checkpoint" / case.shards[0]
    left.parent.mkdir(parents=True)
    with left.open("wb") as stream:
        stream.write(b"x" * 8192)
        os.fsync(stream.fileno())
    assert given.estimate().bytes_needed == before - left.stat().st_blocks * 512 < before


def test_rank_local_files_hold_their_own_ranks_only(case: Case, eplb: Eplb) -> None:
    plan = case.plan(4)
    eplb("convert", case.source, plan, "-o", case.folder / "out", "--layout", "physical", "--format", "quiet")
    for rank in range(4):
        file = case.folder / "out" / f"model-ep{rank:02d}-of-04-00001-of-00001.safetensors"
        slots = {int(name.split(".experts.")[1].split(".")[0]) for name in read_safetensors(file)}
        assert slots == {rank * 3, rank * 3 + 1, rank * 3 + 2}
    shared = read_safetensors(case.folder / "out" / "model-shared-00001-of-00001.safetensors")
    assert not any(".experts." in name for name in shared)


@pytest.mark.parametrize("layout", ["stock", "physical"])
def test_a_largest_shard_size_is_kept(case: Case, eplb: Eplb, layout: str) -> None:
    options = ("--layout", layout, "--max-shard-size", "10KB", "--format", "quiet")
    assert eplb("convert", case.source, case.plan(4), "-o", case.folder / "out", *options).code == 0
    rows = random_rows(case.model.moe_layers, 4)
    assert read_checkpoint(case.folder / "out") == case.model.expected(rows, layout)
    for file in (case.folder / "out").glob("*.safetensors"):
        assert sum(len(tensor.data) for tensor in read_safetensors(file).values()) <= 10_000


@pytest.mark.parametrize("size", ["0", "five", "5XB", "-1GB"])
def test_a_shard_size_that_is_none_is_a_usage_error(case: Case, size: str) -> None:
    assert "--max-shard-size" in case.refusal("--max-shard-size", size, code=2)


def test_unchanged_shards_are_the_sources_own_bytes_and_can_be_linked(case: Case, eplb: Eplb) -> None:
    rows = {1: [*range(E)], 2: [*range(E)]}
    plan = save_plan(case.folder / "same.json", rows)
    run = eplb("convert", case.source, plan, "-o", case.folder / "out", "--link", "--format", "json")
    assert run.code == 0, run.err
    for name in case.shards:
        assert (case.folder / "out" / name).read_bytes() == (case.source / name).read_bytes()
    total = sum((case.source / name).stat().st_size for name in case.shards)
    assert run.json["bytes_cloned"] == total
    assert run.json["bytes_written"] == 0


def test_llama4_scalars_for_all_experts_stay(tmp_path: Path, eplb: Eplb) -> None:
    model = llama4("nvidia-fp8")
    source = model.save(tmp_path / "source")
    plan = save_plan(tmp_path / "plan.json", random_rows(model.moe_layers, 4))
    assert eplb("convert", source, plan, "-o", tmp_path / "out", "--format", "quiet").code == 0
    out = read_checkpoint(tmp_path / "out")
    name = "model.layers.1.feed_forward.experts.gate_up_proj_weight_scale"
    assert out[name] == model.items[name].tensor


def test_a_table_of_ids_with_a_value_that_is_no_expert_is_refused(tmp_path: Path, eplb: Eplb) -> None:
    case = Case(tmp_path, eplb)
    case.model = FORMS["deepseek_v4"]()
    item = case.model.items["layers.0.ffn.gate.tid2eid"]
    tensor = Tensor("I64", item.tensor.shape, (E).to_bytes(8, "little") + item.tensor.data[8:])
    case.model.items["layers.0.ffn.gate.tid2eid"] = type(item)(tensor, "ids", 0)
    case.save()
    assert f"a table of expert ids holds {E}" in case.refusal()


def test_an_empty_table_of_ids_converts(tmp_path: Path, eplb: Eplb) -> None:
    model = FORMS["deepseek_v4"]()
    model.ids(0, "layers.0.ffn.gate.tid2eid", vocabulary=0)
    rows = random_rows(model.moe_layers, 0)
    plan = save_plan(tmp_path / "plan.json", rows)
    run = eplb("convert", model.save(tmp_path / "source"), plan, "-o", tmp_path / "out", "--format", "quiet")
    assert run.code == 0, run.err
    assert read_checkpoint(tmp_path / "out") == model.expected(rows, "stock")


def test_shards_are_ordered_by_number() -> None:
    names = ["model-10.safetensors", "model-2.safetensors", "model-1.safetensors"]
    assert sorted(names, key=natural_key) == [names[2], names[1], names[0]]
