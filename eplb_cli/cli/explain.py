"""One layer's plan in words: who got copies, in which order they were packed, and what the search changed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import UsageError
from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import balancedness, rank_loads
from eplb_cli.placement import Placement
from eplb_cli.planner.counts import window_aware_counts
from eplb_cli.planner.moves import moved_slots
from eplb_cli.planner.packing import pack
from eplb_cli.planner.windows import Evidence

__all__ = ["explain_layer"]

SEARCHED = ("windows", "mean")


def explain_layer(loads: ExpertLoads, placement: Placement, layer_id: int) -> list[str]:
    """The steps that lead to one layer's row, as lines of text.

    For plans of the planner's own search: the copies and the packing that it starts from, step by step, and what the
    search made of it. For others the packing is told from the row itself, by falling share.

    Raises:
        UsageError: the loads have no such layer.
    """
    if layer_id not in loads.layer_ids:
        raise UsageError(
            f"layer {layer_id} is not among the loads' layers",
            rule=f"they are {', '.join(map(str, loads.layer_ids.tolist()))}",
        )
    row = placement.for_layers([layer_id]).physical_to_logical
    counts, ranks = loads.for_layers([layer_id]).counts, placement.ep_size
    load = counts.sum((0, 1))
    start: npt.NDArray[np.integer] = row
    strategy = placement.provenance.strategy
    rule = placement.provenance.dispatch
    if strategy in SEARCHED and rule is None and load.any() and ranks > 1:
        windows = load[None, None] if strategy == "mean" else counts[counts.any((1, 2))]
        evidence = Evidence.of(windows, ranks)
        start = pack(evidence.totals, window_aware_counts(evidence.windows, placement.num_slots, ranks), ranks)
    lines = [
        f"Layer {layer_id}: {load.sum()} assignments in {loads.num_windows} windows over {placement.num_experts} "
        f"experts; the mean rank load is {load.sum() / ranks:.1f}.",
        "",
        *_copies(load, start[0], placement.num_redundant_experts),
        "",
        *_packing(load, start[0], ranks),
        "",
    ]
    if start is not row:
        before, after = (balancedness(rank_loads(placed, counts, ranks)) for placed in (start, row))
        moved = int(moved_slots(start, row, ranks).sum())
        lines += [f"   The search moves {moved} copies: balancedness {before:.4f} -> {after:.4f}.", ""]
    if rule is not None:
        lines += [f"   All figures here are of an even split over copies; the plan is for {rule}.", ""]
    return [*lines, *_ranks(load, counts, row[0], ranks)]


def _copies(load: npt.NDArray[np.int64], row: npt.NDArray[np.integer], spare: int) -> list[str]:
    copies = np.bincount(row, minlength=len(load))
    spread = [int(expert) for expert in np.argsort(-load, kind="stable") if copies[expert] > 1]
    return [
        f"1. Copies ({len(row)} slots, {spare} to spare)",
        *(
            [f"   expert {e}: load {load[e]}, {copies[e]} copies of {load[e] / copies[e]:.1f}" for e in spread]
            or ["   every expert has one"]
        ),
    ]


def _packing(load: npt.NDArray[np.int64], row: npt.NDArray[np.integer], ranks: int) -> list[str]:
    share = load / np.bincount(row, minlength=len(load))
    room = len(row) // ranks
    lines, so_far = ["2. Packing, largest share first"], np.zeros(ranks)
    for slot in np.lexsort((row, -share[row])):
        expert, rank = int(row[slot]), int(slot) // room
        so_far[rank] += share[expert]
        lines.append(f"   expert {expert} ({share[expert]:.1f}) on rank {rank}: rank load {so_far[rank]:.1f}")
    return lines


def _ranks(
    load: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], row: npt.NDArray[np.integer], ranks: int
) -> list[str]:
    by_window = rank_loads(row[None], counts, ranks)[:, 0]
    busiest = np.bincount(by_window[by_window.any(1)].argmax(1), minlength=ranks)
    mean = load.sum() / ranks
    lines = ["3. Ranks (load over all windows; windows in which the rank is the busiest)"]
    for rank, held in enumerate(np.sort(row.reshape(ranks, -1), 1)):
        total = by_window[:, rank].sum()
        lines.append(
            f"   rank {rank}: experts {', '.join(map(str, held.tolist()))}: load {total:.1f}, "
            f"{total / mean if mean else 1:.3f} of the mean, busiest in {busiest[rank]}"
        )
    return [
        *lines,
        "",
        f"Balancedness of this layer: {balancedness(by_window):.4f} "
        "(sum over windows of mean rank load / sum of max rank load).",
    ]
