"""Plans for other engines' rules: what they serve under the rule, beside the plans that know nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_cli.dispatch import StaticRule, loads_under
from eplb_cli.errors import UsageError
from eplb_cli.loads import ExpertLoads
from eplb_cli.metrics import balancedness, initial_map
from eplb_cli.placement import Placement
from eplb_cli.planner import PlanRequest, make_plan, score
from tests.conftest import Run

LLAMA = PlanRequest(16, 16, num_nodes=2, strategy="windows", dispatch="sglang", effort="fast", folds=0)


def skewed(seed: int, layers: int = 4, windows: int = 32, hot: float = 0.8, experts: int = 128) -> ExpertLoads:
    """Top-1 loads: in layer 0 one expert takes `hot` of all tokens, else shares fall as 1 / rank^1.1 by topic."""
    rng = np.random.default_rng(seed)
    zipf = np.arange(1, experts + 1) ** -1.1
    counts = np.empty((windows, layers, experts), np.int64)
    for layer in range(layers):
        common = rng.standard_normal(experts)
        topics = np.stack([zipf[np.argsort(np.argsort(-common - rng.standard_normal(experts)))] for _ in range(4)])
        topics /= topics.sum(1, keepdims=True)
        if layer == 0:
            topics *= 1 - hot
            topics[:, rng.integers(experts)] += hot
        for window in range(windows):
            counts[window, layer] = rng.multinomial(20_000, rng.dirichlet(np.ones(4)) @ topics)
    return ExpertLoads(counts, np.full(windows, 20_000), np.arange(1, 2 * layers, 2, dtype=np.int32), top_k=1)


def test_loads_shaped_like_llama_4_are_served_by_sglang_as_no_other_plan_is() -> None:
    loads = skewed(0)
    known = make_plan(loads, LLAMA)
    even = make_plan(loads, replace(LLAMA, dispatch="even"))
    reference = make_plan(loads, replace(LLAMA, strategy="deepseek"))
    assert known.balancedness.after >= 0.75
    assert score(even.placement, loads, "sglang").balancedness <= 0.7
    assert reference.balancedness.after <= 0.7
    assert not known.placement.twins()


def test_the_figures_are_of_the_rule_and_the_plan_file_says_which(tmp_path: Path) -> None:
    loads = skewed(1, layers=2)
    result = make_plan(loads, LLAMA)
    result.placement.save(tmp_path / "p.json")
    again = Placement.load(tmp_path / "p.json")
    initial = replace(Placement.initial(128, 16, 16, loads.layer_ids), num_nodes=2)
    assert again.provenance.dispatch == "sglang"
    assert score(again, loads, "sglang").balancedness == result.balancedness.after
    assert score(initial, loads, "sglang").balancedness == result.balancedness.before
    assert score(again, loads, "even").balancedness == result.balancedness.even


@pytest.mark.parametrize("rule", ["sglang", "vllm-ascend"])
def test_the_same_seed_makes_the_same_plan_and_another_one_another(rule: StaticRule) -> None:
    loads = skewed(2, layers=2, experts=32)
    request = PlanRequest(8, 8, num_nodes=2, dispatch=rule, effort="fast", folds=0)
    first, second, other = (make_plan(loads, replace(request, seed=seed)).placement for seed in (3, 3, 4))
    assert (first.physical_to_logical == second.physical_to_logical).all()
    assert (first.physical_to_logical != other.physical_to_logical).any()


@example(seed=9999, shape=(6, 3), rule="sglang")
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([(4, 1), (4, 2), (6, 3), (8, 2)]),
    rule=st.sampled_from(["sglang", "vllm-ascend"]),
)
@settings(max_examples=12)
def test_no_plan_is_worse_than_the_windows_plan_or_the_references(
    seed: int, shape: tuple[int, int], rule: StaticRule
) -> None:
    ranks, nodes = shape
    rng = np.random.default_rng(seed)
    experts, layers = int(rng.integers(ranks, 4 * ranks)), 3
    redundant = -experts % ranks + ranks * int(rng.integers(0, 2)) or ranks
    counts = rng.poisson(rng.gamma(0.3, 300, (1, layers, experts)) * rng.gamma(2, 0.5, (9, layers, experts)))
    loads = ExpertLoads(counts, np.zeros(9, np.int64), np.array([0, 2, 3], np.int32))
    request = PlanRequest(ranks, redundant, num_nodes=nodes, strategy="windows", dispatch=rule, effort="fast", folds=0)
    found = make_plan(loads, request)
    assert not found.placement.twins()
    windows = make_plan(loads, replace(request, dispatch="even")).placement
    assert found.balancedness.after >= score(windows, loads, rule).balancedness - 1e-9
    reference = make_plan(loads, replace(request, strategy="deepseek"))
    if not reference.placement.twins():
        assert found.balancedness.after >= reference.balancedness.after - 1e-9


def test_layers_without_load_keep_the_initial_layout() -> None:
    loads = skewed(3, layers=3, experts=32)
    counts = loads.counts.copy()
    counts[:, 1] = 0
    made = make_plan(replace(loads, counts=counts), PlanRequest(8, 8, num_nodes=2, dispatch="sglang", effort="fast"))
    rows = made.placement.physical_to_logical
    assert rows[1].tolist() == initial_map(32, 8).tolist()
    assert rows[0].tolist() != initial_map(32, 8).tolist()


def test_whole_groups_stay_on_their_nodes_when_they_must() -> None:
    loads = skewed(4, layers=2, experts=32)
    request = PlanRequest(
        8, 8, num_nodes=2, num_groups=4, node_policy="strict", dispatch="sglang", effort="fast", folds=0
    )
    made = make_plan(loads, request)
    on_node = made.placement.physical_to_logical.reshape(2, 2, -1) // 8
    for layer in range(2):
        assert not set(on_node[layer, 0].tolist()) & set(on_node[layer, 1].tolist())


def test_a_better_order_of_two_ranks_is_found() -> None:
    # Expert 0 has 8 of 20 tokens. Where both nodes hold it, further copies take their own rank's part only, and the
    # first one on a node the rest: so the first must be the rank with least to do besides.
    counts = np.array([[[8, 6, 1, 1, 2, 2]]] * 2)
    loads = ExpertLoads(counts, np.zeros(2, np.int64), np.array([0], np.int32))
    request = PlanRequest(4, 2, num_nodes=2, strategy="windows", dispatch="sglang", effort="fast", folds=0)
    best = make_plan(loads, request)
    every = []
    rng = np.random.default_rng(0)
    for _ in range(4000):
        row = rng.permutation(np.concatenate([np.arange(6), rng.integers(0, 6, 2)]))[None]
        every.append(balancedness(loads_under("sglang", row, counts, 4, 2)))
    assert best.balancedness.after >= max(every) - 1e-9


def test_tensorrt_llm_splits_evenly_so_its_plan_is_the_even_one() -> None:
    loads = skewed(5, layers=2, experts=32)
    request = PlanRequest(8, 8, effort="fast", folds=0)
    even, theirs = (make_plan(loads, replace(request, dispatch=rule)) for rule in ("even", "tensorrt-llm"))
    assert (even.placement.physical_to_logical == theirs.placement.physical_to_logical).all()
    assert theirs.placement.provenance.dispatch == "tensorrt-llm"


def test_moves_from_a_previous_plan_are_refused_under_a_rule_that_has_no_price_for_them() -> None:
    loads = skewed(6, layers=1, experts=32)
    previous = Placement.initial(32, 8, 8, loads.layer_ids)
    with pytest.raises(UsageError, match="--previous with --dispatch sglang"):
        make_plan(loads, PlanRequest(8, 8, dispatch="sglang", previous=previous))


def test_the_command_plans_for_the_rule(eplb: Callable[..., Run], tmp_path: Path) -> None:
    skewed(7, layers=2, experts=32).save(tmp_path / "l.safetensors")
    run = eplb("plan", tmp_path / "l.safetensors", "--ep-size", 8, "--num-redundant-experts", 8, "--num-nodes", 2,
               "--dispatch", "sglang", "--effort", "fast", "-o", tmp_path / "p.json", "--format", "json")  # fmt: skip
    assert run.code == 0, run.err
    assert run.json["dispatch"] == "sglang"
    files = (tmp_path / "p.json", tmp_path / "l.safetensors")
    scored = eplb("score", *files, "--dispatch", "sglang", "--format", "json")
    assert scored.json["dispatch"] == "sglang"
    assert scored.json["balancedness"] == run.json["balancedness"]["after"]
    shown = eplb("score", *files)
    assert "Copies chosen by the rule even" in " ".join(shown.out.split())
    assert "The plan is made for the rule sglang; --dispatch sglang scores it under that." in shown.err
