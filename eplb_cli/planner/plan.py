"""Loads and a request in, a placement with its figures out."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.bounds import balancedness_bound, stock_bound
from eplb_cli.dispatch import ENGINE_RULES, EVEN_RULES
from eplb_cli.errors import LoadsError, PlacementError, UsageError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.metrics import (
    balancedness,
    balancedness_per_layer,
    rank_loads,
)
from eplb_cli.placement import Placement, Provenance
from eplb_cli.planner import remarks
from eplb_cli.planner.confidence import (
    LOSS_ALLOWED,
    WINDOWS_NEEDED,
    Confidence,
    bootstrap_interval,
    step_noise_ceiling,
    tokens_needed,
)
from eplb_cli.planner.moves import TradeOff, moved_slots
from eplb_cli.planner.nodes import NodeOption, off_home_share, strict_peaks
from eplb_cli.planner.placing import cross_validate, place, place_after, served
from eplb_cli.planner.redundancy import CROSSOVER_TOKENS, KNEE, SweepPoint, candidates, compulsory, knee
from eplb_cli.planner.request import NODE_POLICIES, PlanRequest, Strategy, Topology, topology_of
from eplb_cli.planner.scoring import DIGITS

__all__ = ["Figures", "PlanResult", "WorstLayer", "make_plan"]

IntArray = npt.NDArray[np.int64]

OBJECTIVES = {
    "windows": "sum over windows of the busiest rank's load",
    "mean": "busiest rank's summed load",
    "deepseek": "busiest rank's summed load, by the reference's greedy",
    "stock": "sum over windows of the busiest rank's load, among relabellings of the stock map",
}


@dataclass(frozen=True)
class Figures:
    """Balancedness of vLLM's initial layout, of the plan, of plans on windows they did not see, and its upper bound.

    `before` is of an even split, which vLLM's own choice comes to, or of the other engine's rule that is planned for;
    the next three are of the rule planned for. `even` is of the plan under an even split, where that is another rule.
    """

    before: float
    after: float
    held_out: float | None
    bound: float
    even: float | None = None


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
        confidence: what the held-out figure rests on.
        warnings, notes: for the user's eyes; warnings also stand in the JSON output.
        sweep: the table that "auto" chose R from; empty otherwise.
        nodes: flat, relaxed and strict side by side, with groups on several nodes; empty otherwise.
        curve: balance by moves, with a previous plan; None otherwise.
    """

    placement: Placement
    strategy: str
    reason: str
    balancedness: Figures
    worst_layer: WorstLayer
    moves: int | None
    extra_gib_per_rank: float | None
    confidence: Confidence
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    sweep: tuple[SweepPoint, ...] = ()
    nodes: tuple[NodeOption, ...] = ()
    curve: TradeOff | None = None

    def as_dict(self) -> dict[str, Any]:
        """The object that `eplb plan --format json` prints, without the seconds it took."""
        figures, placement = self.balancedness, self.placement
        document: dict[str, Any] = {
            "strategy": self.strategy,
            "dispatch": placement.provenance.dispatch or "even",
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
                **({} if figures.even is None else {"even": figures.even}),
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
            "confidence": self.confidence.as_dict(),
            "warnings": list(self.warnings),
        }
        if self.sweep:
            document["redundancy_sweep"] = [point.as_dict() for point in self.sweep]
        if self.nodes:
            document["node_policies"] = [
                {
                    "policy": option.policy,
                    "balancedness": option.balancedness,
                    "bound": option.bound,
                    "off_home_share": option.off_home_share,
                }
                for option in self.nodes
            ]
        if self.curve is not None:
            document["trade_off"] = [
                {"moves": moves, "balancedness": round(value, DIGITS)}
                for moves, value in zip(self.curve.moves, self.curve.balancedness, strict=True)
            ]
        return document


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
        LoadsError: the loads hold no window or no layer, or every layer sends everything to one expert.
        PlacementError: the previous plan is of another model, or a model layer set contradicts the loads.
    """
    if not loads.num_windows or not loads.num_layers:
        raise LoadsError(
            f"{loads.num_windows} windows of {loads.num_layers} layers", rule="a plan needs at least one of each"
        )
    strategy, reason = _choose_strategy(loads, request)
    request = replace(request, strategy=strategy)
    warnings = remarks.on_loads(loads)
    notes: list[str] = []
    sweep: tuple[SweepPoint, ...] = ()
    if request.num_redundant_experts == "auto":
        sweep, chosen, remark = _sweep_redundancy(loads, request)
        request = replace(request, num_redundant_experts=chosen)
        notes.append(remark)
    topology = topology_of(loads, request)
    extra_gib = _extra_gib(topology, request)
    notes.extend(remarks.on_initial_layout(loads, topology))
    if topology.ep_size == 1:
        notes.append("One rank: there is nothing to balance, the plan is the identity.")
    if strategy == "deepseek":
        notes.append(
            "deepseek: hierarchical, whole expert groups on nodes"
            if topology.groups_split_over_nodes
            else "deepseek: global, without regard to nodes"
        )

    previous = None if request.previous is None else _previous_rows(loads, topology, request.previous)
    curve = None
    if previous is not None and strategy in ("windows", "mean"):
        rows, curve = place_after(previous, loads.counts, topology, request)
    else:
        rows = place(loads.counts, topology, request)
    unseen = cross_validate(loads.counts, topology, request, None if curve is None else previous)
    if strategy == "mean" and topology.ep_size > 1:
        notes.append(remarks.on_mean(loads, topology, request, unseen))

    initial = Placement.initial(
        topology.num_experts, topology.num_redundant_experts, topology.ep_size, loads.layer_ids
    ).physical_to_logical
    if request.dispatch in ENGINE_RULES:
        before = served(initial, loads.counts, topology, request)
    else:
        before = rank_loads(initial, loads.counts, topology.ep_size)
    after = served(rows, loads.counts, topology, request)
    per_layer_before, per_layer_after = balancedness_per_layer(before), balancedness_per_layer(after)
    worst = int(per_layer_after.argmin())
    bound, strict_bound = _bounds(loads, topology, request)
    options = _node_options(loads, topology, request, rows, bound, strict_bound)
    warnings.extend(remarks.on_nodes(options))
    figures = Figures(
        round(balancedness(before), DIGITS),
        round(balancedness(after), DIGITS),
        None if unseen is None else round(balancedness(unseen), DIGITS),
        _bound_of(request, bound, strict_bound),
        None
        if request.dispatch == "even"
        else round(balancedness(rank_loads(rows, loads.counts, topology.ep_size)), DIGITS),
    )
    layer_ids, named = _all_layers(loads, request.model, request.previous)
    warnings.extend(named)
    placement = Placement(
        rows.astype(np.int32),
        loads.layer_ids,
        topology.num_experts,
        topology.ep_size,
        topology.num_nodes,
        Provenance(
            architecture=loads.model if request.model is None else request.model.architecture,
            top_k=loads.top_k,
            strategy=strategy,
            objective=OBJECTIVES[strategy] + (", copies chosen by load" if request.dispatch == "balanced" else ""),
            dispatch=None if request.dispatch == "even" else request.dispatch,
            seed=request.seed,
            profile_sha256=profile_sha256,
            balancedness={
                "before": figures.before,
                "after": figures.after,
                "held_out": figures.held_out,
                "bound": figures.bound,
                **({} if figures.even is None else {"even": figures.even}),
            },
        ),
    ).for_layers(
        layer_ids,
        missing="initial" if request.previous is None else request.previous.for_layers(layer_ids, missing="initial"),
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
        None if previous is None else int(moved_slots(previous, rows, topology.ep_size).sum()),
        extra_gib,
        _confidence(loads, topology, request, unseen),
        tuple(warnings),
        tuple(notes),
        sweep,
        options,
        curve,
    )


def _choose_strategy(loads: ExpertLoads, request: PlanRequest) -> tuple[Strategy, str]:
    if request.strategy != "auto":
        return request.strategy, "as asked"
    windows = int(loads.counts.any((1, 2)).sum())
    if windows >= 2:
        return "windows", f"the loads hold {windows} windows"
    return "mean", "the loads hold one window, so experts that peak together cannot be told from those that take turns"


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
            f"{topology.num_redundant_experts} redundant experts add {extra:.3g} GiB per rank",
            rule=f"--max-extra-gib is {request.max_extra_gib:g}",
            hint=(
                f"The largest R within it is {smallest + steps * topology.ep_size}."
                if steps >= 0
                else f"Even the smallest valid R, {smallest}, exceeds it."
            ),
        )
    return round(extra, DIGITS)


def _all_layers(
    loads: ExpertLoads, model: ModelShape | None, previous: Placement | None
) -> tuple[list[int], list[str]]:
    """The plan's layers: of the loads, the model and the previous plan; one warning each names those without loads."""
    planned = set(loads.layer_ids.tolist())
    kept: set[int] = set() if previous is None else set(previous.layer_ids.tolist())
    moe_layers = None if model is None else model.moe_layer_ids
    foreign = [] if moe_layers is None else sorted((planned | kept) - set(moe_layers))
    if foreign and moe_layers is not None:
        source = "loads" if foreign[0] in planned else "rows of the previous plan"
        raise PlacementError(
            f"the {source} are of layers {', '.join(map(str, foreign))}, which are not MoE layers of the model",
            rule=f"its MoE layers are {', '.join(map(str, moe_layers))}",
        )
    as_before = sorted(kept - planned)
    as_initial = sorted(set(moe_layers or ()) - planned - kept)
    warnings = [
        f"the loads lack {whose} layer{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}: {outcome}"
        for absent, whose, outcome in (
            (as_initial, "the model's", "vLLM's initial layout is kept there"),
            (
                as_before,
                "the previous plan's",
                "they stay as they were" if len(as_before) > 1 else "it stays as it was",
            ),
        )
        if absent
    ]
    return sorted(planned | kept | set(moe_layers or ())), warnings


def _previous_rows(loads: ExpertLoads, topology: Topology, previous: Placement) -> IntArray:
    """The previous plan's rows of the loads' layers, [L, P]."""
    mismatch = [
        f"{name} {theirs} in the previous plan, {ours} now"
        for name, theirs, ours in (
            ("experts", previous.num_experts, topology.num_experts),
            ("ranks", previous.ep_size, topology.ep_size),
            ("slots", previous.num_slots, topology.num_slots),
        )
        if theirs != ours
    ]
    absent = sorted(set(loads.layer_ids.tolist()) - set(previous.layer_ids.tolist()))
    if absent:
        mismatch.append(f"it lacks layers {', '.join(map(str, absent))}")
    if mismatch:
        raise PlacementError(
            f"the previous plan does not fit: {mismatch[0]}",
            rule="moves are counted between plans of one model and topology",
        )
    return previous.for_layers(loads.layer_ids).physical_to_logical.astype(np.int64)


def _bounds(loads: ExpertLoads, topology: Topology, request: PlanRequest) -> tuple[float, float | None]:
    """Upper bound of any plan of this size and strategy; and of those that keep groups on nodes, where it is asked for.

    The second is None without groups on several nodes, and with too many ways to split them.
    """
    of_kind = stock_bound if request.strategy == "stock" else balancedness_bound
    bound = of_kind(loads.counts, topology.num_slots, topology.ep_size, even_split=request.dispatch in EVEN_RULES)
    if not topology.groups_split_over_nodes or topology.num_groups is None or request.strategy == "stock":
        return bound, None
    peak = strict_peaks(loads.counts, topology.num_slots, topology.ep_size, topology.num_groups, topology.num_nodes)
    return bound, float(loads.counts.sum()) / topology.ep_size / peak if peak else None


def _bound_of(request: PlanRequest, bound: float, strict: float | None) -> float:
    """The one of the request's own kind of plan; rounded up, so that it stays one."""
    if strict is not None and (request.node_policy == "strict" or request.strategy == "deepseek"):
        bound = min(bound, strict)
    scale = 10.0**DIGITS
    return min(1.0, math.ceil(bound * scale - 1e-3) / scale)


def _node_options(
    loads: ExpertLoads, topology: Topology, request: PlanRequest, rows: IntArray, flat: float, strict: float | None
) -> tuple[NodeOption, ...]:
    """The three policies side by side: the chosen one as planned, the others by a fast search."""
    if (
        not topology.groups_split_over_nodes
        or topology.num_groups is None
        or request.strategy not in ("windows", "mean")
        or request.dispatch == "balanced"
    ):
        return ()
    options = []
    for policy in NODE_POLICIES:
        placed = rows
        if policy != request.node_policy:
            placed = place(loads.counts, topology, replace(request, node_policy=policy, effort="fast"))
        bound = strict if policy == "strict" else flat
        options.append(
            NodeOption(
                policy,
                round(balancedness(served(placed, loads.counts, topology, request)), DIGITS),
                None if bound is None else round(bound, DIGITS),
                round(
                    off_home_share(
                        placed, loads.counts.sum(0), topology.ep_size, topology.num_groups, topology.num_nodes
                    ),
                    DIGITS,
                ),
            )
        )
    return tuple(options)


def _confidence(
    loads: ExpertLoads, topology: Topology, request: PlanRequest, unseen: npt.NDArray[np.float64] | None
) -> Confidence:
    interval = None
    if unseen is not None:
        interval = bootstrap_interval(unseen.mean(-1).sum(1), unseen.max(-1, initial=0.0).sum(1), request.seed)
    top_k, steps = loads.top_k or 1, request.step_tokens
    tokens = int(loads.tokens.sum())
    return Confidence(
        None if interval is None else (round(interval[0], DIGITS), round(interval[1], DIGITS)),
        int(loads.counts.any((1, 2)).sum()),
        WINDOWS_NEEDED,
        tokens or None,
        tokens_needed(LOSS_ALLOWED, top_k, topology.ep_size),
        steps,
        None if steps is None else round(step_noise_ceiling(steps, top_k, topology.ep_size), DIGITS),
    )


def _sweep_redundancy(loads: ExpertLoads, request: PlanRequest) -> tuple[tuple[SweepPoint, ...], int, str]:
    """The sweep's table, the R it leads to, and why."""
    options = candidates(loads.num_experts, request.ep_size)
    points: list[SweepPoint] = []
    for redundant in options:
        # Every R is judged by a fast search, the chosen one is planned with the effort asked for.
        tried = replace(request, num_redundant_experts=redundant, effort="fast")
        topology = topology_of(loads, tried)
        extra = _extra_gib(topology, replace(tried, max_extra_gib=None))
        if points and request.max_extra_gib is not None and extra is not None and extra > request.max_extra_gib:
            break
        rows = place(loads.counts, topology, tried)
        unseen = cross_validate(loads.counts, topology, tried)
        points.append(
            SweepPoint(
                redundant,
                round(balancedness(served(rows, loads.counts, topology, request)), DIGITS),
                None if unseen is None else round(balancedness(unseen), DIGITS),
                extra,
            )
        )
    least = compulsory(loads.counts.sum(0), [point.num_redundant_experts for point in points], request.ep_size)
    chosen = points[knee(points, least)].num_redundant_experts
    why = f"R = {chosen}: from there on no further slot a rank adds {KNEE:g} of balancedness"
    if chosen == least and least > options[0]:
        why = f"R = {chosen}: with less, one expert alone outweighs a mean rank"
    if loads.phase == "decode" and request.step_tokens is not None:
        seen = request.step_tokens * (loads.top_k or 1) / (loads.num_experts + chosen)
        if seen < CROSSOVER_TOKENS and chosen > options[0]:
            chosen = options[0]
            why = (
                f"R = {chosen}: at {request.step_tokens} tokens a decode step an expert's copy sees {seen:.0f}, fewer "
                f"than the {CROSSOVER_TOKENS} below which a copy only adds weights to read"
            )
    return tuple(points), chosen, why
