"""`eplb doctor` and `eplb --version`: real look-ups, and for each finding an environment that draws it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.doctor import Finding, _accelerator, _our_variables, _plugin, _plugin_filter, _vllm, examine
from eplb_cli.placement import Placement
from eplb_cli.versions import installed_versions
from tests.conftest import Run

Eplb = Callable[..., Run]


def test_versions_are_those_of_the_installed_distributions() -> None:
    assert installed_versions("torch", "no-such-thing") == {"torch": metadata.version("torch")}


def test_the_plugin_of_this_installation_is_seen() -> None:
    assert _plugin() == Finding("plugin", "ok", "entry point eplb_cli.vllm_plugin:register in vllm.general_plugins")


def test_an_environment_without_anything_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    problems = {finding.name for finding in examine({}) if finding.status == "problem"}
    assert problems == {"vLLM", "plugin"}


@pytest.mark.parametrize(
    ("value", "status"),
    [
        (None, "ok"),
        ("eplb", "ok"),
        ("lora, eplb", "ok"),
        ("lora", "problem"),
        ("", "problem"),
        ("eplb_other", "problem"),
    ],
)
def test_a_filter_that_hides_the_plugin_is_a_problem(value: str | None, status: str) -> None:
    finding = _plugin_filter({} if value is None else {"VLLM_PLUGINS": value})
    assert finding.status == status


def test_the_filter_to_set_keeps_what_was_named() -> None:
    assert "export VLLM_PLUGINS=lora,eplb" in str(_plugin_filter({"VLLM_PLUGINS": "lora"}).hint)


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        ({"platform": "cuda", "devices": ["H200"] * 8}, "ok"),
        ({"platform": "cuda", "devices": ["H200"]}, "warning"),
        ({"platform": "cuda", "devices": []}, "problem"),
        ({"platform": "cpu", "devices": []}, "problem"),
    ],
)
def test_serving_a_plan_needs_accelerators_that_vllm_sees(seen: dict[str, Any], status: str) -> None:
    assert _accelerator(seen).status == status


def test_devices_are_counted_by_name() -> None:
    assert _accelerator({"platform": "cuda", "devices": ["H200"] * 8}).found == "8 x H200 (cuda)"


def test_an_old_vllm_is_named_before_it_is_imported() -> None:
    [finding] = _vllm("0.13.2", {})
    assert finding.status == "problem" and "0.14 or later" in str(finding.hint)


def test_a_vllm_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open')\n")
    [finding] = _vllm("0.32.0", {**os.environ, "PYTHONPATH": str(tmp_path)})
    assert finding.status == "problem" and "libcudart.so.13: cannot open" in finding.found


def test_variables_left_in_the_shell_are_reported(tmp_path: Path) -> None:
    Placement.initial(4, 0, 2, [0]).save(tmp_path / "plan.json")
    [finding] = _our_variables({"EPLB_PLAN": str(tmp_path / "plan.json")})
    assert finding.status == "warning" and "unset EPLB_PLAN" in str(finding.hint)


def test_a_variable_that_names_no_plan_is_a_problem(tmp_path: Path) -> None:
    [finding] = _our_variables({"EPLB_PLAN": str(tmp_path / "gone.json")})
    assert finding.status == "problem" and "no such file" in finding.found


@pytest.mark.vllm
def test_the_command_asks_the_real_vllm(eplb: Eplb, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_PLUGINS", "lora")
    run = eplb("doctor", "--format", "json")
    found = {finding["name"]: finding for finding in run.json["findings"]}
    assert found["vLLM"]["status"] == "ok"
    assert found["VLLM_PLUGINS"]["status"] == "problem"
    assert (run.code, run.json["ok"]) == (1, False)
    assert "serve MODEL" in found["eplb serve"]["found"]


def test_people_see_each_finding_and_the_next_step(eplb: Eplb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.doctor.examine", lambda: [Finding("plugin", "problem", "not there", "Install it.")])
    run = eplb("doctor")
    assert run.code == 1 and "PROBLEM" in run.out and "→ Install it." in run.out


def test_a_healthy_environment_is_exit_0(eplb: Eplb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.doctor.examine", lambda: [Finding("plugin", "ok", "there")])
    assert eplb("doctor").code == 0


def test_the_version_names_what_it_runs_with(eplb: Eplb) -> None:
    out = eplb("--version").out
    assert out.startswith("eplb ") and f"torch {metadata.version('torch')}" in out and out.count("\n") == 1
