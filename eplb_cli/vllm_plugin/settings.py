"""What `eplb serve` asks of the plugin, and the environment variables that carry it to every process of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from eplb_cli.errors import ServeError

__all__ = ["VARIABLES", "Dispatch", "Layout", "Policy", "Settings"]

Layout = Literal["source", "stock", "physical"]
"""How the served checkpoint numbers its experts: as the plan does, relabelled, or by slot."""

Policy = Literal["vllm", "eplb", "static"]
"""Who rearranges experts at run time: vLLM's policy, eplb's planner, or nobody."""

Dispatch = Literal["hash", "balanced"]
"""Which copy of an expert serves a token: by vLLM's hash, or by the step's load (docs/dispatch.md)."""


@dataclass(frozen=True)
class Settings:
    """The plugin's task in one run of vLLM.

    Args:
        plan: the plan file to start from, or None.
        layout: what the checkpoint's expert numbers mean.
        policy: who rearranges at run time.
        max_moves: slots that the "eplb" policy changes per rebalance at most; None for a twentieth of all slots.
        min_gain: the predicted gain in balancedness under which the "eplb" policy changes nothing.
        dispatch: which copy of an expert serves a token.
        copy_cost_tokens: what a slot that serves any token costs a step, in tokens; "balanced" weighs it.
        status_dir: where every rank writes its status record, or None.
        record_dir: where expert loads are recorded, or None.
        record_run: a name that all files of one recording share.
        record_steps: engine steps per recorded window.
        record_max_bytes: size at which a rank stops recording.
    """

    plan: Path | None = None
    layout: Layout = "source"
    policy: Policy = "vllm"
    max_moves: int | None = None
    min_gain: float = 0.02
    dispatch: Dispatch = "hash"
    copy_cost_tokens: int = 0
    status_dir: Path | None = None
    record_dir: Path | None = None
    record_run: str = "run"
    record_steps: int = 100
    record_max_bytes: int = 1 << 30

    def environment(self) -> dict[str, str]:
        """The variables that `from_environment` reads; those at their default are left out."""
        variables: dict[str, str] = {}
        for field, name in VARIABLES.items():
            value = getattr(self, field)
            if value is not None and value != getattr(Settings, field):
                variables[name] = str(value)
        return variables

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Read the variables.

        Raises:
            ServeError: a variable has a value that it cannot have.
        """

        def text(field: str) -> str | None:
            return environment.get(VARIABLES[field])

        def path(field: str) -> Path | None:
            value = text(field)
            return Path(value) if value else None

        def number(field: str, default: int) -> int:
            value = text(field)
            if value is None:
                return default
            if not value.isdecimal():
                raise ServeError(f"{VARIABLES[field]} is {value!r}", rule="it must be a whole number")
            return int(value)

        layout, policy = text("layout") or cls.layout, text("policy") or cls.policy
        dispatch = text("dispatch") or cls.dispatch
        for name, value, legal in (
            (VARIABLES["layout"], layout, get_args(Layout)),
            (VARIABLES["policy"], policy, get_args(Policy)),
            (VARIABLES["dispatch"], dispatch, get_args(Dispatch)),
        ):
            if value not in legal:
                raise ServeError(f"{name} is {value!r}", rule=f"it must be one of {', '.join(legal)}")
        try:
            min_gain = float(text("min_gain") or cls.min_gain)
        except ValueError:
            raise ServeError(f"{VARIABLES['min_gain']} is {text('min_gain')!r}", rule="it must be a number") from None
        return cls(
            plan=path("plan"),
            layout=layout,  # type: ignore[arg-type]
            policy=policy,  # type: ignore[arg-type]
            max_moves=None if text("max_moves") is None else number("max_moves", 0),
            min_gain=min_gain,
            dispatch=dispatch,  # type: ignore[arg-type]
            copy_cost_tokens=number("copy_cost_tokens", cls.copy_cost_tokens),
            status_dir=path("status_dir"),
            record_dir=path("record_dir"),
            record_run=text("record_run") or cls.record_run,
            record_steps=max(1, number("record_steps", cls.record_steps)),
            record_max_bytes=number("record_max_bytes", cls.record_max_bytes),
        )


VARIABLES = {
    "plan": "EPLB_PLAN",
    "layout": "EPLB_LAYOUT",
    "policy": "EPLB_RUNTIME_POLICY",
    "max_moves": "EPLB_MAX_MOVES",
    "min_gain": "EPLB_MIN_GAIN",
    "dispatch": "EPLB_DISPATCH",
    "copy_cost_tokens": "EPLB_COPY_COST_TOKENS",
    "status_dir": "EPLB_STATUS_DIR",
    "record_dir": "EPLB_RECORD_DIR",
    "record_run": "EPLB_RECORD_RUN",
    "record_steps": "EPLB_RECORD_STEPS",
    "record_max_bytes": "EPLB_RECORD_MAX_BYTES",
}
"""Name of the variable for each field."""
