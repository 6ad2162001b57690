"""Trace files: what they are, and their digests."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.errors import TraceError
from eplb_cli.loads import ModelShape
from eplb_cli.traces import ReadOptions, read_traces
from eplb_cli.traces.files import TraceFile, natural_key
from tests.test_traces_token_ids import random_ids

MODEL = ModelShape("M", 8, 2, 2, (0, 1))


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_a_source_is_named_by_the_digest_of_all_its_bytes(tmp_path: Path, name: str) -> None:
    ids = random_ids(50, 2, 2, 8)
    if name == "a.npy":
        np.save(tmp_path / name, ids)
    else:
        np.savez(tmp_path / name, topk_ids=ids)
    (source,) = read_traces([tmp_path / name], ReadOptions(MODEL)).loads.sources
    assert source.sha256 == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()


def test_a_huge_file_is_sampled_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.traces.files.SAMPLED_FROM_BYTES", 1000)
    monkeypatch.setattr("eplb_cli.traces.files.SAMPLE_BYTES", 16)
    ids = random_ids(5000, 2, 2, 8)
    np.save(tmp_path / "a.npy", ids)
    (source,) = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.sources
    assert source.sha256.startswith("sampled-")
    for other in (np.concatenate([ids[:-1], ids[-1:, :, ::-1]]), ids[:-1]):
        np.save(tmp_path / "b.npy", other)
        assert TraceFile(tmp_path / "b.npy").sha256 != source.sha256


def test_samples_never_make_two_files_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.traces.files.SAMPLED_FROM_BYTES", 1000)
    monkeypatch.setattr("eplb_cli.traces.files.SAMPLE_BYTES", 16)
    ids = random_ids(5000, 2, 2, 8)
    np.save(tmp_path / "a.npy", ids)
    content = bytearray((tmp_path / "a.npy").read_bytes())
    position = (len(content) - 16) * 100 // 255 + 20  # behind the sample of 16 bytes that begins here
    position += position % 2  # ids of one token and layer: exchanged, they count alike
    assert content[position] != content[position + 1]
    content[position], content[position + 1] = content[position + 1], content[position]
    (tmp_path / "b.npy").write_bytes(content)
    first, second = TraceFile(tmp_path / "a.npy"), TraceFile(tmp_path / "b.npy")
    assert first.sha256 == second.sha256 and first.identity != second.identity
    assert read_traces([tmp_path], ReadOptions(MODEL)).loads.tokens.sum() == 10_000


def test_a_line_longer_than_any_recorders_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.traces.files.MAX_LINE_BYTES", 40)
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n' + '{"a": "' + "x" * 29 + '"}\n{"a": "' + "x" * 30 + '"}\n')
    records = TraceFile(tmp_path / "a.jsonl").records()
    assert [next(records)[0], next(records)[0]] == [1, 2]
    with pytest.raises(TraceError, match="is longer than any recorder's line") as caught:
        next(records)
    assert caught.value.row == 3


def test_rank_2_comes_before_rank_10() -> None:
    paths = [Path(f"rank{rank}.pt") for rank in (10, 2, 1)]
    assert [path.name for path in sorted(paths, key=natural_key)] == ["rank1.pt", "rank2.pt", "rank10.pt"]
