"""What a user should hear about loads and plans, as sentences."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from eplb_cli.loads import ExpertLoads, refuse_constant_routing
from eplb_cli.metrics import balancedness, rank_loads
from eplb_cli.placement import Placement
from eplb_cli.planner.nodes import NodeOption
from eplb_cli.planner.placing import cross_validate
from eplb_cli.planner.request import PlanRequest, Topology

__all__ = ["on_initial_layout", "on_loads", "on_mean", "on_nodes"]

FEW_ASSIGNMENTS = 100
"""Assignments per expert and layer below which a plan follows noise: their relative error is 1 / sqrt(100)."""


def on_loads(loads: ExpertLoads) -> list[str]:
    """Warnings of layers without load or with one expert's alone, and of loads too few to plan from.

    Raises:
        LoadsError: every layer sends everything to one expert (`refuse_constant_routing`).
    """
    warnings = refuse_constant_routing(loads)
    total = loads.counts.sum(0)
    empty = loads.layer_ids[~total.any(1)]
    if empty.size:
        warnings.append(
            f"no load in layer{'s' * (empty.size > 1)} {', '.join(map(str, empty.tolist()))}: "
            "spare copies go round robin there"
        )
    held = total.sum(1)[total.any(1)]
    if held.size and held.min() < FEW_ASSIGNMENTS * loads.num_experts:
        tail = "" if loads.num_windows >= 2 else "; held-out balancedness is not known"
        warnings.append(
            f"fewer than {FEW_ASSIGNMENTS} tokens per expert ({held.min() / loads.num_experts:.1f} in the layer with "
            f"the fewest){tail}"
        )
    elif loads.num_windows < 2:
        warnings.append("the loads hold one window; held-out balancedness is not known")
    return warnings


def on_initial_layout(loads: ExpertLoads, topology: Topology) -> list[str]:
    """The stock map with R > 0 doubles the first experts, whatever their load: worse than none unless relabelled."""
    if not topology.num_redundant_experts or topology.num_experts % topology.ep_size:
        return []
    doubled, plain = (
        balancedness(
            rank_loads(
                Placement.initial(
                    topology.num_experts, redundant, topology.ep_size, loads.layer_ids
                ).physical_to_logical,
                loads.counts,
                topology.ep_size,
            )
        )
        for redundant in (topology.num_redundant_experts, 0)
    )
    if doubled >= plain:
        return []
    return [
        f"Do not start vLLM with R = {topology.num_redundant_experts} without a plan: its spare slots repeat the first "
        f"experts, whatever their load; balancedness {doubled:.3f}, below the {plain:.3f} of R = 0."
    ]


def on_nodes(options: tuple[NodeOption, ...]) -> list[str]:
    """A warning where no strict placement can reach what a flat one does."""
    by_policy = {option.policy: option for option in options}
    strict, flat = by_policy.get("strict"), by_policy.get("flat")
    if strict is None or flat is None or strict.bound is None or strict.bound > flat.balancedness:
        return []
    return [
        f"whole groups on nodes cap balancedness at {strict.bound:.3f} on these loads (flat reaches "
        f"{flat.balancedness:.3f}); vLLM's own balancer does that unasked whenever groups divide by nodes"
    ]


def on_mean(
    loads: ExpertLoads, topology: Topology, request: PlanRequest, unseen: npt.NDArray[np.float64] | None
) -> str:
    """What balancing the sum is worth on unseen windows, and what planning by windows would be."""
    remark = "mean balances the summed load; on traffic it has not seen that is no better than the reference's plan."
    by_windows = None
    if unseen is not None:
        tried = replace(request, strategy="windows", effort="fast", previous=None, max_moves=None)
        by_windows = cross_validate(loads.counts, topology, tried)
    if unseen is None or by_windows is None:
        return f"{remark} Record windows: they are worth 1 to 12 points (docs/planner.md)."
    return (
        f"{remark} --strategy windows reaches {balancedness(by_windows):.3f} held out with a fast search, "
        f"mean {balancedness(unseen):.3f}."
    )
