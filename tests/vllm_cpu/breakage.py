"""Ways to break a start from a plan, each of which the plugin must notice; applied in a rank before vLLM starts."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["BREAKAGES"]


def one_slot_corrupted(rank: int) -> None:
    """One word of one slot of one rank changes on the way."""
    from eplb_cli.vllm_plugin import move

    transfer = move.transfer

    def corrupting(model_state: Any, expert_weights: Any, *rest: Any) -> None:
        transfer(model_state, expert_weights, *rest)
        if rank == 1:
            import torch

            words = expert_weights[1][0][2].view(-1).view(torch.int32)
            words[3] ^= 1

    move.transfer = corrupting


def router_sees_another_map(rank: int) -> None:
    """vLLM's state holds the plan, but one layer's router looks at a copy made before."""
    from vllm.distributed.eplb import eplb_state

    add_model = eplb_state.EplbState.add_model

    @functools.wraps(add_model)
    def detached(self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        add_model(self, model, *args, **kwargs)
        state = next(iter(model.moe_layers)).eplb_state
        state.logical_to_physical_map = state.logical_to_physical_map.clone()

    eplb_state.EplbState.add_model = detached


def note_tensors_read(rank: int) -> None:
    """Breaks nothing: writes down the names of the tensors that the loader takes from the checkpoint."""
    from vllm.model_executor.model_loader import default_loader

    iterate = default_loader.safetensors_weights_iterator

    def noting(*args: Any, **kwargs: Any) -> Any:
        with Path(os.environ["TENSORS_READ"], f"rank{rank}").open("a") as stream:
            for name, tensor in iterate(*args, **kwargs):
                stream.write(f"{name}\n")
                yield name, tensor

    default_loader.safetensors_weights_iterator = noting


BREAKAGES: dict[str, Callable[[int], None]] = {
    function.__name__: function
    for function in (
        one_slot_corrupted,
        router_sees_another_map,
        note_tensors_read,
    )
}
