"""Planners side by side, in one table and one run: held-out balancedness and processor time.

    python benchmarks/plan.py [--only NAME] [--thorough] [--no-vllm]

Each configuration's first windows make the plan, its last windows score it. Peers get what their interfaces take: the
summed load (reference, vLLM, zigzag) or the windows (mean-variance). Bounds are those of the windows in each column.
Processor time is that of the whole process, all threads together, the least of three runs where they are short.

Synthetic loads are a mixture of topics, since no public windowed loads of these models exist:

    p[k, e] ~ exp(b s[e] + t z[k, e]),  s, z standard normal, b and t drawn for each layer from the model's range,
    the share of an expert capped at 0.8 / top-k; for models with expert groups each group adds its own normals.
    A window's topic shares are those of 200 requests drawn from softmax(0.6 a), a an AR(1) walk (0.7) on a slow drift;
    its counts are multinomial, from about 100,000 tokens (log-normal, 25 %).

Skew was set by recorded loads of DeepSeek-V3 (Gini 0.32 to 0.44, groups 1.5 to 2.1 over their mean); that of Llama 4
is a guess. Real loads lie beside the checkout in ../shared/data and are left out where they do not.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# One BLAS thread: idle ones spin, and would be counted as work.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from eplb_cli.bounds import balancedness_bound, stock_bound
from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import balancedness, initial_map, rank_loads
from eplb_cli.planner import PlanRequest
from eplb_cli.planner.placing import place
from eplb_cli.planner.request import topology_of

SHARED_DATA = Path(__file__).parents[2] / "shared" / "data"
WINDOWS, TOKENS, TOPICS, REQUESTS = 64, 100_000, 12, 200


@dataclass(frozen=True)
class Model:
    """Sizes and skew of a synthetic model: layers, experts, top-k, groups, ranges of b and t, groups' own b and t."""

    layers: int
    experts: int
    top_k: int
    groups: int
    base: tuple[float, float]
    topic: tuple[float, float]
    group_base: float = 0.0
    group_topic: float = 0.0


MODELS = {
    "Qwen3-235B": Model(94, 128, 8, 1, (0.3, 0.8), (0.5, 1.0)),
    "Maverick": Model(24, 128, 1, 1, (0.4, 1.0), (0.8, 1.3)),
    "Scout": Model(48, 16, 1, 1, (0.2, 0.6), (0.4, 0.9)),
    "DeepSeek-V3": Model(58, 256, 8, 8, (0.3, 0.7), (0.5, 0.9), 0.35, 0.45),
}


@dataclass(frozen=True)
class Case:
    """What one row of the table plans for and is scored on."""

    name: str
    planned: np.ndarray
    scored: np.ndarray
    ep_size: int
    redundant: int
    num_nodes: int = 1
    num_groups: int | None = None


def synthetic(model: Model, seed: int) -> np.ndarray:
    """Loads [2 x WINDOWS, L, E] as the module describes."""
    rng = np.random.default_rng(seed)
    layers, experts = model.layers, model.experts
    logits = rng.uniform(*model.base, (layers, 1, 1)) * rng.standard_normal((layers, 1, experts)) + rng.uniform(
        *model.topic, (layers, 1, 1)
    ) * rng.standard_normal((layers, TOPICS, experts))
    if model.groups > 1:
        groups = model.group_topic * rng.standard_normal((layers, TOPICS, model.groups))
        groups = groups + model.group_base * rng.standard_normal((layers, 1, model.groups))
        logits = logits + np.repeat(groups, experts // model.groups, axis=2)
    shares = np.exp(logits)
    shares /= shares.sum(-1, keepdims=True)
    shares = np.minimum(shares, 0.8 / model.top_k)
    shares /= shares.sum(-1, keepdims=True)
    walk, drift, start = rng.standard_normal(TOPICS), np.zeros(TOPICS), 0.5 * rng.standard_normal(TOPICS)
    counts = np.empty((2 * WINDOWS, layers, experts), np.int64)
    for window in range(2 * WINDOWS):
        walk = 0.7 * walk + np.sqrt(1 - 0.7**2) * rng.standard_normal(TOPICS)
        drift = drift + 0.45 / np.sqrt(2 * WINDOWS) * rng.standard_normal(TOPICS)
        mix = np.exp(0.6 * (start + walk + drift))
        mix = rng.multinomial(REQUESTS, mix / mix.sum()) / REQUESTS
        assignments = int(TOKENS * rng.lognormal(0.0, 0.25)) * model.top_k
        for layer in range(layers):
            share = mix @ shares[layer]
            counts[window, layer] = rng.multinomial(assignments, share / share.sum())
    return counts


def cut(file: Path, experts: int, tokens: int) -> np.ndarray:
    """Per-token expert ids cut into windows: loads [W, L, E]."""
    ids = np.load(file)["topk_ids"].astype(np.int64)
    windows, layers, top_k = len(ids) // tokens, *ids.shape[1:]
    ids = ids[: windows * tokens].reshape(windows, tokens, layers, top_k)
    ids = ids.transpose(0, 2, 1, 3).reshape(windows * layers, tokens * top_k)
    flat = ids + experts * np.arange(windows * layers)[:, None]
    return np.bincount(flat.ravel(), minlength=windows * layers * experts).reshape(windows, layers, experts)


def cases() -> Iterator[Case]:
    """All configurations, synthetic first."""
    for name, shapes in (
        ("Qwen3-235B", ((8, 32), (16, 32), (32, 32))),
        ("Maverick", ((8, 16),)),
        ("Scout", ((8, 16),)),
        ("DeepSeek-V3", ((32, 32), (64, 64), (144, 32))),
    ):
        counts = synthetic(MODELS[name], seed=0)
        first, second = counts[:WINDOWS], counts[WINDOWS:]
        for ranks, redundant in shapes:
            yield Case(f"{name} EP{ranks}/R{redundant}", first, second, ranks, redundant)
        if name == "DeepSeek-V3":
            yield Case("DeepSeek-V3 EP32/R32, 4 nodes", first, second, 32, 32, 4, 8)
    if not SHARED_DATA.is_dir():
        return
    for model, experts, folder, shapes in (
        ("gpt-oss-20b", 32, "gptoss20b", ((8, 8), (4, 0))),
        ("DeepSeek-V2-Lite", 64, "esft_dsv2lite", ((8, 8), (16, 16))),
    ):
        files = sorted((SHARED_DATA / folder).glob("*_topk.npz"))
        for tokens in (128, 512, 2000):
            parts = [part for part in (cut(file, experts, tokens) for file in files) if len(part) > 1]
            first = np.concatenate([part[: len(part) // 2] for part in parts])
            second = np.concatenate([part[len(part) // 2 :] for part in parts])
            for ranks, redundant in shapes:
                yield Case(f"real {model} EP{ranks}/R{redundant}, {tokens} tokens", first, second, ranks, redundant)
            half = len(parts) // 2
            across = np.concatenate(parts[:half]), np.concatenate(parts[half:])
            ranks, redundant = shapes[0]
            yield Case(f"real {model} EP{ranks}/R{redundant}, {tokens}, other tasks", *across, ranks, redundant)


def every_split(experts: int, folder: str, ranks: int, redundant: int, tokens: int) -> Iterator[Case]:
    """Every way to plan from some of the recorded tasks and score on the others (tasks of four windows or more)."""
    files = sorted((SHARED_DATA / folder).glob("*_topk.npz"))
    parts = [part for part in (cut(file, experts, tokens) for file in files) if len(part) > 3]
    for size in range(1, len(parts)):
        for seen in itertools.combinations(range(len(parts)), size):
            planned = np.concatenate([parts[task] for task in seen])
            scored = np.concatenate([part for task, part in enumerate(parts) if task not in seen])
            yield Case(f"{folder} EP{ranks}/R{redundant}, {tokens} tokens", planned, scored, ranks, redundant)


def print_unseen_tasks() -> None:
    """Mean held-out balancedness over every split of the tasks, and the difference to mean-variance with its error."""
    print("| configuration | splits | reference | mean-variance | stock | fast | normal | normal - mean-variance |")
    print("|---|---|---|---|---|---|---|---|")
    for experts, folder, ranks in ((32, "gptoss20b", 8), (64, "esft_dsv2lite", 8), (64, "esft_dsv2lite", 16)):
        for tokens in (2000, 512):
            held_out, name = [], ""
            for case in every_split(experts, folder, ranks, ranks, tokens):
                name = case.name
                windows = (ours("windows", "fast"), ours("windows", "normal"))
                planners = (ours("deepseek"), mean_variance, ours("stock"), *windows)
                held_out.append([figure(plan(case), case.scored, ranks) for plan in planners])
            if not held_out:
                continue
            figures = np.array(held_out)
            lead = figures[:, 4] - figures[:, 1]
            error = lead.std(ddof=1) / len(lead) ** 0.5
            columns = " | ".join(f"{value:.4f}" for value in figures.mean(0))
            print(f"| {name} | {len(lead)} | {columns} | {lead.mean():+.4f} (standard error {error:.4f}) |", flush=True)


def reference_in_torch(case: Case) -> np.ndarray:
    """The published algorithm as published: Python loops over torch tensors (global policy, or hierarchical)."""
    import torch

    def pack(weight: torch.Tensor, packs: int) -> tuple[torch.Tensor, torch.Tensor]:
        room = weight.shape[1] // packs
        index, place_ = torch.zeros_like(weight, dtype=torch.int64), torch.zeros_like(weight, dtype=torch.int64)
        if room == 1:
            return torch.arange(weight.shape[1]).expand(weight.shape), place_
        order = weight.float().sort(-1, descending=True).indices
        for row in range(len(weight)):
            load, filled = [0.0] * packs, [0] * packs
            for item in order[row]:
                lightest = min((p for p in range(packs) if filled[p] < room), key=load.__getitem__)
                index[row, item], place_[row, item] = lightest, filled[lightest]
                load[lightest] += weight[row, item]
                filled[lightest] += 1
        return index, place_

    weight = torch.from_numpy(case.planned.sum(0)).float()
    groups, nodes = (case.num_groups, case.num_nodes) if case.num_groups else (1, 1)
    layers, experts = weight.shape
    slots, size = experts + case.redundant, experts // groups
    index, place_ = pack(weight.unflatten(-1, (groups, size)).sum(-1), nodes)
    to_node = (((index * (groups // nodes) + place_) * size)[..., None] + torch.arange(size)).flatten(-2)
    at_node = to_node.argsort(-1)
    local = weight.gather(-1, at_node).view(-1, experts // nodes)
    copies = torch.arange(slots // nodes).repeat(len(local), 1)
    counts, row = torch.ones_like(local, dtype=torch.int64), torch.arange(len(local))
    for slot in range(experts // nodes, slots // nodes):
        hottest = (local / counts).max(-1).indices
        copies[:, slot] = hottest
        counts[row, hottest] += 1
    index, place_ = pack((local / counts).gather(-1, copies), case.ep_size // nodes)
    order = (index * (slots // case.ep_size) + place_).argsort(-1)
    placed = copies.gather(-1, order).view(layers, nodes, -1)
    placed = (placed + torch.arange(0, experts, experts // nodes).view(1, -1, 1)).flatten(-2)
    return at_node.gather(-1, placed).numpy()


def vllm_policy(case: Case) -> np.ndarray:
    """vLLM's policy as installed, on the summed load."""
    import torch
    from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

    weight = torch.from_numpy(case.planned.sum(0))
    slots = weight.shape[1] + case.redundant
    return DefaultEplbPolicy.rebalance_experts(
        weight, slots, case.num_groups or 1, case.num_nodes, case.ep_size
    ).numpy()


def waterfill(weight: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Copies in the order given [L, P] and counts [L, E]: the next one to the largest share."""
    layers, experts = weight.shape
    counts, row = np.ones((layers, experts), np.int64), np.arange(layers)
    copies = np.tile(np.arange(slots), (layers, 1))
    for slot in range(experts, slots):
        copies[:, slot] = (weight / counts).argmax(1)
        counts[row, copies[:, slot]] += 1
    return copies, counts


def zigzag(case: Case) -> np.ndarray:
    """Copies by falling share, dealt to the ranks forth and back."""
    weight = case.planned.sum(0).astype(float)
    copies, counts = waterfill(weight, weight.shape[1] + case.redundant)
    order = np.argsort(-np.take_along_axis(weight / counts, copies, 1), 1, kind="stable")
    dealt = np.take_along_axis(copies, order, 1).reshape(len(weight), -1, case.ep_size).copy()
    dealt[:, 1::2] = dealt[:, 1::2, ::-1]
    return dealt.transpose(0, 2, 1).reshape(len(weight), -1)


def mean_variance(case: Case, z: float = 1.0) -> np.ndarray:
    """Counts by (mean + z deviation) / copies; each copy to the rank without it that keeps mean + z deviation least."""
    counts_by_window = case.planned.astype(float).transpose(1, 2, 0)
    risk = counts_by_window.mean(-1) + z * counts_by_window.std(-1)
    layers, experts = risk.shape
    slots, ranks = experts + case.redundant, case.ep_size
    copies, counts = waterfill(risk, slots)
    row = np.arange(layers)
    order = np.argsort(-np.take_along_axis(risk / counts, copies, 1), 1, kind="stable")
    loads, room = np.zeros((layers, ranks, counts_by_window.shape[2])), np.full((layers, ranks), slots // ranks)
    holds = np.zeros((layers, ranks, experts), bool)
    placed = np.zeros((layers, ranks, slots // ranks), np.int64)
    for step in range(slots):
        expert = copies[row, order[:, step]]
        share = counts_by_window[row, expert] / counts[row, expert][:, None]
        after = loads + share[:, None]
        cost = after.mean(-1) + z * after.std(-1)
        cost[room == 0] = np.inf
        twin = holds[row, :, expert] & (room > 0)
        cost[twin & ~twin.all(1, keepdims=True)] += 1e18
        rank = cost.argmin(1)
        placed[row, rank, slots // ranks - room[row, rank]] = expert
        loads[row, rank] += share
        room[row, rank] -= 1
        holds[row, rank, expert] = True
    return placed.reshape(layers, slots)


def ours(strategy: str, effort: str = "normal", node_policy: str = "flat") -> Callable[[Case], np.ndarray]:
    """This planner's placement of a case."""

    def plan(case: Case) -> np.ndarray:
        counts = case.planned
        loads = ExpertLoads(counts, np.zeros(len(counts), np.int64), np.arange(counts.shape[1], dtype=np.int32))
        request = PlanRequest(
            case.ep_size,
            case.redundant,
            num_nodes=case.num_nodes,
            num_groups=case.num_groups,
            strategy=strategy,  # type: ignore[arg-type]
            effort=effort,  # type: ignore[arg-type]
            node_policy=node_policy if case.num_groups else "flat",  # type: ignore[arg-type]
        )
        return place(counts, topology_of(loads, request), request)

    return plan


def figure(placed: np.ndarray, counts: np.ndarray, ranks: int) -> float:
    return balancedness(rank_loads(placed, counts, ranks))


def timed(plan: Callable[[Case], np.ndarray], case: Case) -> tuple[np.ndarray, float]:
    least = np.inf
    for _ in range(3):
        start = time.process_time()
        placed = plan(case)
        least = min(least, time.process_time() - start)
        if least > 0.5:
            break
    return placed, least


def main() -> None:
    # Beside this file lies profile.py, which would hide the standard library's module of that name from vLLM's imports.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != Path(__file__).parent.resolve()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="configurations whose name contains this")
    parser.add_argument("--thorough", action="store_true", help="plan with thorough effort as well")
    parser.add_argument("--no-vllm", action="store_true", help="leave out vLLM's policy")
    parser.add_argument("--unseen-tasks", action="store_true", help="only: every split of the recorded tasks")
    arguments = parser.parse_args()
    if arguments.unseen_tasks:
        print_unseen_tasks()
        return
    planners: dict[str, Callable[[Case], np.ndarray]] = {
        "reference": reference_in_torch,
        "vLLM": vllm_policy,
        "zigzag": zigzag,
        "mean-variance": mean_variance,
        "deepseek": ours("deepseek"),
        "mean": ours("mean"),
        "mean, fast": ours("mean", "fast"),
        "stock": ours("stock"),
        "fast": ours("windows", "fast"),
        "normal": ours("windows", "normal"),
        "strict": ours("windows", "normal", "strict"),
        "relaxed": ours("windows", "normal", "relaxed"),
    }
    if arguments.thorough:
        planners["thorough"] = ours("windows", "thorough")
    if arguments.no_vllm:
        del planners["vLLM"]
    else:
        import vllm.distributed.eplb.policy.default  # noqa: F401 - so that no run's seconds hold the import
    print("| configuration | planner | planned | held out | CPU s | gap of the sum to its bound |")
    print("|---|---|---|---|---|---|")
    for case in cases():
        if arguments.only not in case.name:
            continue
        ranks, experts = case.ep_size, case.planned.shape[2]
        slots = experts + case.redundant
        initial = np.tile(initial_map(experts, case.redundant), (case.planned.shape[1], 1))
        print(
            f"| {case.name} | vLLM's initial layout | {figure(initial, case.planned, ranks):.4f} | "
            f"{figure(initial, case.scored, ranks):.4f} | | |"
        )
        total = case.planned.sum(0, keepdims=True)
        bound = balancedness_bound(total, slots, ranks)
        for name, bound_of in (("bound", balancedness_bound), ("bound of the stock map", stock_bound)):
            both = (f"{bound_of(counts, slots, ranks):.4f}" for counts in (case.planned, case.scored))
            print(f"| | {name} | {' | '.join(both)} | | |")
        for name, plan in planners.items():
            if name in ("strict", "relaxed") and not case.num_groups:
                continue
            if name in ("zigzag", "mean-variance", "stock") and case.num_groups:
                continue
            placed, seconds = timed(plan, case)
            print(
                f"| | {name} | {figure(placed, case.planned, ranks):.4f} | {figure(placed, case.scored, ranks):.4f} | "
                f"{seconds:.3f} | {100 * (1 - figure(placed, total, ranks) / bound):.2f} % |",
                flush=True,
            )


if __name__ == "__main__":
    main()
