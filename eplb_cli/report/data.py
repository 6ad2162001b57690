"""The numbers of a report: loads and plans in, one document out. No HTML, no files."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.advice import GIB, Advice, Situation, advise, describe_situation
from eplb_cli.bounds import balancedness_bound
from eplb_cli.checkpoint import KvCache
from eplb_cli.dispatch import ENGINE_RULES, EVEN_RULES, Rule
from eplb_cli.errors import PlacementError, UsageError
from eplb_cli.loads import ExpertLoads, refuse_constant_routing
from eplb_cli.metrics import smallest_redundancy
from eplb_cli.placement import Placement
from eplb_cli.planner import STRATEGIES, PlanRequest
from eplb_cli.planner.confidence import bootstrap_interval
from eplb_cli.planner.placing import cross_validate, place
from eplb_cli.planner.request import Strategy, topology_of
from eplb_cli.planner.scoring import DIGITS, loads_of_layers, planned_rule
from eplb_cli.replay import Replay

__all__ = ["Layout", "ModelFacts", "NamedPlan", "RedundancyStep", "Report", "make_report"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Sums = tuple[FloatArray, FloatArray]
"""Mean and max rank load of each window, summed over layers, float64 [W] each."""

FOLDS = 5
"""Contiguous blocks of windows of the cross-validation, as in `eplb plan`."""
MOST_POINTS = 400
"""Windows drawn in the chart over windows; consecutive ones are summed down to this many."""
HOTTEST = 5
"""Experts listed for each layer."""
REDUNDANCY_STEPS = (0, 1, 2, 4, 8)
"""Points of the R curve: the smallest valid R plus so many times G. The first steps pay most."""
CHUNK_WINDOWS = 256
"""Windows whose rank loads are held at once, so that memory does not grow with the recording."""


@dataclass(frozen=True)
class NamedPlan:
    """A plan and the name the user gave it by."""

    name: str
    placement: Placement


@dataclass(frozen=True)
class ModelFacts:
    """What the report says about memory needs to know.

    Args:
        name: MODEL as the user wrote it.
        expert_bytes: bytes of one expert by layer id.
        kv_cache: what a token of context costs a rank, when the model tells.
    """

    name: str
    expert_bytes: Mapping[int, int]
    kv_cache: KvCache | None


@dataclass(frozen=True, eq=False)
class Layout:
    """A placement measured on the report's loads.

    Args:
        name: how it is called in the report.
        kind: "initial" for what vLLM starts with, "plan" for a PLAN.
        strategy: how a plan was made, when it says so.
        ep_size, num_redundant_experts, slots_per_rank: G, R, S.
        initial: index of the initial layout of the same G and R in `Report.layouts`.
        in_sample: True when the plan was made from this very file, False when from another, None when it does not say.
            Another file may hold the same windows (a join of several profiles does), so False proves nothing unseen.
        balancedness: over windows and layers.
        recorded_held_out: the held-out figure that the plan file records, where it is of the report's rule.
        bound: upper bound of any placement of this size on these loads.
        per_layer: balancedness of each layer, float64 [L].
        per_window: balancedness of each drawn window, float64 [points].
        rank_loads: tokens of each rank, summed over windows, float64 [L, G].
        physical_to_logical: the map, int32 [L, P].
        extra_gib_per_rank, kv_cache_tokens: what R costs each rank, when the model is known.
    """

    name: str
    kind: str
    strategy: str | None
    ep_size: int
    num_redundant_experts: int
    slots_per_rank: int
    initial: int
    in_sample: bool | None
    balancedness: float
    recorded_held_out: float | None
    bound: float
    per_layer: FloatArray
    per_window: FloatArray
    rank_loads: FloatArray
    physical_to_logical: npt.NDArray[np.int32]
    extra_gib_per_rank: float | None
    kv_cache_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON; token counts rounded to integers."""
        return {
            "name": self.name,
            "kind": self.kind,
            "strategy": self.strategy,
            "ep_size": self.ep_size,
            "num_redundant_experts": self.num_redundant_experts,
            "slots_per_rank": self.slots_per_rank,
            "initial": self.initial,
            "in_sample": self.in_sample,
            "balancedness": round(self.balancedness, DIGITS),
            "recorded_held_out": self.recorded_held_out,
            "bound": round(self.bound, DIGITS),
            "per_layer": self.per_layer.round(DIGITS).tolist(),
            "per_window": self.per_window.round(DIGITS).tolist(),
            "rank_loads": np.rint(self.rank_loads).astype(np.int64).tolist(),
            "physical_to_logical": self.physical_to_logical.tolist(),
            "extra_gib_per_rank": self.extra_gib_per_rank,
            "kv_cache_tokens": self.kv_cache_tokens,
        }


@dataclass(frozen=True)
class RedundancyStep:
    """One point of the R curve: figures of a plan made with R redundant experts, and what R costs each rank."""

    num_redundant_experts: int
    after: float
    held_out: float | None
    extra_gib_per_rank: float | None
    kv_cache_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class Report:
    """All that a report shows.

    Args:
        loads, profile, profile_sha256: what was recorded, and the file it came from.
        dispatch: the rule that chooses among copies; vLLM's initial layouts are served as vLLM does, unless it is of
            another engine.
        layer_ids: int32 [L], absolute layers that the rank views cover: those of the loads and of every plan.
        layouts: initial layouts first, then the plans; empty when no topology is known.
        window_ids: int64 [points], first window of each drawn point.
        held_out_interval: 90 % bootstrap interval of the held-out figure below; None with too few windows.
        held_out_per_window: float64 [points], the first plan's strategy on windows it did not see; None when the plan
            was not made from these loads, or there is one window.
        redundancy: the R curve, for the first plan's topology.
        redundancy_strategy: the strategy of the curve.
        advice: on the first plan.
        warnings: of the loads and of the comparison.
        commands: (what for, command) to go on with.
        model: MODEL as the user wrote it.
        replay: recorded tokens as engine steps, when the user gave what `eplb replay` wrote.
    """

    loads: ExpertLoads
    profile: str
    profile_sha256: str
    dispatch: Rule
    layer_ids: npt.NDArray[np.int32]
    layouts: tuple[Layout, ...]
    window_ids: IntArray
    held_out_interval: tuple[float, float] | None
    held_out_per_window: FloatArray | None
    redundancy: tuple[RedundancyStep, ...]
    redundancy_strategy: str | None
    advice: Advice | None
    warnings: tuple[str, ...]
    commands: tuple[tuple[str, str], ...]
    model: str | None
    replay: Replay | None = None

    @property
    def plan(self) -> Layout | None:
        """The first plan, which the advice is about."""
        return next((layout for layout in self.layouts if layout.kind == "plan"), None)

    def as_dict(self) -> dict[str, Any]:
        """The same as the page, for JSON."""
        loads = self.loads
        total = loads.counts.sum(0)
        return {
            "format": "eplb-report",
            "version": 1,
            "profile": {
                "file": self.profile,
                "sha256": self.profile_sha256,
                "model": loads.model,
                "phase": loads.phase,
                "windows": loads.num_windows,
                "tokens": int(loads.tokens.sum()),
                "assignments": int(total.sum()),
                "top_k": loads.top_k,
                "num_experts": loads.num_experts,
                "layer_ids": loads.layer_ids.tolist(),
                "sources": [vars(source) for source in loads.sources],
                "dropped": dict(loads.dropped),
            },
            "dispatch": self.dispatch,
            "counts": total.tolist(),
            "hottest": _hottest(total),
            "layer_ids": self.layer_ids.tolist(),
            "window_ids": self.window_ids.tolist(),
            "layouts": [layout.as_dict() for layout in self.layouts],
            "held_out_interval": self.held_out_interval,
            "held_out_per_window": (
                None if self.held_out_per_window is None else self.held_out_per_window.round(DIGITS).tolist()
            ),
            "redundancy": [step.as_dict() for step in self.redundancy],
            "redundancy_strategy": self.redundancy_strategy,
            "advice": None if self.advice is None else self.advice.as_dict(),
            "warnings": list(self.warnings),
            "commands": [{"purpose": purpose, "command": command} for purpose, command in self.commands],
            "replay": None if self.replay is None else self.replay.as_dict(),
        }


def make_report(
    loads: ExpertLoads,
    plans: Sequence[NamedPlan],
    *,
    profile: str,
    profile_sha256: str,
    dispatch: Rule | None = None,
    ep_size: int | None = None,
    model: ModelFacts | None = None,
    step_tokens: int | None = None,
    replayed: Replay | None = None,
    on_step: Callable[[str, int, int], None] = lambda _what, _done, _of: None,
) -> Report:
    """Measure loads and plans.

    Args:
        loads: what was recorded.
        plans: to compare; the first one is what advice is given about.
        profile, profile_sha256: the loads' file and its digest, to tell plans made from it from others.
        dispatch: the rule that chooses among copies; None for the one that the first plan was made for, else `even`.
        ep_size: EP ranks to look at when there is no plan.
        model: sizes, for memory figures.
        step_tokens: tokens of an engine step over all ranks, for advice.
        replayed: shown as it is.
        on_step: called with what is being done, how many steps are done, and how many there are.

    Raises:
        UsageError: `ep_size` contradicts the first plan, or no placement of this size exists.
        PlacementError: a plan is of other experts, or shares no layer with the loads.
        LoadsError: every layer sends everything to one expert (`refuse_constant_routing`).
    """
    if plans and ep_size is not None and plans[0].placement.ep_size != ep_size:
        raise UsageError(
            f"{plans[0].name} is for {plans[0].placement.ep_size} ranks, not {ep_size}",
            rule="the ranks come from the plan",
            hint="Leave out --ep-size.",
        )
    shared, warnings = _shared_layers(loads, plans)
    covered = loads.for_layers(shared)
    warnings.extend(refuse_constant_routing(loads))
    rule = dispatch or (planned_rule(plans[0].placement) if plans else "even")
    point = _points(loads.num_windows)
    layouts = _layouts(covered, plans, ep_size, rule, profile_sha256, model, point)
    plan = next((layout for layout in layouts if layout.kind == "plan"), None)
    requests = _requests(covered, plans, ep_size, rule)
    redundancy = []
    sums: Sums | None = None
    for index, request in enumerate(requests):
        on_step(f"R = {request.num_redundant_experts}", index, len(requests))
        step, held_out = _redundancy_step(covered, request, model)
        redundancy.append(step)
        if plan is not None and request.num_redundant_experts == plan.num_redundant_experts:
            sums = held_out
    if plan is not None and plan.in_sample is False:
        mean, peak, _ = _measure(plans[0].placement, covered, rule)
        sums = mean.sum(1), peak.sum(1)
    interval = None if sums is None else bootstrap_interval(*sums)
    advice = None
    if plan is not None:
        before = layouts[plan.initial].balancedness
        situation = _situation(covered, plans[0].placement, before, plan, sums, model)
        advice = advise(replace(situation, interval=interval, step_tokens=step_tokens))
    return Report(
        loads=loads,
        profile=profile,
        profile_sha256=profile_sha256,
        dispatch=rule,
        layer_ids=covered.layer_ids,
        layouts=layouts,
        window_ids=loads.window_ids[np.unique(point, return_index=True)[1]] if loads.num_windows else loads.window_ids,
        held_out_interval=interval,
        held_out_per_window=None if sums is None else _ratio_of_points(*sums, point),
        redundancy=tuple(redundancy),
        redundancy_strategy=requests[0].strategy if requests else None,
        advice=advice,
        warnings=(*loads.warnings, *warnings),
        commands=_commands(loads, plans, profile, ep_size, None if model is None else model.name),
        model=None if model is None else model.name,
        replay=replayed,
    )


def _shared_layers(loads: ExpertLoads, plans: Sequence[NamedPlan]) -> tuple[npt.NDArray[np.int32], list[str]]:
    """Layers that the loads and every plan have, and what had to be left out."""
    shared, warnings = loads.layer_ids, []
    for plan in plans:
        placement = plan.placement
        if placement.num_experts != loads.num_experts:
            raise PlacementError(
                f"the plan places {placement.num_experts} experts, the loads are of {loads.num_experts}",
                file=plan.name,
                rule="a plan and loads must be of one model",
            )
        absent = np.setdiff1d(loads.layer_ids, placement.layer_ids)
        if absent.size:
            warnings.append(f"{plan.name} lacks layers {', '.join(map(str, absent.tolist()))}: left out of rank views")
        unknown = np.setdiff1d(placement.layer_ids, loads.layer_ids)
        if unknown.size:
            warnings.append(f"no loads for layers {', '.join(map(str, unknown.tolist()))} of {plan.name}")
        shared = np.intersect1d(shared, placement.layer_ids)
        if not shared.size:
            raise PlacementError(
                "the plan shares no layer with the loads and the plans before it",
                file=plan.name,
                rule="layers match by absolute layer id",
            )
    return shared, warnings


def _layouts(
    loads: ExpertLoads,
    plans: Sequence[NamedPlan],
    ep_size: int | None,
    rule: Rule,
    profile_sha256: str,
    model: ModelFacts | None,
    point: IntArray,
) -> tuple[Layout, ...]:
    """vLLM's initial layout for each topology in play, with and without copies, then the plans."""
    sizes = [(plan.placement.ep_size, plan.placement.num_redundant_experts) for plan in plans]
    if not sizes and ep_size is not None:
        sizes = [(ep_size, smallest_redundancy(loads.num_experts, ep_size))]
    # The layout without copies is what many run today, and may be better than the one with them.
    without_copies = [(ranks, smallest_redundancy(loads.num_experts, ranks)) for ranks, _ in sizes[:1]]
    initial = list(dict.fromkeys([*sizes[:1], *without_copies, *sizes]))
    several_ranks = len({ranks for ranks, _ in initial}) > 1
    layouts: list[Layout] = []
    for ranks, redundant in initial:
        placement = replace(
            Placement.initial(loads.num_experts, redundant, ranks, loads.layer_ids),
            num_nodes=next((plan.placement.num_nodes for plan in plans if plan.placement.ep_size == ranks), 1),
        )
        name = f"vLLM's initial layout, R = {redundant}" + (f", {ranks} ranks" if several_ranks else "")
        index = len(layouts)
        bound = balancedness_bound(loads.counts, placement.num_slots, ranks, even_split=rule in EVEN_RULES)
        own = rule if rule in ENGINE_RULES else "even"
        layouts.append(_layout(name, "initial", placement, loads, own, index, bound, None, model, point))
    for plan in plans:
        placement = plan.placement
        digest = placement.provenance.profile_sha256
        in_sample = None if digest is None else digest == profile_sha256
        index = initial.index((placement.ep_size, placement.num_redundant_experts))
        bound = layouts[index].bound  # of the same size
        layouts.append(_layout(plan.name, "plan", placement, loads, rule, index, bound, in_sample, model, point))
    return tuple(layouts)


def _layout(
    name: str,
    kind: str,
    placement: Placement,
    loads: ExpertLoads,
    rule: Rule,
    initial: int,
    bound: float,
    in_sample: bool | None,
    model: ModelFacts | None,
    point: IntArray,
) -> Layout:
    mean, peak, per_rank = _measure(placement, loads, rule)
    recorded = placement.provenance.balancedness.get("held_out") if planned_rule(placement) == rule else None
    gib, tokens = _cost(placement.num_redundant_experts, placement.ep_size, model)
    return Layout(
        name=name,
        kind=kind,
        strategy=placement.provenance.strategy,
        ep_size=placement.ep_size,
        num_redundant_experts=placement.num_redundant_experts,
        slots_per_rank=placement.slots_per_rank,
        initial=initial,
        in_sample=in_sample,
        balancedness=float(_ratio(mean.sum(), peak.sum())),
        recorded_held_out=recorded,
        bound=bound,
        per_layer=_ratio(mean.sum(0), peak.sum(0)),
        per_window=_ratio_of_points(mean.sum(1), peak.sum(1), point),
        rank_loads=per_rank,
        physical_to_logical=placement.for_layers(loads.layer_ids).physical_to_logical,
        extra_gib_per_rank=gib,
        kv_cache_tokens=tokens,
    )


def _measure(placement: Placement, loads: ExpertLoads, rule: Rule) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Mean and max rank load, float64 [W, L] each, and rank loads summed over windows, float64 [L, G]."""
    windows, layers = loads.num_windows, loads.num_layers
    mean, peak = np.zeros((windows, layers)), np.zeros((windows, layers))
    total = np.zeros((layers, placement.ep_size))
    for first in range(0, windows, CHUNK_WINDOWS):
        part = loads_of_layers(placement, loads.select_windows(slice(first, first + CHUNK_WINDOWS)), rule)
        mean[first : first + CHUNK_WINDOWS] = part.mean(-1)
        peak[first : first + CHUNK_WINDOWS] = part.max(-1)
        total += part.sum(0)
    return mean, peak, total


def _ratio(mean: npt.ArrayLike, peak: npt.ArrayLike) -> FloatArray:
    """mean / peak, and 1 (nothing to balance) where there is no load."""
    above, below = np.asarray(mean, np.float64), np.asarray(peak, np.float64)
    return np.divide(above, below, out=np.ones_like(above), where=below > 0)


def _points(windows: int) -> IntArray:
    """The chart's point of each window, int64 [W]: windows in order, evenly merged down to MOST_POINTS."""
    return np.arange(windows) * min(windows, MOST_POINTS) // max(windows, 1)


def _ratio_of_points(mean: FloatArray, peak: FloatArray, point: IntArray) -> FloatArray:
    return _ratio(np.bincount(point, mean), np.bincount(point, peak))


def _cost(redundant: int, ranks: int, model: ModelFacts | None) -> tuple[float | None, int | None]:
    """GiB per rank that R adds, and the tokens of KV cache that would fit there."""
    if model is None:
        return None, None
    nbytes = redundant * sum(model.expert_bytes.values()) / ranks
    return round(nbytes / GIB, DIGITS), None if model.kv_cache is None else model.kv_cache.tokens(nbytes)


def _requests(loads: ExpertLoads, plans: Sequence[NamedPlan], ep_size: int | None, rule: Rule) -> list[PlanRequest]:
    """The points of the R curve, planned quickly; none for one rank, or when no topology is known."""
    nodes, sizes = 1, set()
    strategy: Strategy = "windows" if loads.num_windows > 1 else "mean"
    if plans:
        placement = plans[0].placement
        ep_size, nodes, sizes = placement.ep_size, placement.num_nodes, {placement.num_redundant_experts}
        strategy = next((known for known in STRATEGIES[1:] if known == placement.provenance.strategy), strategy)
    if ep_size is None or ep_size == 1 or not loads.num_windows:
        return []
    smallest = smallest_redundancy(loads.num_experts, ep_size)
    sizes |= {smallest + ep_size * step for step in REDUNDANCY_STEPS}
    return [
        PlanRequest(ep_size, redundant, num_nodes=nodes, strategy=strategy, dispatch=rule, effort="fast", folds=FOLDS)
        for redundant in sorted(sizes)
        if redundant <= loads.num_experts * (ep_size - 1)
    ]


def _redundancy_step(
    loads: ExpertLoads, request: PlanRequest, model: ModelFacts | None
) -> tuple[RedundancyStep, Sums | None]:
    """One point of the R curve, and the held-out sums behind it."""
    topology = topology_of(loads, request)
    rows = place(loads.counts, topology, request).astype(np.int32)
    placement = Placement(rows, loads.layer_ids, loads.num_experts, request.ep_size, request.num_nodes)
    mean, peak, _ = _measure(placement, loads, request.dispatch)
    ranks = cross_validate(loads.counts, topology, request)
    sums = None if ranks is None else (ranks.mean(-1).sum(1), ranks.max(-1, initial=0.0).sum(1))
    gib, tokens = _cost(topology.num_redundant_experts, request.ep_size, model)
    step = RedundancyStep(
        topology.num_redundant_experts,
        round(float(_ratio(mean.sum(), peak.sum())), DIGITS),
        None if sums is None else round(float(_ratio(sums[0].sum(), sums[1].sum())), DIGITS),
        gib,
        tokens,
    )
    return step, sums


def _situation(
    loads: ExpertLoads,
    placement: Placement,
    before: float,
    plan: Layout,
    held_out: Sums | None,
    model: ModelFacts | None,
) -> Situation:
    unseen = None if held_out is None else float(_ratio(held_out[0].sum(), held_out[1].sum()))
    if plan.recorded_held_out is not None:
        # On another file the score counts, unless it looks better than the planner itself promised: see `in_sample`.
        unseen = min(plan.recorded_held_out, unseen or 1.0) if plan.in_sample is False else plan.recorded_held_out
    return describe_situation(
        loads,
        placement,
        before=before,
        after=plan.balancedness,
        held_out=unseen,
        bound=plan.bound,
        expert_bytes=None if model is None else model.expert_bytes,
        kv_cache=None if model is None else model.kv_cache,
    )


def _hottest(total: IntArray) -> list[list[dict[str, Any]]]:
    """The experts with most load in each layer; ties by lowest id."""
    order = np.argsort(-total, axis=1, kind="stable")[:, :HOTTEST]
    return [
        [
            {"expert": int(e), "tokens": int(row[e]), "share": round(float(row[e] / max(row.sum(), 1)), DIGITS)}
            for e in top
        ]
        for row, top in zip(total, order, strict=True)
    ]


def _commands(
    loads: ExpertLoads, plans: Sequence[NamedPlan], profile: str, ep_size: int | None, model: str | None
) -> tuple[tuple[str, str], ...]:
    """What to type next, with the files of this report; MODEL where the user named none."""
    named = "MODEL" if model is None else model
    if not plans:
        ranks = "G" if ep_size is None else str(ep_size)
        words = ["eplb", "plan", profile, "--ep-size", ranks, *([] if model is None else ["--model", model])]
        return (("Compute a placement", shlex.join([*words, "-o", "plan.json"])),)
    plan = plans[0]
    layout = "stock" if plan.placement.is_stock_form() else "physical"
    return (
        (
            "Score the plan on traffic that it has not seen",
            shlex.join(["eplb", "score", plan.name, "new-loads.safetensors"]),
        ),
        (
            "Write the checkpoint",
            shlex.join(["eplb", "convert", named, plan.name, "--layout", layout, "-o", "converted"]),
        ),
        ("Prove it, tensor by tensor", shlex.join(["eplb", "verify", named, "converted", "--level", "full"])),
        ("See the command that serves it", "eplb serve converted --dry-run"),
    )
