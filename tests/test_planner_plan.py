"""make_plan: the rules that every placement keeps, the figures, and the corners."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_cli.errors import LoadsError, PlacementError, UsageError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.metrics import balancedness, rank_loads
from eplb_cli.placement import Placement
from eplb_cli.planner import PlanRequest, PlanResult, make_plan

OWN = ["windows", "mean", "stock"]


def loads_from(counts: object, layer_ids: list[int] | None = None) -> ExpertLoads:
    array = np.asarray(counts, np.int64)
    ids = np.arange(array.shape[1]) if layer_ids is None else np.array(layer_ids)
    return ExpertLoads(array, array[:, 0].sum(-1), ids.astype(np.int32))


def traffic(windows: int = 12, layers: int = 3, experts: int = 16, seed: int = 0) -> ExpertLoads:
    """Two topics that take turns, each with its own hot experts."""
    rng = np.random.default_rng(seed)
    topics = rng.lognormal(0.0, 1.0, (2, layers, experts))
    mix = np.abs(np.sin(np.arange(windows)))
    rates = mix[:, None, None] * topics[0] + (1 - mix)[:, None, None] * topics[1]
    return loads_from(rng.poisson(1000 * rates))


@settings(max_examples=60)
@given(
    st.integers(2, 12),
    st.integers(1, 6),
    st.integers(0, 30),
    st.integers(1, 4),
    st.sampled_from(OWN),
    st.integers(0, 99),
)
def test_every_placement_is_legal(experts: int, ranks: int, more: int, windows: int, strategy: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    redundant = -experts % ranks + ranks * more
    if redundant > experts * (ranks - 1):
        redundant = experts * (ranks - 1)
    counts = rng.integers(0, 50, (windows, 2, experts)) * rng.integers(0, 2, (windows, 2, experts))
    counts[0, 0, :2] += 1
    result = make_plan(loads_from(counts), PlanRequest(ranks, redundant, strategy=strategy, folds=0))  # type: ignore[arg-type]
    placement = result.placement
    assert placement.num_redundant_experts == redundant
    assert placement.twins() == []
    assert placement.replica_counts().max() <= ranks
    assert result.balancedness.after <= result.balancedness.bound + 1e-6
    if strategy == "stock":
        assert placement.is_stock_form()


def test_the_recorded_bound_is_rounded_up() -> None:
    """10 tokens on 3 ranks of one slot, 9 of them on one expert: 10 / 27 = 0.370370370370..."""
    result = make_plan(loads_from([[[1, 9, 0]]], [7]), PlanRequest(3, folds=0))
    assert result.balancedness.bound == 0.370370371
    assert result.balancedness.after == 0.370370370


def test_a_previous_plan_does_not_decide_how_many_copies_pay() -> None:
    loads = traffic()
    alone, after = (
        make_plan(loads, PlanRequest(4, "auto", folds=2, effort="fast", previous=previous))
        for previous in (None, make_plan(loads, PlanRequest(4, 16, folds=0, effort="fast")).placement)
    )
    assert [point.as_dict() for point in alone.sweep] == [point.as_dict() for point in after.sweep]


def test_layers_of_the_model_and_of_the_plan_in_force_are_kept() -> None:
    """Loads of layers 4 and 9; the plan in force has 2, 4, 9; the model 2, 3, 4, 9."""
    previous = Placement(
        np.array([[3, 1, 2, 0], [0, 1, 2, 3], [2, 3, 1, 0]], np.int32), np.array([2, 4, 9], np.int32), 4, 2
    )
    loads = loads_from(np.array([[[9, 8, 1, 1], [5, 1, 5, 1]]]), [4, 9])
    request = PlanRequest(2, folds=0, previous=previous, model=ModelShape("M", 4, 2, 12, (2, 3, 4, 9)))
    result = make_plan(loads, request)
    assert result.placement.layer_ids.tolist() == [2, 3, 4, 9]
    assert result.placement.physical_to_logical[:2].tolist() == [[3, 1, 2, 0], [0, 1, 2, 3]]
    ranks = rank_loads(result.placement.for_layers([4, 9]).physical_to_logical, loads.counts, 2)
    assert ranks[0, 0].tolist() in ([10.0, 9.0], [9.0, 10.0]) and ranks[0, 1].tolist() == [6.0, 6.0]
    assert result.worst_layer.layer_id == 4
    assert "the loads lack the model's layer 3: vLLM's initial layout is kept there" in result.warnings
    assert "the loads lack the previous plan's layer 2: it stays as it was" in result.warnings


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ep_size": 10**9}, "fit into memory"),
        ({"seed": -1}, "--seed -1; it must be at least 0"),
        ({"max_extra_gib": float("nan"), "expert_bytes": {0: 1}}, "--max-extra-gib nan"),
        ({"max_extra_gib": -1.0, "expert_bytes": {0: 1}}, r"--max-extra-gib -1\.0"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(traffic(), PlanRequest(**{"ep_size": 4, **fields}))  # type: ignore[arg-type]


def test_loads_that_were_never_filled_in_make_no_plan() -> None:
    dead = np.zeros((2, 3, 4), np.int64)
    dead[:, 1:, 2] = 9
    with pytest.raises(LoadsError, match=r"layers 5, 9 send everything to a single expert.*monolithic"):
        make_plan(loads_from(dead, [3, 5, 9]), PlanRequest(2))
    dead[1, 1, 0] = 1
    assert make_plan(loads_from(dead, [3, 5, 9]), PlanRequest(2)).warnings[0].startswith("layer 9: all load is on one")


@pytest.mark.parametrize("strategy", ["windows", "mean", "deepseek", "stock"])
def test_figures_agree_with_the_placement_and_the_bound(strategy: str) -> None:
    loads = traffic()
    result = make_plan(loads, PlanRequest(4, 4, strategy=strategy))  # type: ignore[arg-type]
    measured = balancedness(rank_loads(result.placement.physical_to_logical, loads.counts, 4))
    initial = Placement.initial(16, 4, 4, loads.layer_ids)
    figures = result.balancedness
    assert figures.after == pytest.approx(measured, abs=1e-6)
    assert figures.before == pytest.approx(
        balancedness(rank_loads(initial.physical_to_logical, loads.counts, 4)), abs=1e-6
    )
    assert figures.before < figures.after <= figures.bound
    assert figures.held_out is not None
    document = result.as_dict()
    assert document["max_over_mean"]["after"] == pytest.approx(1 / figures.after, abs=1e-5)
    assert document["worst_layer"]["after"] <= figures.after


def test_held_out_is_the_contiguous_k_fold_figure() -> None:
    loads = traffic(windows=7)
    request = PlanRequest(4, strategy="windows", folds=3, effort="fast")
    scored = []
    for first, last in ((0, 2), (2, 4), (4, 7)):
        others = np.r_[0:first, last:7]
        plan = make_plan(
            loads.select_windows(others), PlanRequest(4, strategy="windows", folds=0, effort="fast")
        ).placement
        scored.append(rank_loads(plan.physical_to_logical, loads.counts[first:last], 4))
    assert make_plan(loads, request).balancedness.held_out == pytest.approx(
        balancedness(np.concatenate(scored)), abs=1e-6
    )


def test_windows_beats_the_reference_where_experts_take_turns() -> None:
    # Experts 0 and 1 peak together, as do 2 and 3; only plans that keep each pair apart are balanced in every window.
    loads = loads_from([[[10, 10, 1, 1]], [[1, 1, 10, 10]]])
    windows, mean = (make_plan(loads, PlanRequest(2, strategy=s)).placement for s in ("windows", "deepseek"))
    assert balancedness(rank_loads(windows.physical_to_logical, loads.counts, 2)) == 1.0
    pairs = windows.physical_to_logical[0].reshape(2, 2)
    assert all(sorted(map(int, pair)) not in ([0, 1], [2, 3]) for pair in pairs)
    assert mean.num_slots == 4


def test_auto_takes_windows_where_there_are_any_and_says_why() -> None:
    several, one = make_plan(traffic(), PlanRequest(4)), make_plan(traffic(windows=1), PlanRequest(4))
    assert (several.strategy, several.reason) == ("windows", "the loads hold 12 windows")
    assert one.strategy == "mean"
    assert one.balancedness.held_out is None
    assert any("held-out balancedness is not known" in warning for warning in one.warnings)


def test_a_layer_without_load_gets_its_copies_round_robin_and_is_named() -> None:
    counts = traffic().counts.copy()
    counts[:, 1] = 0
    for strategy in OWN:
        result = make_plan(loads_from(counts, [3, 5, 9]), PlanRequest(4, 4, strategy=strategy))  # type: ignore[arg-type]
        assert result.placement.physical_to_logical[1].tolist() == [*range(16), 0, 1, 2, 3]
        assert "no load in layer 5: spare copies go round robin there" in result.warnings


def test_a_window_without_load_changes_nothing() -> None:
    loads = traffic()
    padded = loads_from(np.concatenate([loads.counts, np.zeros_like(loads.counts[:1])]))
    for strategy in OWN:
        plans = [
            make_plan(x, PlanRequest(4, 4, strategy=strategy, folds=0)).placement.physical_to_logical  # type: ignore[arg-type]
            for x in (loads, padded)
        ]
        np.testing.assert_array_equal(*plans)


def test_loads_without_a_window_are_refused() -> None:
    with pytest.raises(LoadsError, match="0 windows of 1 layers"):
        make_plan(loads_from(np.zeros((0, 1, 8))), PlanRequest(2))


def test_loads_that_are_all_zero_give_the_initial_layout() -> None:
    result = make_plan(loads_from(np.zeros((2, 1, 8))), PlanRequest(2, 2))
    assert result.placement.physical_to_logical[0].tolist() == [*range(8), 0, 1]
    assert result.balancedness.after == 1.0


def test_one_rank_gives_the_identity_and_a_note() -> None:
    result = make_plan(traffic(), PlanRequest(1))
    assert result.placement.physical_to_logical[0].tolist() == list(range(16))
    assert result.balancedness.after == 1.0
    assert any("nothing to balance" in note for note in result.notes)


def test_one_slot_a_rank_gives_the_hottest_expert_the_copies() -> None:
    result = make_plan(loads_from([[[90, 10, 10, 10]]]), PlanRequest(6, 2))
    assert result.placement.slots_per_rank == 1
    assert result.placement.replica_counts()[0].tolist() == [3, 1, 1, 1]


def test_the_largest_r_puts_every_expert_on_every_rank() -> None:
    for strategy in OWN:
        result = make_plan(traffic(), PlanRequest(4, 48, strategy=strategy))  # type: ignore[arg-type]
        assert (np.sort(result.placement.physical_to_logical.reshape(3, 4, 16), -1) == np.arange(16)).all()
        assert result.balancedness.after == 1.0


def test_more_spare_slots_than_experts() -> None:
    # Greedy copies are 4, 2, 2 and a busiest rank of 7/4 + 2/2; three and four copies beside one reach 7/3 + 1/4.
    result = make_plan(loads_from([[[7, 2, 1]]]), PlanRequest(4, 5))
    assert result.placement.replica_counts()[0].tolist() == [3, 1, 4]
    assert result.balancedness.after == pytest.approx(2.5 / (7 / 3 + 1 / 4), abs=1e-6)


def test_twins_of_the_reference_are_counted() -> None:
    result = make_plan(loads_from([[[97, 1, 1, 1]]]), PlanRequest(2, 4, strategy="deepseek"))
    assert any("twice on one rank" in warning for warning in result.warnings)


def test_ties_go_to_the_lowest_ids() -> None:
    result = make_plan(loads_from(np.ones((3, 1, 4))), PlanRequest(2, 2))
    assert result.placement.replica_counts()[0].tolist() == [2, 2, 1, 1]


def test_the_same_request_gives_the_same_bytes() -> None:
    first, second = (make_plan(traffic(), PlanRequest(4, 4)).placement.to_json() for _ in range(2))
    assert first == second


def test_few_assignments_are_warned_about() -> None:
    result = make_plan(loads_from(np.ones((1, 1, 128))), PlanRequest(8))
    assert any("fewer than 100 tokens per expert" in w and "is not known" in w for w in result.warnings)


def test_model_layers_without_loads_keep_the_initial_layout_and_are_named_once() -> None:
    model = ModelShape("Qwen3MoeForCausalLM", 16, moe_layer_ids=(1, 2, 3, 7, 8))
    counts = traffic().counts
    result = make_plan(loads_from(counts, [1, 3, 7]), PlanRequest(4, 4, model=model))
    assert result.placement.layer_ids.tolist() == [1, 2, 3, 7, 8]
    assert result.placement.physical_to_logical[1].tolist() == [*range(16), 0, 1, 2, 3]
    assert [w for w in result.warnings if "layers 2, 8" in w]


def test_loads_of_layers_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(PlacementError, match="layers 2, which are not MoE layers"):
        make_plan(traffic(), PlanRequest(4, model=ModelShape(None, 16, moe_layer_ids=(0, 1))))


def test_extra_memory_is_the_spare_slots_of_all_layers() -> None:
    request = PlanRequest(4, 8, expert_bytes={0: 2**30, 1: 2**30, 2: 2**29})
    assert make_plan(traffic(), request).extra_gib_per_rank == 5.0


def test_memory_bounds_r_and_names_the_largest_that_fits() -> None:
    with pytest.raises(UsageError, match=r"add 5 GiB per rank") as caught:
        make_plan(traffic(), PlanRequest(4, 8, expert_bytes={0: 2**30, 1: 2**30, 2: 2**29}, max_extra_gib=3.0))
    assert caught.value.hint == "The largest R within it is 4."
    with pytest.raises(UsageError, match="needs the experts' sizes"):
        make_plan(traffic(), PlanRequest(4, 8, max_extra_gib=3.0))


def moves_after(result: PlanResult, **changes: object) -> PlanResult:
    return make_plan(traffic(), PlanRequest(4, 4, previous=result.placement, **changes))  # type: ignore[arg-type]


def test_moves_count_slots_whose_expert_was_not_on_that_rank() -> None:
    first = make_plan(traffic(), PlanRequest(4, 4))
    assert first.moves is None
    assert moves_after(first).moves == 0


def test_a_previous_plan_of_another_shape_is_refused() -> None:
    other = Placement.initial(16, 0, 4, [0, 1, 2])
    with pytest.raises(PlacementError, match="slots 16 in the previous plan, 20 now"):
        make_plan(traffic(), PlanRequest(4, 4, previous=other))


def test_stock_keeps_routing_groups_together() -> None:
    result = make_plan(traffic(), PlanRequest(4, 4, strategy="stock", num_groups=4))
    assert (result.placement.physical_to_logical[:, :16] // 4 == np.arange(16) // 4).all()
