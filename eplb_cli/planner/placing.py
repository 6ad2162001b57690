"""Which placement a strategy chooses, and what it is worth on windows it has not seen."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import loads_under
from eplb_cli.metrics import initial_map, rank_shares
from eplb_cli.planner.judged import judged_map
from eplb_cli.planner.moves import TradeOff, keep_slots, options_by_copies, options_by_swaps, trade_off
from eplb_cli.planner.nodes import experts_by_node, off_home_price
from eplb_cli.planner.reference import deepseek_map
from eplb_cli.planner.request import PlanRequest, Topology
from eplb_cli.planner.search import Level, refine, search
from eplb_cli.planner.spare import with_spare_copies
from eplb_cli.planner.stock import STOCK_SWEEPS, stock_map
from eplb_cli.planner.windows import Evidence, peaks, spread

__all__ = ["cross_validate", "place", "place_after", "served"]

IntArray = npt.NDArray[np.int64]

MOST_SERVED = 32
"""Windows in which placements are compared under a choice by load."""
FOLD_LEVEL: dict[str, Level] = {"fast": "fast", "normal": "settled", "thorough": "normal"}
NODE_PRICE = 1e-3
"""What a slot off its home node costs the relaxed policy, in units of Phi (`polish`): a thousandth of a squared mean
rank load, about what moving one expert gains when rank loads spread by 3 %."""


def place(counts: IntArray, topology: Topology, request: PlanRequest, level: Level | None = None) -> IntArray:
    """The placement [L, P] that the request's strategy (not "auto") chooses for loads [W, L, E].

    Layers without load get the initial layout, in which spare copies go round robin. `level` overrides the effort.
    """
    level = level or request.effort
    total = counts.sum(0)
    slots, ranks, groups = topology.num_slots, topology.ep_size, topology.num_groups or 1
    if request.strategy == "deepseek":
        groups, nodes = (groups, topology.num_nodes) if topology.groups_split_over_nodes else (1, 1)
        return deepseek_map(total, slots, ranks, groups, nodes).astype(np.int64)
    rows, loaded = _unloaded(total, topology)
    if not loaded.any() or ranks == 1:
        return rows
    evidence = _evidence(counts[:, loaded], topology, request)
    if request.strategy == "stock" and (topology.num_redundant_experts or groups > 1):
        rows[loaded] = stock_map(total[loaded], evidence.moments, slots, ranks, STOCK_SWEEPS[level], groups)
    else:
        found = _search(evidence, topology, request, level)
        nodes = 1 if request.node_policy == "flat" else topology.num_nodes
        # A choice by load goes by the order of slots, not of ranks.
        renumber = topology.num_redundant_experts and request.dispatch != "balanced"
        rows[loaded] = _coldest_first(evidence.totals, found, ranks, nodes) if renumber else found
        # Without copies there is nothing to choose.
        if (request.dispatch == "sglang" or request.dispatch == "vllm-ascend") and topology.num_redundant_experts:
            reference = rows.copy()
            reference[loaded] = place(counts, topology, replace(request, strategy="deepseek"))[loaded]
            seen = counts.sum(0, keepdims=True) if request.strategy == "mean" else counts
            rows = judged_map(
                request.dispatch,
                seen,
                [rows, reference],
                topology,
                level,
                request.seed,
                within_nodes=request.node_policy != "flat",
            )
    return rows


def place_after(
    previous: IntArray, counts: IntArray, topology: Topology, request: PlanRequest
) -> tuple[IntArray, TradeOff | None]:
    """As `place`, but few moves from a previous placement [L, P]; and the curve of balance by moves.

    Layers without load stay as they are.
    """
    total = counts.sum(0)
    loaded = total.any(1)
    rows = previous.copy()
    if not loaded.any() or topology.ep_size == 1:
        return rows, None
    evidence = _evidence(counts[:, loaded], topology, request)
    fresh = _search(evidence, topology, request, request.effort)
    before, windows, means = previous[loaded], evidence.windows, evidence.window_means
    by_load = request.dispatch == "balanced"
    options = (options_by_copies if by_load else options_by_swaps)(
        evidence, before, fresh, topology.ep_size, request.effort, request.seed
    )
    if by_load:
        judged = spread(len(windows), MOST_SERVED)
        windows, means = windows[judged], means[judged]
        cost = [loads_under("balanced", option, windows, topology.ep_size).max(-1).sum(0) for option in options]
    else:
        cost = [peaks(windows, option, topology.ep_size) for option in options]
    found = trade_off(before, options, np.stack(cost), float(means.sum()), topology.ep_size, request.max_moves)
    rows[loaded] = found.placed if by_load else keep_slots(before, found.placed, topology.ep_size)
    return rows, found


def cross_validate(
    counts: IntArray, topology: Topology, request: PlanRequest, previous: IntArray | None = None
) -> npt.NDArray[np.float64] | None:
    """Rank loads [W, L, G] of every window under a plan made from the other folds; None below two windows or folds.

    Folds are contiguous blocks of windows: neighbours in time resemble each other, so windows drawn at random would all
    but have been seen. A fold is planned with one level of search less than the plan, which can only understate it.
    """
    windows = counts.shape[0]
    folds = min(request.folds, windows)
    if folds < 2:
        return None
    edges = np.arange(folds + 1) * windows // folds
    scored = []
    for first, last in itertools.pairwise(edges):
        others = np.concatenate([counts[:first], counts[last:]])
        if previous is None:
            rows = place(others, topology, request, FOLD_LEVEL[request.effort])
        else:
            rows, _ = place_after(previous, others, topology, replace(request, effort="fast"))
        scored.append(served(rows, counts[first:last], topology, request))
    return np.concatenate(scored)


def served(
    rows: npt.NDArray[np.integer], counts: IntArray, topology: Topology, request: PlanRequest
) -> npt.NDArray[np.float64]:
    """Rank loads [W, L, G] of a placement [L, P] under the request's rule, from loads [W, L, E]."""
    return loads_under(request.dispatch, rows, counts, topology.ep_size, topology.num_nodes, topology.layer_ids)


def _unloaded(total: IntArray, topology: Topology) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    row = initial_map(topology.num_experts, topology.num_redundant_experts).astype(np.int64)
    return np.tile(row, (len(total), 1)), np.asarray(total.any(1))


def _coldest_first(totals: IntArray, placed: IntArray, ranks: int, nodes: int) -> IntArray:
    """The placement with the ranks of each node renumbered from the coldest to the hottest, layer by layer.

    Ranks of a node are alike, so balance stays; but vLLM gives the first rows of every batch to an expert's first copy,
    which now is the one on the coldest of its ranks.
    """
    layers, slots = placed.shape
    loads = (rank_shares(placed, totals.shape[1], ranks) * totals[:, :, None]).sum(1)
    in_node = np.argsort(loads.reshape(layers, nodes, -1), axis=2, kind="stable")
    order = (in_node + np.arange(nodes)[:, None] * (ranks // nodes)).reshape(layers, ranks)
    renumbered: IntArray = placed.reshape(layers, ranks, -1)[np.arange(layers)[:, None], order]
    return renumbered.reshape(layers, slots)


def _evidence(counts: IntArray, topology: Topology, request: PlanRequest) -> Evidence:
    summed = request.strategy == "mean"
    return Evidence.of(counts.sum(0, keepdims=True) if summed else counts[counts.any((1, 2))], topology.ep_size)


def _search(evidence: Evidence, topology: Topology, request: PlanRequest, level: Level) -> IntArray:
    slots, ranks, nodes = topology.num_slots, topology.ep_size, topology.num_nodes
    if request.dispatch == "balanced":
        # The plan without spare copies comes first, on every rank.
        fewest = search(evidence, topology.num_experts + -topology.num_experts % ranks, ranks, level, request.seed)
        start = np.full((len(fewest), ranks, slots // ranks), -1)
        start[:, :, : fewest.shape[1] // ranks] = fewest.reshape(len(fewest), ranks, -1)
        return with_spare_copies(evidence.windows, start.reshape(-1, slots), ranks, level, request.seed)
    if request.node_policy == "flat" or not topology.groups_split_over_nodes or topology.num_groups is None:
        return search(evidence, slots, ranks, level, request.seed)
    home = experts_by_node(evidence.windows, topology.num_groups, nodes)
    layers = len(home)
    by_node = search(evidence.of_nodes(home), slots // nodes, ranks // nodes, level, request.seed, nodes=nodes).reshape(
        layers, nodes, slots // nodes
    )
    strict = np.take_along_axis(home, by_node, 2).reshape(layers, slots)
    if request.node_policy == "strict":
        return strict
    price = off_home_price(home, ranks, NODE_PRICE)
    return refine(evidence, strict, ranks, level, request.seed, price=price)
