"""Large traces: constant memory, and nothing left behind by an interrupted run. Sparse files take no room on disk."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.loads import ExpertLoads

pytestmark = pytest.mark.slow


def sparse_trace(path: Path, tokens: int) -> None:
    """uint8 [tokens, 94, 1]: expert 0 in holes, behind a thousand tokens that show a live recording."""
    with path.open("wb") as stream:
        header = {"descr": "|u1", "fortran_order": False, "shape": (tokens, 94, 1)}
        np.lib.format.write_array_header_1_0(stream, header)
        start = stream.tell()
        stream.write(np.repeat(np.arange(1000, dtype=np.uint8) % 7, 94).tobytes())
        stream.truncate(start + tokens * 94)


def start(trace: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "eplb_cli", "profile", trace, "--num-experts", "128", "-o", out]
    return subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    sparse_trace(tmp_path / "trace.npy", 12_000_000)
    process = start(tmp_path / "trace.npy", tmp_path / "loads")
    peak = 0
    while process.poll() is None:
        found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        peak = max(peak, int(found[1]) if found else 0)
        time.sleep(0.02)
    assert process.returncode == 0, process.stderr and process.stderr.read()
    assert peak < 500_000
    loads = ExpertLoads.load(tmp_path / "loads")
    assert loads.tokens.sum() == 12_000_000 and (loads.counts.sum((0, 2)) == 12_000_000).all()


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    sparse_trace(tmp_path / "trace.npy", 400_000_000)
    process = start(tmp_path / "trace.npy", tmp_path / "loads")
    while _bytes_read(process.pid) < 100_000_000:  # well inside the trace
        assert process.poll() is None
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert b"Traceback" not in (process.stderr.read() if process.stderr else b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.npy"]


def _bytes_read(pid: int) -> int:
    found = re.search(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())
    return int(found[1]) if found else 0
