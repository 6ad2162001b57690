"""What a careful person would ask of a recording before trusting it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import LoadsError, TraceError, ranges
from eplb_cli.loads import NEVER_FILLED, RECORD_ANEW, ExpertLoads, ModelShape
from eplb_cli.loads import refuse_constant_routing as loads_refuse_constant_routing
from eplb_cli.traces.counting import Ranges, within
from eplb_cli.traces.layers import LayerRows
from eplb_cli.traces.protocol import MOST_EXPERTS, Counters, ReadOptions, TokenBlock

__all__ = [
    "TRUSTED_PICKS_PER_EXPERT",
    "CounterHistory",
    "Window",
    "dummy_windows",
    "expected_loss",
    "experts_of_map",
    "first_tokens",
    "identical_leading_rows",
    "one_rank_of",
    "refuse_constant_routing",
    "refuse_dead_buffer",
    "refuse_dead_counts",
    "refuse_one_rank",
    "refuse_zero_layers",
    "warnings_of",
]

TRUSTED_PICKS_PER_EXPERT = 100
"""Below this mean the load of an expert is known to no better than 10 % (one over the root of its picks)."""
NOTABLE_LOSS = 0.02
"""A promise that shrinks by less than this on other tokens of the same traffic is not worth a word."""
TELLING_COUNTS = 32
"""So many counts share a factor by chance once in 2^32."""
BOOTSTRAPS = 8
SHORTEST_DUMMY_RUN = 16
SAMPLED_TOKENS = 4096
TELLING_PICKS = 64
"""So many equal picks are no chance, whatever the number of experts."""
CHANCE = 1e-6
"""Patterns likelier than this to arise from few tokens are not held against a recording."""


@dataclass(frozen=True, eq=False)
class Window:
    """A recorded window: counts int64 [L, E], tokens when told, its id and phase."""

    counts: npt.NDArray[np.int64]
    tokens: int | None
    window_id: int
    phase: int


class CounterHistory:
    """Windows of one recording in order: differences cumulative counters, and notices those nobody declared."""

    def __init__(self) -> None:
        self.windows = 0
        self.baseline: Window | None = None
        self._last: Window | None = None
        self._file = ""
        self._growing = 0
        self._comparisons = 0

    def take(self, window: Window, layer_ids: npt.NDArray[np.int32], file: str, *, difference: bool) -> Window | None:
        """The window's own load; None for the first snapshot of cumulative counters.

        Raises:
            TraceError: a cumulative counter decreases.
        """
        self.windows += 1
        last, self._last = self._last, window
        if not difference:
            self._watch(window, last if file == self._file else None)
            self._file = file
            return window
        if last is None:
            self.baseline = window
            return None
        growth = window.counts - last.counts
        if (growth < 0).any():
            layer, expert = (int(i) for i in np.argwhere(growth < 0)[0])
            raise TraceError(
                f"the counter falls from {last.counts[layer, expert]} to {window.counts[layer, expert]} "
                f"between windows {last.window_id} and {window.window_id}",
                file=file,
                layer=int(layer_ids[layer]),
                expert=expert,
                rule="a cumulative counter never falls",
                hint="Was the recorder restarted in between? Give the parts apart, or pass --counters per-step.",
            )
        tokens = None if window.tokens is None or last.tokens is None else window.tokens - last.tokens
        return Window(growth, tokens, window.window_id, window.phase)

    def _watch(self, window: Window, last: Window | None) -> None:
        if last is None or self._growing < 0:
            return
        growth = window.counts - last.counts
        if not growth.size or growth.min() < 0 or growth.min() == growth.max():
            self._growing = -1
            return
        self._growing += 1
        self._comparisons += window.counts.size

    def refuse_hidden_counters(self, counters: Counters) -> None:
        """Raise TraceError when every count of every window is at least that of the window before.

        Independent windows do not do that; three steps and 512 comparisons make chance impossible.
        """
        if counters is Counters.auto and self._growing >= 3 and self._comparisons >= 512:
            raise TraceError(
                f"no count ever falls over {self._growing + 1} windows: these look like cumulative counters",
                file=self._file,
                hint="Pass --counters cumulative to take the differences, or --counters per-step if they are not.",
            )


def refuse_dead_buffer(block: TokenBlock, rows: LayerRows, ignored: Ranges) -> None:
    """Raise TraceError when all tokens at the start of a file pick alike, each in all layers.

    A buffer that the engine never filled reads so: zeros, one id, or 0..k-1 in every row. Routers of two layers do not
    agree on every token, and with several picks a single layer does not either; with one it may.
    """
    ids = block.ids[:SAMPLED_TOKENS, rows.positions]
    if not ids.size or ids.shape[1:] == (1, 1) or ids.size - ids.shape[2] < TELLING_PICKS:
        return
    first = ids[0, 0]
    if (ids != first).any() or (first < 0).any() or within(first, ignored).any():
        return
    layers = ranges(rows.layer_ids)
    raise TraceError(
        f"{layers} {'reads' if len(rows.layer_ids) == 1 else 'read'} as "
        f"{ranges(sorted(set(first.tolist())), 'expert')} in every pick of the first {len(ids):,} tokens",
        file=block.file,
        rule=NEVER_FILLED,
        hint=RECORD_ANEW,
    )


def refuse_dead_counts(counts: npt.NDArray[np.int64], layer_ids: npt.NDArray[np.int32], file: str) -> None:
    """Raise TraceError when a whole file's counts [n, L, E] lie on one expert in every layer.

    Beside a live file's, they would pass as load of one expert. Windows of few tokens may look like that.
    """
    total = counts.sum(0, dtype=float)  # of 64 bits, the sum may be too large
    if total.sum(1).max(initial=0) < TELLING_PICKS:
        return
    try:
        loads = ExpertLoads(counts, np.zeros(len(counts), np.int64), layer_ids)
    except LoadsError as error:
        error.file = file
        raise
    refuse_constant_routing(loads, file)


def refuse_constant_routing(loads: ExpertLoads, file: str) -> list[str]:
    """Remarks on layers that send everything to one expert, which one layer may do.

    Raises:
        TraceError: all do.
    """
    try:
        return loads_refuse_constant_routing(loads, TraceError)
    except TraceError as error:
        error.file = file
        raise


def refuse_zero_layers(block: TokenBlock, rows: LayerRows, model: ModelShape | None) -> None:
    """Raise TraceError when a layer that would be counted reads as zeros.

    A dense layer and one that the recorder did not reach look the same, and both would count as a hot expert 0. With
    two picks a token or more, zeros are certain not to be routing: no token picks an expert twice.
    """
    if block.ids.shape[2] < 2 or len(block.ids) < 2:
        return
    zeros = (block.ids == 0).all(axis=(0, 2))
    silent = [int(layer) for row, layer in zip(rows.positions, rows.layer_ids, strict=True) if zeros[row]]
    if silent:
        known = model is not None and model.moe_layer_ids is not None
        raise TraceError(
            f"{ranges(silent)} {'reads' if len(silent) == 1 else 'read'} as expert 0 in every pick: "
            + ("the recorder did not reach them" if known else "dense layers, or layers that were not recorded"),
            file=block.file,
            rule="the model says that they are MoE layers" if known else "which layers are MoE is the model's to say",
            hint="Record again with a version that covers all MoE layers." if known else "Pass --model MODEL.",
        )


def first_tokens(block: TokenBlock, rows: LayerRows, ignored: Ranges) -> list[str]:
    """Remarks on the first tokens of a file: a dummy batch in front, and experts picked twice by one token."""
    name = Path(block.file).name
    warnings = []
    alike = identical_leading_rows(block)
    if alike:
        warnings.append(
            f"{name}: the first {alike} tokens are routed alike in all layers: a dummy batch? "
            "--skip-steps leaves windows out at the start"
        )
    picks = np.sort(block.ids[:SAMPLED_TOKENS, rows.positions], axis=2).astype(np.int64)
    told = (picks >= 0) & ~within(picks, ignored)
    twice = int(((picks[..., 1:] == picks[..., :-1]) & told[..., 1:]).any(2).sum())
    if twice:
        warnings.append(
            f"{name}: of the first {picks.shape[0] * picks.shape[1]} choices {twice} name an expert twice, which no "
            "router does: padding written as a real id?"
        )
    return warnings


def identical_leading_rows(block: TokenBlock) -> int:
    """Tokens in front of a file that repeat the first one's routing; 0 when they are too few to mean anything.

    Engines profile their memory with dummy batches, and some recorders keep them.
    """
    if len(block.ids) < SHORTEST_DUMMY_RUN or not block.ids[0].size:
        return 0
    same = (block.ids == block.ids[0]).all(axis=(1, 2))
    run = len(same) if same.all() else int(np.argmin(same))
    return run if run >= SHORTEST_DUMMY_RUN and (block.ids[0] >= 0).any() else 0


def dummy_windows(loads: ExpertLoads) -> int:
    """Windows in front whose load sits on one token's picks in every layer, when later ones are spread."""
    hit = (loads.counts > 0).sum(2)
    narrow = (hit <= (loads.top_k or 1)).all(1) & (loads.counts.sum(2).max(1, initial=0) > 8 * (loads.top_k or 1))
    return 0 if not narrow.size or narrow.all() else int(np.argmin(narrow))


def expected_loss(loads: ExpertLoads) -> tuple[int, float, float] | None:
    """(ranks, promised, reached): balancedness of a plan from a resample of the loads, on it and on another resample.

    A parametric bootstrap: each resample draws every count anew from a Poisson distribution around the recorded one,
    which is what more tokens of the same traffic would look like. The plan packs experts greedily without copies on 8
    ranks (4 or 2 when the experts do not divide); the seed is fixed. None when there is nothing to divide.
    """
    ranks = next((g for g in (8, 4, 2) if loads.num_experts % g == 0 and loads.num_experts > g), None)
    totals = loads.counts.sum(0)
    if ranks is None or not totals.any():
        return None
    generator = np.random.default_rng(0)
    seen, unseen = (generator.poisson(totals, (BOOTSTRAPS, *totals.shape)).astype(float) for _ in range(2))
    rank_of = _pack(seen.reshape(-1, loads.num_experts), ranks)
    return ranks, _balance(seen, rank_of, ranks), _balance(unseen, rank_of, ranks)


def _pack(loads: npt.NDArray[np.float64], ranks: int) -> npt.NDArray[np.int64]:
    """Rank of each expert, [n, E]: the heaviest first, each to the lightest rank that has room."""
    rows, experts = loads.shape
    order = np.argsort(-loads, axis=1, kind="stable")
    held = np.zeros((rows, ranks))
    count = np.zeros((rows, ranks), np.int64)
    rank_of = np.zeros((rows, experts), np.int64)
    row = np.arange(rows)
    for position in range(experts):
        expert = order[:, position]
        rank = np.where(count < experts // ranks, held, np.inf).argmin(1)
        held[row, rank] += loads[row, expert]
        count[row, rank] += 1
        rank_of[row, expert] = rank
    return rank_of


def _balance(loads: npt.NDArray[np.float64], rank_of: npt.NDArray[np.int64], ranks: int) -> float:
    """Sum of the mean over the sum of the max rank load, over layers and resamples."""
    flat = loads.reshape(len(rank_of), -1)
    held = np.zeros((len(flat), ranks))
    np.add.at(held, (np.arange(len(flat))[:, None], rank_of), flat)
    return float(held.mean(1).sum() / max(held.max(1).sum(), 1e-300))


def experts_of_map(
    physical_to_logical: npt.NDArray[Any], known: int | None, layer_ids: npt.NDArray[np.int32], file: str
) -> int:
    """E of a recording's own map [L, P].

    Raises:
        TraceError: the map names an expert that the model does not have.
    """
    experts = known if known is not None else min(MOST_EXPERTS, int(physical_to_logical.max(initial=-1)) + 1)
    outside = np.argwhere((physical_to_logical < -1) | (physical_to_logical >= experts))
    if outside.size:
        layer, slot = (int(i) for i in outside[0])
        raise TraceError(
            f"the recorded map puts expert {physical_to_logical[layer, slot]} into slot {slot}",
            file=file,
            layer=int(layer_ids[layer]),
            rule=f"experts are 0..{experts - 1}",
        )
    return experts


def one_rank_of(loads: ExpertLoads) -> tuple[int, int, str] | None:
    """(rank, ranks, how) when only the experts of one rank have load: a block, or every G-th; None otherwise."""
    counts = loads.counts.sum(0)
    picks = int(counts.sum(1).max(initial=0))
    experts = loads.num_experts
    hit = np.flatnonzero(counts.any(0))
    if not 2 <= hit.size < experts or experts % hit.size or picks * np.log(hit.size / experts) > np.log(CHANCE):
        return None
    ranks = experts // hit.size
    if hit[0] % hit.size == 0 and (np.diff(hit) == 1).all():
        return int(hit[0]) // hit.size, ranks, "block"
    if (np.diff(hit) == ranks).all():
        return int(hit[0]), ranks, "stride"
    return None


def refuse_one_rank(loads: ExpertLoads, file: str, *, allow: bool) -> None:
    """Raise TraceError when the loads look like one rank's share, unless the user says that they are not."""
    found = one_rank_of(loads)
    if found is None or allow:
        return
    rank, ranks, how = found
    experts = loads.num_experts
    held = experts // ranks
    raise TraceError(
        f"{experts - held} of {experts} experts have no load and the non-zeros form exactly rank {rank}'s "
        f"{how} of {held} experts at {ranks} ranks; is this one rank's dump?",
        file=file,
        hint="Give the files of all ranks together, or pass --allow-zero-experts.",
    )


def warnings_of(loads: ExpertLoads, options: ReadOptions, *, tokens_told: bool) -> list[str]:
    """Remarks with numbers on what was read."""
    if not loads.num_windows:
        return []
    warnings = []
    totals = loads.counts.sum(0)
    by_layer = totals.sum(1)
    layers = loads.layer_ids
    idle = layers[by_layer == 0].tolist()
    if idle:
        known = options.model is not None and options.model.moe_layer_ids is not None
        warnings.append(
            f"{ranges(idle)} {'has' if len(idle) == 1 else 'have'} no load at all"
            + (": the recorder did not reach them" if known else "; --model tells dense layers from unrecorded ones")
        )
    active = totals[by_layer > 0]
    silent = int((active == 0).sum())
    if silent:
        warnings.append(
            f"{silent} of {active.size} experts were never hit (in {int((active == 0).any(1).sum())} of "
            f"{len(active)} layers)"
        )
    live = by_layer[by_layer > 0]
    if live.size and live.min() != live.max():
        low, high = (int(layers[by_layer == value][0]) for value in (live.min(), live.max()))
        warnings.append(
            f"layers differ in total: layer {low} has {live.min()} assignments, layer {high} has {live.max()} "
            "(padding, skipped layers, or mixed recordings)"
        )
    if tokens_told and loads.top_k and live.size:
        expected = int(loads.tokens.sum()) * loads.top_k
        off = layers[(by_layer != expected) & (by_layer > 0)]
        if off.size:
            actual = int(by_layer[layers == off[0]][0])
            warnings.append(
                f"{off.size} layers do not hold tokens x top-k = {expected} assignments; layer {off[0]} holds {actual} "
                f"({actual / max(expected, 1):.3g} times)"
            )
    if loads.top_k and any(total % loads.top_k for total in live.tolist()) and not tokens_told:
        warnings.append(f"assignments are not a multiple of top-k {loads.top_k} in every layer")
    dummies = dummy_windows(loads)
    if dummies:
        warnings.append(
            f"in the first {dummies} windows all load sits on {loads.top_k or 1} experts a layer: a dummy batch? "
            f"--skip-steps {dummies} leaves them out"
        )
    loss = expected_loss(loads)
    if loss is not None and loss[1] - loss[2] > NOTABLE_LOSS:
        warnings.append(
            f"too few tokens to trust the balance of a plan: at {loss[0]} ranks without copies it would promise "
            f"balancedness {loss[1]:.3f} and reach {loss[2]:.3f} on more tokens of the same traffic (bootstrap)"
        )
    mean = float(live.max(initial=0)) / max(1, loads.num_experts)
    if mean < TRUSTED_PICKS_PER_EXPERT:
        warnings.append(
            f"{mean:.3g} picks per expert and layer on average, fewer than {TRUSTED_PICKS_PER_EXPERT}: "
            "too few tokens for a trustworthy plan"
            + ("; with one window the held-out balancedness cannot be known" if loads.num_windows < 2 else "")
        )
    if options.model is not None and options.model.moe_layer_ids is not None:
        absent = sorted(set(options.model.moe_layer_ids) - set(layers.tolist()))
        if absent:
            warnings.append(f"the recording lacks the model's MoE {ranges(absent)}")
    factor = int(np.gcd.reduce(loads.counts, axis=None))
    values = loads.counts[loads.counts > 0]
    if factor > 1 and values.size >= TELLING_COUNTS and values.min() != values.max():
        warnings.append(
            f"every count is a multiple of {factor}: was each pick counted {factor} times? The balance is the same, "
            "but there are fewer tokens than it seems"
        )
    return warnings
