"""What the planner chooses or lays side by side: R, nodes, the stock map; and what its figures rest on."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_cli.errors import UsageError
from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import balancedness, rank_loads
from eplb_cli.planner import PlanRequest, make_plan
from eplb_cli.planner.redundancy import SweepPoint, candidates, compulsory, knee
from eplb_cli.planner.reference import deepseek_map
from tests.test_planner_search import traffic


def loads_from(counts: np.ndarray, phase: int = 0, top_k: int = 4) -> ExpertLoads:
    return ExpertLoads(
        counts,
        counts[:, 0].sum(-1) // top_k,
        np.arange(counts.shape[1], dtype=np.int32),
        window_phase=np.full(len(counts), phase, np.uint8),
        top_k=top_k,
    )


def points(*held_out: float) -> list[SweepPoint]:
    return [SweepPoint(8 * index, 1.0, value, None) for index, value in enumerate(held_out)]


@pytest.mark.parametrize(
    ("held_out", "index"),
    [((0.80, 0.90, 0.903, 0.905), 1), ((0.80, 0.80, 0.90, 0.901), 2), ((0.9, 0.901), 0), ((0.7, 0.8, 0.9), 2)],
)
def test_the_knee_is_where_no_further_slot_pays(held_out: tuple[float, ...], index: int) -> None:
    assert knee(points(*held_out), 0) == index


def test_r_that_one_hot_expert_makes_compulsory_is_taken() -> None:
    totals = np.array([[100, 10, 10, 10, 10, 10, 10, 10]])
    # The mean rank load is 42.5: the hot expert needs three copies.
    assert compulsory(totals, [0, 4, 8], 4) == 4
    assert knee(points(0.9, 0.9, 0.9), 16) == 2


def test_candidates_are_the_valid_r_of_use() -> None:
    assert candidates(16, 8) == [0, 8, 16]
    assert candidates(16, 5) == [4, 9, 14]
    assert candidates(8, 1) == [0]


def test_auto_lays_out_what_it_chose_from() -> None:
    result = make_plan(
        loads_from(traffic()), PlanRequest(8, "auto", effort="fast", expert_bytes=dict.fromkeys(range(20), 2**20))
    )
    tried = [point.num_redundant_experts for point in result.sweep]
    assert tried == [0, 8, 16, 24, 32]
    assert result.placement.num_redundant_experts in tried
    assert any(note.startswith("R = ") for note in result.notes)
    assert [point.extra_gib_per_rank for point in result.sweep][-1] == pytest.approx(32 * 20 / 1024 / 8, abs=1e-6)
    assert result.as_dict()["redundancy_sweep"][0]["num_redundant_experts"] == 0


def test_memory_bounds_the_sweep() -> None:
    request = PlanRequest(
        8, "auto", effort="fast", folds=0, expert_bytes=dict.fromkeys(range(20), 2**30), max_extra_gib=45.0
    )
    assert [point.num_redundant_experts for point in make_plan(loads_from(traffic()), request).sweep] == [0, 8, 16]


def test_small_decode_steps_get_no_spare_copies() -> None:
    decode = make_plan(loads_from(traffic(), phase=2), PlanRequest(8, "auto", effort="fast", folds=0, step_tokens=64))
    assert decode.placement.num_redundant_experts == 0
    assert any("a copy only adds weights to read" in note for note in decode.notes)
    prefill = make_plan(loads_from(traffic(), phase=1), PlanRequest(8, "auto", effort="fast", folds=0, step_tokens=64))
    assert prefill.placement.num_redundant_experts > 0


def grouped(seed: int = 0) -> np.ndarray:
    """Eight groups of four experts, one group much hotter than the rest."""
    counts = traffic(layers=4, seed=seed)
    counts[:, :, :4] *= 6
    return counts


def plan_for_nodes(policy: str) -> tuple[np.ndarray, object]:
    result = make_plan(
        loads_from(grouped()),
        PlanRequest(8, 8, num_nodes=4, num_groups=8, node_policy=policy, folds=0),  # type: ignore[arg-type]
    )
    assert result.placement.twins() == []
    return result.placement.physical_to_logical, result


def test_strict_keeps_whole_groups_on_nodes() -> None:
    rows, _ = plan_for_nodes("strict")
    for row in rows:
        nodes = [set((row.reshape(4, 10)[node] // 4).tolist()) for node in range(4)]
        assert all(len(groups) == 2 for groups in nodes)
        assert set.union(*nodes) == set(range(8))


def test_policies_stand_side_by_side_with_bounds_and_off_home_load() -> None:
    _, result = plan_for_nodes("relaxed")
    flat, relaxed, strict = result.nodes  # type: ignore[attr-defined]
    assert (flat.policy, relaxed.policy, strict.policy) == ("flat", "relaxed", "strict")
    assert strict.off_home_share == 0.0
    assert strict.off_home_share < relaxed.off_home_share < flat.off_home_share
    assert strict.balancedness <= strict.bound < flat.balancedness
    assert strict.balancedness < relaxed.balancedness
    assert any("whole groups on nodes cap balancedness" in w for w in result.warnings)  # type: ignore[attr-defined]


def test_a_strict_plans_bound_is_the_strict_one() -> None:
    _, result = plan_for_nodes("strict")
    figures = result.balancedness  # type: ignore[attr-defined]
    assert figures.after <= figures.bound < 0.9


def test_node_policies_need_groups_and_nodes() -> None:
    with pytest.raises(UsageError, match="without expert groups on several nodes"):
        make_plan(loads_from(grouped()), PlanRequest(8, 8, node_policy="strict"))


@pytest.mark.parametrize("redundant", [0, 8, 16])
def test_the_stock_map_relabelled_beats_the_references_free_map_on_unseen_windows(redundant: int) -> None:
    counts = traffic(windows=64)
    seen, unseen = loads_from(counts[:32]), counts[32:]
    stock = make_plan(seen, PlanRequest(8, redundant, strategy="stock", folds=0)).placement
    free = deepseek_map(counts[:32].sum(0), 32 + redundant, 8)
    assert stock.is_stock_form()
    assert balancedness(rank_loads(stock.physical_to_logical, unseen, 8)) > balancedness(rank_loads(free, unseen, 8))


def test_whoever_would_start_vllm_with_r_and_no_plan_is_warned() -> None:
    counts = traffic()
    counts[:, :, 24:] *= 20
    notes = make_plan(loads_from(counts), PlanRequest(8, 8, folds=0)).notes
    assert any("Do not start vLLM with R = 8 without a plan" in note for note in notes)


def test_confidence_tells_what_was_seen_and_what_is_needed() -> None:
    result = make_plan(loads_from(traffic()), PlanRequest(8, effort="fast", step_tokens=128))
    seen = result.confidence
    assert seen.interval is not None
    assert result.balancedness.held_out is not None
    assert seen.interval[0] <= result.balancedness.held_out <= seen.interval[1]
    assert (seen.windows_seen, seen.windows_needed) == (24, 64)
    assert seen.tokens_seen == int(loads_from(traffic()).tokens.sum())
    assert seen.step_ceiling == pytest.approx(0.846451956, abs=1e-9)


def test_one_window_leaves_the_interval_open() -> None:
    assert make_plan(loads_from(traffic(windows=1)), PlanRequest(8)).confidence.interval is None


def test_mean_says_what_windows_would_bring() -> None:
    several = make_plan(loads_from(traffic()), PlanRequest(8, strategy="mean", effort="fast")).notes
    assert any("no better than the reference" in note and "--strategy windows reaches" in note for note in several)
    one = make_plan(loads_from(traffic(windows=1)), PlanRequest(8)).notes
    assert any("Record windows" in note for note in one)


@pytest.mark.parametrize(("nodes", "policy"), [(1, "flat"), (4, "strict"), (4, "relaxed")])
def test_an_experts_first_copy_is_on_the_coldest_of_its_ranks(nodes: int, policy: str) -> None:
    counts = grouped()
    groups = 8 if nodes > 1 else None
    request = PlanRequest(8, 8, num_nodes=nodes, num_groups=groups, node_policy=policy, folds=0)  # type: ignore[arg-type]
    placement = make_plan(loads_from(counts), request).placement
    loads = rank_loads(placement.physical_to_logical, counts, 8).sum(0)
    slots = placement.logical_to_physical()
    spread = 0
    for layer, expert in np.argwhere(placement.replica_counts() > 1):
        ranks = [slot // 5 for slot in slots[layer, expert] if slot >= 0]
        if len({rank // (8 // nodes) for rank in ranks}) == 1:
            spread += 1
            assert loads[layer, ranks[0]] <= min(loads[layer, ranks]) + 1e-6
    assert spread
