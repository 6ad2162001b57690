"""Puts a plan's rows in force: checks that they fit, moves the weights by vLLM's own transfer, and writes the maps.

It proves nothing; `proof` does, by other means.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from eplb_cli.errors import PlacementError, ServeError
from eplb_cli.placement import Placement
from eplb_cli.vllm_plugin.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Target", "fill_slots", "stage_of", "transfer", "write_maps"]


@dataclass(frozen=True)
class Target:
    """The plan this process must start from."""

    settings: Settings
    placement: Placement

    def stage(self, layer_ids: Sequence[int], all_layers: bool) -> Placement:
        """The layout for some of the layers, in the served checkpoint's expert numbers.

        Raises:
            PlacementError: the plan lacks one of the layers, or has others although these are all.
        """
        planned = set(self.placement.layer_ids.tolist())
        if missing := sorted(set(layer_ids) - planned):
            raise PlacementError(
                "the plan has no row for this MoE layer", file=self.settings.plan, layer=missing[0],
                hint="Make the plan with: eplb plan --model MODEL",
            )  # fmt: skip
        if all_layers and (foreign := sorted(planned - set(layer_ids))):
            raise PlacementError(
                "the plan has a row for a layer that is not an MoE layer of the model",
                file=self.settings.plan,
                layer=foreign[0],
            )
        rows = self.placement.for_layers(layer_ids)
        if self.settings.layout == "stock":  # relabelled: vLLM's own start layout is the plan
            return Placement.initial(rows.num_experts, rows.num_redundant_experts, rows.ep_size, layer_ids)
        return rows


def stage_of(
    target: Target, state: Any, model_state: Any | None, model: Any, ep_size: int, all_layers: bool
) -> Placement:
    """The plan's rows for this pipeline stage, after every check that needs no other rank.

    Raises:
        ServeError, PlacementError: vLLM runs something that the plan is not for.
    """
    if model_state is None or getattr(state.parallel_config, "enable_elastic_ep", False):
        raise ServeError("elastic expert parallelism is on", rule="a plan is for a fixed number of ranks")
    plan = target.placement
    for what, planned, actual in (
        ("experts", plan.num_experts, model.num_logical_experts),
        ("redundant experts", plan.num_redundant_experts, model.num_physical_experts - model.num_logical_experts),
        ("EP ranks", plan.ep_size, ep_size),
    ):
        if planned != actual:
            raise PlacementError(f"the plan is for {planned} {what}, vLLM runs {actual}", file=target.settings.plan)
    stage = target.stage(_layer_ids(model), all_layers)
    start = Placement.initial(plan.num_experts, plan.num_redundant_experts, ep_size, stage.layer_ids)
    if model_state.physical_to_logical_map.tolist() != start.physical_to_logical.tolist():
        raise ServeError("vLLM did not load the model in its usual start layout", rule="nothing may have moved yet")
    copies, width = int(stage.replica_counts().max()), model_state.logical_to_physical_map.shape[-1]
    if copies > width:
        raise PlacementError(f"an expert has {copies} copies", file=target.settings.plan, rule=f"vLLM holds {width}")
    tensors = {len(layer) for layer in model.expert_weights}
    if len(model.expert_weights) != stage.num_layers or 0 in tensors:
        raise ServeError(f"vLLM lists expert weights of {len(model.expert_weights)} of {stage.num_layers} MoE layers")
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


def fill_slots(state: Any, model_state: Any, model: Any, stage: Placement, group: Any) -> None:
    """Move the experts of vLLM's start layout to where the stage says.

    Slots that hold redundant copies count as empty, because some loaders leave them unfilled.
    """
    import torch

    old = torch.arange(stage.num_slots).expand(stage.num_layers, -1).clone()
    old[:, stage.num_experts :] = -1
    transfer(model_state, model.expert_weights, old, torch.from_numpy(stage.physical_to_logical).long(), group)


def transfer(model_state: Any, expert_weights: Any, old: Tensor, new: Tensor, group: Any) -> None:
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


def write_maps(model_state: Any, stage: Placement) -> None:
    """Write the three maps in place, where the routers and captured graphs see them."""
    import torch

    slots = torch.from_numpy(stage.logical_to_physical()).long()
    width = model_state.logical_to_physical_map.shape[-1]
    model_state.physical_to_logical_map.copy_(torch.from_numpy(stage.physical_to_logical))
    model_state.logical_to_physical_map.copy_(torch.nn.functional.pad(slots, (0, width - slots.shape[-1]), value=-1))
    model_state.logical_replica_count.copy_(torch.from_numpy(stage.replica_counts()))
