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


def recount_each_choice(rank: int) -> None:
    """Breaks nothing: compares every choice of copies, and what it adds to the load, with the plain rule."""
    import numpy as np

    from eplb_cli.dispatch import serving_slots
    from eplb_cli.vllm_plugin.dispatching import RoutedByLoad

    choose = RoutedByLoad.__call__

    def recounted(self: Any, topk_ids: Any) -> Any:
        seen, rule = self._module.router.eplb_state, self._rule
        before = seen.expert_load_view.clone()
        chosen = choose(self, topk_ids)
        real = int(seen.num_unpadded_tokens_tensors[0])
        row = np.empty(rule.num_slots, int)
        for expert, number in enumerate(seen.logical_replica_count.tolist()):
            row[seen.logical_to_physical_map[expert, :number].tolist()] = expert
        experts = seen.logical_replica_count.shape[0]
        expected = serving_slots(
            topk_ids.numpy(), real, row, experts, rule.ep_size, rule.price, whole_step=rule.whole_step
        )
        assert (chosen.numpy() == expected).all()
        served = expected[:real][expected[:real] >= 0]
        tokens = np.bincount(served, minlength=rule.num_slots) * int(seen.should_record_tensor)
        assert ((seen.expert_load_view - before).numpy() == tokens).all()
        with Path(os.environ["CHOICES"], f"rank{rank}").open("a") as stream:
            stream.write(f"{real} {int(seen.should_record_tensor)}\n")
        return chosen

    RoutedByLoad.__call__ = recounted


def one_id_differs(rank: int) -> None:
    """The router of one rank chooses another expert for one token, once, after some steps."""
    if rank == 0:
        return
    from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

    route = CPURouter._compute_routing
    calls = 0

    def differing(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        weights, ids = route(self, *args, **kwargs)
        calls += 1
        if calls == 120:
            ids = ids.clone()
            ids[0, 0] = next(expert for expert in range(16) if expert not in ids[0])
        return weights, ids

    CPURouter._compute_routing = differing


BREAKAGES: dict[str, Callable[[int], None]] = {
    function.__name__: function
    for function in (
        one_slot_corrupted,
        router_sees_another_map,
        note_tensors_read,
        recount_each_choice,
        one_id_differs,
    )
}
