"""Is a plan worth it, and what does it cost? Figures in, sentences with numbers out.

No sentence promises throughput. What can be said from loads alone is a bound: a MoE layer ends when its busiest rank
ends, so balancing can take away at most the time in which the others wait. Every figure names what it assumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from eplb_cli.checkpoint import KvCache
from eplb_cli.loads import PHASES, ExpertLoads
from eplb_cli.metrics import balancedness, rank_loads, smallest_redundancy
from eplb_cli.placement import Placement
from eplb_cli.planner import PlanRequest, make_plan
from eplb_cli.planner.confidence import LOSS_ALLOWED, step_noise_ceiling, tokens_needed
from eplb_cli.planner.redundancy import CROSSOVER_TOKENS

__all__ = [
    "Advice",
    "PhaseGap",
    "Point",
    "Situation",
    "advise",
    "compare_phases",
    "describe_situation",
]

GIB = 2**30
ALREADY_BALANCED = 0.97
"""Balancedness of the initial layout above which there is little to win: waiting is 3 % of the MoE time."""
CARRIES_OVER = 0.005
"""Held-out gain below which a plan is not told from noise: block bootstraps of held-out figures span 0.5 to 1 point."""
WINDOWS_WANTED = 16
"""Windows below which experts that peak together cannot be told from experts that take turns (docs/planner.md)."""
OLD_DAYS = 30
"""Age of a profile, in days, from which it is worth scoring the plan on a new recording."""
PHASES_DIFFER = 0.02
"""Balancedness that a plan of both phases may lose against a phase's own plan before two plans are advised."""


@dataclass(frozen=True)
class PhaseGap:
    """Balancedness on one phase's windows: of the plan in question, and of a plan made for that phase alone."""

    phase: str
    of_plan: float
    of_own_plan: float


@dataclass(frozen=True)
class Situation:
    """What advice is given about.

    Args:
        before, after, held_out, bound: balancedness of vLLM's initial layout with the same R, of the plan on the loads
            it was made from, on windows that the planner did not see (None when not known), and its upper bound.
        before_without_copies: balancedness of the initial layout with the smallest valid R, 0 where E divides over G.
        num_experts, num_redundant_experts, ep_size: E, R, G.
        windows, tokens: of the loads; tokens 0 when the recorder did not tell.
        top_k: experts per token, when known.
        step_tokens: tokens of one engine step over all ranks, when known.
        extra_bytes_per_rank: weights that R adds to each rank, when the model is known.
        kv_cache: what a token of context costs a rank, when the model is known.
        interval: 90 % bootstrap interval of the held-out figure, when there are windows for it.
        phases: how the plan does on each phase, when the loads hold both.
        profile_age_days: age of the loads' file, when known.
    """

    before: float
    after: float
    held_out: float | None
    bound: float
    before_without_copies: float
    num_experts: int
    num_redundant_experts: int
    ep_size: int
    windows: int
    tokens: int = 0
    top_k: int | None = None
    step_tokens: int | None = None
    extra_bytes_per_rank: float | None = None
    kv_cache: KvCache | None = None
    interval: tuple[float, float] | None = None
    phases: tuple[PhaseGap, ...] = ()
    profile_age_days: float | None = None


@dataclass(frozen=True)
class Point:
    """One remark: `bound` what can be won, `cost` what it takes, `caution` why the numbers may not hold."""

    kind: Literal["bound", "cost", "caution"]
    text: str


@dataclass(frozen=True)
class Advice:
    """A verdict in one sentence and the remarks behind it; `worth_it` is None when the loads cannot tell."""

    worth_it: bool | None
    verdict: str
    points: tuple[Point, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "worth_it": self.worth_it,
            "verdict": self.verdict,
            "points": [{"kind": point.kind, "text": point.text} for point in self.points],
        }


def describe_situation(
    loads: ExpertLoads,
    placement: Placement,
    *,
    before: float,
    after: float,
    held_out: float | None,
    bound: float,
    expert_bytes: Mapping[int, int] | None = None,
    kv_cache: KvCache | None = None,
) -> Situation:
    """Gather what `advise` needs from loads, a placement, its figures and, when known, the model.

    Args:
        expert_bytes: bytes of one expert by layer id.
        kv_cache: what a token of context costs a rank.
    """
    ranks, experts = placement.ep_size, placement.num_experts
    stock = Placement.initial(experts, smallest_redundancy(experts, ranks), ranks, loads.layer_ids)
    without_copies = balancedness(rank_loads(stock.physical_to_logical, loads.counts, ranks))
    extra = None
    if expert_bytes is not None:
        extra = placement.num_redundant_experts * sum(expert_bytes.values()) / ranks
    return Situation(
        before=before,
        after=after,
        held_out=held_out,
        bound=bound,
        before_without_copies=without_copies,
        num_experts=experts,
        num_redundant_experts=placement.num_redundant_experts,
        ep_size=ranks,
        windows=loads.num_windows,
        tokens=int(loads.tokens.sum()),
        top_k=loads.top_k,
        extra_bytes_per_rank=extra,
        kv_cache=kv_cache,
        phases=compare_phases(loads, placement),
    )


def advise(situation: Situation) -> Advice:
    """Say whether a plan is worth it, what it costs, and why the numbers may not hold."""
    worth_it, verdict = _verdict(situation)
    points = [*_bounds(situation), *_costs(situation), *_cautions(situation)]
    return Advice(worth_it, verdict, tuple(points))


def _verdict(at: Situation) -> tuple[bool | None, str]:
    if at.ep_size == 1:
        return False, "Nothing to balance: one rank holds every expert."
    waiting = f"{_percent(1 - at.before)} of the MoE time"
    if at.before >= ALREADY_BALANCED:
        return False, f"Not worth it: balanced already, ranks wait for the busiest in only {waiting}."
    if at.held_out is None:
        return None, (
            f"Not known: ranks wait for the busiest in {waiting} now and in {_percent(1 - at.after)} with this plan, "
            "but on the loads it was made from; record two windows or more."
        )
    gain = at.held_out - at.before
    if gain < CARRIES_OVER:
        return False, (
            f"Not worth it: on windows it has not seen the plan gains {100 * gain:+.1f} points of balancedness; "
            "these loads do not carry over."
        )
    return True, (
        f"Worth it: ranks wait for the busiest in {waiting} now, in {_percent(1 - at.held_out)} with this plan on "
        f"windows it has not seen; the MoE time falls by up to {_percent(1 - at.before / at.held_out)}."
    )


def _bounds(at: Situation) -> list[Point]:
    if at.ep_size == 1:
        return []
    points = [
        Point(
            "bound",
            f"A perfect balance would take {_percent(1 - at.before)} off the MoE time; no placement of this size "
            f"exceeds a balancedness of {at.bound:.3f}. Both assume that a rank's time follows its tokens and leave "
            "out attention, communication and fixed costs, so a whole step gains less.",
        )
    ]
    if at.before_without_copies > at.before + CARRIES_OVER:
        points.append(
            Point(
                "bound",
                f"Without a plan, spare copies make it worse: vLLM's initial layout has {at.before:.3f} with "
                f"{at.num_redundant_experts} redundant experts and {at.before_without_copies:.3f} with "
                f"{-at.num_experts % at.ep_size}, since it copies the first experts whatever their load.",
            )
        )
    return points


def _costs(at: Situation) -> list[Point]:
    if not at.num_redundant_experts or at.extra_bytes_per_rank is None:
        return []
    text = f"{at.num_redundant_experts} redundant experts take {_size(at.extra_bytes_per_rank)} on every rank"
    if at.kv_cache is None:
        return [Point("cost", f"{text}.")]
    tokens = at.kv_cache.tokens(at.extra_bytes_per_rank)
    text += (
        f", the room of {tokens:,} tokens of KV cache ({at.kv_cache.bytes_per_token / 1024:.0f} KiB a token in "
        f"{at.kv_cache.layers} layers, tensor-parallel size {at.kv_cache.tensor_parallel_size}"
        f"{f'; {at.kv_cache.left_out}' if at.kv_cache.left_out else ''})."
    )
    return [Point("cost", text)]


def _cautions(at: Situation) -> list[Point]:
    texts = []
    if at.ep_size == 1:
        return []
    if at.held_out is not None and at.after - at.before > 0 and at.before + CARRIES_OVER <= at.held_out:
        kept = (at.held_out - at.before) / (at.after - at.before)
        if kept < 0.5:
            texts.append(
                f"Only {100 * kept:.0f} % of the gain carries over to unseen windows; record more of the "
                "traffic you serve."
            )
    if at.interval is not None and at.interval[0] - at.before < CARRIES_OVER <= (at.held_out or 0.0) - at.before:
        texts.append(
            f"The 90 % interval of the held-out figure, {at.interval[0]:.3f} to {at.interval[1]:.3f}, reaches down to "
            "the initial layout: record more windows before you rely on it."
        )
    if 2 <= at.windows < WINDOWS_WANTED:
        texts.append(
            f"{at.windows} windows are few: which experts peak together shows from about {WINDOWS_WANTED} windows on, "
            "and 64 spread over the traffic's cycle are better."
        )
    if at.top_k is not None and at.tokens:
        needed = tokens_needed(LOSS_ALLOWED, at.top_k, at.ep_size)
        if at.tokens < needed:
            texts.append(
                f"{at.tokens:,} tokens are few: about {_round_up(needed):,} keep what sampling noise costs below "
                f"{100 * LOSS_ALLOWED:.1f} points of balancedness on {at.ep_size} ranks."
            )
    if at.top_k is not None and at.step_tokens is not None:
        texts.extend(_small_steps(at, at.top_k, at.step_tokens))
    differing = [phase for phase in at.phases if phase.of_own_plan - phase.of_plan > PHASES_DIFFER]
    if differing:
        figures = "; ".join(
            f"{p.phase} {p.of_plan:.3f} with this plan, {p.of_own_plan:.3f} with its own" for p in differing
        )
        texts.append(
            f"Prefill and decode want different plans ({figures}); where they run in separate pools, plan each."
        )
    if at.profile_age_days is not None and at.profile_age_days > OLD_DAYS:
        texts.append(
            f"The profile is {at.profile_age_days:.0f} days old; traffic drifts, so score the plan on a new recording."
        )
    return [Point("caution", text) for text in texts]


def _small_steps(at: Situation, top_k: int, step_tokens: int) -> list[str]:
    texts = []
    per_slot = step_tokens * top_k / (at.num_experts + at.num_redundant_experts)
    if per_slot < CROSSOVER_TOKENS:
        texts.append(
            f"{step_tokens:,} tokens a step are {per_slot:.1f} per slot; below about {CROSSOVER_TOKENS} the "
            "time goes into reading weights, which more copies only add to (a roofline estimate). Prefer few or no "
            "redundant experts there."
        )
    ceiling = step_noise_ceiling(step_tokens, top_k, at.ep_size)
    if ceiling < 1 - 2 * (1 - ALREADY_BALANCED):
        texts.append(
            f"Steps of {step_tokens:,} tokens scatter so much that even a perfect plan reaches only "
            f"{ceiling:.2f} in each of them on {at.ep_size} ranks."
        )
    return texts


def compare_phases(loads: ExpertLoads, placement: Placement) -> tuple[PhaseGap, ...]:
    """How a plan does on prefill and on decode windows, against a plan made for each alone; () without both phases.

    A phase's own plan is scored on windows that it was not made from, where the phase has two windows or more.
    """
    present = [code for code in (1, 2) if (loads.window_phase == code).any()]
    shared = np.intersect1d(placement.layer_ids, loads.layer_ids)
    if len(present) < 2 or not shared.size or placement.ep_size == 1:
        return ()
    placement, loads = placement.for_layers(shared), loads.for_layers(shared)
    gaps = []
    for code in present:
        part = loads.select_windows(loads.window_phase == code)
        request = PlanRequest(placement.ep_size, placement.num_redundant_experts, effort="fast", folds=3)
        own = make_plan(part, request).balancedness
        of_plan = balancedness(rank_loads(placement.physical_to_logical, part.counts, placement.ep_size))
        gaps.append(PhaseGap(PHASES[code], of_plan, own.after if own.held_out is None else own.held_out))
    return tuple(gaps)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 0.01 * GIB else f"{nbytes / 2**20:.2f} MiB"


def _round_up(value: int) -> int:
    """To two significant digits, upwards."""
    unit: int = 10 ** max(0, len(str(value)) - 2)
    return -(-value // unit) * unit
