"""Copies are chosen by load inside vLLM: the tokens stay, every choice is the rule's, and ranks that differ stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.vllm_cpu.engine import DP2, TP2, Engines, Served, eplb_arguments, free_plan

pytestmark = pytest.mark.vllm

TOKENS, ROUNDS = 60, 4
"""More than two hundred steps, with a rebalance every twenty."""


@pytest.fixture(scope="module")
def expected(engines: Engines, vllm_models: dict[str, Served]) -> list[list[int]]:
    """Greedy tokens on two ranks without EPLB."""
    return engines.run(vllm_models["qwen3"].folder, TP2, max_tokens=TOKENS)[0].rounds[0]


@pytest.mark.parametrize("ranks, policy", [(TP2, "vllm"), (DP2, "eplb")], ids=["tensor parallel", "data parallel"])
def test_tokens_stay_through_hundreds_of_steps_and_rebalances(
    engines: Engines,
    vllm_models: dict[str, Served],
    expected: list[list[int]],
    tmp_path: Path,
    ranks: dict,
    policy: str,
) -> None:
    model = vllm_models["qwen3"]
    free_plan(model).save(tmp_path / "plan.json")
    (tmp_path / "choices").mkdir()
    answers = engines.run(
        model.folder,
        {**ranks, **eplb_arguments(model.redundant)},
        plan=tmp_path / "plan.json",
        policy=policy,
        status=tmp_path / "status",
        environment={
            "EPLB_DISPATCH": "balanced",
            "EPLB_COPY_COST_TOKENS": "2",
            "EPLB_MAX_MOVES": "3",
            "EPLB_MIN_GAIN": "0",
            "CHOICES": str(tmp_path / "choices"),
        },
        breakage="recount_each_choice",
        rounds=ROUNDS,
        max_tokens=TOKENS,
        timeout=400,
    )
    assert [answer.rounds for answer in answers] == [[expected] * ROUNDS] * 2
    assert answers[0].answer["rebalances"] >= 3
    for rank in (0, 1):
        choices = [line.split() for line in (tmp_path / f"choices/rank{rank}").read_text().splitlines()]
        assert len(choices) > 4 * TOKENS * ROUNDS  # four layers
        assert {recorded for _, recorded in choices} == {"0", "1"}
    record = json.loads((tmp_path / "status/stage0-rank1.json").read_text())
    assert (record["dispatch"], record["copy_cost_tokens"]) == ("balanced", 2)
    steps = json.loads((tmp_path / "status/dispatch.json").read_text())
    assert steps["steps"] >= 200
    assert 0.5 < steps["balancedness"] <= 1


def test_ranks_that_route_differently_are_stopped(
    engines: Engines, vllm_models: dict[str, Served], tmp_path: Path
) -> None:
    """One id of one token of one layer differs on one rank, in a step after which nothing is compared."""
    model = vllm_models["qwen3"]
    free_plan(model).save(tmp_path / "plan.json")
    ranks = engines.run(
        model.folder,
        {**TP2, **eplb_arguments(model.redundant)},
        plan=tmp_path / "plan.json",
        policy="static",
        status=tmp_path / "status",
        environment={"EPLB_DISPATCH": "balanced"},
        breakage="one_id_differs",
        rounds=2,
        max_tokens=TOKENS,
    )
    for rank in ranks:
        assert "rounds" not in rank.answer
        assert not rank.answer.get("hang")
        assert "ranks 0 and 1 have sent tokens to different copies" in (rank.error or "")
