"""Lets vLLM's CPU build run expert parallelism and EPLB. For tests only.

A `vllm.general_plugins` entry point that does nothing unless EPLB_CPU_SHIM=1. It decides nothing: which experts move,
when, and from where to where is vLLM's own code throughout. It fills in what the CPU backend lacks:

1. the configuration check that lets EPLB run on GPUs only;
2. the router's kernel that maps logical to physical experts and counts them: the same arithmetic in torch;
3. MoE kernels that honour the expert map (the CPU's read out of bounds under expert parallelism);
4. the model runner's registration of the model with EPLB;
5. events, streams and the device index that the EPLB modules ask of an accelerator;
6. the two collectives that data parallel dispatch needs.
"""

import contextlib
import os
import sys
import threading
from functools import partial

from eplb_cli.vllm_plugin.hooks import when_imported

_registered = False


def register():
    global _registered
    if _registered or os.environ.get("EPLB_CPU_SHIM") != "1":
        return
    _registered = True
    eplb = "vllm.distributed.eplb"
    when_imported("vllm.config.parallel", _allow_eplb_in_the_configuration)
    when_imported("vllm.model_executor.layers.fused_moe.router.base_router", _map_and_record_in_the_router)
    when_imported("vllm.model_executor.layers.fused_moe.experts.cpu_moe", _honour_the_expert_map)
    for module in ("eplb_utils", "eplb_communicator", "rebalance_execute", "eplb_state"):
        when_imported(f"{eplb}.{module}", _replace_accelerator_calls)
    when_imported(f"{eplb}.async_worker", _start_the_worker_without_a_device)
    when_imported("vllm.v1.worker.cpu_model_runner", _register_the_model)
    when_imported("vllm.distributed.device_communicators.cpu_communicator", _add_collectives)


# 1 --------------------------------------------------------------------------------------------------------------------
class _Platform:
    """The CPU platform, which answers "like CUDA" to the check of `enable_eplb` and to nobody else."""

    def __init__(self, real):
        self._real = real

    def __getattr__(self, name):
        return getattr(self._real, name)

    def is_cuda_alike(self):
        return sys._getframe(1).f_code.co_name == "_validate_parallel_config"


def _allow_eplb_in_the_configuration(module):
    from vllm.platforms import current_platform

    module.current_platform = _Platform(current_platform)


# 2 --------------------------------------------------------------------------------------------------------------------
KNUTH = 2654435769
"""The multiplier with which vLLM's router kernel spreads token rows over the copies of an expert."""


def map_to_physical_and_record(
    topk_ids,
    expert_load_view,
    logical_to_physical_map,
    logical_replica_count,
    record_enabled,
    num_unpadded_tokens=None,
):
    """What vLLM's Triton kernel computes: physical ids [tokens, k] of logical ids, and the load per slot, in place."""
    import torch

    tokens = topk_ids.shape[0]
    if tokens == 0:
        return topk_ids
    ids = topk_ids.long()
    valid = (ids >= 0) & (ids < logical_replica_count.shape[0])
    known = torch.where(valid, ids, 0)
    copies = logical_replica_count[known].clamp(min=1)
    hashed = (torch.arange(tokens, dtype=torch.int64) * KNUTH) & 0xFFFFFFFF
    physical = torch.where(valid, logical_to_physical_map[known, hashed[:, None] % copies], -1)
    if bool(record_enabled):
        real = tokens if num_unpadded_tokens is None else int(num_unpadded_tokens)
        rows = physical[:real].reshape(-1)
        rows = rows[(rows >= 0) & (rows < expert_load_view.shape[0])]
        expert_load_view += torch.bincount(rows, minlength=expert_load_view.shape[0]).to(expert_load_view.dtype)
    return physical.to(topk_ids.dtype)


def _map_and_record_in_the_router(module):
    module.eplb_map_to_physical_and_record = map_to_physical_and_record


# 3 --------------------------------------------------------------------------------------------------------------------
def _honour_the_expert_map(module):
    import torch

    original = module.CPUUnquantizedExperts.apply

    def apply(self, *args, **kwargs):
        bound = arguments(self, *args, **kwargs)
        expert_map = bound.pop("expert_map")
        if expert_map is None:
            return original(self, expert_map=None, **bound)
        local = expert_map[bound["topk_ids"].long()]
        foreign = local < 0
        # The kernel needs ids in range: other ranks' pairs go to local expert 0 with weight 0.
        bound["topk_ids"] = torch.where(foreign, 0, local).to(bound["topk_ids"].dtype).contiguous()
        weights = bound["topk_weights"]
        bound["topk_weights"] = torch.where(foreign, 0.0, weights).to(weights.dtype).contiguous()
        result = original(self, expert_map=None, **bound)
        if bound["apply_router_weight_on_input"]:  # top-1: the weight is in the input already
            bound["output"][foreign.all(dim=1)] = 0
        return result

    import inspect

    signature = inspect.signature(original)

    def arguments(*args, **kwargs):
        bound = dict(signature.bind(*args, **kwargs).arguments)
        bound.pop("self")
        return bound

    module.CPUUnquantizedExperts.apply = apply


# 4 --------------------------------------------------------------------------------------------------------------------
def _register_the_model(module):
    original = module.CPUModelRunner.load_model

    def load_model(self, *args, **kwargs):
        if not self.parallel_config.enable_eplb:
            return original(self, *args, **kwargs)
        from vllm.distributed.eplb.eplb_state import EplbState
        from vllm.model_executor.models.interfaces import get_mixture_of_experts_model

        self.eplb_state = EplbState(self.parallel_config, self.device)
        result = original(self, *args, **kwargs)
        # After loading, as on the GPU: the CPU kernels lay the weights out anew once they are loaded.
        self._moe_model = get_mixture_of_experts_model(self.model)
        if self._moe_model is not None:
            self.eplb_state.add_model(self._moe_model, self.model_config)
            self.eplb_state.start_async_loop()
        return result

    module.CPUModelRunner.load_model = load_model


# 5 --------------------------------------------------------------------------------------------------------------------
class _Event:
    """An event of a device whose work is done as soon as it is asked for."""

    def __init__(self, *args, **kwargs):
        pass

    def record(self, *args, **kwargs):
        pass

    def wait(self, *args, **kwargs):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _Stream:
    """A stream of such a device."""

    def synchronize(self):
        pass

    def wait_stream(self, *args):
        pass

    wait_event = record_event = wait_stream


class _Torch:
    """torch for one module, with events and streams replaced."""

    Event = _Event

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        if name in ("accelerator", "cuda"):
            return _Accelerator(getattr(self._torch, name))
        return getattr(self._torch, name)


class _Accelerator:
    Event = _Event

    def __init__(self, real):
        self._real = real

    def current_stream(self, *args, **kwargs):
        return _Stream()

    def __getattr__(self, name):
        return getattr(self._real, name)


def _replace_accelerator_calls(module):
    if hasattr(module, "torch") and not module.__name__.endswith("rebalance_execute"):
        module.torch = _Torch(module.torch)
    if hasattr(module, "device_stream"):
        module.device_stream = lambda stream: contextlib.nullcontext()
    if hasattr(module, "start_async_worker"):
        module.start_async_worker = _start_async_worker


def _start_async_worker(state, is_profile=False):
    from vllm.distributed.eplb import async_worker

    def run():
        try:
            async_worker.transfer_run_periodically(state=state, stream=_Stream(), is_profile=is_profile)
        except Exception:
            async_worker.logger.exception("the EPLB thread failed")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def _start_the_worker_without_a_device(module):
    module.device_stream = lambda stream: contextlib.nullcontext()
    module.start_async_worker = _start_async_worker


# 6 --------------------------------------------------------------------------------------------------------------------
def _all_gather_rows(communicator, tensor, sizes):
    """All ranks' rows in rank order; ranks may hold different numbers of rows."""
    import torch
    import torch.distributed as dist

    sizes = sizes or [tensor.shape[0]] * communicator.world_size
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=communicator.cpu_group)
    return torch.cat([rows[:size] for rows, size in zip(gathered, sizes, strict=True)])


def _add_collectives(module):
    import torch.distributed as dist

    def all_gatherv(self, input_, dim=0, sizes=None):
        assert dim == 0
        gather = partial(_all_gather_rows, self, sizes=sizes)
        return [gather(tensor) for tensor in input_] if isinstance(input_, list | tuple) else gather(input_)

    def reduce_scatterv(self, input_, dim=-1, sizes=None):
        assert dim == 0
        total = input_.contiguous().clone()
        dist.all_reduce(total, group=self.cpu_group)
        sizes = sizes or [total.shape[0] // self.world_size] * self.world_size
        start = sum(sizes[: self.rank_in_group])
        return total[start : start + sizes[self.rank_in_group]].contiguous()

    module.CpuCommunicator.all_gatherv = all_gatherv
    module.CpuCommunicator.reduce_scatterv = reduce_scatterv
