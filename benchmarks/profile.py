"""How fast `eplb profile` reads, against the machine's own limits.

Makes traces on the spot, then measures in one run: `cat` of the same file (from the page cache when it fits), numpy's
one-shot bincount, a plain json loop, and `eplb profile` with its peak memory. Random ids: the routing is not a
measurement, only the bytes are.

    python benchmarks/profile.py --binary-gb 20 --jsonl-gb 2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

LAYERS, EXPERTS, TOP_K = 94, 128, 8
SAMPLE_BYTES = 128 << 20
"""The slow ways are timed on this much: their speed does not depend on the size."""


def make_binary(path: Path, size: int) -> None:
    """uint8 [tokens, 94, 8] of distinct picks, one block of random tokens repeated with its experts shifted."""
    tokens = max(1, size // (LAYERS * TOP_K))
    rng = np.random.default_rng(0)
    block = rng.random((2048, LAYERS, EXPERTS), np.float32).argpartition(TOP_K, -1)[..., :TOP_K].astype(np.uint8)
    with path.open("wb") as stream:
        header = {"descr": "|u1", "fortran_order": False, "shape": (tokens, LAYERS, TOP_K)}
        np.lib.format.write_array_header_1_0(stream, header)
        for index, start in enumerate(range(0, tokens, len(block))):
            part = (block[: min(len(block), tokens - start)] + np.uint8(index % EXPERTS)) % np.uint8(EXPERTS)
            stream.write(part.tobytes())


def make_jsonl(path: Path, size: int) -> None:
    """A route a line, as logging hooks write them."""
    rng = np.random.default_rng(0)
    lines = []
    for token in range(64):
        picks = rng.random((LAYERS, EXPERTS)).argsort(-1)[:, :TOP_K]
        for layer in range(LAYERS):
            route = {
                "type": "route",
                "req_id": f"cmpl-{token % 7}",
                "token_idx": token,
                "layer": layer,
                "topk_ids": picks[layer].tolist(),
                "topk_weights": [round(float(w), 4) for w in rng.dirichlet(np.ones(TOP_K))],
            }
            lines.append(json.dumps(route))
    block = ("\n".join(lines) + "\n").encode()
    meta = {"type": "meta", "layers_logged": list(range(LAYERS)), "top_k": TOP_K}
    with path.open("wb") as stream:
        stream.write((json.dumps(meta) + "\n").encode())
        while stream.tell() < size:
            stream.write(block)


def seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """The shortest of some runs."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def cat(path: Path) -> None:
    with open(os.devnull, "wb") as sink:
        subprocess.run([shutil.which("cat") or "cat", path], stdout=sink, check=True)


def run_profile(path: Path, output: Path) -> tuple[float, float, float]:
    """Seconds of the command, its CPU seconds, and the peak MB of its main process."""
    command = [sys.executable, "-m", "eplb_cli", "profile", str(path), "--num-experts", str(EXPERTS)]
    command += ["-o", str(output), "--force", "--format", "quiet"]
    before = os.times()
    start = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        # The kernel's own high-water mark; ru_maxrss would count this process, from which the command was forked.
        found = re.search(r"VmHWM:\s*(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        peak = max(peak, int(found[1]) if found else 0)
        time.sleep(0.02)
    elapsed = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return elapsed, cpu, peak / 1024


def one_shot_bincount(path: Path) -> float:
    """Bytes a second of numpy's bincount over a whole array with the layer folded into the id."""
    ids = np.load(path, mmap_mode="r")
    ids = np.array(ids[: max(1, SAMPLE_BYTES // (LAYERS * TOP_K))])
    offset = (EXPERTS * np.arange(LAYERS, dtype=np.int64))[None, :, None]
    return ids.nbytes / seconds(lambda: np.bincount((ids + offset).ravel(), minlength=LAYERS * EXPERTS))


def plain_json_loop(path: Path) -> float:
    """Bytes a second of json.loads and a dictionary of counts."""
    with path.open("rb") as stream:
        content = stream.read(SAMPLE_BYTES // 4)
    lines = content.splitlines()[:-1]

    def loop() -> None:
        counts: dict[tuple[int, int], int] = {}
        for line in lines:
            record = json.loads(line)
            if record["type"] == "route":
                for expert in record["topk_ids"]:
                    key = record["layer"], expert
                    counts[key] = counts.get(key, 0) + 1

    return sum(map(len, lines)) / seconds(loop)


def sha256_speed() -> float:
    """Bytes a second of the digest of the sources, which one core must compute in order."""
    block = bytes(64 << 20)
    return len(block) / seconds(lambda: hashlib.sha256(block).digest(), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary-gb", type=float, default=20.0, help="size of the .npy; 0 leaves it out")
    parser.add_argument("--jsonl-gb", type=float, default=2.0, help="size of the JSONL; 0 leaves it out")
    parser.add_argument("--folder", type=Path, help="where to make the traces (removed afterwards)")
    arguments = parser.parse_args()
    figures: dict[str, object] = {"cores": len(os.sched_getaffinity(0)), "sha256_MB_s": round(sha256_speed() / 1e6)}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        output = Path(folder) / "loads.safetensors"
        cases = (
            ("binary", arguments.binary_gb, make_binary, ".npy", one_shot_bincount, "bincount"),
            ("jsonl", arguments.jsonl_gb, make_jsonl, ".jsonl", plain_json_loop, "json_loop"),
        )
        for name, gigabytes, make, suffix, baseline, baseline_name in cases:
            if not gigabytes:
                continue
            path = Path(folder) / f"trace{suffix}"
            make(path, int(gigabytes * 1e9))
            size = path.stat().st_size
            cat_speed = size / seconds(lambda path=path: cat(path), 2)  # type: ignore[misc]
            slow = baseline(path)
            elapsed, cpu, peak = run_profile(path, output)
            speed = size / elapsed
            figures[name] = {
                "bytes": size,
                "seconds": round(elapsed, 2),
                "cpu_seconds": round(cpu, 2),
                "MB_s": round(speed / 1e6),
                "peak_MB": round(peak),
                "cat_MB_s": round(cat_speed / 1e6),
                f"{baseline_name}_MB_s": round(slow / 1e6),
                "of_cat": round(speed / cat_speed, 3),
                f"times_{baseline_name}": round(speed / slow, 1),
            }
            path.unlink()
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
