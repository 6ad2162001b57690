"""vLLM starts from a plan: the tokens are those of the same engine without EPLB, before and after rebalances."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.placement import Placement
from tests.conftest import Run
from tests.vllm_cpu.engine import DP2, TP2, Engines, Rank, Served, eplb_arguments, free_plan

pytestmark = pytest.mark.vllm

NAMES = ("qwen3", "qwen3-fused", "llama4", "llama4-per-expert", "llama4-multimodal")


@pytest.fixture(scope="session")
def tokens(engines: Engines, vllm_models: dict[str, Served]) -> Callable[[str], list[list[int]]]:
    """Greedy tokens of a model on two ranks with expert parallelism and without EPLB; one start a model."""
    found: dict[str, list[list[int]]] = {}

    def get(name: str) -> list[list[int]]:
        if name not in found:
            model = vllm_models[name]
            ranks = engines.run(model.folder, {**TP2, **model.extra})
            assert ranks[0].rounds == ranks[1].rounds
            found[name] = ranks[0].rounds[0]
        return found[name]

    return get


def start(
    engines: Engines,
    model: Served,
    placement: Placement,
    folder: Path,
    *,
    ranks: dict = TP2,
    served: Path | None = None,
    layout: str | None = None,
    policy: str | None = None,
    rounds: int = 1,
    redundant: int | None = None,
    **config: object,
) -> list[Rank]:
    """An engine that starts from `placement`."""
    placement.save(folder / "plan.json")
    extra = placement.num_redundant_experts if redundant is None else redundant
    return engines.run(
        served or model.folder,
        {**ranks, **model.extra, **eplb_arguments(extra, **config)},
        plan=(served or folder) / ("eplb_plan.json" if served else "plan.json"),
        layout=layout,
        policy=policy,
        status=folder / "status",
        rounds=rounds,
    )


@pytest.mark.parametrize("name", NAMES)
def test_tokens_stay_through_a_warm_start_and_three_rebalances(
    engines: Engines,
    vllm_models: dict[str, Served],
    tokens: Callable[[str], list[list[int]]],
    tmp_path: Path,
    name: str,
) -> None:
    model = vllm_models[name]
    plan = free_plan(model)
    # 17 steps a round: the first round ends before the first rebalance.
    ranks = start(engines, model, plan, tmp_path, rounds=4)
    assert ranks[0].rounds == [tokens(name)] * 4
    assert ranks[0].answer["rebalances"] >= 3
    records = [json.loads((tmp_path / f"status/stage0-rank{rank}.json").read_text()) for rank in (0, 1)]
    assert all(record["plan_sha256"] == plan.map_sha256 for record in records)
    assert all(
        record["slots_verified"] == record["slots"] == plan.num_layers * plan.slots_per_rank for record in records
    )
    assert [rank["ep_rank"] for rank in records[0]["ranks"]] == [0, 1]


def test_static_never_rebalances_and_holds_the_plan(
    engines: Engines, vllm_models: dict[str, Served], tokens: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    model = vllm_models["qwen3"]
    plan = free_plan(model)
    ranks = start(engines, model, plan, tmp_path, policy="static", rounds=3)
    assert ranks[0].rounds == [tokens("qwen3")] * 3
    assert ranks[0].answer["rebalances"] == 0
    assert ranks[0].answer["physical_to_logical"] == plan.physical_to_logical.tolist()


@pytest.mark.parametrize("use_async", [False, True])
def test_our_policy_adapts_the_plan_in_bounded_steps(
    engines: Engines,
    vllm_models: dict[str, Served],
    tokens: Callable[[str], list[list[int]]],
    tmp_path: Path,
    use_async: bool,
) -> None:
    model = vllm_models["llama4-per-expert" if use_async else "qwen3"]
    plan = free_plan(model, seed=1)
    plan.save(tmp_path / "plan.json")
    ranks = engines.run(
        model.folder,
        {**TP2, **eplb_arguments(model.redundant, use_async=use_async)},
        plan=tmp_path / "plan.json",
        policy="eplb",
        environment={"EPLB_MAX_MOVES": "3", "EPLB_MIN_GAIN": "0"},
        rounds=5,
    )
    assert ranks[0].rounds == [tokens(model.name)] * 5
    assert ranks[0].answer["rebalances"] >= 3
    moved = (np.array(ranks[0].answer["physical_to_logical"]) != plan.physical_to_logical).sum()
    assert 0 < moved <= 3 * ranks[0].answer["rebalances"]


def test_asynchronous_rebalances_keep_the_tokens(
    engines: Engines, vllm_models: dict[str, Served], tokens: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    model = vllm_models["qwen3"]
    ranks = start(engines, model, free_plan(model), tmp_path, rounds=5, use_async=True)
    assert ranks[0].rounds == [tokens("qwen3")] * 5
    assert ranks[0].answer["rebalances"] >= 3


@pytest.mark.parametrize("use_async", [False, True])
def test_data_parallel_ranks_start_from_the_plan(
    engines: Engines,
    vllm_models: dict[str, Served],
    tokens: Callable[[str], list[list[int]]],
    tmp_path: Path,
    use_async: bool,
) -> None:
    model = vllm_models["llama4" if use_async else "qwen3"]
    ranks = start(engines, model, free_plan(model), tmp_path, ranks=DP2, rounds=4, use_async=use_async)
    assert [rank.rounds for rank in ranks] == [[tokens(model.name)] * 4] * 2
    assert ranks[0].answer["rebalances"] >= 3


def test_a_plan_without_copies_starts_too(
    engines: Engines, vllm_models: dict[str, Served], tokens: Callable[[str], list[list[int]]], tmp_path: Path
) -> None:
    model = vllm_models["llama4"]
    plan = free_plan(model, redundant=0)
    ranks = start(engines, model, plan, tmp_path, policy="static")
    assert ranks[0].rounds == [tokens("llama4")]
    assert ranks[0].answer["physical_to_logical"] == plan.physical_to_logical.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_a_physical_checkpoint_is_the_warm_start_to_the_bit(
    engines: Engines,
    vllm_models: dict[str, Served],
    tokens: Callable[[str], list[list[int]]],
    eplb: Callable[..., Run],
    tmp_path: Path,
    name: str,
) -> None:
    model = vllm_models[name]
    plan = free_plan(model, seed=3)
    (tmp_path / "warm").mkdir()
    warm = start(engines, model, plan, tmp_path / "warm", policy="static")
    out = tmp_path / "physical"
    assert eplb("convert", model.folder, tmp_path / "warm/plan.json", "--layout", "physical", "-o", out).code == 0
    direct = start(engines, model, plan, tmp_path, served=out, layout="physical", policy="static")
    assert direct[0].rounds == [tokens(name)]
    for rank in (0, 1):
        assert direct[rank].answer["slots"] == warm[rank].answer["slots"]
        assert direct[rank].logprobs == warm[rank].logprobs


def test_a_physical_checkpoint_is_read_by_each_rank_for_its_own_slots(
    engines: Engines, vllm_models: dict[str, Served], eplb: Callable[..., Run], tmp_path: Path
) -> None:
    model = vllm_models["qwen3"]
    plan = free_plan(model)
    plan.save(tmp_path / "plan.json")
    out = tmp_path / "physical"
    assert eplb("convert", model.folder, tmp_path / "plan.json", "--layout", "physical", "-o", out).code == 0
    (tmp_path / "read").mkdir()
    ranks = engines.run(
        out,
        {**TP2, **eplb_arguments(model.redundant)},
        plan=out / "eplb_plan.json",
        layout="physical",
        breakage="note_tensors_read",
        environment={"TENSORS_READ": str(tmp_path / "read")},
    )
    assert len(ranks[0].rounds) == 1
    for rank in (0, 1):
        names = (tmp_path / f"read/rank{rank}").read_text().splitlines()
        slots = {int(name.split(".experts.")[1].split(".")[0]) for name in names if ".experts." in name}
        assert slots == set(range(rank * plan.slots_per_rank, (rank + 1) * plan.slots_per_rank))


BROKEN = {
    "one_slot_corrupted": "(1 of 80 slots hold the wrong weights)",
    "router_sees_another_map": "the router does not see the map that vLLM keeps for it",
}


@pytest.mark.parametrize("breakage, message", BROKEN.items(), ids=BROKEN.keys())
def test_a_broken_start_stops_every_rank(
    engines: Engines, vllm_models: dict[str, Served], tmp_path: Path, breakage: str, message: str
) -> None:
    model = vllm_models["qwen3"]
    free_plan(model).save(tmp_path / "plan.json")
    ranks = engines.run(
        model.folder,
        {**TP2, **eplb_arguments(model.redundant)},
        plan=tmp_path / "plan.json",
        status=tmp_path / "status",
        breakage=breakage,
    )
    assert_all_stopped(ranks, message)
    errors = [json.loads(file.read_text())["error"] for file in (tmp_path / "status").glob("*.json")]
    assert len(errors) == 2
    assert all(message in error for error in errors)


def assert_all_stopped(ranks: list[Rank], message: str) -> None:
    """Every rank gave up by itself, in seconds, with the reason; none served, none hung."""
    for rank in ranks:
        assert "rounds" not in rank.answer
        assert not rank.answer.get("hang")
        assert message in (rank.error or "")


def test_another_plan_on_one_rank_stops_all(engines: Engines, vllm_models: dict[str, Served], tmp_path: Path) -> None:
    model = vllm_models["qwen3"]
    for seed in (0, 1):
        free_plan(model, seed=seed).save(tmp_path / f"plan{seed}.json")
    ranks = engines.run(
        model.folder,
        {**TP2, **eplb_arguments(model.redundant)},
        rank_environment=[{"EPLB_PLAN": str(tmp_path / f"plan{seed}.json")} for seed in (0, 1)],
    )
    assert_all_stopped(ranks, "the ranks read different plans")


MISFITS = {
    "wrong R": (lambda model: free_plan(model, redundant=2), "the plan is for 2 redundant experts, vLLM runs 4"),
    "wrong EP size": (lambda model: free_plan(model, ep_size=4), "the plan is for 4 EP ranks, vLLM runs 2"),
    "missing layer": (
        lambda model: free_plan(Served("", model.folder, 16, 4, (1, 2, 4))),
        "layer 3: the plan has no row for this MoE layer",
    ),
    "foreign layer": (
        lambda model: free_plan(Served("", model.folder, 16, 4, (0, 1, 2, 3, 4))),
        "layer 0: the plan has a row for a layer that is not an MoE layer",
    ),
    "another model": (
        lambda model: free_plan(Served("", model.folder, 14, 6, (1, 2, 3, 4))),
        "the plan is for 14 experts, vLLM runs 16",
    ),
}


@pytest.mark.parametrize("make, message", MISFITS.values(), ids=MISFITS.keys())
def test_a_plan_that_does_not_fit_stops_every_rank(
    engines: Engines, vllm_models: dict[str, Served], tmp_path: Path, make: Callable, message: str
) -> None:
    model = vllm_models["qwen3"]
    assert_all_stopped(start(engines, model, make(model), tmp_path, redundant=model.redundant), message)


def test_a_missing_plan_file_stops_every_rank(engines: Engines, vllm_models: dict[str, Served], tmp_path: Path) -> None:
    model = vllm_models["qwen3"]
    ranks = engines.run(model.folder, {**TP2, **eplb_arguments(model.redundant)}, plan=tmp_path / "nope.json")
    assert_all_stopped(ranks, "nope.json: no such file")


def test_a_plan_without_eplb_stops_every_rank(engines: Engines, vllm_models: dict[str, Served], tmp_path: Path) -> None:
    model = vllm_models["qwen3"]
    free_plan(model).save(tmp_path / "plan.json")
    ranks = engines.run(model.folder, TP2, plan=tmp_path / "plan.json", status=tmp_path / "status")
    assert_all_stopped(ranks, "vLLM loaded the model without EPLB")


def test_the_checks_would_see_a_wrong_answer(
    engines: Engines, vllm_models: dict[str, Served], tokens: Callable[[str], list[list[int]]]
) -> None:
    """Unmodified vLLM leaves the spare slots of this checkpoint unfilled: the comparison of tokens must notice."""
    model = vllm_models["qwen3-fused"]
    ranks = engines.run(model.folder, {**TP2, **eplb_arguments(model.redundant)})
    assert ranks[0].rounds != [tokens("qwen3-fused")]
