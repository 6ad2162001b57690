"""What a plan serves under other engines' rules: plans for an even split beside plans for the rule itself.

    python benchmarks/engines.py [--effort normal] [--seed 0]

Loads shaped like those of Llama 4 Maverick (top-1, 128 experts, 24 MoE layers), which no one has published: in HOT
layers one expert takes 77 to 83 % of all tokens, as early layers of Llama 4 do; in the others shares fall as
1 / rank^ZIPF, in an order of its own for each of TOPICS topics, whose mix wanders from window to window. Plans are made
from the first half of the windows; figures are of those windows, and of the second half.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

# One BLAS thread: idle ones spin, and would be counted as work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import numpy.typing as npt

from eplb_cli import ExpertLoads
from eplb_cli.dispatch import STATIC_RULES, Rule, loads_under
from eplb_cli.metrics import balancedness
from eplb_cli.planner import EFFORTS, PlanRequest
from eplb_cli.planner.placing import place
from eplb_cli.planner.request import topology_of

LAYERS, EXPERTS, WINDOWS, TOKENS = 24, 128, 128, 50_000
HOT, ZIPF, TOPICS = (0, 1, 2), 1.15, 6
SHAPES = ((16, 16, 2), (16, 32, 2), (8, 16, 2), (8, 16, 1), (32, 32, 4))
"""Ranks, redundant experts, nodes."""


def llama4(seed: int) -> ExpertLoads:
    """Loads as the module describes."""
    rng = np.random.default_rng(seed)
    counts = np.empty((WINDOWS, LAYERS, EXPERTS), np.int64)
    walk = rng.standard_normal((WINDOWS, TOPICS))
    for window in range(1, WINDOWS):
        walk[window] = 0.8 * walk[window - 1] + 0.6 * walk[window]
    mixes = np.exp(walk)
    mixes /= mixes.sum(1, keepdims=True)
    zipf = 1.0 / np.arange(1, EXPERTS + 1) ** ZIPF
    for layer in range(LAYERS):
        common = rng.standard_normal(EXPERTS)
        topics = np.empty((TOPICS, EXPERTS))
        for topic in range(TOPICS):
            topics[topic, np.argsort(-(common + rng.standard_normal(EXPERTS)))] = zipf / zipf.sum()
        shares = mixes @ topics
        if layer in HOT:
            hot = rng.uniform(0.77, 0.83)
            shares *= 1 - hot
            shares[:, rng.integers(EXPERTS)] += hot
        for window in range(WINDOWS):
            counts[window, layer] = rng.multinomial(TOKENS, shares[window] / shares[window].sum())
    return ExpertLoads(counts, np.full(WINDOWS, TOKENS), np.arange(1, 2 * LAYERS, 2, dtype=np.int32), top_k=1)


def planned(loads: ExpertLoads, request: PlanRequest) -> tuple[npt.NDArray[np.int64], float]:
    """The placement [L, P], and the processor seconds it took."""
    started = time.process_time()
    rows = place(loads.counts, topology_of(loads, request), request)
    return rows, time.process_time() - started


def main() -> None:
    """Print a row for every shape and rule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effort", choices=EFFORTS, default="normal")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    loads = llama4(arguments.seed)
    halves = [loads.select_windows(slice(0, WINDOWS // 2)), loads.select_windows(slice(WINDOWS // 2, None))]
    print("| shape | rule | windows, evenly split | windows | reference | planned for it | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ranks, redundant, nodes in SHAPES:
        for rule in STATIC_RULES:
            even = PlanRequest(ranks, redundant, num_nodes=nodes, strategy="windows", effort=arguments.effort)
            windows, _ = planned(halves[0], even)
            reference, _ = planned(halves[0], replace(even, strategy="deepseek"))
            known, seconds = planned(halves[0], replace(even, dispatch=rule))
            shape = f"EP{ranks}/R{redundant}, {nodes} node{'s' * (nodes > 1)}"
            cases: list[tuple[npt.NDArray[np.int64], Rule]]
            cases = [(windows, "even"), (windows, rule), (reference, rule), (known, rule)]
            figures = [
                " / ".join(
                    f"{balancedness(loads_under(by, rows, half.counts, ranks, nodes, half.layer_ids)):.3f}"
                    for half in halves
                )
                for rows, by in cases
            ]
            print(f"| {shape} | {rule} | {' | '.join(figures)} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
