"""What a replay found: its rows, the document that it is written as, and how that is read back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, Self

from eplb_cli.errors import TraceError
from eplb_cli.loads import PHASES
from eplb_cli.replay.tally import MOST_STRETCHES
from eplb_cli.untrusted import read_json, shown

__all__ = ["PhaseSteps", "Replay", "Row"]

FORMAT = "eplb-replay"
VERSION = 1
MOST_BYTES = 1 << 24
MOST_ROWS = 10_000


@dataclass(frozen=True)
class Row:
    """What the steps of one phase were like under one plan, rule and run-time policy.

    Args:
        phase: of the steps: "prefill", "decode", or "all" where the trace does not tell.
        plan, dispatch: which.
        rebalance: the run-time policy as `policy:window/interval`; None where the placement stays.
        balancedness: sum of the mean rank's tokens over sum of the busiest rank's, over steps and layers.
        ratio_p50, ratio_p95, ratio_worst: of the steps' max / mean, each summed over the step's layers; the percentiles
            to 0.01 %.
        active_mean: slots of a layer that serve any token, averaged over steps and layers.
        active_max: the most such slots of one rank.
        step_time: tokens plus price x active slots of a layer's slowest rank, averaged over steps and layers; None
            without a price.
        rebalances: how often the policy was asked.
        moved_slots: slots whose expert was not on that rank before, over all rebalances and layers.
        curve: balancedness of each stretch of the phase's steps.
    """

    phase: str
    plan: str
    dispatch: str
    rebalance: str | None
    balancedness: float
    ratio_p50: float
    ratio_p95: float
    ratio_worst: float
    active_mean: float
    active_max: int
    step_time: float | None
    rebalances: int
    moved_slots: int
    curve: tuple[float, ...]

    def as_dict(self) -> dict[str, Any]:
        """The row in `eplb replay --format json`."""
        return {
            "phase": self.phase,
            "plan": self.plan,
            "dispatch": self.dispatch,
            "rebalance": self.rebalance,
            "balancedness": self.balancedness,
            "max_over_mean": {"p50": self.ratio_p50, "p95": self.ratio_p95, "worst": self.ratio_worst},
            "active_copies": {"mean": self.active_mean, "max": self.active_max},
            "step_time": self.step_time,
            "rebalances": self.rebalances,
            "moved_slots": self.moved_slots,
            "curve": list(self.curve),
        }


@dataclass(frozen=True)
class PhaseSteps:
    """How many steps were of a phase, and the number of the first step in each stretch of the curves; steps of all
    phases are counted together, from 1."""

    phase: str
    steps: int
    first_steps: tuple[int, ...]


@dataclass(frozen=True)
class Replay:
    """All rows, phase by phase, and the steps that they are of.

    Args:
        rows: see `Row`.
        phases: see `PhaseSteps`.
        step_tokens: tokens of a step over all ranks.
        batches: batches that they are in.
        price: what a slot that serves any token costs a step, in tokens; None when it was left out.
        vllms_policy: whose algorithm stood for vLLM's policy; None when it was not asked.
        warnings: of the traces.
    """

    rows: tuple[Row, ...]
    phases: tuple[PhaseSteps, ...]
    step_tokens: int
    batches: int
    price: int | None
    vllms_policy: str | None
    warnings: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def as_dict(self) -> dict[str, Any]:
        """The object that `eplb replay --format json` prints."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "rows": [row.as_dict() for row in self.rows],
            "phases": [
                {"phase": phase.phase, "steps": phase.steps, "first_steps": list(phase.first_steps)}
                for phase in self.phases
            ],
            "steps": self.steps,
            "step_tokens": self.step_tokens,
            "data_parallel_size": self.batches,
            "copy_cost_tokens": self.price,
            "vllms_policy": self.vllms_policy,
            "warnings": list(self.warnings),
        }

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Self:
        """Read what `eplb replay --format json` wrote.

        Raises:
            TraceError: there is no such file, it is no such document, or a value cannot be.
        """
        fields = _Fields(Path(path), read_json(path, TraceError, most_bytes=MOST_BYTES))
        if fields.raw.get("format") != FORMAT:
            fields.refuse(
                f'is not a replay: it does not say "format": "{FORMAT}"',
                hint="Write one: eplb replay PLAN --trace TRACE --format json > replay.json",
            )
        if fields.raw.get("version") != VERSION:
            fields.refuse(f"has version {shown(fields.raw.get('version'))}", rule=f"this eplb reads version {VERSION}")
        phases = tuple(_phase(entry) for entry in fields.each("phases", len(PHASES)))
        lengths = {phase.phase: len(phase.first_steps) for phase in phases}
        rows = tuple(_row(entry, lengths) for entry in fields.each("rows", MOST_ROWS))
        batches, price = fields.whole("data_parallel_size"), fields.raw.get("copy_cost_tokens")
        return cls(
            rows,
            phases,
            fields.whole("step_tokens"),
            batches,
            None if price is None else fields.whole("copy_cost_tokens"),
            None if fields.raw.get("vllms_policy") is None else fields.text("vllms_policy"),
            tuple(fields.texts("warnings")),
        )


@dataclass(frozen=True)
class _Fields:
    """An object of the document, read field by field; what is missing or of another kind is refused by name."""

    file: Path
    document: object
    name: str = "the document"

    @property
    def raw(self) -> Mapping[str, Any]:
        """The object."""
        if not isinstance(self.document, dict):
            self.refuse(f"{self.name} is {shown(self.document)}", rule="it must be an object")
        return self.document

    def refuse(self, problem: str, *, rule: str | None = None, hint: str | None = None) -> NoReturn:
        """Raise a TraceError with the file's name."""
        raise TraceError(problem, file=self.file, rule=rule, hint=hint)

    def _refuse(self, key: str, rule: str) -> NoReturn:
        self.refuse(f"{self.name}: {key} is {shown(self.raw.get(key))}", rule=f"it must be {rule}")

    def each(self, key: str, most: int) -> list[_Fields]:
        """The objects of a list of `most` at most."""
        value = self.raw.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            self._refuse(key, f"a list of 1 to {most:,} objects")
        return [_Fields(self.file, entry, f"{key}[{index}]") for index, entry in enumerate(value)]

    def part(self, key: str) -> _Fields:
        """An object in the object."""
        return _Fields(self.file, self.raw.get(key), f"{self.name}: {key}")

    def text(self, key: str) -> str:
        """A text."""
        value = self.raw.get(key)
        if not isinstance(value, str):
            self._refuse(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            self._refuse(key, "a list of texts")
        return value

    def phase(self) -> str:
        """The name of a phase."""
        if self.raw.get("phase") not in PHASES:
            self._refuse("phase", f"one of {', '.join(PHASES)}")
        return self.text("phase")

    def whole(self, key: str) -> int:
        """A whole number that is not negative."""
        value = self.raw.get(key)
        if type(value) is not int or not 0 <= value < 2**63:
            self._refuse(key, "a whole number, 0 or more")
        return value

    def number(self, key: str, least: float, most: float) -> float:
        """A number within bounds."""
        value: Any = self.raw.get(key)
        if type(value) not in (int, float) or not least <= value <= most:
            self._refuse(key, f"a number, {least:g} to {most:g}")
        return float(value)

    def list_of(self, key: str, length: int, least: float, most: float) -> list[Any]:
        """A list of so many numbers within bounds."""
        value = self.raw.get(key)
        if not isinstance(value, list) or len(value) != length:
            self._refuse(key, f"a list of {length} numbers")
        if not all(type(entry) in (int, float) and least <= entry <= most for entry in value):
            self._refuse(key, f"numbers, {least:g} to {most:g}")
        return value


def _phase(fields: _Fields) -> PhaseSteps:
    steps, first = fields.whole("steps"), fields.raw.get("first_steps")
    if (
        not isinstance(first, list)
        or not 1 <= len(first) <= MOST_STRETCHES
        or any(type(step) is not int for step in first)
    ):
        fields.refuse(
            f"{fields.name}: first_steps is {shown(first)}", rule=f"it must be a list of 1 to {MOST_STRETCHES} numbers"
        )
    if first != sorted(set(first)) or first[0] < 1:
        fields.refuse(f"{fields.name}: first_steps is {shown(first)}", rule="steps follow each other, from 1")
    return PhaseSteps(fields.phase(), steps, tuple(first))


def _row(fields: _Fields, lengths: Mapping[str, int]) -> Row:
    phase, ratios, active = fields.phase(), fields.part("max_over_mean"), fields.part("active_copies")
    if phase not in lengths:
        fields.refuse(f"{fields.name}: phase is {phase}", rule=f"the steps are of {', '.join(lengths)}")
    huge = 1e18
    return Row(
        phase,
        fields.text("plan"),
        fields.text("dispatch"),
        None if fields.raw.get("rebalance") is None else fields.text("rebalance"),
        fields.number("balancedness", 0, 1),
        ratios.number("p50", 0, huge),
        ratios.number("p95", 0, huge),
        ratios.number("worst", 0, huge),
        active.number("mean", 0, huge),
        active.whole("max"),
        None if fields.raw.get("step_time") is None else fields.number("step_time", 0, huge),
        fields.whole("rebalances"),
        fields.whole("moved_slots"),
        tuple(map(float, fields.list_of("curve", lengths[phase], 0, 1))),
    )
