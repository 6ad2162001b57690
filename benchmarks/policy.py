"""Run-time policies side by side on traffic that drifts: balancedness, moved slots and processor time.

    python benchmarks/policy.py [--only gpt-oss]

A recording's first quarter of the windows (32 at most) makes a plan (`windows`, fast). Every later window is served,
with an even split, by the placement that the policy left after the window before; then the policy is given it. Starts
are vLLM's initial layout and that plan. vLLM's policy is the published algorithm on the newest window, with experts
that stay on their rank kept in their slots, as vLLM 0.32 does (distributed/eplb/policy/default.py). Real recordings lie
beside the checkout in ../shared/data: windows of consecutive tokens, task after task, so that each change of task is a
lasting change of traffic. Synthetic ones are those of benchmarks/plan.py.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from plan import MODELS, SHARED_DATA, cut, synthetic

from eplb_cli import ExpertLoads
from eplb_cli.metrics import balancedness, initial_map, rank_loads
from eplb_cli.planner import PlanRequest, make_plan
from eplb_cli.planner.moves import keep_slots, moved_slots
from eplb_cli.planner.rebalancing import Rebalancer
from eplb_cli.planner.reference import deepseek_map

FIRST, SERVED = 32, 64
"""Most windows that make the plan, and most that are served."""
Policy = Callable[[np.ndarray, np.ndarray], np.ndarray]


def cases() -> Iterator[tuple[str, np.ndarray, int, int]]:
    """Name, loads [W, L, E], ranks and redundant experts."""
    for model, experts, folder, tokens, shapes in (
        ("gpt-oss-20b", 32, "gptoss20b", 512, ((8, 8), (8, 16))),
        ("DeepSeek-V2-Lite", 64, "esft_dsv2lite", 512, ((8, 8), (16, 16))),
    ):
        parts = [cut(file, experts, tokens) for file in sorted((SHARED_DATA / folder).glob("*_topk.npz"))]
        for ranks, redundant in shapes if parts else ():
            yield f"{model} EP{ranks}/R{redundant}, {tokens} tokens", np.concatenate(parts), ranks, redundant
    for name in ("Qwen3-235B", "DeepSeek-V3"):
        yield f"{name} EP32/R32, synthetic", synthetic(MODELS[name], seed=3), 32, 32


def vllms(ranks: int) -> Policy:
    """vLLM's policy, from the newest window alone."""

    def rebalance(loads: np.ndarray, live: np.ndarray) -> np.ndarray:
        new = deepseek_map(loads, live.shape[1], ranks).astype(np.int64)
        return keep_slots(live.astype(np.int64), new, ranks).astype(np.int32)

    return rebalance


def forgetful(ranks: int, *, planned: bool) -> Policy:
    """eplb's policy without its ring: the newest window alone."""
    policy = Rebalancer(ranks, planned)

    def rebalance(loads: np.ndarray, live: np.ndarray) -> np.ndarray:
        policy._ring.clear()
        return policy.rebalance(loads, live)

    return rebalance


def serve(windows: np.ndarray, live: np.ndarray, ranks: int, policy: Policy) -> tuple[float, float, int, float]:
    """Balancedness of the first eight windows and of all, moved slots, processor seconds of a rebalance."""
    loads, moves, seconds = [], 0, 0.0
    for window in windows:
        loads.append(rank_loads(live, window[None], ranks)[0])
        began = time.process_time()
        new = policy(window, live)
        seconds += time.process_time() - began
        moves += int(moved_slots(live, new, ranks).sum())
        live = new
    served = np.stack(loads)
    return balancedness(served[:8]), balancedness(served), moves, seconds / len(windows)


def main() -> None:
    """Print a row for every case, start and policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a case's name")
    only = parser.parse_args().only
    print("| case | start | policy | first 8 windows | all | moved slots | s a rebalance |")
    print("|---|---|---|---|---|---|---|")
    for name, counts, ranks, redundant in cases():
        if only not in name:
            continue
        first = min(len(counts) // 4, FIRST)
        layers, experts = counts.shape[1:]
        seen = ExpertLoads(counts[:first], np.zeros(first, np.int64), np.arange(layers, dtype=np.int32))
        request = PlanRequest(ranks, redundant, effort="fast", folds=0)
        starts = {
            "initial": np.tile(initial_map(experts, redundant), (layers, 1)),
            "plan": make_plan(seen, request).placement.physical_to_logical,
        }
        for start, live in starts.items():
            planned = start == "plan"
            policies: dict[str, Policy] = {
                "none": lambda _, live: live,
                "vLLM": vllms(ranks),
                "eplb, newest window": forgetful(ranks, planned=planned),
                "eplb": Rebalancer(ranks, planned).rebalance,
            }
            for policy, rebalance in policies.items():
                early, whole, moves, seconds = serve(counts[first : first + SERVED], live, ranks, rebalance)
                print(
                    f"| {name} | {start} | {policy} | {early:.3f} | {whole:.3f} | {moves:,} | {seconds:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
