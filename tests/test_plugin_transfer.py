"""The start from a plan on two ranks: by the installed vLLM's transfer and by that of each release claimed to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from eplb_cli.vllm_plugin.proof import slot_checksums
from eplb_cli.vllm_plugin.status import read_records
from tests.vllm_cpu.engine import free_port
from tests.vllm_cpu.releases import RELEASES, sources
from tests.vllm_cpu.two_ranks import MISTAKES


def two_ranks(folder: Path, what: str, scratch: Path) -> list[tuple[int, str]]:
    """Exit code and stdout of both ranks."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm_cpu.two_ranks", str(folder), str(rank), str(port), what, str(scratch)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    if what not in ("dies", "hangs"):
        assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [(rank.returncode, out) for rank, (out, _) in zip(ranks, outputs, strict=True)]


RIGHT = {
    "plan_sha256": True, "slots_verified": 20, "at first": True, "idle": True, "moved": False, "step": 0,
    "interval": True, "load": 0.0,
}  # fmt: skip
CONTROLS = {
    "source": RIGHT,
    "stock": RIGHT,
    "physical": RIGHT,
    "empty window": [True, False, True, True],
}


@pytest.fixture(scope="session")
def installed() -> Path:
    """The folder that holds the installed vLLM."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    return Path(spec.origin).parents[1]


@pytest.fixture(scope="session")
def starts(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What both ranks make of every start of `two_ranks`."""
    return [json.loads(out) for _, out in two_ranks(installed, "mistakes", tmp_path_factory.mktemp("starts"))]


@pytest.mark.parametrize("name", CONTROLS)
def test_a_start_without_a_mistake_is_proven_and_stays_so(starts: list[dict[str, Any]], name: str) -> None:
    """The digest is the plan's own, also after a rebalance that moved nothing; it is not once two slots change."""
    assert [answer[name] for answer in starts] == [CONTROLS[name]] * 2


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_start_is_refused_on_both_ranks(starts: list[dict[str, Any]], name: str) -> None:
    for answer in starts:
        assert MISTAKES[name][1] in (answer[name] or "accepted")


def test_a_rank_that_fails_in_the_middle_of_the_move_stops_the_other(installed: Path, tmp_path: Path) -> None:
    ranks = two_ranks(installed, "dies", tmp_path)
    assert [out for _, out in ranks] == ["rank 1: OutOfMemoryError: out of memory\n"] * 2
    assert {record["error"] for record in read_records(tmp_path / "status")} == {
        "rank 1: OutOfMemoryError: out of memory"
    }


def test_a_rank_that_waits_in_vain_is_ended(installed: Path, tmp_path: Path) -> None:
    """The one that failed lives on, so that no broken connection wakes the other."""
    ranks = two_ranks(installed, "hangs", tmp_path)
    assert ranks == [(1, ""), (0, "rank 1: OutOfMemoryError: out of memory\n")]
    records = {record["ep_rank"]: record["error"] for record in read_records(tmp_path / "status")}
    assert records == dict.fromkeys((0, 1), "rank 1: OutOfMemoryError: out of memory")


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_moves_every_expert_to_its_slots(release: str, tmp_path: Path) -> None:
    try:
        folder = sources(release)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    for _, out in two_ranks(folder, "controls", tmp_path):
        assert json.loads(out) == CONTROLS


def test_a_checksum_sees_any_changed_word_and_any_exchange() -> None:
    tensors = [torch.arange(60, dtype=torch.float32).reshape(3, 20), torch.arange(9, dtype=torch.int8).reshape(3, 3)]
    before = slot_checksums(tensors)
    assert len(set(before.tolist())) == 3
    changed = [tensor.clone() for tensor in tensors]
    changed[1][1, 2] += 1
    assert (slot_checksums(changed) != before).tolist() == [False, True, False]
    exchanged = [tensor.clone() for tensor in tensors]
    exchanged[0][2, [4, 11]] = tensors[0][2, [11, 4]]
    assert (slot_checksums(exchanged) != before).tolist() == [False, False, True]
    alike = [tensors[0], tensors[0] + 1]
    assert (slot_checksums(alike) != slot_checksums(alike[::-1])).all()
    rows_exchanged = [tensor[[1, 0, 2]] for tensor in tensors]
    assert slot_checksums(rows_exchanged).tolist() == before[[1, 0, 2]].tolist()


def test_a_checksum_is_of_bytes_not_of_values() -> None:
    zeros = torch.tensor([[0.0, 0.0], [0.0, -0.0]])
    assert len(set(slot_checksums([zeros]).tolist())) == 2
    same = torch.tensor([[float("nan"), 1.0]] * 2)
    assert len(set(slot_checksums([same]).tolist())) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32])
def test_a_checksum_takes_any_dtype_and_shape(dtype: torch.dtype) -> None:
    tensor = torch.arange(30).reshape(2, 5, 3).to(dtype)
    assert slot_checksums([tensor, tensor[:, 0, 0].contiguous()]).shape == (2,)


def test_the_page_of_proofs_lists_every_mistake() -> None:
    page = (Path(__file__).parents[1] / "docs/proofs.md").read_text()
    listed = page.partition("### Mistakes that were made on purpose")[2].replace("\n", " ")
    for name in MISTAKES:
        assert name.replace("_s_", "'s ").replace("_", " ") in listed
