"""Whether the user's arguments, the plan and the model belong together; each refusal names the flag to change."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint import Model
from eplb_cli.errors import PlacementError, UsageError
from eplb_cli.placement import Placement
from eplb_cli.serve.arguments import EngineArguments
from eplb_cli.vllm_plugin.settings import Layout, Policy

__all__ = [
    "check_loading",
    "check_model",
    "check_partners",
    "check_topology",
    "static_config",
    "tensor_parallel_size",
    "wants_eplb",
]

NEVER_STEPS = 1_000_000_000
"""The largest rebalance interval that any vLLM takes; the plugin sets a longer one."""

_WEIGHT_ORDER_KNOWN = {
    "auto", "hf", "safetensors", "pt", "npcache", "mistral", "dummy", "fastsafetensors", "instanttensor",
    "runai_streamer",
}  # fmt: skip
"""Load formats that fill the slots from a checkpoint's own names; others restore another run's memory."""

_READS_SLOTS = {"auto", "hf", "safetensors", "instanttensor"}
_SIZES = {"tensor_parallel_size": "TP", "data_parallel_size": "DP", "prefill_context_parallel_size": "PCP"}
"""Sizes whose product is vLLM's number of EP ranks."""


def check_partners(given: EngineArguments) -> None:
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


def check_model(model: Model, plan: Path, placement: Placement, layout: Layout) -> None:
    """The plan's experts and layers must be the model's."""
    shape = model.shape
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
            hint=f"eplb plan LOADS --model {shlex.quote(model.name)} -o PLAN",
        )


def check_topology(given: EngineArguments, placement: Placement) -> None:
    """What contradicts experts at fixed places."""
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


def tensor_parallel_size(given: EngineArguments, placement: Placement) -> int | None:
    """The size to add so that expert parallelism runs over the plan's ranks; None where the user gave sizes."""
    if not given.given & _SIZES.keys():
        if placement.num_nodes > 1:
            raise UsageError(
                f"the plan is for {placement.ep_size} ranks on {placement.num_nodes} nodes",
                rule="say how with --tensor-parallel-size and --data-parallel-size",
            )
        return placement.ep_size
    product = math.prod(getattr(given, name) for name in _SIZES)
    if product != placement.ep_size:
        shown = " x ".join(f"{short} {getattr(given, name)}" for name, short in _SIZES.items() if name in given.given)
        raise UsageError(
            f"the plan is for {placement.ep_size} EP ranks, {shown} is {product}",
            rule=f"TP x DP must be {placement.ep_size}",
            hint=f"Or plan anew: eplb plan LOADS --ep-size {product} -o PLAN",
        )
    return None


def wants_eplb(given: EngineArguments, placement: Placement, layout: Layout, policy: Policy | None) -> bool:
    """A relabelled checkpoint without copies is served as planned by expert parallelism alone; all else needs EPLB."""
    needed = layout != "stock" or placement.num_redundant_experts > 0 or policy == "eplb"
    if needed and given.enable_eplb is False:
        redundant = placement.num_redundant_experts
        why = f"the plan has {redundant} redundant experts" if redundant else "vLLM starts from a plan through EPLB"
        raise UsageError("--no-enable-eplb", rule=f"{why}; add --enable-eplb")
    return needed or bool(given.enable_eplb)


def check_loading(given: EngineArguments, layout: Layout) -> None:
    """Only loaders whose slots are known; nothing that loads weights again later."""
    legal = _READS_SLOTS if layout == "physical" else _WEIGHT_ORDER_KNOWN
    if given.load_format not in legal:
        raise UsageError(
            f"--load-format {given.load_format} may fill expert slots by another rule than the plan assumes",
            rule=f"use one of {', '.join(sorted(legal))}",
        )
    if given.weight_transfer_config is not None:
        raise UsageError("--weight-transfer-config", rule="weights cannot be replaced under a plan")


def static_config(eplb_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `--eplb-config` for a plan that stays."""
    for name in ("step_interval", "use_async", "window_size"):
        if name in eplb_config:
            raise UsageError(f"--static and {name} in --eplb-config", rule="a static plan is never rebalanced")
    # The smallest window and no thread: both would only cost memory and time.
    return {"step_interval": NEVER_STEPS, "use_async": False, "window_size": 1}
