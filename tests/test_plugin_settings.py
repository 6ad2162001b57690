"""The variables that carry the plugin's task from `eplb serve` to every process of vLLM."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from eplb_cli.errors import ServeError
from eplb_cli.vllm_plugin.settings import Settings

EVERYTHING = Settings(
    plan=Path("/p/plan.json"), layout="physical", policy="eplb", max_moves=0, min_gain=0.5, dispatch="balanced",
    copy_cost_tokens=90, status_dir=Path("/s"), record_dir=Path("/r"), record_run="noon", record_steps=7,
    record_max_bytes=0,
)  # fmt: skip
VARIABLES = {
    "EPLB_PLAN": "/p/plan.json",
    "EPLB_LAYOUT": "physical",
    "EPLB_RUNTIME_POLICY": "eplb",
    "EPLB_MAX_MOVES": "0",
    "EPLB_MIN_GAIN": "0.5",
    "EPLB_DISPATCH": "balanced",
    "EPLB_COPY_COST_TOKENS": "90",
    "EPLB_STATUS_DIR": "/s",
    "EPLB_RECORD_DIR": "/r",
    "EPLB_RECORD_RUN": "noon",
    "EPLB_RECORD_STEPS": "7",
    "EPLB_RECORD_MAX_BYTES": "0",
}


def test_each_field_has_its_variable() -> None:
    assert EVERYTHING.environment() == VARIABLES
    assert Settings.from_environment(VARIABLES) == EVERYTHING
    assert all(getattr(EVERYTHING, field.name) != field.default for field in fields(Settings))


def test_without_variables_all_is_at_its_default() -> None:
    assert Settings.from_environment({"EPLB_OTHER": "1"}) == Settings()
    assert Settings().environment() == {}


@pytest.mark.parametrize(
    "name, value, rule",
    [
        ("EPLB_LAYOUT", "sorted", "it must be one of source, stock, physical"),
        ("EPLB_RUNTIME_POLICY", "none", "it must be one of vllm, eplb, static"),
        ("EPLB_DISPATCH", "even", "it must be one of hash, balanced"),
        ("EPLB_COPY_COST_TOKENS", "0.5", "it must be a whole number"),
        ("EPLB_MAX_MOVES", "-1", "it must be a whole number"),
        ("EPLB_MIN_GAIN", "much", "it must be a number"),
        ("EPLB_RECORD_STEPS", "1.5", "it must be a whole number"),
    ],
)
def test_a_value_that_cannot_be_is_refused(name: str, value: str, rule: str) -> None:
    with pytest.raises(ServeError, match=rule) as caught:
        Settings.from_environment({name: value})
    assert f"{name} is {value!r}" in str(caught.value)
