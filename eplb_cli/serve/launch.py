"""From a model and a plan to the exact `vllm serve` command, with every check that can be made before it starts."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint import read_expert_bytes, read_model_shape
from eplb_cli.checkpoint.config import PLACEMENT_KEY
from eplb_cli.errors import EplbError, PlacementError, ServeError, UsageError
from eplb_cli.placement import PLAN_FILE, Placement
from eplb_cli.serve.arguments import EngineArguments, read_arguments
from eplb_cli.vllm_plugin.settings import VARIABLES, Layout, Policy, Settings

__all__ = ["Launch", "plugin_names", "prepare", "vllm_command", "without_plan"]

NEVER_STEPS = 1_000_000_000
"""The largest rebalance interval that any vLLM takes; the plugin sets a longer one."""

_WEIGHT_ORDER_KNOWN = {
    "auto", "hf", "safetensors", "pt", "npcache", "mistral", "dummy", "fastsafetensors", "instanttensor",
    "runai_streamer",
}  # fmt: skip
"""Load formats that fill the slots from a checkpoint's own names; others restore another run's memory."""

_READS_SLOTS = {"auto", "hf", "safetensors", "instanttensor"}
_NO_EPLB_METHODS = {"awq", "awq_marlin", "bitsandbytes", "gguf", "gptq", "gptq_marlin", "moe_wna16"}
"""Quantisation methods whose vLLM kernels do not take EPLB."""


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
        dry_run: allow that no vLLM is installed here.

    Raises:
        UsageError: the arguments contradict the plan or each other; one line says which flag to change.
        PlacementError, CheckpointError: the plan or the model is unusable, or they do not belong together.
        ServeError: vLLM is not installed, or its own parser refuses the arguments.
    """
    given = read_arguments(arguments)
    notes: list[str] = []
    warnings: list[str] = []
    folder = Path(model)
    layout, own = _layout(folder)
    if own is not None and plan is not None and Placement.load(plan).map_sha256 != own.map_sha256:
        raise PlacementError(
            "is not the plan that the checkpoint was converted with",
            file=plan,
            hint=f"Leave --plan out: {folder} holds its own.",
        )
    placement = own or (None if plan is None else Placement.load(plan))
    if own is not None:
        plan = folder / PLAN_FILE
    elif plan is not None and plan.is_dir():
        plan = plan / PLAN_FILE
    if placement is None and record is None:
        raise UsageError("there is neither a plan nor anything to record", rule="give --plan PLAN or --record DIR")
    flags: list[str] = []
    eplb_config = dict(given.eplb_config)
    use_eplb = bool(given.enable_eplb)
    _check_partners(given)
    if placement is None and policy is not None:
        raise UsageError("a run-time policy without a plan", rule="--static and --runtime-policy need --plan")
    if placement is not None:
        placement.require_distinct_copies(plan)
        _check_model(model, plan, placement, layout)
        flags += _parallel_flags(given, placement, notes)
        use_eplb = _wants_eplb(given, placement, layout, policy)
        if use_eplb:
            flags += [] if given.enable_eplb else ["--enable-eplb"]
            eplb_config["num_redundant_experts"] = placement.num_redundant_experts
            _check_loading(given, layout)
            if policy == "static":
                _make_static(eplb_config)
        notes += _memory_notes(model, placement, layout)
        warnings += _quantisation_warnings(folder)
    settings = None
    if use_eplb and placement is not None and plan is not None:
        settings = Settings(
            plan=plan.resolve(),
            layout=layout,
            policy=policy or "vllm",
            max_moves=max_moves,
            min_gain=min_gain,
        )
    if record is not None:
        settings = replace(
            settings or Settings(),
            record_dir=record.resolve(),
            record_run=f"run-{time.strftime('%Y%m%dT%H%M%S')}-{uuid.uuid4().hex[:6]}",
            record_steps=record_steps,
        )
    tail = ["--eplb-config", json.dumps(eplb_config, sort_keys=True)] if eplb_config else []
    command = (*vllm_command(dry_run, warnings), "serve", model, *given.rest, *flags, *tail)
    notes += _mode_notes(placement, layout, policy, use_eplb)
    environment = {} if settings is None else {**settings.environment(), **plugin_names()}
    if settings is not None and "ray" in (given.distributed_executor_backend, given.data_parallel_backend):
        environment |= _ray_environment()
    nodes = _node_notes(given, settings)
    launch = Launch(
        command=command,
        environment=environment,
        settings=settings,
        layout=layout,
        plan_sha256=None if placement is None else placement.map_sha256,
        ep_size=0 if placement is None else placement.ep_size,
        stages=given.pipeline_parallel_size,
        num_redundant_experts=0 if placement is None else placement.num_redundant_experts,
        arguments=given,
        notes=(*notes, *nodes),
        warnings=tuple(warnings),
    )
    _ask_vllm(launch, dry_run)
    return launch


def without_plan(launch: Launch, model: str) -> Launch:
    """The same server of the unconverted `model` without EPLB and without the plugin, to compare with."""
    start = launch.command.index("serve") + 2
    dropped = {"--enable-eplb"}
    tokens = [token for token in launch.command[start:] if token not in dropped]
    if "--eplb-config" in tokens:
        index = tokens.index("--eplb-config")
        del tokens[index : index + 2]
    return replace(
        launch,
        command=(*launch.command[: start - 1], model, *tokens),
        environment={},
        settings=None,
        layout="source",
        plan_sha256=None,
    )


def _layout(folder: Path) -> tuple[Layout, Placement | None]:
    """How a converted folder stores its experts, and its plan; ("source", None) for any other model."""
    file = folder / "config.json"
    if not file.is_file():
        return "source", None
    try:
        record = json.loads(file.read_bytes()).get(PLACEMENT_KEY)
    except (ValueError, AttributeError):
        raise ServeError("is not a model's config.json", file=file) from None
    if record is None:
        return "source", None
    layout = record.get("layout")
    if layout not in ("stock", "physical"):
        raise ServeError(f"`eplb_placement` names the layout {layout!r}", file=file, rule="known: stock, physical")
    placement = Placement.load(folder)
    if record.get("plan_sha256") != placement.map_sha256:
        raise ServeError(f"{PLAN_FILE} is not the plan that config.json names", file=file, hint="Convert again.")
    return layout, placement


def _check_partners(given: EngineArguments) -> None:
    """Refuse a flag whose partner the user left out or switched off."""
    redundant = given.eplb_config.get("num_redundant_experts", 0)
    if redundant and not given.enable_eplb:
        raise UsageError(
            f"num_redundant_experts is {redundant} without --enable-eplb", rule="add --enable-eplb",
            hint="Or leave both out: with --plan, eplb sets them from the plan.",
        )  # fmt: skip
    if given.enable_eplb and not given.enable_expert_parallel:
        raise UsageError(
            "--enable-eplb without --enable-expert-parallel", rule="add --enable-expert-parallel",
            hint="Or leave both out: with --plan, eplb sets them from the plan.",
        )  # fmt: skip


def _check_model(model: str, plan: Path | None, placement: Placement, layout: Layout) -> None:
    """The plan's experts and layers must be the model's."""
    shape = read_model_shape(model)
    if shape.num_experts != placement.num_experts:
        raise PlacementError(
            f"the plan has {placement.num_experts} experts, {shape.architecture} has {shape.num_experts}",
            file=plan,
            rule="a plan is for one model",
        )
    planned, actual = set(placement.layer_ids.tolist()), set(shape.moe_layer_ids or ())
    if layout == "source" and actual and planned != actual:
        missing, foreign = sorted(actual - planned), sorted(planned - actual)
        what = f"lacks the MoE layers {missing}" if missing else f"has the layers {foreign}, which are not MoE layers"
        raise PlacementError(
            f"the plan {what}",
            file=plan,
            layer=(missing or foreign)[0],
            hint=f"eplb plan LOADS --model {model} -o PLAN",
        )


def _parallel_flags(given: EngineArguments, placement: Placement, notes: list[str]) -> list[str]:
    """Expert parallelism over exactly the plan's ranks."""
    if given.enable_elastic_ep:
        raise UsageError("--enable-elastic-ep", rule="a plan is for a fixed number of ranks")
    if given.enable_expert_parallel is False:
        raise UsageError(
            "--no-enable-expert-parallel", rule=f"the plan is for expert parallelism over {placement.ep_size} ranks"
        )
    if given.expert_placement_strategy != "linear":
        raise UsageError(
            f"--expert-placement-strategy {given.expert_placement_strategy}", rule="the plan says where experts are"
        )
    redundant = given.eplb_config.get("num_redundant_experts")
    if redundant is not None and redundant != placement.num_redundant_experts:
        raise UsageError(
            f"the plan has {placement.num_redundant_experts} redundant experts, --eplb-config says {redundant}",
            rule="leave num_redundant_experts out, or make it the plan's",
        )
    flags = [] if given.enable_expert_parallel else ["--enable-expert-parallel"]
    sizes = {"tensor_parallel_size": "TP", "data_parallel_size": "DP", "prefill_context_parallel_size": "PCP"}
    if not given.given & sizes.keys():
        if placement.num_nodes > 1:
            raise UsageError(
                f"the plan is for {placement.ep_size} ranks on {placement.num_nodes} nodes",
                rule="say how with --tensor-parallel-size and --data-parallel-size",
            )
        notes.append(
            f"Neither -tp nor -dp was given: --tensor-parallel-size {placement.ep_size} is the plan's EP size."
        )
        return [*flags, "--tensor-parallel-size", str(placement.ep_size)]
    product = 1
    for name in sizes:
        product *= getattr(given, name)
    if product != placement.ep_size:
        shown = " x ".join(f"{short} {getattr(given, name)}" for name, short in sizes.items() if name in given.given)
        raise UsageError(
            f"the plan is for {placement.ep_size} EP ranks, {shown} is {product}",
            rule=f"TP x DP must be {placement.ep_size}",
            hint=f"Or plan anew: eplb plan LOADS --ep-size {product} -o PLAN",
        )
    return flags


def _wants_eplb(given: EngineArguments, placement: Placement, layout: Layout, policy: Policy | None) -> bool:
    """A relabelled checkpoint without copies is served as planned by expert parallelism alone; all else needs EPLB."""
    needed = layout != "stock" or placement.num_redundant_experts > 0 or policy == "eplb"
    if needed and given.enable_eplb is False:
        redundant = placement.num_redundant_experts
        why = f"the plan has {redundant} redundant experts" if redundant else "vLLM starts from a plan through EPLB"
        raise UsageError("--no-enable-eplb", rule=f"{why}; add --enable-eplb")
    return needed or bool(given.enable_eplb)


def _check_loading(given: EngineArguments, layout: Layout) -> None:
    """Only loaders whose slots are known; nothing that loads weights again later."""
    legal = _READS_SLOTS if layout == "physical" else _WEIGHT_ORDER_KNOWN
    if given.load_format not in legal:
        raise UsageError(
            f"--load-format {given.load_format} may fill expert slots by another rule than the plan assumes",
            rule=f"use one of {', '.join(sorted(legal))}",
        )
    if given.weight_transfer_config is not None:
        raise UsageError("--weight-transfer-config", rule="weights cannot be replaced under a plan")


def _make_static(eplb_config: dict[str, Any]) -> None:
    for name in ("step_interval", "use_async", "window_size"):
        if name in eplb_config:
            raise UsageError(f"--static and {name} in --eplb-config", rule="a static plan is never rebalanced")
    # The smallest window and no thread: both would only cost memory and time.
    eplb_config.update(step_interval=NEVER_STEPS, use_async=False, window_size=1)


def _memory_notes(model: str, placement: Placement, layout: Layout) -> list[str]:
    redundant = placement.num_redundant_experts
    if not redundant or layout == "physical":
        return []
    with contextlib.suppress(EplbError):  # sizes are a courtesy; vLLM reads the weights itself
        extra = sum(read_expert_bytes(model).values()) * redundant / placement.ep_size
        return [f"{redundant} redundant experts take {extra / 2**30:.3g} GiB of weights per rank."]
    return []


def _quantisation_warnings(folder: Path) -> list[str]:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        method = json.loads((folder / "config.json").read_bytes()).get("quantization_config", {}).get("quant_method")
        if method in _NO_EPLB_METHODS:
            return [
                f"vLLM does not support EPLB for {method} weights and will refuse them. A plan without redundant "
                "experts, converted with --layout stock, needs no EPLB."
            ]
    return []


def _mode_notes(
    placement: Placement | None, layout: Layout, policy: Policy | None, use_eplb: bool
) -> list[str]:  # fmt: skip
    if placement is None:
        return []
    if not use_eplb:
        return ["The placement is in the checkpoint's expert numbers: it runs without EPLB, and nothing rebalances it."]
    if policy == "static":
        return [
            "Static: no rebalancing, no load recording and no rebalancing thread. What stays is EPLB's own cost: one "
            "small kernel per MoE layer that maps experts to slots, and no monolithic MoE kernels."
        ]
    if policy == "eplb":
        return ["eplb's planner rebalances at run time from the live placement, a bounded number of slots at a time."]
    return [
        "vLLM's own policy rebalances a full interval after the start and does not keep the plan. Pass --static to "
        "keep it, or --runtime-policy eplb to adapt it in small steps."
    ]


def vllm_command(dry_run: bool, warnings: list[str]) -> tuple[str, ...]:
    """The `vllm` of this Python environment, where the plugin is installed too."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        if not dry_run:
            raise ServeError(
                "vLLM is not installed in this Python environment", hint="pip install 'eplb[vllm]', beside vLLM"
            )
        warnings.append("vLLM is not installed here: the command was not checked against its flags.")
        return ("vllm",)
    script = Path(sys.executable).with_name("vllm")
    if script.is_file():
        same = shutil.which("vllm") == str(script)
        return ("vllm",) if same else (str(script),)
    return (sys.executable, "-m", "vllm.entrypoints.cli.main")


def plugin_names() -> dict[str, str]:
    """VLLM_PLUGINS with our plugin in it.

    vLLM loads endpoint plugins only when the variable names them. Where it is not set, all plugins that vLLM would load
    anyway are named as well, so that setting it switches none of them off.
    """
    from importlib.metadata import entry_points

    given = os.environ.get("VLLM_PLUGINS")
    if given is not None:
        names = [name for name in given.split(",") if name]
    else:
        groups = ("general", "platform", "io_processor", "stat_logger")
        names = sorted({point.name for group in groups for point in entry_points(group=f"vllm.{group}_plugins")})
    return {"VLLM_PLUGINS": ",".join(dict.fromkeys([*names, "eplb"]))}


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
        or "ray" in (given.distributed_executor_backend, given.data_parallel_backend)
    )
    if not several or settings is None:
        return []
    where = settings.plan or settings.record_dir
    if "ray" in (given.distributed_executor_backend, given.data_parallel_backend):
        return [
            f"Several nodes: each needs eplb installed beside vLLM, and {where} at the same path. Ray hands the EPLB_ "
            "variables to its workers."
        ]
    return [
        "Several nodes: run this same `eplb serve` on each, with that node's own flags; each needs eplb installed "
        f"beside vLLM, and {where} at the same path. All ranks compare the plan's hash before anything moves."
    ]


def _ask_vllm(launch: Launch, dry_run: bool) -> None:
    """Let the installed vLLM's parser read the final command, and compare what it understood with what was meant."""
    from importlib.util import find_spec

    if find_spec("vllm") is None:
        return
    start = launch.command.index("serve") + 1
    question = [sys.executable, "-m", "eplb_cli.vllm_plugin.arguments", *launch.command[start:]]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}
    answer = subprocess.run(question, capture_output=True, text=True, env=environment, check=False)
    try:
        reply = json.loads(answer.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = [line for line in answer.stderr.splitlines() if line.strip()]
        raise ServeError(f"vLLM cannot be imported: {lines[-1] if lines else 'no reason given'}") from None
    if "error" in reply:
        raise ServeError(f"vLLM {reply['version']} refuses the arguments: {reply['error']}")
    values = reply["values"]
    meant = {"enable_expert_parallel": True} if launch.plan_sha256 else {}
    if launch.proven_by_plugin:
        meant["enable_eplb"] = True
    for name, value in meant.items():
        if name not in values:
            raise ServeError(
                f"vLLM {reply['version']} has no --{name.replace('_', '-')}", hint="Use vLLM 0.14 or later."
            )
        if values[name] != value:
            raise ServeError(f"vLLM {reply['version']} reads {name} as {values[name]}, {value} was meant")
    ranks = 1
    for name in ("tensor_parallel_size", "data_parallel_size", "prefill_context_parallel_size"):
        ranks *= values.get(name) or 1
    if launch.plan_sha256 and ranks != launch.ep_size:
        raise ServeError(
            f"vLLM {reply['version']} makes {ranks} EP ranks of the arguments, the plan is for {launch.ep_size}"
        )
