"""Recorded routing replayed as engine steps: what each step waits for, under a plan and a rule that chooses copies.

A plan's own figures come from sums over windows and an even split of every expert over its copies. Here the recorded
ids of single tokens are put into steps of a given size, the rule chooses the copies in every step, and the busiest rank
of every step counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import Rule, chosen_slots, rank_times, slot_tokens
from eplb_cli.errors import PlacementError, TraceError
from eplb_cli.loads import PHASES, ModelShape
from eplb_cli.metrics import smallest_redundancy
from eplb_cli.placement import Placement
from eplb_cli.traces import ReadOptions, RecordedTokens, open_recordings, recorded_tokens

__all__ = ["LANE_TOKENS", "Replay", "Row", "Step", "replay_traces", "steps_of"]

IntArray = npt.NDArray[np.int64]

DECODE = PHASES.index("decode")
DIGITS = 9
LANE_TOKENS = 64
"""Tokens of a sequence that follow each other in as many decode steps."""
NONE, INITIAL = "none", "initial"
"""Names of the rows for vLLM without EPLB, and for the layout that its EPLB starts with."""


@dataclass(frozen=True, eq=False)
class Step:
    """The tokens of one engine step: logical ids [n, L, k] with -1 for none, and the batch of each token, [n]."""

    ids: npt.NDArray[np.integer]
    source: IntArray


@dataclass(frozen=True)
class Row:
    """What the steps were like under one plan and rule.

    Args:
        plan, dispatch: which.
        balancedness: sum of the mean rank's tokens over sum of the busiest rank's, over steps and layers.
        ratio_p50, ratio_p95, ratio_worst: of the steps' max / mean, each summed over the step's layers.
        active_mean: slots of a layer that serve any token, averaged over steps and layers.
        active_max: the most such slots of one rank.
        step_time: tokens plus price x active slots of a layer's slowest rank, averaged over steps and layers; None
            without a price.
    """

    plan: str
    dispatch: Rule
    balancedness: float
    ratio_p50: float
    ratio_p95: float
    ratio_worst: float
    active_mean: float
    active_max: int
    step_time: float | None

    def as_dict(self) -> dict[str, Any]:
        """The row in `eplb replay --format json`."""
        return {
            "plan": self.plan,
            "dispatch": self.dispatch,
            "balancedness": self.balancedness,
            "max_over_mean": {"p50": self.ratio_p50, "p95": self.ratio_p95, "worst": self.ratio_worst},
            "active_copies": {"mean": self.active_mean, "max": self.active_max},
            "step_time": self.step_time,
        }


@dataclass(frozen=True)
class Replay:
    """All rows, and the steps that they are of."""

    rows: tuple[Row, ...]
    steps: int
    step_tokens: int
    batches: int
    price: int | None
    warnings: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The object that `eplb replay --format json` prints."""
        return {
            "rows": [row.as_dict() for row in self.rows],
            "steps": self.steps,
            "step_tokens": self.step_tokens,
            "data_parallel_size": self.batches,
            "warnings": list(self.warnings),
        }


@dataclass
class _Route:
    """One plan's map [L, P] and rule, a static rule's slots [L, E, G], and the sums of the steps so far."""

    plan: str
    rule: Rule
    rows: npt.NDArray[np.int32]
    ep_size: int
    chosen: IntArray | None = None
    mean: float = 0.0
    busiest: float = 0.0
    active: float = 0.0
    most_active: int = 0
    time: float = 0.0
    ratios: list[float] = field(default_factory=list)

    def take(self, step: Step, num_experts: int, price: int) -> None:
        """Serve one step."""
        served = slot_tokens(step.ids, step.source, self.rows, num_experts, self.ep_size, self.rule, price, self.chosen)
        loads = rank_times(served, self.ep_size, 0)
        active = (served > 0).reshape(len(served), self.ep_size, -1).sum(2)
        mean, busiest = float(loads.mean(1).sum()), float(loads.max(1).sum())
        self.mean += mean
        self.busiest += busiest
        self.active += float(active.sum(1).mean())
        self.most_active = max(self.most_active, int(active.max()))
        self.time += float((loads + price * active).max(1).mean())
        self.ratios.append(busiest / mean if mean else 1.0)

    def row(self, price: int | None) -> Row:
        """The figures."""
        p50, p95 = np.quantile(self.ratios, [0.5, 0.95])
        steps = len(self.ratios)
        return Row(
            self.plan,
            self.rule,
            round(self.mean / self.busiest, DIGITS) if self.busiest else 1.0,
            round(float(p50), DIGITS),
            round(float(p95), DIGITS),
            round(max(self.ratios), DIGITS),
            round(self.active / steps, DIGITS),
            self.most_active,
            None if price is None else round(self.time / steps, DIGITS),
        )


def replay_traces(
    plans: Sequence[tuple[str, Placement]],
    paths: Sequence[Path],
    *,
    rules: Sequence[Rule],
    step_tokens: int,
    batches: int = 1,
    price: int | None = None,
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
        phase: index into PHASES; others are left out.
        model: which layers the trace holds, where it does not tell; else the first plan's.
        trace_format, advance, expect: as in `open_recordings`.

    Raises:
        PlacementError: plans of different models.
        TraceError: a trace cannot be read, holds no single tokens or fewer than a step, or layers that a plan lacks.
    """
    first = plans[0][1]
    for name, placement in plans:
        if placement.num_experts != first.num_experts:
            raise PlacementError(
                f"places {placement.num_experts} experts", file=name, rule=f"{plans[0][0]} places {first.num_experts}"
            )
    shape = model or ModelShape(None, first.num_experts, moe_layer_ids=tuple(first.layer_ids.tolist()))
    options = ReadOptions(model=shape, phase=phase)
    recordings = open_recordings(paths, options, trace_format=trace_format, advance=advance, expect=expect)
    blocks = recorded_tokens(recordings, options)
    start = next(blocks)
    routes = _routes(plans, rules, start.layer_ids)
    steps = 0
    for step in steps_of(itertools.chain([start], blocks), step_tokens, batches):
        steps += 1
        for route in routes:
            route.take(step, first.num_experts, price or 0)
    if not steps:
        raise TraceError(
            "holds fewer tokens than one step", file=", ".join(map(str, paths)), rule=f"a step has {step_tokens}"
        )
    warnings = [warning for _, recording in recordings for warning in (*recording.warnings, *recording.notes)]
    rows = tuple(route.row(price) for route in routes)
    return Replay(rows, steps, step_tokens, batches, price, tuple(warnings))


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
    routes = [_Route(name, "hash", placement.physical_to_logical, ranks) for name, placement in own]
    for name, placement in plans:
        rows = placement.for_layers(layer_ids).physical_to_logical
        routes += [_Route(name, rule, rows, placement.ep_size, _chosen(placement, rule, layer_ids)) for rule in rules]
    return routes


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


def steps_of(blocks: Iterable[RecordedTokens], step_tokens: int, batches: int) -> Iterator[Step]:
    """Put consecutive tokens into steps of `step_tokens`, each phase by itself.

    A prefill step takes tokens as they follow each other, cut into one stretch for each batch. A decode step takes one
    token of each of `step_tokens` sequences: the trace is dealt out in lanes of LANE_TOKENS, which advance together,
    and lanes go to the batches in turn. What does not fill a step at the end is left out.
    """
    held: dict[int, list[npt.NDArray[np.integer]]] = {}
    amount: dict[int, int] = {}
    for block in blocks:
        phase = block.phase
        held.setdefault(phase, []).append(block.ids)
        amount[phase] = amount.get(phase, 0) + len(block.ids)
        batch = step_tokens * (LANE_TOKENS if phase == DECODE else 1)
        if amount[phase] >= batch:
            tokens = np.concatenate(held[phase])
            whole = len(tokens) // batch * batch
            for start in range(0, whole, batch):
                yield from _steps(tokens[start : start + batch], phase, step_tokens, batches)
            held[phase], amount[phase] = [tokens[whole:]], len(tokens) - whole
    for phase in sorted(held):
        tokens = np.concatenate(held[phase])
        yield from _steps(tokens[: len(tokens) // step_tokens * step_tokens], phase, step_tokens, batches)


def _steps(tokens: npt.NDArray[np.integer], phase: int, step_tokens: int, batches: int) -> Iterator[Step]:
    lanes = np.arange(step_tokens)
    if phase == DECODE:
        by_lane = tokens.reshape(step_tokens, -1, *tokens.shape[1:])
        for place in range(by_lane.shape[1]):
            yield Step(by_lane[:, place], lanes % batches)
    else:
        for start in range(0, len(tokens), step_tokens):
            yield Step(tokens[start : start + step_tokens], lanes * batches // step_tokens)
