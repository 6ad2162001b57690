"""Recordings made to do harm: each is refused at once, by an error that names its file."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from eplb_cli.errors import EplbError, TraceError
from eplb_cli.loads import ModelShape
from eplb_cli.traces import ReadOptions, read_traces
from eplb_cli.traces.protocol import Recording
from eplb_cli.traces.ranks import name_gaps
from tests.test_traces_recorders import poisson

MODEL = ModelShape("M", 8, 2, 4, (1, 2, 3))


def refuse(path: Path, match: str) -> None:
    with pytest.raises(TraceError, match=match) as caught:
        read_traces([path], ReadOptions(MODEL))
    assert str(path) in str(caught.value)


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", method) as stream:
        for name, content in members.items():
            stream.writestr(name, content)
    return path


def test_a_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    refuse(tmp_path / "a.npy", "is a named pipe")
    refuse(tmp_path, "is a named pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    refuse(tmp_path / "zero", "is a device")


def test_a_flipped_byte_in_an_archive_is_noticed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", counts=poisson(2, 3, 8))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[len(content) // 2] ^= 4
    (tmp_path / "a.npz").write_bytes(content)
    refuse(tmp_path / "a.npz", "is a damaged or cut archive")


def test_an_archive_that_expands_a_thousandfold_is_refused_unread(tmp_path: Path) -> None:
    bomb = npy(np.zeros((400_000, 3, 8), np.int64))
    archive(tmp_path / "a.npz", {"counts.npy": bomb}, zipfile.ZIP_DEFLATED)
    refuse(tmp_path / "a.npz", r"expands [\d,]+ bytes to 76,800,128")


def test_an_array_shorter_than_its_header_says_is_refused(tmp_path: Path) -> None:
    content = npy(poisson(2, 3, 8)).replace(b"(2, 3, 8), }", b"(2000, 3, 8), }"[:12] + b"")
    whole = npy(poisson(2000, 3, 8))[:128] + content[128:]
    refuse(archive(tmp_path / "a.npz", {"counts.npy": whole}), "its header promises 384,128")
    (tmp_path / "b.npy").write_bytes(whole)
    refuse(tmp_path / "b.npy", "is cut: its header promises 384000")


@pytest.mark.parametrize("shape", ["(-1, 3)", "(4611686018427387904, 3, 8)", "(2, 3, " + "(" * 3000, "'a'"])
def test_an_array_header_that_lies_is_refused(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}}}".encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\0" + len(header).to_bytes(2, "little") + header + bytes(400))
    refuse(tmp_path / "a.npy", r"has a damaged .npy header|only plain arrays are read|is cut")


def test_a_tensor_of_more_elements_than_bytes_is_refused(tmp_path: Path) -> None:
    row = torch.from_numpy(poisson(1, 1, 8))
    torch.save(row.expand(1000, 3, 8), tmp_path / "a.pt")
    refuse(tmp_path / "a.pt", r"strides \[0, 0, 1\]; 64 bytes are there for its 24,000 elements")
    torch.save(torch.from_numpy(poisson(3, 8)).T.contiguous().T, tmp_path / "b.pt")  # a view, but of its own bytes
    assert read_traces([tmp_path / "b.pt"], ReadOptions(MODEL)).loads.counts[0].tolist() == poisson(3, 8).tolist()


def test_a_compressed_torch_file_is_refused(tmp_path: Path) -> None:
    torch.save(torch.from_numpy(poisson(3, 8)), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as stream:
        members = {name: stream.read(name) for name in stream.namelist()}
    refuse(archive(tmp_path / "b.pt", members, zipfile.ZIP_DEFLATED), "is a compressed archive")


@pytest.mark.parametrize(
    ("document", "match"),
    [
        ("[" * 20_000 + "]" * 20_000, "nested too deep"),
        ('{"counts": [[' + "1" * 5_000 + "]]}", "a number of 5,000 digits"),
        ('{"counts": [[1, 2], [3, 4]], "layer_ids": [1, 1000000000000]}', "layer ids are|layers"),
        ('{"counts": [[1, 2], [3, 4]], "counts": [[1, 2], [3, 4]]}', "has the key 'counts' twice"),
        ('{"logical_count": {"a": "\\ud800"}}', "must be valid Unicode"),
        ('{"format": "eplb-recording", "version": 1, "num_experts": [8]}', "its header lacks|num_experts is"),
        ('{"n_expert": [8], "tokens": 3, "layers": {"1": 5}}', "a.json"),
        ('{"layers": [{"layer_id": {}, "experts": 7}]}', "a.json"),
    ],
)
def test_json_of_another_shape_is_refused_by_name(tmp_path: Path, document: str, match: str) -> None:
    (tmp_path / "a.json").write_text(document)
    refuse(tmp_path / "a.json", match)


def safetensors_file(path: Path, entry: dict[str, object], data: bytes) -> Path:
    header = json.dumps({"counts": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


ENTRY = {"dtype": "I64", "shape": [1, 3, 8], "data_offsets": [0, 192]}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"dtype": ["I64"]}, "has the unknown dtype"),
        ({"dtype": "I536870912"}, "has the unknown dtype 'I536870912'"),
        ({"shape": [True, 3]}, "has the shape"),
        ({"data_offsets": [0, 193]}, "does not fill bytes"),
        ({"data_offsets": [8, 0]}, "does not fill bytes"),
    ],
)
def test_a_header_may_name_only_what_is_in_the_file(tmp_path: Path, change: dict[str, object], match: str) -> None:
    refuse(safetensors_file(tmp_path / "a.safetensors", ENTRY | change, bytes(192)), match)


@pytest.mark.parametrize("dtype", ["I64", "U32", "F16", "BF16"])
def test_counts_of_every_dtype_are_read(tmp_path: Path, dtype: str) -> None:
    counts = poisson(1, 3, 8) % 100
    data = {
        "I64": counts.astype("<i8"),
        "U32": counts.astype("<u4"),
        "F16": counts.astype("<f2"),
        "BF16": counts.astype("<f4").view("<u4") >> 16,
    }[dtype]
    content = data.astype("<u2").tobytes() if dtype == "BF16" else data.tobytes()
    entry = {"dtype": dtype, "shape": [1, 3, 8], "data_offsets": [0, len(content)]}
    safetensors_file(tmp_path / "a.safetensors", entry, content)
    read = read_traces([tmp_path / "a.safetensors"], ReadOptions(MODEL)).loads
    assert read.counts.tolist() == counts.tolist()


def test_a_cell_of_megabytes_makes_a_short_message(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("layer,expert,hits,layer_rows\n1,2," + "x" * 3_000_000 + ",5\n")
    with pytest.raises(TraceError) as caught:
        read_traces([tmp_path / "a.csv"], ReadOptions(MODEL))
    assert len(str(caught.value)) < 400


def test_counts_whose_sum_leaves_64_bits_name_their_file(tmp_path: Path) -> None:
    counts = poisson(2, 3, 8)
    counts[0, 1, 5] = counts[1, 2, 6] = 2**62
    np.save(tmp_path / "a.npy", counts)
    with pytest.raises(EplbError, match=r"a\.npy: counts add up to"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL))


ROUTE = '{"type": "route", "layer": 1, "topk_ids": [2, 3]}'
STATS = '{"record_type": "eplb_load_stats", "step": 5, "expert_load": [[1, 2]], "p2l_map": [[0, 1]]}'
ANSWER = '{"routed_experts": [[[1, 2]]], "prompt_tokens": 3}'
CHOICES = '{"usage": {"prompt_tokens": 3}, "choices": [{"routed_experts": [[[1, 2]]]}]}'
LOG = "hello\n[dump activation] decode step 7 in rank 0 for layer 1 get 4 experts data: 5 6 7 8\n"
PLUMB = '{"layers": [{"layer_id": 1, "experts": [{"expert_id": 0, "token_count": 2}]}]}'


@pytest.mark.parametrize(
    ("name", "content", "old", "new", "match"),
    [
        ("a.jsonl", f"{ROUTE}\n{ROUTE}\n", "[2, 3]", "[2, 4294967296]", "is no route: .*topk_ids"),
        ("a.jsonl", f"{ROUTE}\n{ROUTE}\n", '"layer": 1', '"layer": 2147483648', r"is no route: .*\.layer"),
        ("a.jsonl", f"{STATS}\n{STATS}\n", '"step": 5', '"step": [5]', r"step is \[5\]; a whole number"),
        ("a.jsonl", f"{STATS}\n{STATS}\n", '"step": 5', '"step": 1e999', "step is inf; a whole number"),
        ("a.json", ANSWER, '"prompt_tokens": 3', '"prompt_tokens": "3"', "prompt_tokens is '3'; a number"),
        ("a.json", CHOICES, '{"prompt_tokens": 3}', "7", "usage is 7; an object"),
        ("a.json", CHOICES, '"prompt_tokens": 3', '"prompt_tokens_details": [1]', r"prompt_tokens_details is \[1\]"),
        ("a.json", PLUMB, '"layer_id": 1', '"layer_id": []', r"layer_id is \[\]; a whole number"),
        ("a.json", PLUMB, '"expert_id": 0', '"expert_id": 1e400', "expert_id is inf"),
        ("a.json", PLUMB, '"token_count": 2', '"token_count": 1e300', r"load is 1e\+300"),
        ("a.log", LOG, "data: 5", "data: " + "5" * 19, "holds a number of 19 digits; at most 18"),
        ("a.log", LOG, "step 7", "step " + "7" * 5_000, "holds a number of 5000 digits"),
        ("layer_1.txt", "1\t2\t\t.5\t.5\n", "1\t2", "1\t" + "2" * 5_000, "an id is no number"),
    ],
)
def test_a_value_of_another_kind_is_named(
    tmp_path: Path, name: str, content: str, old: str, new: str, match: str
) -> None:
    assert old in content
    (tmp_path / name).write_text(content.replace(old, new))
    with pytest.raises(TraceError, match=match) as caught:
        read_traces([tmp_path / name], ReadOptions(MODEL))
    assert "is not as" not in str(caught.value)  # the last net's words


@pytest.mark.parametrize("key", ["num_experts", "num_experts_per_token"])
@pytest.mark.parametrize("value", ["8", [8], float("inf"), -8, 2**17])
def test_tensorrt_llm_sizes_are_numbers(tmp_path: Path, key: str, value: object) -> None:
    meta = {"num_experts": 8, "num_experts_per_token": 2} | {key: value}
    (tmp_path / "meta_info.json").write_text(json.dumps(meta))
    save_file({"3_1": torch.arange(8)}, tmp_path / "rank0.safetensors")
    with pytest.raises(TraceError, match=f"{key} of meta_info.json is .*; a whole number"):
        read_traces([tmp_path], ReadOptions(MODEL))


def test_a_line_that_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.traces.layer_files.MOST_LINE_BYTES", 30)
    for layer in (1, 2, 3):
        (tmp_path / f"layer_{layer}.txt").write_text("1\t2\t\t.5\t.5\n" + "1\t2" * 10 + "\t\t.5\n")
    with pytest.raises(TraceError, match=r"layer_1\.txt, row 2: is too long; at most 30 bytes"):
        read_traces([tmp_path], ReadOptions(MODEL))


def test_steps_far_apart_are_counted_not_listed(tmp_path: Path) -> None:
    recording = Recording([], ReadOptions(), folder=tmp_path)
    name_gaps([5, 10**15, 7], recording, "step")
    assert recording.warnings == [
        f"{10**15 - 7} steps missing between the first and the last: 6, 8, 9, 10, 11, 12, 13, 14, ..."
    ]


def test_an_array_header_of_no_length_is_refused(tmp_path: Path) -> None:
    content = npy(poisson(2, 3, 8))
    (tmp_path / "a.npy").write_bytes(content[:8] + bytes(2) + content[10:])
    refuse(tmp_path / "a.npy", r"has a damaged \.npy header")


def test_a_map_of_billions_of_experts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f"{STATS}\n".replace("[[0, 1]]", "[[0, 4294967296]]"))
    with pytest.raises(TraceError, match=r"a\.jsonl.*puts expert 4294967296 into slot 1; experts are 0\.\.65535"):
        read_traces([tmp_path], ReadOptions())


@pytest.mark.parametrize("layers", [[1, 2, float("inf")], [1, 2, float("nan")], [1, 2, 2.5]])
def test_layers_are_whole_numbers(tmp_path: Path, layers: list[float]) -> None:
    document = {"counts": poisson(2, 3, 8).tolist(), "layer_ids": layers}
    (tmp_path / "counts.json").write_text(json.dumps(document))
    refuse(tmp_path / "counts.json", "layers are whole numbers|layer_ids")


@pytest.mark.parametrize(
    ("name", "values"),
    [("tokens", [3, 1 << 48]), ("tokens", [5, -1]), ("window_ids", [0, 1 << 63]), ("tokens", [1 << 63, 1 << 63])],
)
def test_numbers_of_a_window_are_bounded(tmp_path: Path, name: str, values: list[int]) -> None:
    (tmp_path / "counts.json").write_text(json.dumps({"counts": poisson(2, 3, 8).tolist(), name: values}))
    refuse(tmp_path / "counts.json", f"{name.split('_')[0]}|step number|whole number")


def test_a_window_of_as_many_tokens_as_fit_is_read(tmp_path: Path) -> None:
    document = {"counts": poisson(2, 3, 8).tolist(), "tokens": [3, (1 << 48) - 1]}
    (tmp_path / "counts.json").write_text(json.dumps(document))
    assert read_traces([tmp_path / "counts.json"], ReadOptions(MODEL)).loads.tokens.tolist() == [3, (1 << 48) - 1]


@pytest.mark.parametrize(
    ("shape", "words"),
    [((4294967296, 0, 256), "must have layers and columns"), ((2**62, 8, 0), "only plain arrays are read")],
)
def test_an_axis_of_no_length_hides_no_endless_one(tmp_path: Path, shape: tuple[int, ...], words: str) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    (tmp_path / "ids.npy").write_bytes(header.getvalue())
    refuse(tmp_path / "ids.npy", words)


@pytest.mark.parametrize("key", ["9" * 5000, "\u00b2", "1234567890"])
@pytest.mark.parametrize("place", ["layer", "expert"])
def test_keys_that_are_no_layer_or_expert_are_refused(tmp_path: Path, key: str, place: str) -> None:
    row = {str(expert): 5 for expert in range(7)}
    document = {"1": {**row, "7": 5}, "2": {**row, "7": 5}, "3": {**row, "7": 5}}
    if place == "layer":
        document[key] = document.pop("3")
    else:
        document["3"] = {**row, key: 5}
    (tmp_path / "heat.json").write_text(json.dumps(document))
    refuse(tmp_path / "heat.json", f"an? {place} is ")


def test_times_are_no_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "ids.npz", topk_ids=np.zeros((5, 3, 2), "M8[s]"))
    refuse(tmp_path / "ids.npz", "only plain arrays are read")
