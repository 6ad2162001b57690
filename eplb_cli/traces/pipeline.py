"""The rules that all recorders share: from blocks as recorded to windows of loads per logical expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import LoadsError, PlacementError, TraceError, UsageError
from eplb_cli.loads import PHASES, ExpertLoads, ModelShape, Source
from eplb_cli.traces import checks
from eplb_cli.traces.counting import (
    BadExpertIdError,
    Loop,
    OrderedPool,
    Tally,
    count_token_ids,
)
from eplb_cli.traces.layers import LayerRows, resolve_layers
from eplb_cli.traces.numbers import fold_physical, integral_counts
from eplb_cli.traces.protocol import (
    ALL,
    MOST_EXPERTS,
    Block,
    CountBlock,
    Counters,
    LayerAxis,
    Reader,
    ReadOptions,
    Recording,
    Space,
    TokenBlock,
)
from eplb_cli.traces.windows import BUDGET_BYTES, TOKEN_BUDGET_BYTES, WindowStore
from eplb_cli.untrusted import shown

__all__ = ["DEFAULT_WINDOW_TOKENS", "Profile", "as_recorded", "collect"]

DEFAULT_WINDOW_TOKENS = 1024
MAX_TOKEN_WINDOWS = 1024
"""Windows kept of a per-token trace when the user names no size; the window doubles beyond it."""
MAX_COUNTS_BYTES = 4 << 30
"""What an explicit --window-tokens may ask for."""
MOST_OF_A_WINDOW = 1 << 48
"""Tokens of a window, or its step number: thirty thousand of them still add up in int64."""
PIECE_BYTES = 4 << 20
SETS_FROM_BYTES = 4 << 30
"""Recordings from this size on are worth compiling the fastest loop."""
COMPILED_AFTER_IDS = 32 << 20
"""Ids that numpy counts before the compiled loop takes over: about the time that compiling takes."""


@dataclass(frozen=True, eq=False)
class Profile:
    """What was read: the loads, and remarks on this run that do not belong to what the loads mean."""

    loads: ExpertLoads
    notes: tuple[str, ...]


@dataclass
class _Collector:
    """Takes the blocks of all recordings, in order, into windows."""

    options: ReadOptions
    pool: OrderedPool
    stores: dict[int, WindowStore] = field(default_factory=dict)
    layer_ids: npt.NDArray[np.int32] | None = None
    num_experts: int | None = None
    first_file: str = ""
    dropped: dict[str, int] = field(default_factory=dict)
    warnings: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    token_fill: dict[int, int] = field(default_factory=dict)
    """phase -> tokens submitted to the window that is still open."""
    open_windows: dict[int, tuple[npt.NDArray[np.int64], int]] = field(default_factory=dict)
    """phase -> counts and tokens of the open window, as far as results have come in."""
    windows_done: dict[int, int] = field(default_factory=dict)
    submitted_ids: int = 0
    window_size: int = 0
    """Tokens a window is cut at; settled by the first per-token recording."""
    skipped: int = 0
    """Of the recording at hand: steps, or tokens of a per-token trace, left out so far."""
    tokens_told: bool = False
    top_ks: set[int] = field(default_factory=set)
    """What the recorders say, and how many ids their tokens hold."""

    @property
    def model(self) -> ModelShape | None:
        """What is known of the model, from the user or from the plan in force while recording."""
        plan = self.options.physical_to_logical
        if self.options.model is None and plan is not None:
            return ModelShape(None, plan.num_experts, moe_layer_ids=tuple(plan.layer_ids.tolist()))
        return self.options.model

    def drop(self, reason: str, amount: int) -> None:
        if amount:
            self.dropped[reason] = self.dropped.get(reason, 0) + amount

    def warn(self, text: str) -> None:
        self.warnings[text] = None

    # -- layers and experts ------------------------------------------------------------------------------------------

    def rows_of(self, axis: LayerAxis, file: str) -> LayerRows:
        rows = resolve_layers(axis, self.model, file)
        if rows.beyond:
            self.warn(f"layers {list(rows.beyond)} lie beyond the model's last (a draft layer?) and were left out")
        if self.layer_ids is None:
            self.layer_ids, self.first_file = rows.layer_ids, file
        elif not np.array_equal(self.layer_ids, rows.layer_ids):
            raise TraceError(
                f"holds layers {rows.layer_ids.tolist()}",
                file=file,
                rule=f"{self.first_file} holds layers {self.layer_ids.tolist()}; files merge when their layers agree",
            )
        return rows

    def settle_num_experts(self, columns: int, file: str) -> None:
        if columns > MOST_EXPERTS:
            raise TraceError(f"{columns} columns a layer", file=file, rule=f"no model has {MOST_EXPERTS} experts")
        known = self.num_experts if self.num_experts is not None else self.options.num_experts
        if known is not None and columns != known:
            raise TraceError(
                f"{columns} columns a layer, expected {known} experts",
                file=file,
                rule="a column is a logical expert",
                hint="Are these physical slots? Pass the map in force: --physical-to-logical PLAN. "
                "With fused shared experts, record with the fusion off."
                if columns > known
                else "Is this the model that was recorded?",
            )
        self.num_experts = columns

    def plan_rows(self, rows: LayerRows, slots: int | None, file: str) -> npt.NDArray[np.int32]:
        """Rows [L, P] of --physical-to-logical for the block's layers."""
        plan = self.options.physical_to_logical
        assert plan is not None  # noqa: S101 - callers ask only when it was given
        if slots is not None and slots != plan.num_slots:
            raise TraceError(
                f"{slots} columns a layer",
                file=file,
                rule=f"the plan given as --physical-to-logical has {plan.num_slots} slots",
            )
        try:
            return plan.for_layers(rows.layer_ids).physical_to_logical
        except PlacementError as error:
            raise TraceError(f"{error.problem} (given as --physical-to-logical)", file=file, rule=error.rule) from None

    # -- windows -----------------------------------------------------------------------------------------------------

    def store(self, phase: int, *, of_tokens: bool) -> WindowStore:
        if phase not in self.stores:
            assert self.layer_ids is not None and self.num_experts is not None  # noqa: S101
            layers, experts = len(self.layer_ids), self.num_experts
            limit: int | None = max(2, BUDGET_BYTES // max(1, 8 * layers * experts))
            if of_tokens:
                limit = None if self.options.window_tokens else self.token_window_limit()
            self.stores[phase] = WindowStore(layers, experts, limit)
        return self.stores[phase]

    def put(self, counts: npt.NDArray[np.int64], tokens: int, window_id: int, phase: int, *, of_tokens: bool) -> None:
        """Keep a finished window, unless it is empty."""
        if tokens == 0 and not counts.any():
            self.drop("empty_windows", 1)
            return
        store = self.store(phase, of_tokens=of_tokens)
        store.append(counts, tokens, window_id)
        used = store.arrays()[0].nbytes
        if store.limit is None and used > MAX_COUNTS_BYTES:
            raise UsageError(
                f"--window-tokens {self.options.window_tokens} makes more than {len(store.arrays()[1])} windows, "
                f"{used / 2**30:.0f} GiB of counts",
                hint="Ask for larger windows, or leave --window-tokens out: the size then follows the trace.",
            )

    def token_window_limit(self) -> int:
        """Most windows of a per-token trace when the user names no size."""
        assert self.layer_ids is not None and self.num_experts is not None  # noqa: S101
        window_bytes = max(1, 8 * len(self.layer_ids) * self.num_experts)
        return min(max(2, TOKEN_BUDGET_BYTES // window_bytes), MAX_TOKEN_WINDOWS)

    def settle_window_size(self, recording: Recording) -> int:
        """The user's size, or the least doubling of the default that the trace's length, when told, calls for.

        Windows would merge to the same size later; starting with it saves work.
        """
        if not self.window_size:
            self.window_size = self.options.window_tokens or DEFAULT_WINDOW_TOKENS
            while not self.options.window_tokens and (
                recording.expected_tokens > self.window_size * self.token_window_limit()
            ):
                self.window_size *= 2
        return self.window_size

    def kept_phase(self, phase: int) -> int | None:
        """The phase a window is filed under; None when --phase leaves it out."""
        wanted = self.options.phase
        if wanted == ALL or phase == wanted:
            return phase
        if phase == ALL:
            self.warn(f"the trace does not tell prefill from decode; taken as {PHASES[wanted]}, as --phase says")
            return wanted
        return None

    # -- blocks ------------------------------------------------------------------------------------------------------

    def add_tokens(self, block: TokenBlock, recording: Recording) -> None:
        if self.options.counters is Counters.cumulative:
            raise UsageError("--counters cumulative: a per-token trace has no counters", file=block.file)
        if block.space is Space.logical and self.options.physical_to_logical is not None:
            raise UsageError(
                "the recorder writes logical ids", file=block.file, hint="Leave --physical-to-logical out."
            )
        phase = self.kept_phase(block.phase)
        rows = self.rows_of(block.axis, block.file)
        if not block.first_row:
            checks.refuse_dead_buffer(block, rows, self.options.ignored_ids)
            checks.refuse_zero_layers(block, rows, self.model)
            for warning in checks.first_tokens(block, rows, self.options.ignored_ids):
                self.warn(warning)
        plan = self.options.physical_to_logical
        fold = None if plan is None else self.plan_rows(rows, None, block.file)
        experts = self.options.need_num_experts(block.file) if plan is None else plan.num_experts
        self.settle_num_experts(experts, block.file)
        self.top_ks.add(block.ids.shape[2])
        if phase is None:
            self.drop("other_phase_tokens", len(block.ids))
            return
        size = self.settle_window_size(recording)
        most = max(1, PIECE_BYTES // max(1, block.ids[:1].nbytes))
        start = min(len(block.ids), max(0, self.options.skip_steps * size - self.skipped))
        self.skipped += start
        self.drop("skipped_tokens", start)
        while start < len(block.ids):
            fill = self.token_fill.get(phase, 0)
            stop = min(len(block.ids), start + size - fill, start + most)
            self._submit(block, rows, fold, start, stop, phase, recording)
            self.token_fill[phase] = fill + stop - start
            if self.token_fill[phase] == size:
                self.token_fill[phase] = 0
                self.pool.submit(_nothing, partial(self._close_after, phase))
            start = stop

    def _submit(
        self,
        block: TokenBlock,
        rows: LayerRows,
        fold: npt.NDArray[np.int32] | None,
        start: int,
        stop: int,
        phase: int,
        recording: Recording,
    ) -> None:
        ids = block.ids[start:stop]
        assert self.num_experts is not None  # noqa: S101
        width = self.num_experts if fold is None else fold.shape[1]
        loop = Loop.numpy
        if self.submitted_ids >= COMPILED_AFTER_IDS:
            loop = Loop.sets if recording.size >= SETS_FROM_BYTES else Loop.compiled
        self.submitted_ids += ids.size
        ignore = self.options.ignored_ids

        def work() -> Tally:
            try:
                return count_token_ids(ids, rows.positions, width, ignore, loop)
            except BadExpertIdError as bad:
                raise self._bad_id(block, rows, start, bad, width) from None

        self.pool.submit(work, partial(self._take, phase=phase, fold=fold))

    def _bad_id(self, block: TokenBlock, rows: LayerRows, start: int, bad: BadExpertIdError, width: int) -> TraceError:
        layer = int(rows.layer_ids[int(np.flatnonzero(rows.positions == bad.layer)[0])])
        known = "num_experts" if self.options.physical_to_logical is None else "slots of --physical-to-logical"
        return TraceError(
            f"id {bad.value} >= {known} {width} at column {bad.column}"
            if bad.value >= 0
            else f"id {bad.value} at column {bad.column} is negative (padding is -1)",
            file=block.file,
            layer=layer,
            row=block.first_row + start + bad.row,
            rule=f"ids are 0..{width - 1}",
            hint=f"Are these physical ids? Pass the map in force: --physical-to-logical PLAN. "
            f"Is {bad.value} a placeholder? --ignore-expert-id {bad.value} drops it.",
        )

    def _take(self, tally: Tally, *, phase: int, fold: npt.NDArray[np.int32] | None) -> None:
        counts = tally.counts
        if fold is not None:
            assert self.num_experts is not None  # noqa: S101
            counts = fold_physical(counts[None], fold, self.num_experts)[0]
        self.drop("padding_rows", tally.padding_rows)
        self.drop("padding_ids", tally.padding_ids)
        self.drop("ignored_expert_ids", tally.ignored_ids)
        if phase in self.open_windows:
            held, tokens = self.open_windows[phase]
            held += counts
            self.open_windows[phase] = (held, tokens + tally.tokens)
        else:
            self.open_windows[phase] = (counts.copy(), tally.tokens)

    def _close_after(self, phase: int, _: None) -> None:
        self._close(phase)

    def _close(self, phase: int) -> None:
        if phase in self.open_windows:
            counts, tokens = self.open_windows.pop(phase)
            number = self.windows_done.get(phase, 0)
            self.windows_done[phase] = number + 1
            self.put(counts, tokens, number, phase, of_tokens=True)

    def close_token_windows(self) -> None:
        """The last, shorter window of each phase."""
        self.pool.drain()
        for phase in sorted(self.open_windows):
            self._close(phase)

    def add_counts(self, block: CountBlock, recording: Recording, history: checks.CounterHistory) -> None:
        rows = self.rows_of(block.axis, block.file)
        ids = np.full(block.axis.length, -1, np.int64)
        ids[rows.positions] = rows.layer_ids
        for row, layer in rows.dense.items():
            ids[row] = layer
        counts = integral_counts(block.counts, ids, block.file)
        for row, layer in rows.dense.items():
            if counts[:, row].any():
                raise TraceError(
                    "has load, but the model says the layer is dense",
                    file=block.file,
                    layer=layer,
                    expert=int(np.flatnonzero(counts[:, row].any(0))[0]),
                    hint="Is --model the model that was recorded?",
                )
        counts = counts[:, rows.positions]
        if block.space is Space.logical and self.options.physical_to_logical is not None:
            raise UsageError(
                "the recorder writes logical counts", file=block.file, hint="Leave --physical-to-logical out."
            )
        if block.physical_to_logical is not None:
            if self.options.physical_to_logical is not None:
                raise UsageError(
                    "the recording holds its own map", file=block.file, hint="Leave --physical-to-logical out."
                )
            table = block.physical_to_logical[rows.positions]
            experts = checks.experts_of_map(table, self.options.num_experts, rows.layer_ids, block.file)
            counts = fold_physical(counts, table, experts)
        elif self.options.physical_to_logical is not None:
            table = self.plan_rows(rows, counts.shape[2], block.file)
            counts = fold_physical(counts, table, self.options.physical_to_logical.num_experts)
        elif block.space is Space.physical and counts.shape[2] == self.options.num_experts:
            self.warn(
                f"the recorder counts slots and holds no map; {counts.shape[2]} slots for as many experts were "
                "taken in their default order (pass --physical-to-logical if a placement was in force)"
            )
        elif block.space is Space.physical:
            raise TraceError(
                f"counts {counts.shape[2]} physical slots, and the recording does not hold the map in force",
                file=block.file,
                rule="physical against logical is never guessed",
                hint="Pass the map in force: --physical-to-logical PLAN. "
                "Without redundant experts, --model or --num-experts shows that slots are experts.",
            )
        self.settle_num_experts(counts.shape[2], block.file)
        self.pool.drain()
        step = self.options.counters is Counters.cumulative or (
            recording.cumulative and self.options.counters is Counters.auto
        )
        if not step and any(block.file == file.name for file in recording.files):
            checks.refuse_dead_counts(counts, rows.layer_ids, block.file)
        for name, numbers in (("tokens", block.tokens), ("step number", block.window_ids)):
            if numbers is not None:
                _require_bounded(np.asarray(numbers), name, block.file)
        phases = np.broadcast_to(np.asarray(block.phase, np.uint8), (len(counts),))
        window_ids = np.arange(history.windows, history.windows + len(counts))
        if block.window_ids is not None:
            window_ids = block.window_ids
        for index in range(len(counts)):
            window = checks.Window(
                counts[index],
                None if block.tokens is None else int(block.tokens[index]),
                int(window_ids[index]),
                int(phases[index]),
            )
            taken = history.take(window, rows.layer_ids, block.file, difference=step)
            if taken is not None:
                self.put_recorded(taken, recording)

    def put_recorded(self, window: checks.Window, recording: Recording) -> None:
        """Keep a recorded window; its tokens are assignments / top-k when the recorder does not tell them."""
        phase = self.kept_phase(window.phase)
        if phase is None:
            self.drop("other_phase_windows", 1)
            return
        if self.skipped < self.options.skip_steps:
            self.skipped += 1
            self.drop("skipped_steps", 1)
            return
        tokens = window.tokens
        if tokens is None:
            top_k = recording.top_k or self.options.top_k
            tokens = int(window.counts.sum(1).max(initial=0)) // top_k if top_k else 0
        else:
            self.tokens_told = True
        self.put(window.counts, tokens, window.window_id, phase, of_tokens=False)

    def finish_counters(self, history: checks.CounterHistory, recording: Recording) -> None:
        """A lone snapshot of cumulative counters counts from zero; otherwise what came before the first is left out."""
        history.refuse_hidden_counters(self.options.counters)
        if history.baseline is None:
            return
        if history.windows == 1:
            self.put_recorded(history.baseline, recording)
        else:
            self.drop("counters_before_recording", int(history.baseline.counts.sum()))

    def finish_recording(self, recording: Recording) -> None:
        self.skipped = 0
        if recording.top_k is not None:
            self.top_ks.add(recording.top_k)
        if recording.repeated_prefixes:
            self.warn(
                f"{recording.repeated_prefixes} sequences begin as an earlier one does; a prefix that came from the "
                "cache loaded no expert, and is counted again here unless the trace tells"
            )
        for reason, amount in recording.dropped.items():
            self.drop(reason, amount)
        self.warnings.update(dict.fromkeys(recording.warnings))
        self.notes.update(dict.fromkeys(recording.notes))


def _nothing() -> None:
    """The task of closing a window: nothing to compute, it only waits its turn."""


def collect(recordings: Sequence[tuple[Reader, Recording]], options: ReadOptions) -> Profile:
    """Read all recordings, in order, into one profile.

    Raises:
        TraceError: a file breaks a rule of its format or of all formats.
        UsageError: an option contradicts a recording, or a needed one is missing.
    """
    architectures: set[str] = set()
    with OrderedPool() as pool:
        collector = _Collector(options, pool)
        for reader, recording in recordings:
            history = checks.CounterHistory()
            for block in _blocks(reader, recording):
                _check_axis(block)
                if isinstance(block, TokenBlock):
                    collector.add_tokens(block, recording)
                else:
                    collector.add_counts(block, recording, history)
            pool.drain()
            collector.finish_counters(history, recording)
            collector.finish_recording(recording)
            if recording.architecture is not None:
                architectures.add(recording.architecture)
        collector.close_token_windows()
    return _profile(collector, recordings, architectures)


@contextmanager
def as_recorded(reader: Reader, file: str) -> Iterator[None]:
    """What a reader trips over in a file that is shaped otherwise than its recorder writes it, as a TraceError.

    Two dozen formats, each a tree of values that any other type may stand in for: readers check what they count, and
    the shape of the tree is checked by walking it.

    Raises:
        TraceError: in place of the errors that values of a wrong type, size or encoding lead to.
    """
    try:
        yield
    except TraceError as error:
        error.file = error.file or file
        raise
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, MemoryError) as error:
        raise TraceError(
            f"is not as {reader.name} writes it ({type(error).__name__}: {shown(str(error))})",
            file=file,
            rule=reader.looks_for,
        ) from error


def _blocks(reader: Reader, recording: Recording) -> Iterator[Block]:
    files = [file.name for file in recording.files]
    with as_recorded(reader, files[0] if len(files) == 1 else f"{recording.folder} ({len(files)} files)"):
        yield from reader.read(recording)


def _require_bounded(numbers: npt.NDArray[np.generic], name: str, file: str) -> None:
    """Refuse numbers of windows that sums of them in int64 would not hold."""
    whole = numbers.dtype.kind in "iu"
    wrong = [number for number in numbers.tolist() if not whole or not 0 <= number < MOST_OF_A_WINDOW]
    if wrong:
        raise TraceError(
            f"a window's {name} is {shown(wrong[0])}",
            file=file,
            rule=f"a whole number from 0, below {MOST_OF_A_WINDOW:,}",
        )


def _check_axis(block: Block) -> None:
    array = block.counts if isinstance(block, CountBlock) else block.ids
    if array.ndim != 3 or array.shape[1] != block.axis.length:
        raise TraceError(
            f"holds an array {list(array.shape)} for {block.axis.length} layers",
            file=block.file,
            rule="three axes are expected, the second of them the layers",
        )
    if 0 in array.shape[1:]:
        raise TraceError(f"holds an array {list(array.shape)}", file=block.file, rule="it must have layers and columns")


def _profile(
    collector: _Collector,
    recordings: Sequence[tuple[Reader, Recording]],
    architectures: set[str],
) -> Profile:
    options = collector.options
    names = ", ".join(file.name for _, recording in recordings for file in recording.files[:3])
    if collector.layer_ids is None or collector.num_experts is None:
        raise TraceError("nothing to count: the traces hold no record", file=names)
    if not collector.stores and collector.dropped:
        left_out = ", ".join(f"{reason} {amount}" for reason, amount in sorted(collector.dropped.items()))
        raise TraceError(f"nothing to count: no window holds a token (left out: {left_out})", file=names)
    stores = [(phase, collector.stores[phase]) for phase in sorted(collector.stores)]
    arrays = [store.arrays() for _, store in stores]
    if not arrays:
        none = np.zeros(0, np.int64)
        arrays = [(np.zeros((0, len(collector.layer_ids), collector.num_experts), np.int64), none, none)]
    counts, tokens, window_ids = (
        arrays[0] if len(arrays) == 1 else tuple(np.concatenate([a[i] for a in arrays]) for i in range(3))
    )
    window_phase = np.repeat([phase for phase, _ in stores], [len(store.arrays()[1]) for _, store in stores])
    top_k = options.top_k or (next(iter(collector.top_ks)) if len(collector.top_ks) == 1 else None)
    for phase, store in stores:
        of_phase = "" if phase == ALL else f" ({PHASES[phase]})"
        tokens_a_window = store.merged * collector.window_size
        if not collector.windows_done.get(phase):
            if store.merged > 1:
                collector.warn(f"{store.merged} recorded windows each were merged into one to bound memory{of_phase}")
        elif tokens_a_window > (options.window_tokens or DEFAULT_WINDOW_TOKENS):
            collector.warn(f"windows hold {tokens_a_window} tokens, so that they stay few{of_phase}")
    model = options.model.architecture if options.model and options.model.architecture else None
    try:
        loads = ExpertLoads(
            counts=counts,
            tokens=tokens,
            layer_ids=collector.layer_ids,
            window_ids=window_ids,
            window_phase=window_phase.astype(np.uint8),
            model=model or (architectures.pop() if len(architectures) == 1 else None),
            top_k=top_k,
            sources=tuple(
                Source(file.label, file.sha256, reader.name)
                for reader, recording in recordings
                for file in recording.files
            ),
            dropped=collector.dropped,
        )
    except LoadsError as error:
        error.file = names
        raise
    remarks = checks.refuse_constant_routing(loads, names)
    checks.refuse_one_rank(loads, names, allow=options.allow_zero_experts)
    warnings = [*collector.warnings, *remarks, *checks.warnings_of(loads, options, tokens_told=collector.tokens_told)]
    return Profile(replace(loads, warnings=tuple(warnings)), tuple(collector.notes))
