"""Traces through routes: every step is served under every plan, rule and run-time policy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import ENGINE_RULES, Rule, chosen_slots, rank_times, slot_tokens
from eplb_cli.errors import PlacementError, TraceError, UsageError
from eplb_cli.loads import PHASES, ModelShape
from eplb_cli.metrics import smallest_redundancy
from eplb_cli.placement import Placement
from eplb_cli.replay.policies import LivePlacement, Rebalance, policies_of
from eplb_cli.replay.result import PhaseSteps, Replay, Row
from eplb_cli.replay.steps import Step, steps_of
from eplb_cli.replay.tally import DIGITS, Tally
from eplb_cli.traces import ReadOptions, open_recordings, recorded_tokens

__all__ = ["replay_traces"]

IntArray = npt.NDArray[np.int64]

NONE, INITIAL = "none", "initial"
"""Names of the rows for vLLM without EPLB, and for the layout that its EPLB starts with."""


@dataclass
class _Route:
    """A plan under a rule: its map [L, P], which a policy may change, and what each phase's steps were like.

    Args:
        plan, rule: which.
        placement: the map [L, P] to start with, and its sizes.
        live: the map that a run-time policy changes; None where it stays.
        rebalance: that policy.
        chosen: a static rule's slots, [L, E, G].
        tallies: by phase.
    """

    plan: str
    rule: Rule
    placement: Placement
    live: LivePlacement | None = None
    rebalance: Rebalance | None = None
    chosen: IntArray | None = None
    tallies: dict[int, Tally] = field(default_factory=dict)

    def take(self, step: Step, number: int, loads: IntArray | None, price: int) -> None:
        """Serve a step, with the loads [L, E] for the policy where there is one."""
        experts, ranks = self.placement.num_experts, self.placement.ep_size
        rows = self.placement.physical_to_logical if self.live is None else self.live.rows
        served = slot_tokens(step.ids, step.source, rows, experts, ranks, self.rule, price, self.chosen)
        active = (served > 0).reshape(len(served), ranks, -1).sum(2)
        self.tallies.setdefault(step.phase, Tally()).add(number, rank_times(served, ranks, 0), active, price)
        if self.live is not None and loads is not None:
            self.live.after_step(loads)

    def row(self, phase: int, price: int | None) -> Row:
        """The figures of a phase."""
        tally = self.tallies[phase]
        return Row(
            PHASES[phase],
            self.plan,
            self.rule,
            None if self.rebalance is None else str(self.rebalance),
            round(tally.mean / tally.busiest, DIGITS) if tally.busiest else 1.0,
            round(tally.ratios.quantile(0.5), DIGITS),
            round(tally.ratios.quantile(0.95), DIGITS),
            round(tally.ratios.worst, DIGITS),
            round(tally.active / tally.steps, DIGITS),
            tally.most_active,
            None if price is None else round(tally.time / tally.steps, DIGITS),
            0 if self.live is None else self.live.rebalances,
            0 if self.live is None else self.live.moved,
            tally.stretches.balancedness(),
        )


def replay_traces(
    plans: Sequence[tuple[str, Placement]],
    paths: Sequence[Path],
    *,
    rules: Sequence[Rule],
    step_tokens: int,
    batches: int = 1,
    price: int | None = None,
    rebalances: Sequence[Rebalance] = (),
    num_groups: int = 1,
    phase: int = 0,
    model: ModelShape | None = None,
    trace_format: str = "auto",
    advance: Callable[[int], None] = lambda _: None,
    expect: Callable[[int], None] = lambda _: None,
) -> Replay:
    """Replay traces of single tokens under plans and rules, beside vLLM's own layouts; in memory that the trace's size
    does not change.

    Args:
        plans: names and placements; vLLM's own layouts are those of the first one's ranks and redundancy.
        paths: traces.
        rules: for the plans; vLLM's own layouts are served as vLLM does.
        step_tokens: tokens of a step over all ranks.
        batches: batches that the tokens of a step are in, each of which chooses copies by itself.
        price: what a slot that serves any token costs a step, in tokens; None leaves it out.
        rebalances: run-time policies, each from vLLM's start layout and from every plan. Phases share the placement,
            as in a server of both.
        num_groups: expert groups of the router, which vLLM's policy keeps on nodes where they split over them.
        phase: index into PHASES; others are left out.
        model: which layers the trace holds, where it does not tell; else the first plan's.
        trace_format, advance, expect: as in `open_recordings`.

    Raises:
        UsageError: a run-time policy under another engine's rule.
        PlacementError: plans of different models.
        TraceError: a trace cannot be read, holds no single tokens or fewer than a step, or layers that a plan lacks.
    """
    first = plans[0][1]
    for name, placement in plans:
        if placement.num_experts != first.num_experts:
            raise PlacementError(
                f"places {placement.num_experts} experts", file=name, rule=f"{plans[0][0]} places {first.num_experts}"
            )
    foreign = [rule for rule in rules if rule in ENGINE_RULES]
    if rebalances and foreign:
        raise UsageError(f"--rebalance with --dispatch {foreign[0]}", rule="the policies are those of a server of vLLM")
    shape = model or ModelShape(None, first.num_experts, moe_layer_ids=tuple(first.layer_ids.tolist()))
    options = ReadOptions(model=shape, phase=phase)
    recordings = open_recordings(paths, options, trace_format=trace_format, advance=advance, expect=expect)
    blocks = recorded_tokens(recordings, options)
    start = next(blocks)
    routes = _routes(plans, rules, start.layer_ids)
    whose = None
    if rebalances:
        moving, whose = _rebalanced(plans, rules, rebalances, num_groups, start.layer_ids)
        routes += moving
    layer = np.arange(len(start.layer_ids))[None, :, None] * first.num_experts
    for number, step in enumerate(steps_of(itertools.chain([start], blocks), step_tokens, batches), 1):
        loads = None
        if rebalances:
            flat = (step.ids + layer)[step.ids >= 0]
            loads = np.bincount(flat, minlength=layer.size * first.num_experts).reshape(layer.size, -1)
        for route in routes:
            route.take(step, number, loads, price or 0)
    phases = sorted(routes[0].tallies)
    if not phases:
        raise TraceError(
            "holds fewer tokens than one step", file=", ".join(map(str, paths)), rule=f"a step has {step_tokens}"
        )
    warnings = [warning for _, recording in recordings for warning in (*recording.warnings, *recording.notes)]
    tallies = routes[0].tallies
    return Replay(
        tuple(route.row(phase, price) for phase in phases for route in routes),
        tuple(PhaseSteps(PHASES[i], tallies[i].steps, tuple(tallies[i].stretches.first_steps)) for i in phases),
        step_tokens,
        batches,
        price,
        whose,
        tuple(warnings),
    )


def _routes(
    plans: Sequence[tuple[str, Placement]], rules: Sequence[Rule], layer_ids: npt.NDArray[np.int32]
) -> list[_Route]:
    """vLLM without EPLB, vLLM's start layout where it has copies, then every plan under every rule."""
    first = plans[0][1]
    experts, ranks, redundant = first.num_experts, first.ep_size, first.num_redundant_experts
    least = smallest_redundancy(experts, ranks)
    own = [(NONE, Placement.initial(experts, least, ranks, layer_ids))]
    if redundant > least:
        own.append((INITIAL, Placement.initial(experts, redundant, ranks, layer_ids)))
    routes = [_Route(name, "hash", placement) for name, placement in own]
    for name, placement in plans:
        rows = placement.for_layers(layer_ids)
        routes += [_Route(name, rule, rows, chosen=_chosen(placement, rule, layer_ids)) for rule in rules]
    return routes


def _rebalanced(
    plans: Sequence[tuple[str, Placement]],
    rules: Sequence[Rule],
    rebalances: Sequence[Rebalance],
    num_groups: int,
    layer_ids: npt.NDArray[np.int32],
) -> tuple[list[_Route], str | None]:
    """Every run-time policy from vLLM's start layout and from every plan, and whose algorithm stands for vLLM's."""
    whose, policy_of = policies_of(rebalances, num_groups)
    first = plans[0][1]
    initial = Placement.initial(first.num_experts, first.num_redundant_experts, first.ep_size, layer_ids)
    starts: list[tuple[str, Placement, Rule, bool]] = [
        (INITIAL, replace(initial, num_nodes=first.num_nodes), "hash", False)
    ]
    starts += [(name, placement.for_layers(layer_ids), rule, True) for name, placement in plans for rule in rules]
    routes = []
    for rebalance in rebalances:
        for name, placement, rule, planned in starts:
            policy = policy_of(rebalance, placement, rule, planned)
            live = LivePlacement(placement, rebalance, policy, planned=planned)
            routes.append(_Route(name, rule, placement, live, rebalance))
    return routes, whose


def _chosen(placement: Placement, rule: Rule, layer_ids: npt.NDArray[np.int32]) -> IntArray | None:
    """A static rule's slots in these layers of the plan; None under another rule."""
    if rule != "sglang" and rule != "vllm-ascend":
        return None
    chosen = chosen_slots(
        rule,
        placement.physical_to_logical,
        placement.num_experts,
        placement.ep_size,
        placement.num_nodes,
        placement.layer_ids,
    )
    return chosen[np.searchsorted(placement.layer_ids, layer_ids)]
