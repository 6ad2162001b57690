"""How fast `eplb convert` is beside `cp -r` and beside loading and saving tensors.

A synthetic checkpoint of the given size is made from random bytes. Every run starts with the source out of the page
cache and ends with every file synced; methods take turns, in rotating order, so that a busy disk hits all alike. Ratios
are medians over the rounds, of a method's seconds over those of `cp -r` in the same round; `per_byte` divides them by
the bytes that were written. Processor seconds are those of the process, user and system.

    python benchmarks/convert.py --gigabytes 4 --rounds 5
    python benchmarks/convert.py --gigabytes 4 --rounds 5 --busy 1    # while one core computes something else
    python benchmarks/convert.py --gigabytes 4 --xfs          # on a loop-mounted XFS with reflink; needs root
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from eplb_cli.checkpoint.safetensors_file import TensorEntry, header_bytes
from eplb_cli.placement import Placement

SHARD_BYTES = 4_000_000_000

COPY = """
import os, subprocess, sys
subprocess.run(["cp", "-r", "--reflink=never", sys.argv[1], sys.argv[2]], check=True)
for parent, _, names in os.walk(sys.argv[2]):
    for name in names:
        descriptor = os.open(os.path.join(parent, name), os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
"""

NAIVE = """
import os, re, shutil, sys
from safetensors.torch import load_file, save_file
source, target = sys.argv[1:3]
os.mkdir(target)
for name in sorted(os.listdir(source)):
    path = os.path.join(target, name)
    if not name.endswith(".safetensors"):
        shutil.copy(os.path.join(source, name), path)
        continue
    tensors = {}
    for key, tensor in load_file(os.path.join(source, name)).items():
        if re.search(r"experts\\.(gate_up_proj|down_proj)$|router.weight$|mlp.gate.weight$", key):
            tensor = tensor.flip(0).contiguous()
        tensors[re.sub(r"experts\\.(\\d+)\\.", lambda m: f"experts.{int(m[1]) ^ 1}.", key)] = tensor
    save_file(tensors, path, {"format": "pt"})
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
"""


@dataclass
class Shape:
    """A model's sizes: what one layer holds, as (name, shape)."""

    config: dict[str, object]
    experts: int
    layer: list[tuple[str, tuple[int, ...]]]

    @property
    def layer_bytes(self) -> int:
        return sum(2 * int(np.prod(shape)) for _, shape in self.layer)


def qwen3() -> Shape:
    """Qwen3-30B-A3B: 128 experts of 9.4 MB a layer, one entry each."""
    hidden, width, experts = 2048, 768, 128
    layer: list[tuple[str, tuple[int, ...]]] = [("self_attn.q_proj.weight", (4096, hidden))]
    layer.append(("mlp.gate.weight", (experts, hidden)))
    for expert in range(experts):
        layer += [
            (f"mlp.experts.{expert}.gate_proj.weight", (width, hidden)),
            (f"mlp.experts.{expert}.up_proj.weight", (width, hidden)),
            (f"mlp.experts.{expert}.down_proj.weight", (hidden, width)),
        ]
    config = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": experts, "num_experts_per_tok": 8}
    return Shape(config, experts, layer)


def llama4() -> Shape:
    """Llama 4 Scout: 16 experts of 252 MB a layer, fused."""
    hidden, width, experts = 5120, 8192, 16
    layer: list[tuple[str, tuple[int, ...]]] = [
        ("self_attn.q_proj.weight", (hidden, hidden)),
        ("feed_forward.router.weight", (experts, hidden)),
        ("feed_forward.experts.gate_up_proj", (experts, hidden, 2 * width)),
        ("feed_forward.experts.down_proj", (experts, width, hidden)),
    ]
    config = {"architectures": ["Llama4ForCausalLM"], "num_local_experts": experts, "interleave_moe_layer_step": 1}
    return Shape(config, experts, layer)


SHAPES = {"qwen3": qwen3, "llama4": llama4}


def make_checkpoint(folder: Path, shape: Shape, gigabytes: float) -> int:
    """Write a checkpoint of about the size asked for; returns the number of layers."""
    folder.mkdir(parents=True)
    layers = max(1, round(gigabytes * 1e9 / shape.layer_bytes))
    groups: list[list[tuple[str, tuple[int, ...], int]]] = [[]]
    size = 0
    for layer in range(layers):
        for name, dimensions in shape.layer:
            nbytes = 2 * int(np.prod(dimensions))
            if groups[-1] and size + nbytes > SHARD_BYTES:
                groups.append([])
                size = 0
            groups[-1].append((f"model.layers.{layer}.{name}", dimensions, nbytes))
            size += nbytes
    noise = np.random.default_rng(0).bytes(64 << 20)
    weight_map, total = {}, 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        entries, offset = [], 0
        for name, dimensions, nbytes in group:
            entries.append(TensorEntry(name, "BF16", dimensions, offset, offset + nbytes))
            weight_map[name] = file
            offset += nbytes
        total += offset
        with (folder / file).open("wb") as stream:
            stream.write(header_bytes(entries, {"format": "pt"}, pad_to=(0, 8)))
            written = 0
            while written < offset:
                # Shifted each time, so that no two experts hold the same bytes.
                start = (written >> 20) * 4099 % (1 << 20)
                written += stream.write(noise[start : start + min(offset - written, (64 << 20) - (1 << 20))])
            stream.flush()
            os.fsync(stream.fileno())
    config = {**shape.config, "num_hidden_layers": layers, "hidden_size": shape.layer[0][1][1]}
    (folder / "config.json").write_text(json.dumps(config))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return layers


def make_plan(file: Path, shape: Shape, layers: int, redundant: int) -> Path:
    """A random plan of the stock form."""
    rng = np.random.default_rng(1)
    rows = np.stack([rng.permutation(shape.experts) for _ in range(layers)]).astype(np.int32)
    rows = np.concatenate([rows, rows[:, :redundant]], axis=1)
    Placement(rows, np.arange(layers, dtype=np.int32), shape.experts, 8).save(file)
    return file


def evict(folder: Path) -> None:
    """Take a folder's files out of the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@dataclass
class Method:
    """One way to make the copy, and what its runs gave."""

    name: str
    command: list[str]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    peak_mb: float = 0.0
    blocks_mb: float = 0.0


def peak_memory_mb(process: int) -> float:
    """The most memory a process has held so far; ru_maxrss would count this process's own before the exec."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM:")), 0.0)


def measure(method: Method, source: Path, target: Path) -> None:
    """One run: cold source, wall time to the last sync, the child's peak memory, and the new blocks on the device."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    evict(source)
    free = os.statvfs(target.parent)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begin = time.perf_counter()
    child = subprocess.Popen(method.command, stdout=subprocess.DEVNULL)
    while child.poll() is None:
        method.peak_mb = max(method.peak_mb, peak_memory_mb(child.pid))
        time.sleep(0.01)
    method.seconds.append(time.perf_counter() - begin)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    method.cpu_seconds.append(used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime)
    if child.returncode != 0:
        raise SystemExit(f"{method.name} failed: {' '.join(method.command)}")
    os.sync()
    after = os.statvfs(target.parent)
    method.blocks_mb = (free.f_bfree - after.f_bfree) * free.f_frsize / 1e6
    shutil.rmtree(target)


def benchmark(folder: Path, name: str, gigabytes: float, rounds: int, *, naive: bool) -> list[dict[str, object]]:
    """All methods on one model shape; returns a row a method."""
    shape = SHAPES[name]()
    source, target = folder / f"source-{name}", folder / "target"
    layers = make_checkpoint(source, shape, gigabytes)
    stock = make_plan(folder / "stock.json", shape, layers, 0)
    spare = make_plan(folder / "spare.json", shape, layers, 8)
    eplb = [sys.executable, "-m", "eplb_cli", "convert", str(source)]
    methods = [
        Method("cp -r", [sys.executable, "-c", COPY, str(source), str(target)]),
        Method("convert stock", [*eplb, str(stock), "-o", str(target), "--format", "quiet"]),
        Method(
            "convert physical, R=8",
            [*eplb, str(spare), "-o", str(target), "--layout", "physical", "--format", "quiet"],
        ),
    ]
    if naive:
        methods.append(Method("load_file/save_file", [sys.executable, "-c", NAIVE, str(source), str(target)]))
    for number in range(rounds):
        for method in methods[number % len(methods) :] + methods[: number % len(methods)]:
            measure(method, source, target)
            took = f"{method.seconds[-1]:.2f} s, processor {method.cpu_seconds[-1]:.2f} s"
            print(f"{name} round {number + 1} {method.name}: {took}", file=sys.stderr, flush=True)
    size = sum(file.stat().st_size for file in source.iterdir())
    shutil.rmtree(source)
    return [_row(name, method, methods[0], size) for method in methods]


def _row(shape: str, method: Method, reference: Method, size: int) -> dict[str, object]:
    ratio = _median_ratio(method.seconds, reference.seconds)
    return {
        "shape": shape,
        "method": method.name,
        "bytes": size,
        "median_s": round(statistics.median(method.seconds), 2),
        "ratio": round(ratio, 3),
        "ratio_per_byte": round(ratio * reference.blocks_mb / max(method.blocks_mb, 1), 3),
        "cpu_median_s": round(statistics.median(method.cpu_seconds), 2),
        "cpu_ratio": round(_median_ratio(method.cpu_seconds, reference.cpu_seconds), 3),
        "peak_rss_mb": round(method.peak_mb, 1),
        "new_blocks_mb": round(method.blocks_mb, 1),
    }


def _median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over rounds: neighbours in time share the machine's mood."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Keep some cores computing."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


@contextmanager
def loop_xfs(folder: Path, gigabytes: float) -> Iterator[Path | None]:
    """A loop-mounted XFS that can share blocks; None where that is impossible."""
    image, mount = folder / "xfs.img", folder / "xfs"
    mount.mkdir()
    with image.open("wb") as stream:
        stream.truncate(int(gigabytes * 1e9))
    steps = [["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], ["mount", "-o", "loop", str(image), str(mount)]]
    try:
        for step in steps:
            subprocess.run(step, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"XFS is skipped, it cannot be mounted here: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the source")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--folder", type=Path, help="where to work; needs three times the size")
    parser.add_argument("--xfs", action="store_true", help="work on a loop-mounted XFS with reflink")
    parser.add_argument("--busy", type=int, default=0, help="cores to keep computing something else meanwhile")
    parser.add_argument("--no-naive", action="store_true", help="leave out load_file/save_file")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(dir=arguments.folder) as temporary, busy_cores(arguments.busy):
        folder = Path(temporary)
        names = list(SHAPES) if arguments.shape == "all" else [arguments.shape]

        def run(where: Path) -> None:
            for name in names:
                rows.extend(benchmark(where, name, arguments.gigabytes, arguments.rounds, naive=not arguments.no_naive))

        if arguments.xfs:
            with loop_xfs(folder, 3 * arguments.gigabytes + 2) as mount:
                if mount is not None:
                    run(mount)
        else:
            run(folder)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = f"{platform.system()} {platform.release()}, {os.cpu_count()} cores, {memory:.0f} GiB"
    print(json.dumps({"machine": machine, "busy_cores": arguments.busy, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
