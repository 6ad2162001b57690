"""The transfer and the guard of empty windows, on the EPLB code of each vLLM release that is claimed to work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from eplb_cli.vllm_plugin.warm_start import slot_checksums
from tests.vllm_cpu.engine import free_port

RELEASES = ("0.14.0", "0.18.0", "0.22.0", "0.26.0", "0.30.0", "0.33.0")
CACHE = Path(__file__).parents[1] / ".pytest_cache" / "vllm"


def eplb_code(release: str) -> Path:
    """The folder with a release's EPLB modules, taken from its wheel once and kept."""
    folder = CACHE / f"vllm-{release}"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        command = [
            sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", scratch,
            "--platform", "manylinux_2_31_x86_64", "--platform", "manylinux_2_28_x86_64", f"vllm=={release}",
        ]  # fmt: skip
        download = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if not wheels:
            pytest.skip(f"the wheel of vLLM {release} cannot be fetched: {download.stderr.strip()[-200:]}")
        target = Path(scratch) / "code"
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if name.startswith("vllm/distributed/eplb/")]
            wheel.extractall(target, names)
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.move(target, folder)
    return folder


def run_two_ranks(folder: Path) -> None:
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm_cpu.released_eplb", str(folder), str(rank), str(port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=Path(__file__).parents[1],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0] + outputs[1]


@pytest.mark.slow
@pytest.mark.parametrize("release", RELEASES)
def test_a_release_moves_every_expert_to_its_slots(release: str) -> None:
    run_two_ranks(eplb_code(release))


@pytest.mark.slow
def test_the_installed_vllm_moves_every_expert_to_its_slots() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    run_two_ranks(Path(spec.origin).parents[1])


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
