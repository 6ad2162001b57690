"""What choosing copies by load costs: processor time of the CPU's rule beside vLLM's hash, and the kernel's operations.

    python benchmarks/dispatch_cost.py

Times are of one MoE layer's call on one core, in milliseconds; ids are drawn with uneven odds. `hash` is the arithmetic
of vLLM's kernel as the CPU tests have it. Operations are the machine instructions of the one loop that runs one after
the other, as compiled for an H100: no GPU is needed for that, and none tells how long they take.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from eplb_cpu_shim import map_to_physical_and_record

from eplb_cli.vllm_plugin.balanced_torch import Layer, Rule, map_and_record

PRICE = 90
SHAPES = {"gpt-oss-20b EP8/R16": (32, 4, 8, 16), "DeepSeek-V3 EP32/R32": (256, 8, 32, 32)}
SIZES = (8, 256, 2048)


def layer_of(row: np.ndarray, experts: int) -> Layer:
    """vLLM's tables of a map [P]."""
    table, count = np.full((experts, 1024), -1), np.zeros(experts, np.int64)
    for slot, expert in enumerate(row):
        table[expert, count[expert]] = slot
        count[expert] += 1
    zeros = torch.zeros(len(row), dtype=torch.int64)
    return Layer(
        torch.from_numpy(table), torch.from_numpy(count), zeros.int(), torch.tensor(True), zeros, zeros[:1].clone()
    )


def milliseconds(call: Callable[[], object]) -> float:
    """Processor time of a call: the least of several."""
    call()
    least = float("inf")
    for _ in range(7):
        start = time.process_time()
        call()
        least = min(least, time.process_time() - start)
    return 1e3 * least


def pouring_instructions() -> int:
    """Instructions of a try's inner loop, one expert poured once, for compute capability 9.0."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from eplb_cli.dispatch.balanced import MOST_OPEN, PRIMARIES, ROUNDS
    from eplb_cli.vllm_plugin.balanced_triton import _fill_and_scan

    constants = {
        "SURE": False, "SHARED": 32, "ROUNDS": ROUNDS, "PRIMARIES": PRIMARIES, "EXPERTS": 32, "COPIES": MOST_OPEN,
        "RANKS": 32, "BLOCK": 128,
    }  # fmt: skip
    numbers = ("price", "num_experts", "blocks", "tries", "ep_size", "per_rank")
    kinds = {
        name: "constexpr" if name in constants else "i32" if name in numbers else "*i64"
        for name in _fill_and_scan.arg_names
    }
    source = ASTSource(fn=_fill_and_scan, signature=kinds, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1}).asm["cubin"]
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        listing = subprocess.run([tool, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", listing)
    places = [int(place, 16) for place, _ in lines]
    # Loops by their backward jumps; the one within another is the pouring.
    loops = []
    for end, (_, text) in enumerate(lines):
        jump = re.search(r"BRA.*?(0x[0-9a-f]+)", text)
        if jump and int(jump[1], 16) < places[end]:
            loops.append((places.index(int(jump[1], 16)), end))
    inner = [(a, b) for a, b in loops if any(c < a and b < d for c, d in loops)]
    return max(end - start + 1 for start, end in inner)


def main() -> None:
    """Print a row for every shape and size."""
    torch.set_num_threads(1)
    print("processor ms per layer | tokens | hash | balanced, one batch | own batch | one batch, no price")
    for name, (experts, top_k, ranks, redundant) in SHAPES.items():
        rng = np.random.default_rng(0)
        odds = rng.dirichlet(np.full(experts, 2.0))
        row = rng.permutation(np.r_[np.arange(experts), rng.choice(experts, redundant, p=odds)])
        layer = layer_of(row, experts)
        for size in SIZES:
            ids = torch.from_numpy(rng.choice(experts, (size, top_k), p=odds).astype(np.int32))
            real = torch.tensor(size, dtype=torch.int32)
            load, table, count = layer.load, layer.logical_to_physical, layer.replica_count
            row_of = [
                milliseconds(
                    lambda: map_to_physical_and_record(ids, load, table, count, layer.record_enabled, real)  # noqa: B023
                )
            ]
            for price, whole in ((PRICE, True), (PRICE, False), (0, True)):
                rule = Rule.on("cpu", ranks, len(row), price, whole_step=whole)
                row_of.append(
                    milliseconds(lambda: map_and_record(ids, rule, layer, counted=real, recorded=real))  # noqa: B023
                )
            print(f"{name:22s} | {size:6d} | " + " | ".join(f"{number:6.2f}" for number in row_of))
    print(f"\ninstructions of the kernel for each expert with copies and round: {pouring_instructions()}")


if __name__ == "__main__":
    main()
