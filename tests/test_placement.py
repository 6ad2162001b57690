"""Placement: its invariants, what is derived from the map, and its file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eplb_cli.errors import PlacementError
from eplb_cli.metrics import initial_map, smallest_redundancy
from eplb_cli.placement import Placement, Provenance


def placement(rows: list[list[int]], num_experts: int, ep_size: int, **fields: object) -> Placement:
    array = np.array(rows, np.int32)
    ids = fields.pop("layer_ids", list(range(len(rows))))
    return Placement(array, np.array(ids, np.int32), num_experts, ep_size, **fields)  # type: ignore[arg-type]


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    """Any legal placement of up to 9 experts on up to 4 ranks, twins included."""
    experts, ranks, layers = draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    redundant = smallest_redundancy(experts, ranks) + ranks * draw(st.integers(0, 2))
    rows = [
        draw(
            st.permutations(
                [*range(experts), *draw(st.lists(st.integers(0, experts - 1), min_size=redundant, max_size=redundant))]
            )
        )
        for _ in range(layers)
    ]
    ids = sorted(draw(st.sets(st.integers(0, 99), min_size=layers, max_size=layers)))
    array = np.array(rows, np.int32).reshape(layers, experts + redundant)
    return Placement(array, np.array(ids, np.int32), experts, ranks)


@given(placements())
def test_the_file_gives_back_the_plan(plan: Placement) -> None:
    read = Placement.from_json(plan.to_json())
    np.testing.assert_array_equal(read.physical_to_logical, plan.physical_to_logical)
    np.testing.assert_array_equal(read.layer_ids, plan.layer_ids)
    assert read.to_json() == plan.to_json()
    assert read.map_sha256 == plan.map_sha256


@given(placements())
def test_the_inverse_map_names_every_slot_once(plan: Placement) -> None:
    table = plan.logical_to_physical()
    for layer in range(plan.num_layers):
        for expert in range(plan.num_experts):
            slots = [slot for slot in table[layer, expert].tolist() if slot >= 0]
            assert slots == np.flatnonzero(plan.physical_to_logical[layer] == expert).tolist()


@given(placements())
def test_twins_are_the_experts_a_rank_holds_twice(plan: Placement) -> None:
    expected = set()
    for layer, row in zip(plan.layer_ids.tolist(), plan.physical_to_logical.tolist(), strict=True):
        for rank in range(plan.ep_size):
            own = row[rank * plan.slots_per_rank : (rank + 1) * plan.slots_per_rank]
            expected |= {(layer, rank, expert) for expert in own if own.count(expert) > 1}
    assert plan.twins() == sorted(expected)


@pytest.mark.parametrize("experts", range(1, 10))
@pytest.mark.parametrize("redundant", range(21))
def test_the_initial_map_is_vllms(experts: int, redundant: int) -> None:
    assert initial_map(experts, redundant).tolist() == [*range(experts), *(i % experts for i in range(redundant))]


def test_the_initial_layout_has_the_stock_form() -> None:
    assert Placement.initial(8, 12, 4, [0]).is_stock_form()


def test_a_relabelled_initial_layout_has_the_stock_form() -> None:
    assert placement([[2, 0, 1, 2]], 3, 2).is_stock_form()


@pytest.mark.parametrize("row", [[2, 0, 1, 0], [0, 1, 0, 2]])
def test_another_layout_has_not(row: list[int]) -> None:
    assert not placement([row], 3, 2).is_stock_form()


@pytest.mark.parametrize(
    ("rows", "experts", "ranks", "message"),
    [
        ([[0, 1, 3, 2]], 3, 2, "layer 5, rank 1: slot 2 holds expert 3; experts are 0..2"),
        ([[0, -1]], 2, 1, "layer 5, rank 0: slot 1 holds expert -1"),
        ([[3, 3, 0, 1]], 4, 2, "layer 5, expert 2: the expert has no slot"),
        ([[0, 1, 2, 0, 1]], 3, 2, "5 slots do not divide over 2 ranks"),
    ],
)
def test_a_broken_map_is_named_by_layer_and_expert(
    rows: list[list[int]], experts: int, ranks: int, message: str
) -> None:
    with pytest.raises(PlacementError, match=message):
        placement(rows, experts, ranks, layer_ids=[5])


def test_ranks_must_split_over_nodes() -> None:
    with pytest.raises(PlacementError, match="4 ranks do not split over 3 nodes"):
        placement([[0, 1, 2, 3]], 4, 4, num_nodes=3)


def test_provenance_stands_in_the_file() -> None:
    provenance = Provenance("Llama4ForCausalLM", 1, "stock", "windows", 7, "ab", {"before": 0.5, "held_out": None})
    document = json.loads(placement([[0, 1]], 2, 2, provenance=provenance).to_json())
    assert document["model"] == {"architecture": "Llama4ForCausalLM", "experts": 2, "top_k": 1}
    assert document["topology"] == {"ep_size": 2, "nodes": 1}
    assert document["balancedness"] == {"before": 0.5, "held_out": None}
    assert document["layers"] == [{"layer_id": 0, "moe_index": 0, "physical_to_logical": [0, 1]}]
    assert Placement.from_json(json.dumps(document).encode()).provenance == provenance


def edited(**changes: object) -> bytes:
    document = json.loads(placement([[0, 1], [1, 0]], 2, 2).to_json())
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = document
        for key in parents:
            target = target[int(key) if key.isdigit() else key]
        target[last] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not JSON"),
        (b"[]", "is not a plan"),
        (b"\xff\xfe", "is not JSON"),
        (b'{"format": "eplb-plan", "format": "eplb-plan"}', "has the key 'format' twice"),
        (edited(version=2), "has plan version 2; this eplb reads version 1"),
        (edited(stratgy="x"), "unknown key 'stratgy'; did you mean 'strategy'?"),
        (edited(model__expert=3), "unknown key 'expert'; did you mean 'experts'?"),
        (edited(layers__0__physical_to_logical=[0, 1, 1]), "layer 0: 3 slots; every layer has .* = 2"),
        (edited(layers__0__physical_to_logical=[0, True]), "layer 0: .* not a list of integers"),
        (edited(layers__0__physical_to_logical=[0.0, 1.0]), "layer 0: .* not a list of integers"),
        (edited(layers__1__moe_index=5), "layer 1: moe_index is 5; it must be 1"),
        (edited(layers__1__layer_id=0), "not ascending"),
        (edited(topology__ep_size="2"), "`ep_size` is '2'"),
        (edited(topology=None), "has no section `topology`"),
        (edited(layers=3), "has no list `layers`"),
        (edited(layers__0__physical_to_logical=[0, 2**40]), "layer 0: holds expert .*; experts fit in 32 bits"),
        (edited(layers__0__physical_to_logical=[0, -(2**80)]), "experts fit in 32 bits"),
        (edited(layers__1__layer_id=2**40), "`layer_id` is 1099511627776"),
        (edited(layers=[]), "has no layer"),
        (edited(layers=[[]]), "has a layer that is not an object"),
        (edited(layers__1__moe_index=True), "layer 1: moe_index is True; it must be 1"),
        (edited(layers__1__layer_id=True), "`layer_id` is True"),
        (edited(layers__1__layer_id=10**12), "`layer_id` is 1000000000000"),
        (edited(layers__0__physical_to_logical={}), "not a list of integers"),
        (edited(model__experts=[2]), r"`experts` is \[2\]"),
        (edited(model__experts=10**9), "every layer has .* = 1000000000"),
        (edited(model__experts=0), "every layer has .* = 0"),
        (edited(topology__ep_size=0), "all must be >= 1"),
        (edited(topology__nodes=0), "all must be >= 1"),
        (edited(topology__nodes="a" * 999), "`nodes` is 'a{76}\\.\\.\\."),
        (edited(num_redundant_experts=-1), "`num_redundant_experts` is -1"),
        (edited(version=1.0), "has plan version 1.0"),
        (edited(version=True), "has plan version True"),
        (edited(balancedness=[]), "`balancedness` is"),
        (edited(balancedness__after=True), "`after` is True"),
        (edited(profile_sha256=5), "`profile_sha256` is 5"),
        (edited(version=None), "has no plan version; this eplb reads version 1"),
        (edited(version="1"), "has plan version '1'"),
        (edited(seed="x"), "`seed` is 'x'; it must be int, or null"),
        (edited(strategy=5), "`strategy` is 5; it must be str, or null"),
        (edited(model__top_k=True), "`top_k` is True"),
        (edited(balancedness__bfore=0.5), "unknown key 'bfore'; did you mean 'before'?"),
        (edited(balancedness__after="good"), "`after` is 'good'"),
        (edited(balancedness__after=float("nan")), "holds NaN"),
    ],
)
def test_a_broken_file_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Placement.from_json(content)


@pytest.mark.parametrize(
    ("rows", "experts", "ranks"),
    [([[0, 1]], 10**12, 1), ([[0, 1]], 2, 10**9), ([[0, 1]], 3, 2), ([list(range(20_000))], 20_000, 20_000)],
)
def test_sizes_that_no_memory_holds_are_refused_at_once(rows: list[list[int]], experts: int, ranks: int) -> None:
    with pytest.raises(PlacementError, match=r"fit into memory|experts in 2 slots|do not divide over"):
        placement(rows, experts, ranks)


def test_copies_of_one_expert_without_end_are_refused() -> None:
    """The inverse map has a column for each copy."""
    row = [*range(20_000), *[7] * 20_000]
    with pytest.raises(PlacementError, match="20,001 ranks or copies"):
        placement([row], 20_000, 2)


def test_a_plan_of_many_slots_is_made_nowhere() -> None:
    with pytest.raises(PlacementError, match=r"every layer has .* = 1000000002"):
        Placement.from_json(edited(num_redundant_experts=10**9))
    with pytest.raises(PlacementError, match="ranks or copies"):
        Placement.from_json(edited(topology__ep_size=10**9))


def test_a_folder_stands_for_the_plan_in_it(tmp_path: Path) -> None:
    placement([[0, 1]], 2, 2).save(tmp_path / "eplb_plan.json")
    assert Placement.load(tmp_path).num_experts == 2


def test_a_folder_without_a_plan_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"the folder holds no eplb_plan\.json"):
        Placement.load(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlacementError, match=r"plan\.json: no such file"):
        Placement.load(tmp_path / "plan.json")


def test_the_digest_depends_on_the_map_only() -> None:
    a = placement([[0, 1]], 2, 2)
    assert a.map_sha256 == placement([[0, 1]], 2, 2, provenance=Provenance(seed=3)).map_sha256
    assert a.map_sha256 != placement([[1, 0]], 2, 2).map_sha256
    assert a.map_sha256 != placement([[0, 1]], 2, 1).map_sha256
    assert a.map_sha256 != placement([[0, 1]], 2, 2, layer_ids=[1]).map_sha256


UNEVEN = placement([[2, 0, 1, 2], [0, 1, 2, 0], [1, 2, 0, 1]], 3, 2, layer_ids=[3, 7, 12])


def test_rows_are_taken_by_layer_id() -> None:
    part = UNEVEN.for_layers([3, 12])
    assert part.physical_to_logical.tolist() == [[2, 0, 1, 2], [1, 2, 0, 1]]
    assert (part.layer_ids.tolist(), part.num_experts, part.ep_size) == ([3, 12], 3, 2)
    assert UNEVEN.for_layers(UNEVEN.layer_ids).to_json() == UNEVEN.to_json()


def test_layers_that_a_plan_lacks_are_refused_or_get_the_start_layout_or_anothers_rows() -> None:
    with pytest.raises(PlacementError, match=r"the plan lacks layers 4-5; it has layers 3, 7, 12"):
        UNEVEN.for_layers([3, 4, 5, 7])
    start = UNEVEN.for_layers([4, 7, 13], missing="initial")
    assert start.physical_to_logical.tolist() == [[0, 1, 2, 0], [0, 1, 2, 0], [0, 1, 2, 0]]
    other = placement([[2, 1, 0, 1], [1, 0, 2, 2]], 3, 2, layer_ids=[3, 4])
    mixed = UNEVEN.for_layers([3, 4, 12], missing=other)
    assert mixed.physical_to_logical.tolist() == [[2, 0, 1, 2], [1, 0, 2, 2], [1, 2, 0, 1]]
    with pytest.raises(PlacementError, match="the plan lacks layer 5; it has layers 3-4"):
        UNEVEN.for_layers([3, 5], missing=other)


def test_layers_are_not_negative() -> None:
    with pytest.raises(PlacementError, match=r"layer ids \[-1, 0\] are not ascending"):
        placement([[0, 1], [1, 0]], 2, 2, layer_ids=[-1, 0])


def test_layers_are_asked_for_in_ascending_order() -> None:
    with pytest.raises(PlacementError, match="not ascending"):
        UNEVEN.for_layers([12, 3])


def twins(strategy: str | None) -> Placement:
    return placement([[0, 0, 1, 2]], 3, 2, layer_ids=[5], provenance=Provenance(strategy=strategy))


def test_a_rank_that_holds_an_expert_twice_is_named() -> None:
    with pytest.raises(
        PlacementError, match=r"p\.json, layer 5, rank 0, expert 0: the rank holds the expert more than once"
    ):
        twins("windows").require_distinct_copies(Path("p.json"))


def test_the_reference_may_hold_an_expert_twice_on_a_rank() -> None:
    twins("deepseek").require_distinct_copies()


def test_vllms_own_start_layout_may_too() -> None:
    own = Placement.initial(2, 4, 2, [0])
    assert own.twins()
    own.require_distinct_copies()


def test_files_may_be_named_by_strings(tmp_path: Path) -> None:
    name = str(tmp_path / "plan.json")
    saved = placement([[0, 1]], 2, 2)
    saved.save(name)
    assert Placement.load(name).to_json() == saved.to_json()
    assert Placement.load(tmp_path / "plan.json").to_json() == saved.to_json()


def test_a_figure_that_is_no_number_is_a_defect(tmp_path: Path) -> None:
    rows = np.array([[0, 1]], np.int32)
    plan = Placement(rows, np.array([0], np.int32), 2, 1, provenance=Provenance(balancedness={"after": float("nan")}))
    with pytest.raises(ValueError, match="not JSON compliant"):
        plan.save(tmp_path / "plan.json")
    assert not list(tmp_path.iterdir())
