"""Makes vLLM's run-time EPLB start from a plan: weights are moved and proven, then the maps are committed.

Runs when vLLM has loaded the model and registers it with EPLB, before any request, warm-up or graph capture:

1. every rank checks the plan against the model, and all ranks exchange what they found and the plan's hash before the
   first collective that moves anything, so that one bad rank stops all of them instead of leaving the rest waiting;
2. the experts move by vLLM's own synchronous transfer; slots that hold redundant copies count as empty, because some
   loaders leave them unfilled;
3. the checksum of every slot is compared, across ranks, with that of the expert it must hold;
4. the three maps are written in place, where the routers and captured graphs see them, and read back;
5. the step counter is reset: vLLM starts it at three quarters of the interval.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from eplb_cli.errors import EplbError, PlacementError, ServeError
from eplb_cli.metrics import initial_map
from eplb_cli.placement import Placement
from eplb_cli.vllm_plugin import rebalancing
from eplb_cli.vllm_plugin.settings import Settings
from eplb_cli.vllm_plugin.status import write_record

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NEVER", "Target", "require_plan", "slot_checksums", "start_from_plan", "transfer"]

logger = logging.getLogger("vllm.eplb")

NEVER = 1 << 62
"""A rebalance interval in steps that no server lives to see."""

_MAPS = ("physical_to_logical_map", "logical_to_physical_map", "logical_replica_count")
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed 64-bit number


@dataclass(frozen=True)
class Target:
    """The plan this process must start from."""

    settings: Settings
    placement: Placement

    @functools.cached_property
    def sha256(self) -> str:
        """What the ranks compare: the plan's meaning."""
        return self.placement.map_sha256

    def stage(self, layer_ids: Sequence[int], all_layers: bool) -> Placement:
        """The layout for some of the layers, in the served checkpoint's expert numbers.

        Raises:
            PlacementError: the plan lacks one of the layers, or has others although these are all.
        """
        rows = dict(zip(self.placement.layer_ids.tolist(), self.placement.physical_to_logical, strict=True))
        for layer in layer_ids:
            if layer not in rows:
                raise PlacementError(
                    "the plan has no row for this MoE layer", file=self.settings.plan, layer=layer,
                    hint="Make the plan with: eplb plan --model MODEL",
                )  # fmt: skip
        foreign = sorted(rows.keys() - set(layer_ids))
        if all_layers and foreign:
            raise PlacementError(
                "the plan has a row for a layer that is not an MoE layer of the model",
                file=self.settings.plan,
                layer=foreign[0],
            )
        if self.settings.layout == "stock":  # relabelled: vLLM's own start layout is the plan
            return Placement.initial(
                self.placement.num_experts, self.placement.num_redundant_experts, self.placement.ep_size, layer_ids
            )
        return Placement(
            np.stack([rows[layer] for layer in layer_ids]),
            np.array(layer_ids, np.int32),
            self.placement.num_experts,
            self.placement.ep_size,
        )


_in_force = False


def start_from_plan(target: Target, module: ModuleType) -> None:
    """Hook `EplbState.add_model`, which vLLM calls once for each loaded model."""
    if not hasattr(getattr(module, "EplbState", None), "add_model"):
        raise ServeError("this vLLM has no EplbState.add_model", rule="the plugin knows vLLM 0.14 and later")
    original = module.EplbState.add_model
    signature = inspect.signature(original)

    @functools.wraps(original)
    def add_model(self: Any, *args: Any, **kwargs: Any) -> None:
        arguments = signature.bind(self, *args, **kwargs).arguments
        known = set(self.model_states)
        original(self, *args, **kwargs)
        if _is_drafter(arguments["model_config"]):
            logger.info("eplb: the drafter keeps vLLM's own expert layout")
            return
        added = [state for key, state in self.model_states.items() if key not in known]
        scaled_up = arguments.get("global_expert_load") is not None
        _apply(target, self, added[0] if len(added) == 1 and not scaled_up else None, arguments["model"])

    module.EplbState.add_model = add_model


def require_plan(target: Target, module: ModuleType) -> None:
    """Stop a worker whose model is loaded but was never registered with EPLB, and one that would reload weights."""
    original = module.WorkerWrapperBase.initialize_from_config

    @functools.wraps(original)
    def initialize_from_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _in_force:
            problem = ServeError(
                "a plan was asked for, but vLLM loaded the model without EPLB",
                rule="--enable-eplb must be on and the model must be a mixture of experts that supports it",
            )
            write_record(target.settings.status_dir, f"failed-{os.getpid()}", {"error": str(problem)})
            raise problem
        return original(self, *args, **kwargs)

    module.WorkerWrapperBase.initialize_from_config = initialize_from_config

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ServeError(
            "weights cannot be reloaded under a plan",
            rule="vLLM would load them in its own layout while the maps keep the plan's",
            hint="Restart the server with the new weights.",
        )

    # Reached through collective_rpc; shadows the model runner's method of the same name.
    module.WorkerWrapperBase.reload_weights = reload_weights


def _is_drafter(model_config: Any) -> bool:
    if getattr(model_config, "runner_type", None) == "draft" or getattr(model_config, "runner", None) == "draft":
        return True
    from vllm.config import get_current_vllm_config

    speculative = getattr(get_current_vllm_config(), "speculative_config", None)
    return speculative is not None and getattr(speculative, "draft_model_config", None) is model_config


def _apply(target: Target, state: Any, model_state: Any | None, model: Any) -> None:
    """Steps 1 to 5 of the module's text, on every EP rank.

    Raises:
        ServeError, PlacementError: on every rank alike, when one of them cannot go on.
    """
    global _in_force
    from vllm.distributed.parallel_state import get_ep_group, get_pp_group

    started = time.monotonic()
    group, stage_rank = get_ep_group(), get_pp_group().rank_in_group
    rank = group.rank_in_group
    name = f"stage{stage_rank}-rank{rank}"
    try:
        problem, stage = None, None
        try:
            stage = _stage(target, state, model_state, model, group)
        except Exception as error:  # whatever it is, the other ranks must learn of it
            problem = str(error) if isinstance(error, EplbError) else f"{type(error).__name__}: {error}"
        _agree(group, problem, target.sha256)
        if stage is None or model_state is None:  # not reached: without a problem there are both
            raise ServeError("no stage")
        verified = _move_and_prove(target, state, model_state, model, stage, group)
        _agree(group, _commit(model_state, model, stage), target.sha256)
    except EplbError as error:
        write_record(target.settings.status_dir, name, {"error": str(error), "ep_rank": rank})
        raise
    state.expert_rearrangement_step = 0
    model_state.expert_load_pass.zero_()
    rebalancing.watch(target.settings, state, model_state, stage, rank)
    if target.settings.policy == "static":
        state.expert_rearrangement_step_interval = NEVER
    seconds = time.monotonic() - started
    record = {
        "plan_sha256": target.sha256,
        "ep_rank": rank,
        "ep_size": group.world_size,
        "pp_rank": stage_rank,
        "pp_size": get_pp_group().world_size,
        "host": socket.gethostname(),
        "layer_ids": stage.layer_ids.tolist(),
        "slots": stage.num_layers * stage.slots_per_rank,
        "slots_verified": verified,
        "policy": target.settings.policy,
        "seconds": round(seconds, 3),
    }
    # Each node sees its own files only, so each holds the records of all.
    write_record(target.settings.status_dir, name, {**record, "ranks": _gather(group, record)})
    state.eplb_plan = record
    _in_force = True
    if rank == 0:
        logger.info(
            "eplb: the plan %s (sha256 %s) is in force: %d experts in %d slots on %d EP ranks, %d MoE layers, "
            "all slots verified in %.1f s; rebalancing at run time: %s",
            target.settings.plan,
            target.sha256[:16],
            stage.num_experts,
            stage.num_slots,
            stage.ep_size,
            stage.num_layers,
            seconds,
            {"static": "never", "vllm": "vLLM's policy", "eplb": "eplb's planner"}[target.settings.policy],
        )


def _gather(group: Any, value: Any) -> list[Any]:
    """Every EP rank's value, in rank order."""
    import torch.distributed as dist

    values: list[Any] = [None] * group.world_size
    dist.all_gather_object(values, value, group=group.cpu_group)
    return values


def _agree(group: Any, problem: str | None, sha256: str) -> None:
    """Raise on all ranks when one has a problem, or when their plans differ."""
    replies = _gather(group, (problem, sha256))
    failed = [(rank, text) for rank, (text, _) in enumerate(replies) if text]
    if failed:
        rank, text = failed[0]
        others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
        raise ServeError(f"{text}{others}", rank=rank)
    plans = [digest[:12] for _, digest in replies]
    if len(set(plans)) > 1:
        raise ServeError(
            f"the ranks read different plans: {plans}", rule="every node must see the same plan file",
            hint="Copy the plan, or the converted folder, to all nodes again.",
        )  # fmt: skip


def _stage(target: Target, state: Any, model_state: Any | None, model: Any, group: Any) -> Placement:
    """The plan's rows for this pipeline stage, after every check that needs no other rank."""
    import torch
    from vllm.distributed.parallel_state import get_pp_group

    parallel = state.parallel_config
    if model_state is None or getattr(parallel, "enable_elastic_ep", False):
        raise ServeError("elastic expert parallelism is on", rule="a plan is for a fixed number of ranks")
    for name in _MAPS:
        if not isinstance(getattr(model_state, name, None), torch.Tensor):
            raise ServeError(f"this vLLM's EplbModelState has no tensor `{name}`", rule="the plugin does not know it")
    plan = target.placement
    for what, planned, actual in (
        ("experts", plan.num_experts, model.num_logical_experts),
        ("redundant experts", plan.num_redundant_experts, model.num_physical_experts - model.num_logical_experts),
        ("EP ranks", plan.ep_size, group.world_size),
    ):
        if planned != actual:
            raise PlacementError(f"the plan is for {planned} {what}, vLLM runs {actual}", file=target.settings.plan)
    stage = target.stage(_layer_ids(model), get_pp_group().world_size == 1)
    start = torch.from_numpy(initial_map(plan.num_experts, plan.num_redundant_experts)).long()
    current = model_state.physical_to_logical_map.detach().cpu().long()
    if current.shape != (stage.num_layers, stage.num_slots) or not bool((current == start).all()):
        raise ServeError("vLLM did not load the model in its usual start layout", rule="nothing may have moved yet")
    copies, width = int(stage.replica_counts().max()), model_state.logical_to_physical_map.shape[-1]
    if copies > width:
        raise PlacementError(f"an expert has {copies} copies", file=target.settings.plan, rule=f"vLLM holds {width}")
    tensors = {len(layer) for layer in model.expert_weights}
    if len(model.expert_weights) != stage.num_layers or 0 in tensors:
        raise ServeError(f"vLLM lists expert weights of {len(model.expert_weights)} of {stage.num_layers} MoE layers")
    for layer in model.moe_layers:
        _router_table(layer)
    return stage


def _layer_ids(model: Any) -> list[int]:
    """The decoder layer of each MoE layer, read from its name."""
    ids = []
    for layer in model.moe_layers:
        found = re.findall(r"(?:^|\.)layers\.(\d+)\.", layer.layer_name)
        if len(found) != 1:
            raise ServeError(f"the decoder layer of {layer.layer_name!r} is not to be told from its name")
        ids.append(int(found[0]))
    return ids


def _router_table(layer: Any) -> Tensor:
    """The layer's own view of `logical_to_physical_map`, [E, copies]."""
    holder = getattr(layer, "eplb_state", None) or layer
    table: Tensor | None = getattr(holder, "logical_to_physical_map", None)
    if table is None:
        raise ServeError(f"{layer.layer_name} shows no `logical_to_physical_map`", rule="the plugin does not know it")
    return table


def _move_and_prove(
    target: Target, state: Any, model_state: Any, model: Any, stage: Placement, group: Any
) -> int:  # fmt: skip
    """Fill the slots as the stage says; returns the number of this rank's slots proven right.

    Raises:
        ServeError: on every rank, when a slot anywhere holds other bytes than its expert's.
    """
    import torch

    layers, experts = stage.num_layers, stage.num_experts
    rows = torch.from_numpy(stage.physical_to_logical).long()
    if target.settings.layout == "physical":
        # The loader read every slot under its own number; copies of an expert must agree with the first of them.
        first = torch.from_numpy(stage.logical_to_physical()[:, :, 0]).long()
        found = _all_slots(model, group)
        wanted = found.gather(1, first).gather(1, rows)
    else:
        primary = _all_slots(model, group)[:, :experts]
        wanted = primary.gather(1, rows)
        old = torch.arange(stage.num_slots).expand(layers, -1).clone()
        old[:, experts:] = -1
        transfer(state, model_state, model.expert_weights, old, rows, group)
        found = _all_slots(model, group)
    wrong = (found != wanted).nonzero()
    if len(wrong):
        layer, slot = wrong[0].tolist()
        raise ServeError(
            f"slot {slot} does not hold expert {stage.physical_to_logical[layer, slot]} ({len(wrong)} of "
            f"{found.numel()} slots hold the wrong weights)",
            layer=int(stage.layer_ids[layer]),
            rank=slot // stage.slots_per_rank,
        )
    return layers * stage.slots_per_rank


def transfer(
    state: Any, model_state: Any, expert_weights: Any, old: Tensor, new: Tensor, group: Any
) -> None:  # fmt: skip
    """Move experts by vLLM's own synchronous rearrangement, whichever arguments this version takes.

    `old` and `new` are int64 [L, P]: the expert that each slot holds and shall hold; -1 marks an empty slot.

    Raises:
        ServeError: this vLLM's function needs an argument that the plugin does not know.
    """
    import torch
    from vllm.distributed.eplb import rebalance_execute

    move = rebalance_execute.rearrange_expert_weights_inplace
    device = model_state.physical_to_logical_map.device
    known = {
        "old_global_expert_indices": old.to(device),
        "new_global_expert_indices": new.to(device),
        "expert_weights": expert_weights,
        "expert_buffer": getattr(model_state, "expert_buffer", None),
        "ep_group": group.device_group,
        "communicator": getattr(model_state, "communicator", None),
    }
    arguments = {}
    for name, parameter in inspect.signature(move).parameters.items():
        if name in known:
            arguments[name] = known[name]
        elif parameter.default is inspect.Parameter.empty:
            raise ServeError(
                f"this vLLM's rearrange_expert_weights_inplace needs `{name}`", rule="the plugin does not know it"
            )
    move(**arguments)
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _all_slots(model: Any, group: Any) -> Tensor:
    """Checksums of every slot on every rank, int64 [L, P]."""
    import torch
    import torch.distributed as dist

    own = torch.stack([slot_checksums(list(tensors)) for tensors in model.expert_weights])
    gathered = [torch.empty_like(own) for _ in range(group.world_size)]
    dist.all_gather(gathered, own, group=group.cpu_group)
    return torch.cat(gathered, dim=1)


def slot_checksums(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum of each slot's bytes over all its weight tensors, int64 [slots] on the CPU.

    Each 32-bit word is multiplied by an odd number that depends on its place and tensor, and summed modulo 2^64: any
    single changed word, and any two words exchanged, change the sum.

    Args:
        tensors: [slots, ...] each, any dtype.
    """
    import torch

    slots = tensors[0].shape[0]
    total = torch.zeros(slots, dtype=torch.int64, device=tensors[0].device)
    place = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(slots, -1).view(torch.uint8)
        words = torch.nn.functional.pad(flat, (0, -flat.shape[1] % 4)).view(torch.int32)
        # In pieces: 64-bit copies of whole weights would not fit beside them.
        piece = max(1, (1 << 24) // slots)
        for begin in range(0, words.shape[1], piece):
            part = words[:, begin : begin + piece].long()
            index = torch.arange(place + begin, place + begin + part.shape[1], device=part.device)
            total += (part * ((index * _GOLDEN) | 1)).sum(1)
        place += words.shape[1]
    return total.cpu()


def _commit(model_state: Any, model: Any, stage: Placement) -> str | None:
    """Write the maps in place and read them back as the routers see them; returns what is wrong, or None."""
    import torch

    rows = torch.from_numpy(stage.physical_to_logical).long()
    slots = torch.from_numpy(stage.logical_to_physical()).long()
    counts = torch.from_numpy(stage.replica_counts())
    width = model_state.logical_to_physical_map.shape[-1]
    table = torch.nn.functional.pad(slots, (0, width - slots.shape[-1]), value=-1)
    _write_maps(model_state, rows, table, counts)
    for name, wanted in zip(_MAPS, (rows, table, counts), strict=True):
        if not torch.equal(getattr(model_state, name).cpu().long(), wanted):
            return f"vLLM's `{name}` does not hold the plan after it was written"
    for index, layer in enumerate(model.moe_layers):
        if not torch.equal(_router_table(layer).cpu().long(), table[index]):
            return f"the router of {layer.layer_name} does not see the plan's map"
    return None


def _write_maps(model_state: Any, rows: Tensor, table: Tensor, counts: Tensor) -> None:
    for name, value in zip(_MAPS, (rows, table, counts), strict=True):
        getattr(model_state, name).copy_(value)
