"""Runs the plugin's transfer on one vLLM release's own rearrangement code, without the rest of that release.

    python -m tests.vllm_cpu.released_eplb FOLDER RANK PORT

FOLDER holds the release's `vllm/distributed/eplb/*.py`. Two ranks do what vLLM's workers do at start: the first E slots
hold their experts, the R spare slots hold garbage, and a random plan is put in force. Exits 0 when every slot of this
rank then holds exactly the bytes of its expert, and the release's own default policy keeps a placement whose window is
empty.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

REAL = "vllm.distributed.eplb"
LAYERS, EXPERTS, REDUNDANT, RANKS = 5, 12, 4, 2
SLOTS = EXPERTS + REDUNDANT


class _Anything:
    """Stands for whatever a release imports beside its EPLB code."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls


class _Stub(ModuleType):
    __path__: ClassVar[list[str]] = []  # every stub is a package

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the release's EPLB modules in FOLDER, and stubs for all others of vLLM."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] != "vllm":
            return None
        base = self._folder / Path(*name.split("."))
        if name.startswith(REAL):
            if base.is_dir():
                return importlib.util.spec_from_file_location(
                    name, base / "__init__.py", submodule_search_locations=[str(base)]
                )
            return importlib.util.spec_from_file_location(name, base.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        for name, value in _FACTS.get(module.__name__, {}).items():
            setattr(module, name, value)


class _Logger(logging.Logger):
    def info_once(self, *args: Any, **kwargs: Any) -> None:
        pass

    warning_once = debug_once = info_once


_FACTS: dict[str, dict[str, Any]] = {
    "vllm.logger": {"init_logger": _Logger},
    "vllm.config.parallel": {"EPLBPolicyOption": Literal["default"]},
    "vllm.distributed.utils": {"is_weak_contiguous": lambda tensor: tensor.is_contiguous()},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
    "vllm.utils.torch_utils": {"PIN_MEMORY": False},
    "vllm.distributed.nixl_utils": {"NixlWrapper": None, "is_nixl_available": lambda: False},
    "vllm.distributed.parallel_state": {
        "get_ep_group": lambda: SimpleNamespace(
            device_group=dist.group.WORLD,
            cpu_group=dist.group.WORLD,
            rank=dist.get_rank(),
            world_size=RANKS,
            device_communicator=SimpleNamespace(pynccl_comm=None),
        )
    },
}


def _weights(rank: int, experts: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """This rank's slots in vLLM's start layout, spare slots filled with garbage."""
    per_rank = SLOTS // RANKS
    weights = []
    for tensors in experts:
        row = []
        for tensor in tensors:
            slots = torch.full((per_rank, *tensor.shape[1:]), 77).to(tensor.dtype)
            for slot in range(per_rank):
                if rank * per_rank + slot < EXPERTS:
                    slots[slot] = tensor[rank * per_rank + slot]
            row.append(slots)
        weights.append(row)
    return weights


def main(folder: Path, rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda *args, **kwargs: None
    sys.meta_path.insert(0, _Finder(folder))

    import numpy as np

    from eplb_cli.vllm_plugin import warm_start
    from eplb_cli.vllm_plugin.rebalancing import WatchedPolicy
    from eplb_cli.vllm_plugin.settings import Settings

    random = torch.Generator().manual_seed(1)
    experts = [
        [
            torch.randn(EXPERTS, 6, 4, generator=random),
            torch.randn(EXPERTS, 7, generator=random).to(torch.bfloat16),
            torch.randint(-100, 100, (EXPERTS, 5), generator=random, dtype=torch.int8),
            torch.randn(EXPERTS, generator=random),
        ]
        for _ in range(LAYERS)
    ]
    new = torch.stack(
        [
            torch.cat([torch.arange(EXPERTS), torch.randint(0, EXPERTS, (REDUNDANT,), generator=random)])[
                torch.randperm(SLOTS, generator=random)
            ]
            for _ in range(LAYERS)
        ]
    )
    old = torch.tensor([*range(EXPERTS), *[-1] * REDUNDANT]).repeat(LAYERS, 1)
    weights = _weights(rank, experts)
    model_state = SimpleNamespace(
        physical_to_logical_map=new, expert_buffer=[torch.empty_like(tensor) for tensor in weights[0]]
    )
    if (folder / "vllm/distributed/eplb/eplb_communicator.py").exists():
        from vllm.distributed.eplb import eplb_communicator

        # Named for NCCL, it is torch.distributed's point-to-point calls on whatever group it is given.
        model_state.communicator = eplb_communicator.TorchDistNcclEplbCommunicator(ep_group=dist.group.WORLD)
    group = SimpleNamespace(device_group=dist.group.WORLD, cpu_group=dist.group.WORLD, world_size=RANKS)
    warm_start.transfer(None, model_state, weights, old, new, group)
    per_rank = SLOTS // RANKS
    own = new[:, rank * per_rank : (rank + 1) * per_rank]
    for layer in range(LAYERS):
        for slots, tensor in zip(weights[layer], experts[layer], strict=True):
            assert torch.equal(slots, tensor[own[layer]]), (layer, slots.dtype)
        wanted = warm_start.slot_checksums([tensor[own[layer]] for tensor in experts[layer]])
        assert torch.equal(warm_start.slot_checksums(weights[layer]), wanted)

    from vllm.distributed.eplb.policy import default

    state = SimpleNamespace(model_states={})
    policy = WatchedPolicy(Settings(), default.DefaultEplbPolicy, state, RANKS, rank)
    loads = torch.zeros(LAYERS, EXPERTS)
    loads[1] = torch.arange(EXPERTS) + 1
    answer = policy.rebalance_experts(loads, SLOTS, 1, 1, RANKS, new)
    answered = answer[0] if isinstance(answer, tuple) else answer
    quiet = np.arange(LAYERS) != 1
    assert torch.equal(answered[quiet], new[quiet])
    assert not torch.equal(answered[1], new[1])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
