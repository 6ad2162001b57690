"""Two ranks on one vLLM release's own EPLB code, without the rest of that release.

FOLDER holds the release's `vllm/distributed/eplb/*.py`. Two ranks do what vLLM's workers do at start: the first E slots
hold their experts, the R spare slots hold garbage, and a random plan is put in force by the plugin's own start. What
runs on them is in `two_ranks`.
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
RANKS = 2


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
            rank_in_group=dist.get_rank(),
            ranks=list(range(RANKS)),
            world_size=RANKS,
            device_communicator=SimpleNamespace(pynccl_comm=None),
        ),
        "get_pp_group": lambda: SimpleNamespace(rank_in_group=0, world_size=1),
    },
}


def join(folder: Path, rank: int, port: int) -> None:
    """Make this process rank `rank` of two, with the release in `folder` as its vLLM."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.cuda.synchronize = torch.accelerator.synchronize = lambda *args, **kwargs: None
    sys.meta_path.insert(0, _Finder(folder))
