"""Loads and a request in, a placement with its figures out."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import LoadsError, PlacementError, UsageError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.metrics import (
    balancedness,
    balancedness_bound,
    balancedness_per_layer,
    initial_map,
    rank_loads,
)
from eplb_cli.placement import Placement, Provenance
from eplb_cli.planner.moves import moved_slots
from eplb_cli.planner.reference import deepseek_map
from eplb_cli.planner.request import PlanRequest, Strategy, Topology, topology_of
from eplb_cli.planner.scoring import DIGITS
from eplb_cli.planner.search import search
from eplb_cli.planner.stock import stock_map
from eplb_cli.planner.windows import Evidence

__all__ = ["Figures", "PlanResult", "WorstLayer", "make_plan", "place"]

IntArray = npt.NDArray[np.int64]

STOCK_SWEEPS = {"fast": 3, "normal": 12, "thorough": 48}
FEW_ASSIGNMENTS = 100
"""Assignments per expert and layer below which a plan follows noise: their relative error is 1 / sqrt(100)."""
OBJECTIVES = {
    "windows": "sum over windows of the busiest rank's load",
    "mean": "busiest rank's summed load",
    "deepseek": "busiest rank's summed load, by the reference's greedy",
    "stock": "sum over windows of the busiest rank's load, among relabellings of the stock map",
}


@dataclass(frozen=True)
class Figures:
    """Balancedness of vLLM's initial layout, of the plan, of plans on windows they did not see, and its upper bound."""

    before: float
    after: float
    held_out: float | None
    bound: float


@dataclass(frozen=True)
class WorstLayer:
    """The layer that the plan leaves least balanced."""

    layer_id: int
    before: float
    after: float


@dataclass(frozen=True)
class PlanResult:
    """A placement and what to know of it.

    Args:
        placement: the plan, provenance included.
        strategy, reason: what was chosen, and why.
        balancedness: the figures, of the layers that the loads cover.
        worst_layer: see `WorstLayer`.
        moves: slots whose expert was not on that rank in the previous plan; None without one.
        extra_gib_per_rank: weights that R adds to each rank; None when the model's sizes are not known.
        warnings, notes: for the user's eyes; warnings also stand in the JSON output.
    """

    placement: Placement
    strategy: str
    reason: str
    balancedness: Figures
    worst_layer: WorstLayer
    moves: int | None
    extra_gib_per_rank: float | None
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The object that `eplb plan --format json` prints, without the seconds it took."""
        figures, placement = self.balancedness, self.placement
        return {
            "strategy": self.strategy,
            "ep_size": placement.ep_size,
            "num_nodes": placement.num_nodes,
            "num_experts": placement.num_experts,
            "num_redundant_experts": placement.num_redundant_experts,
            "slots_per_rank": placement.slots_per_rank,
            "seed": placement.provenance.seed,
            "balancedness": {
                "before": figures.before,
                "after": figures.after,
                "held_out": figures.held_out,
                "bound": figures.bound,
            },
            "max_over_mean": {
                "before": _reciprocal(figures.before),
                "after": _reciprocal(figures.after),
                "held_out": None if figures.held_out is None else _reciprocal(figures.held_out),
            },
            "worst_layer": {
                "layer_id": self.worst_layer.layer_id,
                "before": self.worst_layer.before,
                "after": self.worst_layer.after,
            },
            "moves": self.moves,
            "extra_gib_per_rank": self.extra_gib_per_rank,
            "warnings": list(self.warnings),
        }


def _reciprocal(value: float) -> float:
    return round(1.0 / value, DIGITS)


def make_plan(loads: ExpertLoads, request: PlanRequest, profile_sha256: str | None = None) -> PlanResult:
    """Choose a placement for the loads and measure it.

    Args:
        loads: what to balance.
        request: topology, strategy and effort.
        profile_sha256: digest of the loads' file, recorded in the plan.

    Raises:
        UsageError: the request contradicts itself or the loads.
        LoadsError: the loads hold no window or no layer.
        PlacementError: the previous plan is of another model, or a model layer set contradicts the loads.
    """
    if not loads.num_windows or not loads.num_layers:
        raise LoadsError(
            f"{loads.num_windows} windows of {loads.num_layers} layers", rule="a plan needs at least one of each"
        )
    topology = topology_of(loads, request)
    strategy, reason = _choose_strategy(loads, request)
    warnings, notes = _remarks_on_loads(loads)
    if topology.ep_size == 1:
        notes.append("One rank: there is nothing to balance, the plan is the identity.")
    extra_gib = _extra_gib(topology, request)

    rows = place(loads.counts, topology, strategy, request)
    if strategy == "deepseek":
        notes.append(
            "deepseek: hierarchical, whole expert groups on nodes"
            if topology.groups_split_over_nodes
            else "deepseek: global, without regard to nodes"
        )

    initial = np.tile(initial_map(topology.num_experts, topology.num_redundant_experts), (loads.num_layers, 1))
    before, after = (rank_loads(candidate, loads.counts, topology.ep_size) for candidate in (initial, rows))
    per_layer_before, per_layer_after = balancedness_per_layer(before), balancedness_per_layer(after)
    worst = int(per_layer_after.argmin())
    figures = Figures(
        round(balancedness(before), DIGITS),
        round(balancedness(after), DIGITS),
        _held_out(loads.counts, topology, strategy, request),
        round(balancedness_bound(loads.counts, topology.num_slots, topology.ep_size), DIGITS),
    )
    layer_ids, rows, warning = _add_model_layers(loads.layer_ids, rows, initial[0], request.model)
    warnings.extend(warning)
    placement = Placement(
        rows.astype(np.int32),
        layer_ids,
        topology.num_experts,
        topology.ep_size,
        topology.num_nodes,
        Provenance(
            architecture=loads.model if request.model is None else request.model.architecture,
            top_k=loads.top_k,
            strategy=strategy,
            objective=OBJECTIVES[strategy],
            seed=request.seed,
            profile_sha256=profile_sha256,
            balancedness={
                "before": figures.before,
                "after": figures.after,
                "held_out": figures.held_out,
                "bound": figures.bound,
            },
        ),
    )
    twins = placement.twins()
    if twins:
        warnings.append(
            f"{len(twins)} times an expert is twice on one rank (the reference does that): "
            f"first in layer {twins[0][0]}, rank {twins[0][1]}, expert {twins[0][2]}"
        )
    return PlanResult(
        placement,
        strategy,
        reason,
        figures,
        WorstLayer(
            int(loads.layer_ids[worst]),
            round(float(per_layer_before[worst]), DIGITS),
            round(float(per_layer_after[worst]), DIGITS),
        ),
        _moves(placement, request.previous),
        extra_gib,
        tuple(warnings),
        tuple(notes),
    )


def place(counts: IntArray, topology: Topology, strategy: Strategy, request: PlanRequest) -> IntArray:
    """The placement [L, P] that a strategy chooses for loads [W, L, E]; layers without load get the initial layout."""
    total = counts.sum(0)
    slots, ranks, groups = topology.num_slots, topology.ep_size, topology.num_groups or 1
    if strategy == "deepseek":
        groups, nodes = (groups, topology.num_nodes) if topology.groups_split_over_nodes else (1, 1)
        return deepseek_map(total, slots, ranks, groups, nodes).astype(np.int64)
    rows = np.tile(initial_map(topology.num_experts, topology.num_redundant_experts).astype(np.int64), (len(total), 1))
    loaded = total.any(1)
    if not loaded.any() or ranks == 1:
        return rows
    seen = counts[:, loaded]
    evidence = Evidence.of(total[None, loaded] if strategy == "mean" else seen[seen.any((1, 2))], ranks)
    if strategy == "stock" and (topology.num_redundant_experts or groups > 1):
        rows[loaded] = stock_map(total[loaded], evidence.moments, slots, ranks, STOCK_SWEEPS[request.effort], groups)
    else:
        rows[loaded] = search(evidence, slots, ranks, request.effort, request.seed)
    return rows


def _choose_strategy(loads: ExpertLoads, request: PlanRequest) -> tuple[Strategy, str]:
    if request.strategy != "auto":
        return request.strategy, "as asked"
    windows = int(loads.counts.any((1, 2)).sum())
    if windows >= 2:
        return "windows", f"the loads hold {windows} windows"
    return "mean", "the loads hold one window, so experts that peak together cannot be told from those that take turns"


def _held_out(counts: IntArray, topology: Topology, strategy: Strategy, request: PlanRequest) -> float | None:
    """Balancedness over all windows, each scored with a plan made from the other folds; folds are contiguous blocks."""
    windows = counts.shape[0]
    folds = min(request.folds, windows)
    if folds < 2:
        return None
    edges = np.arange(folds + 1) * windows // folds
    scored = []
    for first, last in itertools.pairwise(edges):
        others = np.concatenate([counts[:first], counts[last:]])
        rows = place(others, topology, strategy, request)
        scored.append(rank_loads(rows, counts[first:last], topology.ep_size))
    return round(balancedness(np.concatenate(scored)), DIGITS)


def _extra_gib(topology: Topology, request: PlanRequest) -> float | None:
    if request.expert_bytes is None:
        if request.max_extra_gib is not None:
            raise UsageError("--max-extra-gib needs the experts' sizes", hint="Pass --model MODEL as well.")
        return None
    per_expert = sum(request.expert_bytes.values()) / 2**30
    extra = topology.num_redundant_experts * per_expert / topology.ep_size
    if request.max_extra_gib is not None and extra > request.max_extra_gib:
        smallest = -topology.num_experts % topology.ep_size
        steps = int((request.max_extra_gib * topology.ep_size / per_expert - smallest) // topology.ep_size)
        raise UsageError(
            f"{topology.num_redundant_experts} redundant experts add {extra:.2f} GiB per rank",
            rule=f"--max-extra-gib is {request.max_extra_gib:g}",
            hint=(
                f"The largest R within it is {smallest + steps * topology.ep_size}."
                if steps >= 0
                else f"Even the smallest valid R, {smallest}, exceeds it."
            ),
        )
    return round(extra, DIGITS)


def _remarks_on_loads(loads: ExpertLoads) -> tuple[list[str], list[str]]:
    warnings: list[str] = []
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
    return warnings, []


def _add_model_layers(
    layer_ids: npt.NDArray[np.int32],
    rows: IntArray,
    initial: npt.NDArray[np.int32],
    model: ModelShape | None,
) -> tuple[npt.NDArray[np.int32], IntArray, list[str]]:
    """Rows for all of the model's MoE layers: those without loads get the initial layout, and one warning."""
    if model is None or model.moe_layer_ids is None:
        return layer_ids, rows, []
    foreign = sorted(set(layer_ids.tolist()) - set(model.moe_layer_ids))
    if foreign:
        raise PlacementError(
            f"the loads are of layers {', '.join(map(str, foreign))}, which are not MoE layers of the model",
            rule=f"its MoE layers are {', '.join(map(str, model.moe_layer_ids))}",
        )
    absent = sorted(set(model.moe_layer_ids) - set(layer_ids.tolist()))
    if not absent:
        return layer_ids, rows, []
    all_ids = np.array([*layer_ids.tolist(), *absent], np.int32)
    all_rows = np.concatenate([rows, np.tile(initial.astype(np.int64), (len(absent), 1))])
    order = np.argsort(all_ids, kind="stable")
    warning = (
        f"the loads lack the model's layer{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}: "
        "vLLM's initial layout is kept there"
    )
    return all_ids[order], all_rows[order], [warning]


def _moves(placement: Placement, previous: Placement | None) -> int | None:
    if previous is None:
        return None
    mismatch = [
        f"{name} {theirs} in the previous plan, {ours} now"
        for name, theirs, ours in (
            ("experts", previous.num_experts, placement.num_experts),
            ("ranks", previous.ep_size, placement.ep_size),
            ("slots", previous.num_slots, placement.num_slots),
        )
        if theirs != ours
    ]
    if mismatch or not np.array_equal(previous.layer_ids, placement.layer_ids):
        raise PlacementError(
            f"the previous plan does not fit: {mismatch[0] if mismatch else 'it has other layers'}",
            rule="moves are counted between plans of one model and topology",
        )
    return int(moved_slots(previous.physical_to_logical, placement.physical_to_logical, placement.ep_size).sum())
