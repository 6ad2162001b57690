"""Fused Llama 4 checkpoints with redundant experts, and `physical` checkpoints read straight into the slots."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from eplb_cli.checkpoint import Model
from eplb_cli.errors import PlacementError
from eplb_cli.placement import Placement
from eplb_cli.vllm_plugin.hooks import when_imported
from eplb_cli.vllm_plugin.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["give_fused_llama4_its_copies", "read_slots_directly"]


def give_fused_llama4_its_copies(module: ModuleType) -> None:
    """Let fused Llama 4 tensors [E, ...] load with redundant experts.

    vLLM selects a rank's rows of the fused tensor by slot number, so with R > 0 it asks for rows >= E. It is handed a
    tensor [E + R, ...] whose row s is the expert of slot s in vLLM's start layout.
    """
    original = module.Llama4Model.load_moe_expert_weights
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load_moe_expert_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        weight = bound.arguments["loaded_weight"]
        experts, redundant = self.num_experts, self.n_redundant_experts
        if (
            redundant
            and bound.arguments.get("fused", True)
            and weight.ndim == 3
            and weight.shape[0] == experts
            and "experts." in bound.arguments["name"]
        ):
            import torch

            slots = torch.arange(experts + redundant) % experts
            bound.arguments["loaded_weight"] = weight[slots.to(weight.device)]
        return original(*bound.args, **bound.kwargs)

    module.Llama4Model.load_moe_expert_weights = load_moe_expert_weights


def read_slots_directly(settings: Settings, placement: Placement) -> None:
    """Teach vLLM the `physical` layout: the config's true expert count, and tensors numbered by slot."""
    folder = (settings.plan or Path()).resolve().parent
    when_imported("vllm.config.model", functools.partial(_restore_expert_count, folder, placement))
    # The builder of the loaders' name table lives in one of these, depending on the version.
    for name in ("layer", "routed_experts"):
        when_imported(f"vllm.model_executor.layers.fused_moe.{name}", _name_weights_by_slot)
    when_imported("vllm.model_executor.model_loader.default_loader", functools.partial(_read_own_slots_only, placement))


def _restore_expert_count(folder: Path, placement: Placement, module: ModuleType) -> None:
    """`config.json` says P, so that an engine without this plugin refuses the checkpoint; the model has E."""
    original = vars(module)["get_config"]

    @functools.wraps(original)
    def get_config(*args: Any, **kwargs: Any) -> Any:
        config = original(*args, **kwargs)
        model = kwargs.get("model", args[0] if args else None)
        if model is None or Path(model).resolve() != folder:
            return config
        section = getattr(config, "text_config", None) or config
        # Not only the file's own key: config classes give the count a second name, or a copy.
        known = Model.open(folder).config.family.num_experts
        keys = [key for key in known if getattr(section, key, None) == placement.num_slots]
        if not keys:
            raise PlacementError(
                f"{type(section).__name__} has no expert count of {placement.num_slots}",
                file=folder / "config.json",
                rule=f"a `physical` checkpoint says its slots per layer there, as {' or '.join(known)}",
            )
        for key in keys:
            setattr(section, key, placement.num_experts)
        return config

    vars(module)["get_config"] = get_config


def _name_weights_by_slot(module: ModuleType) -> None:
    if not hasattr(module, "EplbState"):
        return

    class SlotNames(vars(module)["EplbState"]):  # type: ignore[misc]
        """EplbState as this module sees it: the checkpoint holds every slot under the slot's own number."""

        @staticmethod
        def build_initial_global_physical_to_logical_map(
            num_routed_experts: int, num_redundant_experts: int
        ) -> Sequence[int]:
            return list(range(num_routed_experts + num_redundant_experts))

    vars(module)["EplbState"] = SlotNames


def _read_own_slots_only(placement: Placement, module: ModuleType) -> None:
    """vLLM turns its filter of other ranks' tensors off under EPLB, as slots may need any expert; here they do not."""
    original = getattr(module.DefaultModelLoader, "_init_ep_weight_filter", None)
    if original is None:
        return  # vLLM < 0.18 reads through mmap and skips what it does not copy

    @functools.wraps(original)
    def _init_ep_weight_filter(self: Any, model_config: Any) -> None:
        from vllm.config import get_current_vllm_config
        from vllm.distributed.parallel_state import get_ep_group

        original(self, model_config)
        if get_current_vllm_config().model_config is not model_config:
            return  # a drafter
        rank, slots = get_ep_group().rank_in_group, placement.slots_per_rank
        self.local_expert_ids = set(range(rank * slots, (rank + 1) * slots))

    module.DefaultModelLoader._init_ep_weight_filter = _init_ep_weight_filter
