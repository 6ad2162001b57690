"""`stock` checkpoints run on an unmodified vLLM; `physical` ones are refused by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Run
from tests.vllm_cpu.engine import TP2, Engines, Served, eplb_arguments, free_plan, stock_plan

pytestmark = pytest.mark.vllm

NAMES = ("qwen3", "qwen3-fused", "llama4", "llama4-per-expert", "llama4-multimodal")


@pytest.mark.parametrize("name", NAMES)
def test_an_unmodified_vllm_gives_the_source_s_tokens(
    engines: Engines, vllm_models: dict[str, Served], eplb: Callable[..., Run], tmp_path: Path, name: str
) -> None:
    model = vllm_models[name]
    stock_plan(model, redundant=0).save(tmp_path / "plan.json")
    assert eplb("convert", model.folder, tmp_path / "plan.json", "-o", tmp_path / "stock").code == 0
    source, stock = (engines.run(folder, model.extra)[0] for folder in (model.folder, tmp_path / "stock"))
    assert stock.rounds == source.rounds


@pytest.mark.parametrize("name", ["qwen3-fused", "llama4"])
def test_the_copies_in_a_fused_checkpoint_serve_stock_eplb(
    engines: Engines, vllm_models: dict[str, Served], eplb: Callable[..., Run], tmp_path: Path, name: str
) -> None:
    model = vllm_models[name]
    stock_plan(model).save(tmp_path / "plan.json")
    assert eplb("convert", model.folder, tmp_path / "plan.json", "-o", tmp_path / "stock").code == 0
    source = engines.run(model.folder)[0]
    stock = engines.run(tmp_path / "stock", {**TP2, **eplb_arguments(model.redundant)}, rounds=2)
    assert stock[0].answer["rebalances"] is None  # no plugin took part
    assert stock[0].rounds == [source.rounds[0]] * 2


@pytest.mark.parametrize("name", ["qwen3", "qwen3-fused"])
def test_the_plugin_proves_a_stock_checkpoint(
    engines: Engines, vllm_models: dict[str, Served], eplb: Callable[..., Run], tmp_path: Path, name: str
) -> None:
    model = vllm_models[name]
    stock_plan(model).save(tmp_path / "plan.json")
    out = tmp_path / "stock"
    assert eplb("convert", model.folder, tmp_path / "plan.json", "-o", out).code == 0
    source = engines.run(model.folder)[0]
    ranks = engines.run(
        out, {**TP2, **eplb_arguments(model.redundant)}, plan=out / "eplb_plan.json", layout="stock", policy="static"
    )
    assert ranks[0].rounds == source.rounds
    assert ranks[0].answer["rebalances"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_an_unmodified_vllm_refuses_a_physical_checkpoint(
    engines: Engines, vllm_models: dict[str, Served], eplb: Callable[..., Run], tmp_path: Path, name: str
) -> None:
    model = vllm_models[name]
    free_plan(model).save(tmp_path / "plan.json")
    assert (
        eplb("convert", model.folder, tmp_path / "plan.json", "--layout", "physical", "-o", tmp_path / "out").code == 0
    )
    (rank,) = engines.run(tmp_path / "out", model.extra)
    assert "Tried to load weights of size" in (rank.error or "")  # the router has a row for each expert
