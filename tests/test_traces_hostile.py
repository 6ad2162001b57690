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

from eplb_cli.errors import EplbError, TraceError
from eplb_cli.loads import ModelShape
from eplb_cli.traces import ReadOptions, read_traces
from eplb_cli.traces.files import TraceFile
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


def test_a_header_with_a_dtype_of_another_kind_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"counts": {"dtype": ["I64"], "shape": [1, 3, 8], "data_offsets": [0, 192]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(192))
    refuse(tmp_path / "a.safetensors", "has a damaged safetensors header: 'counts' is")


@pytest.mark.parametrize("change", [{"shape": [True, 3]}, {"data_offsets": [0, 193]}, {"data_offsets": [8, 0]}, {}])
def test_a_header_may_name_only_what_is_in_the_file(tmp_path: Path, change: dict[str, object]) -> None:
    entry = {"dtype": "I64", "shape": [1, 3, 8], "data_offsets": [0, 192]} | change
    header = json.dumps({"counts": entry}).encode()
    (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header + bytes(192))
    if change:
        with pytest.raises(TraceError, match="has a damaged safetensors header"):
            TraceFile(tmp_path / "a").safetensors_header()
    else:
        assert TraceFile(tmp_path / "a").safetensors_header() == {"counts": entry}


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
