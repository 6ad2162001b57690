"""From a model and a plan to the exact `vllm serve` command, with every check that can be made before it starts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint import Model
from eplb_cli.errors import CheckpointError, PlacementError, ServeError, UsageError
from eplb_cli.placement import PLAN_FILE, Placement
from eplb_cli.serve.arguments import EngineArguments, read_arguments
from eplb_cli.serve.checks import (
    check_loading,
    check_model,
    check_partners,
    check_topology,
    static_config,
    tensor_parallel_size,
    wants_eplb,
)
from eplb_cli.serve.installed import SAFE_PATH, ask, is_installed, plugin_names, vllm_command
from eplb_cli.vllm_plugin.settings import Dispatch, Layout, Policy, Settings

__all__ = ["Launch", "prepare", "without_plan"]


@dataclass(frozen=True)
class Launch:
    """A `vllm serve` that has passed all checks.

    Args:
        command: the exact command.
        environment: the variables that eplb adds to its own environment.
        settings: what the plugin is asked to do, or None when vLLM runs without it.
        plan_sha256: digest of the plan's meaning, or None without a plan.
        ep_size, stages: EP ranks, and pipeline stages, whose records prove the plan.
        arguments: the user's arguments as read.
        notes, warnings: what the user should know before it starts.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    settings: Settings | None
    layout: Layout
    plan_sha256: str | None
    ep_size: int
    stages: int
    num_redundant_experts: int
    arguments: EngineArguments
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def proven_by_plugin(self) -> bool:
        """True when every rank must report that it started from the plan."""
        return self.settings is not None and self.settings.plan is not None

    def shell(self) -> str:
        """The command with its environment, to paste into a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in sorted(self.environment.items())]
        return " ".join([*variables, shlex.join(self.command)])

    def report(self) -> dict[str, Any]:
        """What `--dry-run --format json` prints."""
        return {
            "command": list(self.command),
            "environment": dict(sorted(self.environment.items())),
            "layout": self.layout,
            "plan_sha256": self.plan_sha256,
            "ep_size": self.ep_size,
            "num_redundant_experts": self.num_redundant_experts,
            "policy": self.settings.policy if self.settings else None,
            "dispatch": self.settings.dispatch if self.proven_by_plugin and self.settings else None,
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


def prepare(
    model: str,
    plan: Path | None,
    arguments: Sequence[str],
    *,
    policy: Policy | None = None,
    record: Path | None = None,
    record_steps: int = Settings.record_steps,
    max_moves: int | None = None,
    min_gain: float = Settings.min_gain,
    dispatch: Dispatch = Settings.dispatch,
    copy_cost_tokens: int = Settings.copy_cost_tokens,
    dry_run: bool = False,
) -> Launch:
    """Check everything that can be checked before vLLM starts, and derive its flags from the plan.

    Args:
        model: a folder or a repository id; of a folder that `eplb convert` wrote, its own plan is the default.
        plan: the plan, or None.
        arguments: for `vllm serve`.
        policy: who rearranges at run time; None leaves it to vLLM's policy where EPLB runs at all.
        record: a folder to record expert loads to.
        max_moves, min_gain: bounds of the "eplb" policy, see `Settings`.
        dispatch, copy_cost_tokens: which copy of an expert serves a token, see `Settings`.
        dry_run: allow that no vLLM is installed here.

    Raises:
        UsageError: the arguments contradict the plan or each other; one line says which flag to change.
        PlacementError, CheckpointError: the plan or the model is unusable, or they do not belong together.
        ServeError: vLLM is not installed, or its own parser refuses the arguments.
    """
    given = read_arguments(arguments)
    check_partners(given)
    opened, layout, placement, plan = _what_to_serve(model, plan)
    if placement is None and record is None:
        raise UsageError("there is neither a plan nor anything to record", rule="give --plan PLAN or --record DIR")
    if placement is None and policy is not None:
        raise UsageError("a run-time policy without a plan", rule="--static and --runtime-policy need --plan")
    if dispatch == "balanced" and (placement is None or not placement.num_redundant_experts):
        what = "a plan" if placement is None else "copies in the plan"
        raise UsageError(f"--dispatch balanced without {what}", rule="it chooses among the copies of an expert")
    flags: list[str] = []
    warnings: tuple[str, ...] = ()
    eplb_config = dict(given.eplb_config)
    use_eplb = bool(given.enable_eplb)
    notes: list[str] = []
    if opened is not None and placement is not None and plan is not None:
        placement.require_distinct_copies(plan)
        check_model(opened, plan, placement, layout)
        check_topology(given, placement)
        flags += [] if given.enable_expert_parallel else ["--enable-expert-parallel"]
        size = tensor_parallel_size(given, placement)
        if size is not None:
            flags += ["--tensor-parallel-size", str(size)]
            notes.append(f"Neither -tp nor -dp was given: --tensor-parallel-size {size} is the plan's EP size.")
        use_eplb = wants_eplb(given, placement, layout, policy)
        if use_eplb:
            check_loading(given, layout)
            flags += [] if given.enable_eplb else ["--enable-eplb"]
            eplb_config |= {"num_redundant_experts": placement.num_redundant_experts}
            eplb_config |= static_config(eplb_config) if policy == "static" else {}
        notes += [*_memory_notes(opened, placement, layout), _mode_note(policy, use_eplb)]
        if use_eplb and placement.num_redundant_experts:
            notes.append(_dispatch_note(dispatch))
            warnings = _dispatch_warnings(dispatch, placement)
    settings = None
    if plan is not None and use_eplb:
        settings = Settings(plan.resolve(), layout, policy or "vllm", max_moves, min_gain, dispatch, copy_cost_tokens)
    settings = _with_recording(settings, record, record_steps)
    tail = ["--eplb-config", json.dumps(eplb_config, sort_keys=True)] if eplb_config else []
    launch = Launch(
        command=(*vllm_command(), "serve", model, *given.rest, *flags, *tail),
        environment=_environment(given, settings),
        settings=settings,
        layout=layout,
        plan_sha256=None if placement is None else placement.map_sha256,
        ep_size=0 if placement is None else placement.ep_size,
        stages=given.pipeline_parallel_size,
        num_redundant_experts=0 if placement is None else placement.num_redundant_experts,
        arguments=given,
        notes=(*notes, *_node_notes(given, settings)),
        warnings=warnings,
    )
    if is_installed():
        _ask_vllm(launch, opened)
        return launch
    if not dry_run:
        raise ServeError(
            "vLLM is not installed in this Python environment", hint="pip install 'eplb[vllm]', beside vLLM"
        )
    unchecked = "vLLM is not installed here: the command was not checked against it."
    return replace(launch, warnings=(*launch.warnings, unchecked))


def without_plan(launch: Launch, model: str) -> Launch:
    """The same server of the unconverted `model` without EPLB and without the plugin, to compare with."""
    start = launch.command.index("serve") + 2
    tokens = [word for word in launch.command[start:] if word != "--enable-eplb"]
    if "--eplb-config" in tokens:
        index = tokens.index("--eplb-config")
        del tokens[index : index + 2]
    if "--config" in tokens:
        # The file may ask for EPLB and for copies.
        tokens += ["--no-enable-eplb", "--eplb-config", '{"num_redundant_experts": 0}']
    return replace(
        launch,
        command=(*launch.command[: start - 1], model, *tokens),
        environment=SAFE_PATH,
        settings=None,
        layout="source",
        plan_sha256=None,
    )


def _what_to_serve(model: str, plan: Path | None) -> tuple[Model | None, Layout, Placement | None, Path | None]:
    """The model (None where nothing need be known of it), how it numbers its experts, the plan and the plan's file."""
    try:
        opened = Model.open(model)
    except CheckpointError:
        if plan is not None or (Path(model) / PLAN_FILE).exists():
            raise
        # To record the loads of a model, eplb need not know its family.
        return None, "source", None, None
    if opened.placement is None:
        if plan is None:
            return opened, "source", None, None
        file = plan / PLAN_FILE if plan.is_dir() else plan
        return opened, "source", Placement.load(file), file
    folder = opened.config.file.parent
    own = Placement.load(folder)
    if opened.placement.get("plan_sha256") != own.map_sha256:
        raise ServeError(
            f"{PLAN_FILE} is not the plan that config.json names", file=opened.config.file, hint="Convert again."
        )
    if plan is not None and Placement.load(plan).map_sha256 != own.map_sha256:
        raise PlacementError(
            "is not the plan that the checkpoint was converted with",
            file=plan,
            hint=f"Leave --plan out: {folder} holds its own.",
        )
    return opened, opened.placement["layout"], own, folder / PLAN_FILE


def _with_recording(settings: Settings | None, record: Path | None, record_steps: int) -> Settings | None:
    """What the plugin is asked to do, with a recording; None when vLLM needs none of it."""
    if record is not None:
        return replace(
            settings or Settings(),
            record_dir=record.resolve(),
            record_run=f"run-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:6]}",
            record_steps=record_steps,
        )
    return settings


def _environment(given: EngineArguments, settings: Settings | None) -> dict[str, str]:
    if settings is None:
        return dict(SAFE_PATH)
    return {**SAFE_PATH, **settings.environment(), **plugin_names(), **(_ray_environment() if _on_ray(given) else {})}


def _memory_notes(model: Model, placement: Placement, layout: Layout) -> list[str]:
    redundant = placement.num_redundant_experts
    if not redundant or layout == "physical":
        return []
    with contextlib.suppress(CheckpointError):  # sizes are a courtesy; vLLM reads the weights itself
        extra = sum(model.expert_bytes.by_layer.values()) * redundant / placement.ep_size
        return [f"{redundant} redundant experts take {extra / 2**30:.3g} GiB of weights per rank."]
    return []


def _mode_note(policy: Policy | None, use_eplb: bool) -> str:
    if not use_eplb:
        return "The placement is in the checkpoint's expert numbers: it runs without EPLB, and nothing rebalances it."
    if policy == "static":
        return (
            "Static: no rebalancing, no load recording and no rebalancing thread. What stays is EPLB's own cost: one "
            "small kernel per MoE layer that maps experts to slots, and no monolithic MoE kernels."
        )
    if policy == "eplb":
        return "eplb's planner rebalances at run time from the live placement, a bounded number of slots at a time."
    return (
        "vLLM's own policy rebalances a full interval after the start and does not keep the plan. Pass --static to "
        "keep it, or --runtime-policy eplb to adapt it in small steps."
    )


def _dispatch_note(dispatch: Dispatch) -> str:
    if dispatch == "hash":
        return "Copies are chosen by vLLM's hash: an even split on average."
    return (
        "Copies are chosen by each step's load. No GPU has run this yet: every rank tries it on a batch before it "
        "serves, and the server stops when ranks choose differently."
    )


def _dispatch_warnings(dispatch: Dispatch, placement: Placement) -> tuple[str, ...]:
    """A plan is only as good as its figure under the rule that it is served by."""
    planned, figures = placement.provenance.dispatch, placement.provenance.balancedness
    if dispatch != "hash" or planned != "balanced":
        return ()
    even = figures.get("even")
    known = "" if even is None else f", {even:.4f} when copies share evenly, as they do under vLLM's hash"
    after = figures.get("after")
    promised = "" if after is None else f": balancedness {after:.4f} under that rule{known}"
    return (f"The plan is made for --dispatch balanced{promised}. Serve it so, or plan without --dispatch.",)


def _on_ray(given: EngineArguments) -> bool:
    return "ray" in (given.distributed_executor_backend, given.data_parallel_backend)


def _ray_environment() -> dict[str, str]:
    """Ray's workers get variables by prefix; without this they would not see the plan."""
    name = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
    prefixes = [prefix for prefix in os.environ.get(name, "").split(",") if prefix]
    return {name: ",".join(dict.fromkeys([*prefixes, "EPLB_"]))}


def _node_notes(given: EngineArguments, settings: Settings | None) -> list[str]:
    several = (
        given.nnodes > 1
        or given.headless
        or given.data_parallel_rank is not None
        or (given.data_parallel_size_local is not None and given.data_parallel_size_local < given.data_parallel_size)
        or _on_ray(given)
    )
    if not several or settings is None:
        return []
    where = settings.plan or settings.record_dir
    if _on_ray(given):
        return [
            f"Several nodes: each needs eplb installed beside vLLM, and {where} at the same path. Ray hands the EPLB_ "
            "variables to its workers."
        ]
    return [
        "Several nodes: run this same `eplb serve` on each, with that node's own flags; each needs eplb installed "
        f"beside vLLM, and {where} at the same path. All ranks compare the plan's hash before anything moves."
    ]


def _ask_vllm(launch: Launch, model: Model | None) -> None:
    """Let the installed vLLM read the final command and look the model up, and compare its answer with what was meant.

    Raises:
        ServeError: its parser refuses the arguments or means something else by them, or it cannot run the model, or
            the model's quantisation, under EPLB.
    """
    question = {
        "arguments": launch.command[launch.command.index("serve") + 1 :],
        "architecture": None if model is None else model.shape.architecture,
        "quantisation": None if model is None else model.quantisation_method,
    }
    answer = ask("eplb_cli.vllm_plugin.arguments", question)
    vllm = f"vLLM {answer['version']}"
    if "error" in answer:
        raise ServeError(f"{vllm} refuses the arguments: {answer['error']}")
    values = answer["values"]
    meant = {"enable_expert_parallel": True} if launch.plan_sha256 else {}
    if launch.proven_by_plugin:
        meant["enable_eplb"] = True
    for name, value in meant.items():
        if name not in values:
            raise ServeError(f"{vllm} has no --{name.replace('_', '-')}", hint="Use vLLM 0.14 or later.")
        if values[name] != value:
            raise ServeError(f"{vllm} reads {name} as {values[name]}, {value} was meant")
    sizes = ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size")
    ranks = math.prod(values.get(name) or 1 for name in sizes)
    if launch.plan_sha256 and ranks != launch.ep_size:
        raise ServeError(f"{vllm} makes {ranks} EP ranks of the arguments, the plan is for {launch.ep_size}")
    for what, runs in answer["eplb"].items():
        if not runs:
            raise ServeError(
                f"{vllm} cannot run {question[what]} under EPLB on this machine's platform",
                rule=f"it has no support for this {what}",
                hint="A plan without redundant experts, converted with --layout stock, needs no EPLB.",
            )
