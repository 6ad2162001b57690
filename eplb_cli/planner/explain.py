"""One layer's plan in words: who got copies, in which order they were packed, and what the search changed."""

from __future__ import annotations

import numpy as np

from eplb_cli.errors import UsageError
from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import rank_loads
from eplb_cli.placement import Placement

__all__ = ["explain_layer"]


def explain_layer(loads: ExpertLoads, placement: Placement, layer_id: int) -> list[str]:
    """The steps that lead to one layer's row, as lines of text; loads are those summed over windows.

    Copies are listed in falling order of share w / c, the order in which they are packed; the rank's load so far stands
    beside each.

    Raises:
        UsageError: the loads have no such layer.
    """
    at = np.flatnonzero(loads.layer_ids == layer_id)
    if not at.size:
        raise UsageError(
            f"layer {layer_id} is not among the loads' layers",
            rule=f"they are {', '.join(map(str, loads.layer_ids.tolist()))}",
        )
    row = placement.physical_to_logical[np.flatnonzero(placement.layer_ids == layer_id)[0]]
    load = loads.counts[:, at[0]].sum(0)
    copies = np.bincount(row, minlength=placement.num_experts)
    share = load / copies
    ranks, room = placement.ep_size, placement.slots_per_rank
    mean = load.sum() / ranks
    lines = [
        f"Layer {layer_id}: {load.sum()} assignments in {loads.num_windows} windows over {placement.num_experts} "
        f"experts; the mean rank load is {mean:.1f}.",
        "",
        f"1. Copies ({placement.num_slots} slots, {placement.num_redundant_experts} to spare)",
    ]
    spread = [int(expert) for expert in np.lexsort((np.arange(len(load)), -load)) if copies[expert] > 1]
    lines += [f"   expert {e}: load {load[e]}, {copies[e]} copies of {share[e]:.1f}" for e in spread] or [
        "   every expert has one"
    ]
    lines += ["", "2. Packing, largest share first"]
    so_far = np.zeros(ranks)
    for slot in np.lexsort((np.arange(len(row)), -share[row])):
        expert, rank = int(row[slot]), int(slot) // room
        so_far[rank] += share[expert]
        lines.append(
            f"   expert {expert} ({share[expert]:.1f}) on rank {rank}, slot {slot}: rank load {so_far[rank]:.1f}"
        )
    by_window = rank_loads(row[None], loads.counts[:, at], ranks)[:, 0]
    held = [", ".join(map(str, sorted(row[g * room : (g + 1) * room].tolist()))) for g in range(ranks)]
    busiest = np.bincount(by_window.argmax(1), minlength=ranks)
    lines += ["", "3. Ranks (load over all windows, windows in which the rank is the busiest)"]
    lines += [
        f"   rank {g}: experts {held[g]}: load {so_far[g]:.1f}, {so_far[g] / mean if mean else 1:.3f} of the mean, "
        f"busiest in {busiest[g]}"
        for g in range(ranks)
    ]
    peak = by_window.max(1).sum()
    lines += [
        "",
        f"Balancedness of this layer: {(by_window.mean(1).sum() / peak if peak else 1):.4f} "
        "(sum over windows of mean rank load / max rank load).",
    ]
    return lines
