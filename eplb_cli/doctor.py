"""What `eplb serve` would meet here: vLLM, the plugin, a GPU, and variables that change what happens."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from eplb_cli.errors import EplbError, ServeError
from eplb_cli.placement import Placement
from eplb_cli.serve.installed import SAFE_PATH, ask, plugin_names, vllm_command
from eplb_cli.versions import installed_versions
from eplb_cli.vllm_plugin.settings import VARIABLES, Settings

__all__ = ["Finding", "examine"]

OLDEST_VLLM = (0, 14)
"""The first vLLM whose `--eplb-config` and `--enable-eplb` are those that `eplb serve` writes."""
EPLB_PLATFORMS = ("cuda", "rocm", "xpu")
"""Platforms on which vLLM allows EPLB."""
PLUGIN_GROUP = "vllm.general_plugins"

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at.

    Args:
        name: what was looked at.
        status: "problem" when `eplb serve` with a plan, or vLLM with our variables, would not do what was asked for.
        found: what is there.
        hint: the next step, when there is one.
    """

    name: str
    status: Status
    found: str
    hint: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"name": self.name, "status": self.status, "found": self.found, "hint": self.hint}


def examine(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at this Python environment and machine, in the order in which serving depends on them."""
    versions = installed_versions("eplb", "vllm", "torch", "transformers")
    findings = [
        Finding(
            "Python", "ok", f"{platform.python_version()}, eplb {versions.get('eplb', 'not installed')} in {sys.prefix}"
        ),
        Finding(
            "libraries",
            "ok",
            ", ".join(f"{name} {versions.get(name, 'not installed')}" for name in ("torch", "transformers")),
        ),
    ]
    if "vllm" not in versions:
        hint = "Install vLLM in this environment to serve; profile, plan, convert and verify work without it."
        findings.append(Finding("vLLM", "problem", "not installed in this environment", hint))
    else:
        findings += _vllm(versions["vllm"], environment)
    findings += [_plugin(), _plugin_filter(environment), *_our_variables(environment)]
    if "vllm" in versions:
        findings.append(_command())
    return findings


def _vllm(version: str, environment: Mapping[str, str]) -> list[Finding]:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if len(numbers) == 2 and numbers < OLDEST_VLLM:
        oldest = ".".join(map(str, OLDEST_VLLM))
        return [Finding("vLLM", "problem", f"{version} is too old", f"`eplb serve` needs vLLM {oldest} or later.")]
    try:
        seen = ask("eplb_cli.vllm_plugin.environment", {}, environment)
    except ServeError as error:
        hint = f"Run: {shlex.join([sys.executable, '-P', '-c', 'import vllm'])}"
        return [Finding("vLLM", "problem", f"{version}, but {error}", hint)]
    return [Finding("vLLM", "ok", f"{seen['vllm']} imports"), _accelerator(seen)]


def _accelerator(seen: Mapping[str, Any]) -> Finding:
    devices, kind = seen["devices"], seen["platform"]
    named = ", ".join(f"{devices.count(name)} x {name}" for name in dict.fromkeys(devices))
    if kind not in EPLB_PLATFORMS:
        hint = "vLLM allows EPLB on CUDA, ROCm and XPU only; a checkpoint of the stock layout serves without EPLB."
        return Finding("accelerator", "problem", f"none that vLLM sees (its platform is {kind})", hint)
    if not devices:
        hint = "See CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES, ZE_AFFINITY_MASK) and the driver."
        return Finding("accelerator", "problem", f"vLLM is built for {kind}, torch sees no device", hint)
    if len(devices) == 1:
        hint = "Expert parallelism needs two ranks or more; more of them may be on other nodes."
        return Finding("accelerator", "warning", f"{named} ({kind})", hint)
    return Finding("accelerator", "ok", f"{named} ({kind})")


def _plugin() -> Finding:
    found = [point.value for point in metadata.entry_points(group=PLUGIN_GROUP) if point.name == "eplb"]
    if not found:
        hint = "Install eplb into the environment of vLLM: pip install eplb"
        return Finding("plugin", "problem", f"no entry point `eplb` in {PLUGIN_GROUP}", hint)
    if len(set(found)) > 1:
        return Finding("plugin", "problem", f"several entry points are called eplb: {', '.join(sorted(set(found)))}")
    return Finding("plugin", "ok", f"entry point {found[0]} in {PLUGIN_GROUP}")


def _plugin_filter(environment: Mapping[str, str]) -> Finding:
    given = environment.get("VLLM_PLUGINS")
    if given is None:
        return Finding("VLLM_PLUGINS", "ok", "not set: vLLM loads every plugin")
    names = [name.strip() for name in given.split(",")]
    if "eplb" in names:
        return Finding("VLLM_PLUGINS", "ok", f"{given!r} names eplb")
    wanted = shlex.quote(",".join([*filter(None, names), "eplb"]))
    hint = f"`eplb serve` adds eplb to it. Before a plain `vllm serve`: export VLLM_PLUGINS={wanted}"
    return Finding("VLLM_PLUGINS", "problem", f"{given!r} hides the plugin from a plain `vllm serve`", hint)


def _our_variables(environment: Mapping[str, str]) -> list[Finding]:
    """What every vLLM started from this shell would be told by variables that are already set."""
    present = {name: environment[name] for name in VARIABLES.values() if name in environment}
    if not present:
        return [Finding("EPLB variables", "ok", "none set: vLLM starts as if the plugin were not there")]
    listed = " ".join(f"{name}={shlex.quote(value)}" for name, value in sorted(present.items()))
    try:
        settings = Settings.from_environment(environment)
        if settings.plan is not None:
            Placement.load(settings.plan)
    except EplbError as error:
        return [Finding("EPLB variables", "problem", f"{listed}: {error}", f"unset {' '.join(sorted(present))}")]
    hint = f"Every vLLM of this shell obeys them. To undo: unset {' '.join(sorted(present))}"
    return [Finding("EPLB variables", "warning", listed, hint)]


def _command() -> Finding:
    variables = {**SAFE_PATH, **plugin_names(), "EPLB_PLAN": "PLAN"}
    words = [*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(vllm_command())]
    found = f"{' '.join(words)} serve MODEL --enable-expert-parallel --enable-eplb ..."
    script = Path(sys.executable).with_name("vllm")
    if not script.is_file():
        return Finding(
            "eplb serve", "warning", found, "There is no `vllm` script beside this Python; its module is run."
        )
    return Finding("eplb serve", "ok", found)
