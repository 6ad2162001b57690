"""What choosing copies by load is worth: recorded tokens replayed as engine steps, plans by rules by sizes.

    python benchmarks/dispatch.py [--only gpt-oss] [--steps 8]

Plans are made from the first half of every recording's sequences (`windows`; `even` and `balanced` are the rules that
they are planned for), steps are drawn from the second half: tokens of random places in random sequences, as in decode.
Real recordings lie beside the checkout in ../shared/data; nothing runs without them. Times are in reads of one expert's
weights: a slot that serves any token costs PRICE tokens. `bound` is the linear program of every step and layer, which
no choice of copies is better than; `fewest` is METRO's idea, the fewest active experts on the busiest rank. Both are of
the plan for `balanced`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_bipartite_matching

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


def fastest(counts: npt.NDArray[np.int64], row: npt.NDArray[np.int32], ranks: int, price: int) -> float:
    """What no choice of copies is faster than, by linear program: least time of the slowest rank.

    A slot that serves x of an expert's n tokens is taken to cost x / n of the price, which is too little unless it
    serves all or none. Without a price this is the least that the busiest rank can have to do.
    """
    slots, room = len(row), len(row) // ranks
    on_rank = np.zeros((ranks, slots + 1))
    on_rank[np.arange(slots) // room, np.arange(slots)] = 1 + price / np.maximum(counts[row], 1)
    on_rank[:, -1] = -1
    of_expert = np.zeros((len(counts), slots + 1))
    of_expert[row, np.arange(slots)] = 1
    return float(linprog(np.eye(slots + 1)[-1], on_rank, np.zeros(ranks), of_expert, counts).fun)


def fewest_active(
    counts: npt.NDArray[np.int64], row: npt.NDArray[np.int32], ranks: int, price: int
) -> npt.NDArray[np.int64]:
    """Time of each rank, [G], where every expert is served by one copy, and no rank by more of them than must be.

    The idea of METRO (arXiv 2512.09277), as an exact matching of experts with places on ranks: the number of places is
    raised until all find one. Which of the best matchings it is, is chance.
    """
    active = np.flatnonzero(counts)
    holds = np.zeros((len(counts), ranks), bool)
    holds[row, np.arange(len(row)) // (len(row) // ranks)] = True
    places = -(-len(active) // ranks)
    while True:
        table = csr_array(np.repeat(holds[active], places, 1))
        matched = maximum_bipartite_matching(table, perm_type="column")
        if (matched >= 0).all():
            return np.bincount(matched // places, counts[active] + price, ranks).astype(np.int64)
        places += 1


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
            print(f"\n{name}, EP{ranks}, R = {redundant}")
            print("tokens | step time: R = 0, hash, one batch, own, fewest, bound | ", end="")
            print("balancedness: plan for even: hash, one batch, own; for balanced: one batch, own, fewest, bound")
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
                        rows = balanced[layer]
                        for key, value in (
                            ("fewest", fewest_active(counts, rows, ranks, PRICE).max()),
                            ("fewest_0", fewest_active(counts, rows, ranks, 0).max()),
                            ("bound", fastest(counts, rows, ranks, PRICE)),
                            ("bound_0", fastest(counts, rows, ranks, 0)),
                        ):
                            totals[key] = totals.get(key, 0.0) + float(value)
                reads = {k: totals[k] / arguments.steps / len(layers) / PRICE for k in totals if not k.endswith("_0")}
                share = {k: totals["mean"] / totals[k] for k in totals if k.endswith("_0")}
                times = "  ".join(f"{reads[key]:5.2f}" for key in ("none", "hash", "one", "own", "fewest", "bound"))
                keys = ("hash_0", "even_one_0", "even_own_0", "one_0", "own_0", "fewest_0", "bound_0")
                print(f"{size:6d} | {times} | {'  '.join(f'{share[key]:.3f}' for key in keys)}", flush=True)


if __name__ == "__main__":
    main()
