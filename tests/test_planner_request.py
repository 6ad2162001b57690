"""Rules of a request, each with the message that a user reads."""

from __future__ import annotations

import numpy as np
import pytest

from eplb_cli.errors import UsageError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.planner import PlanRequest
from eplb_cli.planner.request import topology_of


def loads_of(experts: int) -> ExpertLoads:
    return ExpertLoads(np.ones((2, 1, experts), np.int64), np.zeros(2, np.int64), np.zeros(1, np.int32))


def refusal(experts: int, **request: object) -> str:
    with pytest.raises(UsageError) as caught:
        topology_of(loads_of(experts), PlanRequest(**request))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("redundant", [0, 1])
def test_slots_that_do_not_divide_name_the_smallest_valid_r(redundant: int) -> None:
    assert refusal(256, ep_size=3, num_redundant_experts=redundant) == (
        f"256 + {redundant} experts do not divide over 3 ranks; "
        "smallest valid --num-redundant-experts is 2 (258 slots, 86 per rank)"
    )


@pytest.mark.parametrize(("experts", "ranks", "least"), [(128, 8, 0), (128, 12, 4), (256, 3, 2), (16, 5, 4)])
def test_the_default_r_is_the_smallest_valid(experts: int, ranks: int, least: int) -> None:
    assert topology_of(loads_of(experts), PlanRequest(ranks)).num_redundant_experts == least


def test_an_r_that_only_an_engine_of_groups_would_refuse_is_legal() -> None:
    assert topology_of(loads_of(256), PlanRequest(5, 4)).slots_per_rank == 52


def test_an_r_beyond_use_names_the_maximum() -> None:
    assert "the maximum is 24" in refusal(8, ep_size=4, num_redundant_experts=32)
    assert topology_of(loads_of(8), PlanRequest(4, 24)).slots_per_rank == 8


def test_a_single_rank_has_no_use_for_copies() -> None:
    assert topology_of(loads_of(8), PlanRequest(1, 0)).num_slots == 8
    assert "single rank" in refusal(8, ep_size=1, num_redundant_experts=4)


def test_nodes_that_do_not_divide_the_ranks_are_told_which_do() -> None:
    assert refusal(64, ep_size=16, num_nodes=3) == "16 ranks do not split over 3 nodes; use 1, 2, 4, 8 or 16"


def test_groups_must_split_over_nodes() -> None:
    assert "4 groups do not split over 3 nodes" in refusal(
        64, ep_size=12, num_redundant_experts=8, num_groups=4, num_nodes=3
    )
    assert "64 experts do not split into 5 groups" in refusal(64, ep_size=8, num_groups=5)


@pytest.mark.parametrize("request_", [{"ep_size": 0}, {"ep_size": 4, "num_redundant_experts": -4}])
def test_sizes_below_the_least_are_refused(request_: dict[str, int]) -> None:
    assert "at least" in refusal(8, **request_)


def test_loads_of_another_model_are_refused() -> None:
    assert "the model has 16" in refusal(8, ep_size=2, model=ModelShape(None, 16))


@pytest.mark.parametrize("request_", [{"strategy": "best"}, {"effort": "maximal"}, {"node_policy": "hierarchical"}])
def test_unknown_words_are_told_the_known_ones(request_: dict[str, str]) -> None:
    assert "is not known; use " in refusal(8, ep_size=2, **request_)


def test_moves_need_a_plan_to_count_from() -> None:
    assert "--max-moves without --previous" in refusal(8, ep_size=2, max_moves=3)
