"""What choosing copies by load is worth: recorded tokens replayed as engine steps, plans by rules by sizes.

    python benchmarks/dispatch.py [--only gpt-oss] [--steps 8]

Plans are made from the first half of every recording's sequences (`windows`; `even` and `balanced` are the rules that
they are planned for), steps are drawn from the second half: tokens of random places in random sequences, as in decode.
Real recordings lie beside the checkout in
../shared/data; nothing runs without them. `bound` is the linear program of every step and layer: no choice of copies is
better balanced. Times are in reads of one expert's weights: a slot that serves any token costs PRICE tokens.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from eplb_cli import ExpertLoads, Placement
from eplb_cli.dispatch import Rule, rank_times, slot_tokens
from eplb_cli.planner import PlanRequest, make_plan

DATA = Path(__file__).parents[2] / "shared" / "data"
PRICE = 90
"""Tokens that take as long as reading one more expert's weights: FP8 on an H100 (docs/planner.md)."""
SIZES = (32, 128, 512, 2048, 8192)
SETS = {
    "gpt-oss-20b": ("gptoss20b", ("gpqa_main", "mmlu_test", "tulu3_persona_if"), 32, 2000, ((8, 8), (8, 16))),
    "DeepSeek-V2-Lite": (
        "esft_dsv2lite",
        ("intent", "law", "summary", "translation"),
        64,
        1000,
        ((8, 8), (16, 16), (16, 32)),
    ),
}
Ids = npt.NDArray[np.uint8]


def halves(folder: str, names: tuple[str, ...]) -> tuple[Ids, list[Ids]]:
    """The first half of each file's sequences as one run of tokens [n, L, k]; the sequences of the second half."""
    first, second = [], []
    for name in names:
        recorded = np.load(DATA / folder / f"{name}_topk.npz")
        sequences = np.split(recorded["topk_ids"], np.cumsum(recorded["seq_lens"])[:-1])
        half = len(sequences) // 2
        first += sequences[:half]
        second += [sequence for sequence in sequences[half:] if len(sequence)]
    return np.concatenate(first), second


def plan(tokens: Ids, experts: int, window: int, ranks: int, redundant: int, dispatch: Rule) -> Placement:
    """A plan for a rule from windows of consecutive tokens."""
    windows = len(tokens) // window
    layers = tokens.shape[1]
    counts = np.zeros((windows, layers, experts), np.int64)
    for index in range(windows):
        for layer in range(layers):
            picks = tokens[index * window : (index + 1) * window, layer].ravel()
            counts[index, layer] = np.bincount(picks, minlength=experts)
    loads = ExpertLoads(counts, np.full(windows, window), np.arange(layers, dtype=np.int32))
    return make_plan(loads, PlanRequest(ranks, redundant, dispatch=dispatch, folds=0)).placement


def least_busiest(counts: npt.NDArray[np.int64], row: npt.NDArray[np.int32], ranks: int) -> float:
    """The busiest rank's tokens in the best split, by linear program."""
    slots, room = len(row), len(row) // ranks
    on_rank = np.zeros((ranks, slots + 1))
    on_rank[np.arange(slots) // room, np.arange(slots)] = 1
    on_rank[:, -1] = -1
    of_expert = np.zeros((len(counts), slots + 1))
    of_expert[row, np.arange(slots)] = 1
    return float(linprog(np.eye(slots + 1)[-1], on_rank, np.zeros(ranks), of_expert, counts).fun)


def main() -> None:
    """Print a row for every plan and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of a set's name")
    parser.add_argument("--steps", type=int, default=8)
    arguments = parser.parse_args()
    for name, (folder, files, experts, window, shapes) in SETS.items():
        if arguments.only not in name or not (DATA / folder).is_dir():
            continue
        tokens, sequences = halves(folder, files)
        layers = list(range(1, tokens.shape[1], 4))
        for ranks, redundant in shapes:
            kinds: tuple[tuple[int, Rule], ...] = ((0, "even"), (redundant, "even"), (redundant, "balanced"))
            none, even, balanced = (
                plan(tokens, experts, window, ranks, r, rule).physical_to_logical[layers] for r, rule in kinds
            )
            print(f"\n{name}, EP{ranks}: step time with R = 0 and R = {redundant}; balancedness with R = {redundant}")
            print("       |               chosen by load    |        chosen by load, plan for even   for balanced")
            print("tokens |  R=0   hash  one batch  own     | hash   one batch  own    one batch  own    bound")
            for size in SIZES:
                rng = np.random.default_rng(size)
                totals: dict[str, float] = {}
                for _ in range(arguments.steps):
                    drawn = [sequences[i] for i in rng.integers(0, len(sequences), size)]
                    ids = np.stack([sequence[rng.integers(len(sequence))] for sequence in drawn])[:, layers]
                    one, own = np.zeros(size, np.int64), np.arange(size) % ranks
                    totals["mean"] = totals.get("mean", 0.0) + len(layers) * size * ids.shape[2] / ranks
                    served = {
                        "none": (none, one, "hash", PRICE),
                        "hash": (even, own, "hash", PRICE),
                        "one": (balanced, one, "balanced", PRICE),
                        "own": (balanced, own, "balanced", PRICE),
                        "hash_0": (even, own, "hash", 0),
                        "even_one_0": (even, one, "balanced", 0),
                        "even_own_0": (even, own, "balanced", 0),
                        "one_0": (balanced, one, "balanced", 0),
                        "own_0": (balanced, own, "balanced", 0),
                    }
                    for key, (rows, source, rule, price) in served.items():
                        chosen: Rule = "hash" if rule == "hash" else "balanced"
                        slots = slot_tokens(ids, source, rows, experts, ranks, chosen, price)
                        totals[key] = totals.get(key, 0.0) + float(rank_times(slots, ranks, price).max(1).sum())
                    for layer in range(len(layers)):
                        counts = np.bincount(ids[:, layer].ravel(), minlength=experts)
                        best = least_busiest(counts, balanced[layer], ranks)
                        totals["bound"] = totals.get("bound", 0.0) + best
                reads = {k: totals[k] / arguments.steps / len(layers) / PRICE for k in ("none", "hash", "one", "own")}
                share = {k: totals["mean"] / totals[k] for k in totals if k.endswith("_0") or k == "bound"}
                print(
                    f"{size:6d} | {reads['none']:5.2f}  {reads['hash']:5.2f}  {reads['one']:9.2f}  {reads['own']:5.2f}"
                    f"   | {share['hash_0']:.3f}  {share['even_one_0']:9.3f}  {share['even_own_0']:.3f}  "
                    f"{share['one_0']:9.3f}  {share['own_0']:.3f}  {share['bound']:.3f}"
                )


if __name__ == "__main__":
    main()
