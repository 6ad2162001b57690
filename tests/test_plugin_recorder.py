"""The recorder's lines, on routers that show ids as vLLM's do; test_vllm_recording has the real ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from eplb_cli.errors import ServeError
from eplb_cli.vllm_plugin import recorder
from eplb_cli.vllm_plugin.recorder import Recorder
from eplb_cli.vllm_plugin.settings import Settings

pytestmark = pytest.mark.skipif(
    not hasattr(torch, "accelerator"), reason="vLLM is not installed: this torch is older than any that it takes"
)

EXPERTS = 4


class BaseRouter:
    """A router that shows its ids to whoever asks."""

    top_k = 2
    capture_fn: Callable[[torch.Tensor], None] | None = None

    def set_capture_fn(self, capture_fn: Callable[[torch.Tensor], None]) -> None:
        self.capture_fn = capture_fn


class Layer(nn.Module):
    """An MoE layer."""

    def __init__(self, layer_id: int) -> None:
        super().__init__()
        self.layer_name = f"model.layers.{layer_id}.mlp.experts"
        self.router, self.moe_config, self.quant_method = BaseRouter(), SimpleNamespace(), None


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Layer]:
    """Two MoE layers, and just the modules of vLLM that the recorder imports."""
    one = SimpleNamespace(rank_in_group=0, world_size=1)
    facts = {
        "vllm.distributed.parallel_state": {
            f"get_{name}_group": lambda: one for name in ("dp", "pp", "tp")
        },
        "vllm.model_executor.layers.fused_moe.router.base_router": {"BaseRouter": BaseRouter},
    }  # fmt: skip
    for name, values in facts.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            if end == len(parts):
                vars(module).update(values)
            monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(recorder, "IDLE_SECONDS", 1e6)  # the clock writes nothing here
    monkeypatch.setattr(recorder.atexit, "register", lambda function: None)
    return {layer_id: Layer(layer_id) for layer_id in (5, 3)}


def start(layers: dict[int, Layer], folder: Path, **settings: Any) -> Recorder:
    model_config = SimpleNamespace(
        get_num_experts=lambda: EXPERTS, model="m", hf_config=SimpleNamespace(architectures=["A"])
    )
    config = SimpleNamespace(
        model_config=model_config, parallel_config=SimpleNamespace(), device_config=SimpleNamespace(device="cpu"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
    )  # fmt: skip
    return Recorder(Settings(record_dir=folder, **settings), config, nn.ModuleList(layers.values()))


def step(one: Recorder, layers: dict[int, Layer], ids: dict[int, list[list[int]]], *, prompt: int = 0) -> None:
    """One engine step of one request, whose first `prompt` tokens are new ones of its prompt."""
    for layer_id, rows in ids.items():
        padded = torch.tensor([*rows, [0, 0]], dtype=torch.int32)  # padding is not counted
        capture = layers[layer_id].router.capture_fn
        assert capture is not None
        capture(padded)
    tokens = len(next(iter(ids.values())))
    new = [SimpleNamespace(req_id="r", prompt_token_ids=[0] * prompt, num_computed_tokens=0)] if prompt else []
    cached = SimpleNamespace(req_ids=[] if prompt else ["r"], num_computed_tokens=[] if prompt else [100])
    output = SimpleNamespace(
        total_num_scheduled_tokens=tokens, scheduled_new_reqs=new, scheduled_cached_reqs=cached,
        num_scheduled_tokens={"r": tokens}, finished_req_ids=set(),
    )  # fmt: skip
    one.finish_step(output, SimpleNamespace())


def lines(folder: Path) -> list[dict[str, Any]]:
    (file,) = folder.iterdir()
    return [json.loads(line) for line in file.read_text().splitlines()]


FIRST = {5: [[0, 1], [0, 2], [0, 3]], 3: [[3, 2], [3, 2], [3, 2]]}
SECOND = {5: [[1, 2]], 3: [[0, 9]]}
THIRD = {5: [[3, 3]], 3: [[-1, 1]]}


def test_windows_hold_what_was_routed_in_them(layers: dict[int, Layer], tmp_path: Path) -> None:
    one = start(layers, tmp_path, record_steps=2)
    step(one, layers, FIRST, prompt=3)
    step(one, layers, SECOND)
    step(one, layers, THIRD)
    one.finish_dummy_step()
    header, *windows = lines(tmp_path)
    assert (header["layer_ids"], header["num_experts"], header["top_k"]) == ([3, 5], EXPERTS, 2)
    for window in windows:
        del window["time"]
    assert windows == [
        {
            "window": 0, "phase": "prefill", "steps": 1, "tokens": 3, "dropped": 0,
            "counts": [[0, 0, 3, 3], [3, 1, 1, 1]],
        },
        {"window": 0, "phase": "decode", "steps": 1, "tokens": 1, "dropped": 1, "counts": [[1, 0, 0, 0], [0, 1, 1, 0]]},
        {"window": 1, "phase": "decode", "steps": 1, "tokens": 1, "dropped": 1, "counts": [[0, 1, 0, 0], [0, 0, 0, 2]]},
    ]  # fmt: skip


@pytest.mark.parametrize("missing", [0, 1])
def test_the_size_limit_holds_to_the_byte(
    layers: dict[int, Layer], tmp_path: Path, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that fits just so is written; with one byte less the recording ends before it."""
    monkeypatch.setattr("time.time", lambda: 1.5)  # the digits of a time count, too
    free = start(layers, tmp_path / "free", record_steps=1)
    step(free, layers, SECOND)
    (file,) = (tmp_path / "free").iterdir()
    size = file.stat().st_size
    for layer in layers.values():
        layer.router = BaseRouter()
    one = start(layers, tmp_path / "limited", record_steps=1, record_max_bytes=size - missing)
    step(one, layers, SECOND)
    step(one, layers, THIRD)
    _, *rest = lines(tmp_path / "limited")
    assert [sorted(line)[:1] for line in rest] == ([["end"]] if missing else [["counts"], ["end"]])


def test_a_router_that_shows_nothing_ends_the_recording(layers: dict[int, Layer], tmp_path: Path) -> None:
    one = start(layers, tmp_path)
    with pytest.raises(ServeError, match="layer 5: the router has shown no ids in a step that routed tokens"):
        step(one, layers, {3: [[0, 1]]})


def test_who_watched_a_router_before_still_sees_its_ids(layers: dict[int, Layer], tmp_path: Path) -> None:
    seen: list[Any] = []
    layers[5].router.set_capture_fn(lambda ids: seen.append(ids.tolist()))
    step(start(layers, tmp_path), layers, SECOND)
    assert seen == [[[1, 2], [0, 0]]]
