"""Other engines' choice of copies, against a plain statement of each rule, rank by rank and expert by expert."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_cli.dispatch import StaticRule, chosen_slots, loads_under, slot_tokens, static_shares, usual_shares
from eplb_cli.errors import PlacementError
from eplb_cli.metrics import initial_map

STATIC: tuple[StaticRule, ...] = ("sglang", "vllm-ascend")


class Case:
    """Rows on ranks and nodes, at some decoder layers; twins are allowed."""

    def __init__(self, nodes: int, per_node: int, room: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.nodes, self.ranks, self.room = nodes, nodes * per_node, room
        self.slots = self.ranks * room
        self.experts = int(rng.integers(1, self.slots + 1))
        spare = rng.integers(0, self.experts, (3, self.slots - self.experts))
        self.rows = np.stack([rng.permutation(np.concatenate([np.arange(self.experts), more])) for more in spare])
        self.layer_ids = np.sort(rng.choice(6, 3, replace=False))
        self.rng = rng

    def rank(self, slot: int) -> int:
        return slot // self.room

    def node(self, rank: int) -> int:
        return rank // (self.ranks // self.nodes)


cases = st.builds(
    Case,
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 4),
    room=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
)


def sglang_plainly(case: Case) -> np.ndarray:
    """[L, E, G], from what every rank of SGLang does by itself at start."""
    rows = np.tile(initial_map(case.experts, case.slots - case.experts), (case.layer_ids.max() + 1, 1))
    rows[case.layer_ids] = case.rows

    def near(slots: list[int], rank: int) -> int | None:
        if len(slots) == 1:
            return slots[0]
        own = [slot for slot in slots if case.rank(slot) == rank]
        beside = [slot for slot in slots if case.node(case.rank(slot)) == case.node(rank)]
        if own:
            return own[0]
        return beside[0] if 0 < len(beside) < len(slots) else None

    result = np.empty((len(rows), case.experts, case.ranks), int)
    for me in range(case.ranks):
        generator = random.Random(42)
        for layer, row in enumerate(rows.tolist()):
            for expert in range(case.experts):
                slots = [slot for slot, held in enumerate(row) if held == expert]
                found = near(slots, me)
                if found is None:
                    players = [rank for rank in range(case.ranks) if near(slots, rank) is None]
                    cards = slots * (len(players) // len(slots))
                    cards += generator.sample(slots, len(players) % len(slots))
                    generator.shuffle(cards)
                    found = cards[players.index(me)]
                result[layer, expert, me] = found
    return result[case.layer_ids]


def vllm_ascend_plainly(case: Case) -> np.ndarray:
    """[L, E, G]."""
    result = np.empty((len(case.rows), case.experts, case.ranks), int)
    for layer, row in enumerate(case.rows.tolist()):
        for expert in range(case.experts):
            last_on = {case.rank(slot): slot for slot, held in enumerate(row) if held == expert}
            for source in range(case.ranks):
                holder = sorted(last_on)[source % len(last_on)]
                result[layer, expert, source] = last_on[holder]
    return result


@given(cases)
@settings(max_examples=150)
def test_sglang_sends_to_the_nearest_copy_and_deals_the_others(case: Case) -> None:
    chosen = chosen_slots("sglang", case.rows, case.experts, case.ranks, case.nodes, case.layer_ids)
    assert (chosen == sglang_plainly(case)).all()


@given(cases)
@settings(max_examples=100)
def test_vllm_ascend_takes_the_rank_modulo_the_copies(case: Case) -> None:
    chosen = chosen_slots("vllm-ascend", case.rows, case.experts, case.ranks, case.nodes)
    assert (chosen == vllm_ascend_plainly(case)).all()


def test_sglang_by_hand() -> None:
    # Ranks 0, 1 | 2, 3 of two slots. Expert 0 is on ranks 0, 1 and 2; 1 on rank 1 and 3; 2, 3 and 4 once.
    rows = np.array([[2, 0, 0, 1, 3, 0, 1, 4]])
    chosen = chosen_slots("sglang", rows, 5, 4, 2)[0]
    # 0: everyone serves itself, rank 3 asks rank 2. 1: ranks 1 and 3 serve themselves, 0 asks 1 and 2 asks 3.
    assert chosen.tolist() == [[1, 2, 5, 5], [3, 3, 6, 6], [0] * 4, [4] * 4, [7] * 4]
    shares = static_shares("sglang", rows, 5, 4, 2)[0]
    assert shares.tolist()[:2] == [[0.25, 0.25, 0.5, 0], [0, 0.5, 0, 0.5]]


def test_copies_on_one_node_are_dealt_to_all_who_hold_none() -> None:
    # Expert 0 on both ranks of node 0: the ranks of node 1 get one each, in an order that only the seed knows.
    rows = np.array([[0, 1, 0, 2, 3, 4, 5, 6]])
    shares = static_shares("sglang", rows, 7, 4, 2)[0]
    assert shares[0].tolist() == [0.5, 0.5, 0, 0]
    far = chosen_slots("sglang", rows, 7, 4, 2)[0, 0, 2:]
    expected = [0, 2]
    random.Random(42).shuffle(expected)
    assert far.tolist() == expected


def test_the_deal_depends_on_the_layers_before_even_dense_ones() -> None:
    rows = np.array([[0, 1, 2, 3, 0, 4, 0, 5]])
    first, later = (
        [int(chosen_slots("sglang", rows, 6, 4, 1, [layer])[0, 0, 1]) for layer in layers]
        for layers in ([0] * 12, list(range(12)))
    )
    assert len(set(first)) == 1
    assert set(later) == {0, 4, 6}


def test_a_layer_beyond_any_models_is_refused_before_it_is_dealt() -> None:
    with pytest.raises(PlacementError, match="fit into memory"):
        chosen_slots("sglang", np.array([[0, 1]]), 2, 2, 1, [2**31 - 1])


def test_vllm_ascend_by_hand() -> None:
    rows = np.array([[0, 1, 0, 2, 3, 0, 4, 5]])
    shares = static_shares("vllm-ascend", rows, 6, 4, 1)[0]
    # Ranks 0 and 3 take the first of expert 0's three copies.
    assert shares[0].tolist() == [0.5, 0.25, 0.25, 0]


@given(cases, st.sampled_from(STATIC))
@settings(max_examples=100)
def test_shares_are_of_holders_and_sum_to_one(case: Case, rule: StaticRule) -> None:
    shares = static_shares(rule, case.rows, case.experts, case.ranks, case.nodes)
    assert np.allclose(shares.sum(2), 1)
    held = np.zeros(shares.shape, bool)
    held[np.arange(3)[:, None], case.rows, np.arange(case.slots) // case.room] = True
    assert not shares[~held].any()


@given(cases, st.sampled_from(STATIC))
@settings(max_examples=150)
def test_usual_shares_are_exact_but_for_what_is_dealt(case: Case, rule: StaticRule) -> None:
    held = np.zeros((3, case.experts, case.ranks), bool)
    held[np.arange(3)[:, None], case.rows, np.arange(case.slots) // case.room] = True
    twins = np.array([[max(Counter(row.reshape(case.ranks, -1)[g].tolist()).get(e, 0) for g in range(case.ranks)) > 1
                       for e in range(case.experts)] for row in case.rows])  # fmt: skip
    on_node = held.reshape(3, case.experts, case.nodes, -1).any(3)
    met = on_node.all(2) & (case.nodes > 1) | (held.sum(2) == 1) | held.all(2)
    exact = static_shares(rule, case.rows, case.experts, case.ranks, case.nodes)
    usual = usual_shares(rule, held, case.nodes)
    assert np.allclose(usual.sum(2), 1)
    compared = ~twins & (met if rule == "sglang" else True)
    assert np.allclose(usual[compared], exact[compared])


def test_usual_shares_are_the_mean_of_the_deals() -> None:
    rows = np.tile([0, 1, 0, 2, 0, 3, 4, 5, 6, 7], (500, 1))
    held = np.array([True, True, True, False, False])
    deals = static_shares("sglang", rows, 8, 5, 1)[:, 0]
    assert usual_shares("sglang", held, 1) == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert np.mean(deals, 0) == pytest.approx(usual_shares("sglang", held, 1), abs=0.03)


def test_windows_are_served_by_the_engines_shares() -> None:
    rows = np.array([[2, 0, 0, 1, 3, 0, 1, 4]])
    counts = np.array([[[8, 4, 1, 2, 3]], [[0, 0, 0, 0, 7]]])
    loads = loads_under("sglang", rows, counts, 4, 2)
    assert loads.tolist() == [[[2 + 1, 2 + 2, 4 + 2, 2 + 3]], [[0, 0, 0, 7]]]
    even = loads_under("tensorrt-llm", rows, counts, 4, 2)
    assert even.tolist() == loads_under("even", rows, counts, 4).tolist()


@pytest.mark.parametrize("rule", STATIC)
def test_a_step_with_a_batch_a_rank_is_served_from_each_rank(rule: StaticRule) -> None:
    case = Case(2, 2, 3, 5)
    ids = case.rng.integers(0, case.experts, (200, 3, 2))
    ids[case.rng.random(ids.shape) < 0.1] = -1
    source = case.rng.permutation(np.arange(200) % case.ranks)
    chosen = chosen_slots(rule, case.rows, case.experts, case.ranks, case.nodes, case.layer_ids)
    expected = np.zeros((3, case.slots), int)
    for token in range(200):
        for layer in range(3):
            for expert in ids[token, layer]:
                if expert >= 0:
                    expected[layer, chosen[layer, expert, source[token]]] += 1
    served = slot_tokens(ids, source, case.rows, case.experts, case.ranks, rule, chosen=chosen)
    assert served.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("batches", "ranks_of"),
    [(1, [[0, 1, 2, 3]]), (2, [[0, 1], [2, 3]]), (4, [[0], [1], [2], [3]])],
)
def test_the_tokens_of_a_batch_come_from_its_ranks_in_equal_parts(batches: int, ranks_of: list[list[int]]) -> None:
    # Every rank holds expert 0 and serves itself, so that slots tell where tokens came from.
    rows = np.array([[0, 1, 0, 2, 0, 3, 0, 4]])
    chosen = chosen_slots("sglang", rows, 5, 4, 2)
    source = np.arange(24) % batches
    for batch, ranks in enumerate(ranks_of):
        ids = np.where(source == batch, 0, -1)[:, None, None]
        served = slot_tokens(ids, source, rows, 5, 4, "sglang", chosen=chosen)[0]
        assert served[::2].tolist() == [24 // batches // len(ranks) if rank in ranks else 0 for rank in range(4)]


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("top_k", [1, 3])
def test_tensorrt_llm_goes_round_the_copies_in_every_block_of_picks(batches: int, top_k: int) -> None:
    rng = np.random.default_rng(top_k)
    rows = np.array([[0, 1, 0, 2, 0, 3, 1, 4], [4, 3, 2, 1, 0, 1, 2, 4]])
    ids = rng.choice(5, (3000, 2, top_k), p=[0.4, 0.3, 0.1, 0.1, 0.1])
    ids[rng.random(ids.shape) < 0.05] = -1
    source = rng.permutation(np.arange(3000) % batches)
    expected = np.zeros((2, 8), int)
    for layer in range(2):
        for batch in range(batches):
            picks = ids[source == batch, layer].ravel()
            for first in range(0, len(picks), 1024):
                seen: Counter[int] = Counter()
                for expert in picks[first : first + 1024].tolist():
                    if expert >= 0:
                        slots = np.flatnonzero(rows[layer] == expert)
                        turn = seen[expert] + first // 1024 + (batch if batches > 1 else 0)
                        expected[layer, slots[turn % len(slots)]] += 1
                        seen[expert] += 1
    assert slot_tokens(ids, source, rows, 5, 4, "tensorrt-llm").tolist() == expected.tolist()
