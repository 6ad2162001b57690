"""Recorded expert loads equal the router counts of transformers on the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import Run
from tests.vllm_cpu.engine import DP2, PROMPTS, TP2, Engines, Rank, Served, eplb_arguments, free_plan

pytestmark = pytest.mark.vllm


def router_counts(model: Served, tokens: list[list[int]]) -> dict[str, np.ndarray]:
    """What transformers' routers choose for the prompts and their continuations, int64 [layers, experts] by phase.

    The last token of a continuation is never run through the model.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(model.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model.folder)
    top_k = network.config.num_experts_per_tok
    chosen: dict[int, Any] = {}

    def watch(layer: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, outputs: Any) -> None:
            found = outputs if isinstance(outputs, tuple) else (outputs,)
            logits = next(t for t in reversed(found) if t.shape[-1] == model.experts and t.is_floating_point())
            chosen[layer] = logits.reshape(-1, model.experts).topk(top_k, -1).indices

        return hook

    for layer in model.layer_ids:
        block = network.model.layers[layer]
        router = block.mlp.gate if hasattr(block, "mlp") else block.feed_forward.router
        router.register_forward_hook(watch(layer))
    counts = {phase: np.zeros((len(model.layer_ids), model.experts), np.int64) for phase in ("prefill", "decode")}
    for prompt, continuation in zip(PROMPTS, tokens, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        with torch.no_grad():
            network(torch.tensor([ids + continuation[:-1]]))
        for row, layer in enumerate(model.layer_ids):
            for phase, part in (("prefill", chosen[layer][: len(ids)]), ("decode", chosen[layer][len(ids) :])):
                counts[phase][row] += np.bincount(part.reshape(-1).numpy(), minlength=model.experts)
    return counts


def recorded(folder: Path) -> dict[str, np.ndarray]:
    """The sum of all lines by phase, after a check of the headers."""
    counts: dict[str, np.ndarray] = {}
    for file in folder.glob("*.jsonl"):
        header, *lines = (json.loads(line) for line in file.read_text().splitlines())
        assert (header["format"], header["version"]) == ("eplb-recording", 1)
        for line in lines:
            assert line["dropped"] == 0
            assert np.sum(line["counts"]) == line["tokens"] * header["top_k"] * len(header["layer_ids"])
            counts[line["phase"]] = counts.get(line["phase"], 0) + np.array(line["counts"])
    return counts


def record(engines: Engines, model: Served, folder: Path, llm: dict[str, Any], **more: Any) -> list[Rank]:
    environment = {"EPLB_RECORD_DIR": str(folder), "EPLB_RECORD_STEPS": "5"}
    return engines.run(model.folder, {**llm, **model.extra}, environment=environment, **more)


@pytest.mark.parametrize("name", ["qwen3", "llama4"])
def test_counts_without_eplb(engines: Engines, vllm_models: dict[str, Served], tmp_path: Path, name: str) -> None:
    model = vllm_models[name]
    (silent,) = engines.run(model.folder)
    (rank,) = record(engines, model, tmp_path, {})
    assert (rank.rounds, rank.logprobs) == (silent.rounds, silent.logprobs)
    counts = router_counts(model, rank.rounds[0])
    found = recorded(tmp_path)
    assert found.keys() == counts.keys()
    for phase, expected in counts.items():
        np.testing.assert_array_equal(found[phase], expected)


def test_counts_with_a_plan_rebalances_and_two_tensor_parallel_ranks(
    engines: Engines, vllm_models: dict[str, Served], tmp_path: Path, eplb: Callable[..., Run]
) -> None:
    model = vllm_models["qwen3"]
    free_plan(model).save(tmp_path / "plan.json")
    llm = {**TP2, **eplb_arguments(model.redundant)}
    ranks = record(engines, model, tmp_path / "loads", llm, plan=tmp_path / "plan.json", rounds=3)
    assert ranks[0].answer["rebalances"] >= 2
    assert len(list((tmp_path / "loads").iterdir())) == 1
    counts = router_counts(model, ranks[0].rounds[0])
    for phase, found in recorded(tmp_path / "loads").items():
        np.testing.assert_array_equal(found, 3 * counts[phase])
    run = eplb("profile", tmp_path / "loads", "--model", model.folder, "-o", tmp_path / "p", "--format", "json")
    assert run.code == 0, run.err
    assert run.json["assignments"] == 3 * sum(int(part.sum()) for part in counts.values())
    assert run.json["layer_ids"] == list(model.layer_ids)


def test_counts_of_two_data_parallel_ranks(engines: Engines, vllm_models: dict[str, Served], tmp_path: Path) -> None:
    model = vllm_models["qwen3"]
    ranks = record(engines, model, tmp_path, DP2)  # each rank serves all prompts
    assert len(list(tmp_path.iterdir())) == 2
    counts = router_counts(model, ranks[0].rounds[0])
    for phase, found in recorded(tmp_path).items():
        np.testing.assert_array_equal(found, 2 * counts[phase])


def test_a_recording_ends_at_its_size_limit(engines: Engines, vllm_models: dict[str, Served], tmp_path: Path) -> None:
    model = vllm_models["qwen3"]
    environment = {"EPLB_RECORD_DIR": str(tmp_path), "EPLB_RECORD_STEPS": "1", "EPLB_RECORD_MAX_BYTES": "2000"}
    (rank,) = engines.run(model.folder, environment=environment)
    assert len(rank.rounds[0]) == len(PROMPTS)
    (file,) = tmp_path.iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[-1] == {"end": "size limit"}
    assert file.stat().st_size < 2100


def test_a_dense_model_cannot_be_recorded(engines: Engines, tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.tiny_models import tokenizer

    torch.manual_seed(0)
    folder = tmp_path / "dense"
    folder.mkdir()
    config = Qwen3Config(
        vocab_size=tokenizer(folder), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (rank,) = engines.run(folder, environment={"EPLB_RECORD_DIR": str(tmp_path / "loads")})
    assert "vLLM sees no MoE layers in this model" in (rank.error or "")
