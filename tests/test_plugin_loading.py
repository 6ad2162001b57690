"""Fused Llama 4 tensors get a row for every slot of vLLM's start layout."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from eplb_cli.vllm_plugin.loading import give_fused_llama4_its_copies


class Llama4Model:
    """As much of vLLM's as the hook touches."""

    num_experts, n_redundant_experts = 5, 7

    def load_moe_expert_weights(self, name: str, loaded_weight: torch.Tensor, fused: bool = True) -> Any:
        return loaded_weight


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Llama4Model:
    monkeypatch.setattr(Llama4Model, "load_moe_expert_weights", Llama4Model.load_moe_expert_weights)
    module = ModuleType("llama4")
    vars(module)["Llama4Model"] = Llama4Model
    give_fused_llama4_its_copies(module)
    return Llama4Model()


WEIGHT = torch.arange(5 * 2 * 3).reshape(5, 2, 3)
NAME = "layers.1.feed_forward.experts.gate_up_proj"


def test_slot_s_gets_expert_s_modulo_e(hooked: Llama4Model) -> None:
    loaded = hooked.load_moe_expert_weights(NAME, WEIGHT)
    assert loaded[:, 0, 0].tolist() == [6 * expert for expert in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1)]


@pytest.mark.parametrize(
    "name, weight, fused",
    [
        (NAME, WEIGHT, False),
        (NAME, WEIGHT[:4], True),
        (NAME, WEIGHT[..., 0], True),
        ("layers.1.feed_forward.shared_expert.down_proj", WEIGHT, True),
    ],
    ids=["per expert", "other rows", "two axes", "no routed experts"],
)
def test_other_tensors_stay(hooked: Llama4Model, name: str, weight: torch.Tensor, fused: bool) -> None:
    assert hooked.load_moe_expert_weights(name, loaded_weight=weight, fused=fused) is weight


def test_without_redundant_experts_nothing_changes(hooked: Llama4Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Llama4Model, "n_redundant_experts", 0)
    assert hooked.load_moe_expert_weights(NAME, WEIGHT) is WEIGHT
