"""Which copy serves a token: the rule against a plain statement of itself, against the optimum, and against vLLM's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from eplb_cli.dispatch import Copies, choose_copies, rank_times, serving_slots, slot_tokens

# Experts 0..5 on 3 ranks of 3 slots: the third slot of each rank is a spare copy, of 4, 4 and 1.
ROW = np.array([[5, 0, 4, 2, 3, 4, 4, 1, 1]])
UNEVEN = np.array([[5, 0, 4, 2, 3, 4, 4, 1, 2]])


def step(counts: list[int]) -> np.ndarray:
    """Ids [n, 1, 1] of a step with these tokens of each expert, in no order."""
    ids = np.repeat(np.arange(len(counts)), counts)
    return np.random.default_rng(5).permutation(ids)[:, None, None]


def served(counts: list[int], row: np.ndarray = UNEVEN, price: int = 0, sources: int = 1) -> list[int]:
    ids = step(counts)
    return slot_tokens(ids, np.arange(len(ids)) % sources, row, 6, 3, "balanced", price)[0].tolist()


def test_copies_are_listed_primary_first_by_their_place_on_the_rank() -> None:
    copies = Copies.of(UNEVEN, 6, 3)
    assert copies.count.tolist() == [[1, 1, 2, 1, 3, 1]]
    assert copies.slots[0, 4].tolist() == [6, 2, 5]
    assert copies.slots[0, 2].tolist() == [3, 8, 3]
    assert copies.ranks[0, 4].tolist() == [2, 0, 1]


def test_tokens_go_where_least_is_to_be_done() -> None:
    # Ranks 0 and 1 have 20 and 10 tokens that only they can serve, rank 2 has none: 4's 30 tokens level them at 20.
    assert served([15, 0, 0, 10, 30, 5]) == [5, 15, 0, 0, 10, 10, 20, 0, 0]


def test_what_does_not_divide_goes_to_the_least_busy_rank() -> None:
    assert served([0, 0, 0, 0, 10, 0]) == [0, 0, 3, 0, 0, 3, 4, 0, 0]


def test_a_copy_that_does_not_earn_its_price_stays_closed() -> None:
    assert served([15, 0, 0, 10, 30, 5], price=40) == [5, 15, 0, 0, 10, 0, 30, 0, 0]


def test_a_few_tokens_of_one_of_many_batches_open_nothing() -> None:
    counts = [6, 0, 0, 6, 60, 6]
    assert served(counts, price=30, sources=6) == [6, 6, 0, 0, 6, 0, 60, 0, 0]


def test_many_tokens_of_many_batches_open_copies_in_all_of_them_alike() -> None:
    opened = served([600, 0, 0, 600, 6000, 600], price=30, sources=6)
    assert all(opened[slot] > 1000 for slot in (2, 5, 6))


@pytest.mark.parametrize(("price", "opened"), [(13, [50, 0, 50]), (14, [0, 0, 100])])
def test_each_copy_is_worth_three_prices_of_what_a_batch_can_rely_on(price: int, opened: list[int]) -> None:
    # Of 100 tokens 100 - 2 sqrt(100) = 80 can be relied on: two copies at 3 x 13 each, one at 3 x 14.
    copies = Copies.of(UNEVEN, 6, 3)
    quota = choose_copies(np.array([[0, 0, 0, 0, 100, 0]]), copies, price, whole_step=False)
    assert np.bincount(copies.ranks[0, 4], quota[0, 4], 3).tolist() == opened


def test_padding_is_not_counted() -> None:
    ids = step([15, 0, 0, 10, 30, 5])
    padded = np.concatenate([ids, np.full((40, 1, 1), -1)])
    args = UNEVEN, 6, 3, "balanced"
    assert (slot_tokens(padded, np.zeros(100, int), *args) == slot_tokens(ids, np.zeros(60, int), *args)).all()


@pytest.mark.parametrize("tokens", [1, 7, 500])
def test_the_hash_is_vllms(tokens: int) -> None:
    ids = np.random.default_rng(1).integers(0, 6, (tokens, 1, 2))
    expected = np.zeros(9, int)
    by_slot = {expert: np.flatnonzero(UNEVEN[0] == expert) for expert in range(6)}
    for place in range(tokens):
        for expert in ids[place, 0]:
            slots = by_slot[int(expert)]
            expected[slots[(place * 2654435769 % 2**32) % len(slots)]] += 1
    assert slot_tokens(ids, np.zeros(tokens, int), UNEVEN, 6, 3, "hash")[0].tolist() == expected.tolist()


def test_each_batch_has_its_own_places_under_the_hash() -> None:
    ids = np.random.default_rng(1).integers(0, 6, (50, 1, 2))
    source = np.random.default_rng(2).integers(0, 3, 50)
    parts = [slot_tokens(ids[source == s], np.zeros((source == s).sum(), int), UNEVEN, 6, 3, "hash") for s in range(3)]
    assert (slot_tokens(ids, source, UNEVEN, 6, 3, "hash") == sum(parts)).all()


def test_layers_do_not_touch_each_other() -> None:
    rows = np.concatenate([UNEVEN, ROW])
    ids = np.random.default_rng(3).integers(0, 6, (200, 2, 2))
    both = slot_tokens(ids, np.zeros(200, int), rows, 6, 3, "balanced", 9)
    for layer in range(2):
        alone = slot_tokens(ids[:, [layer]], np.zeros(200, int), rows[[layer]], 6, 3, "balanced", 9)
        assert (both[layer] == alone[0]).all()


def test_a_ranks_time_is_its_tokens_and_the_price_of_its_active_slots() -> None:
    assert rank_times(np.array([[3, 0, 4, 0, 0, 0]]), 2, 10).tolist() == [[27, 0]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int, int]:
    """A row without twins, counts, ranks, and a price."""
    ranks, room = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    experts = draw(st.integers(room, ranks * room))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = np.full((ranks, room), -1)
    for expert in rng.permutation(experts):  # everyone once, then copies where they are no twins
        rank = min(range(ranks), key=lambda g: ((row[g] >= 0).sum(), rng.random()))
        row[rank, np.flatnonzero(row[rank] < 0)[0]] = expert
    for rank, slot in np.argwhere(row < 0):
        row[rank, slot] = rng.choice(np.setdiff1d(np.arange(experts), row[rank]))
    counts = rng.integers(0, draw(st.sampled_from([3, 30, 3000])), experts)
    return row.reshape(1, -1), counts[None], ranks, draw(st.sampled_from([0, 1, 20, 90]))


@given(cases())
@settings(max_examples=300)
def test_every_token_is_served_by_a_copy_of_its_expert(case: tuple[np.ndarray, np.ndarray, int, int]) -> None:
    row, counts, ranks, price = case
    copies = Copies.of(row, counts.shape[1], ranks)
    for whole in (True, False):
        quota = choose_copies(counts, copies, price, whole_step=whole)
        assert (quota >= 0).all()
        assert (quota.sum(2) == counts).all()
        assert not (quota * (np.arange(quota.shape[2]) >= copies.count[:, :, None])).any()
        assert (row[0, copies.slots[0]] == np.arange(counts.shape[1])[:, None]).all()


@given(cases())
@settings(max_examples=200)
def test_a_step_seen_whole_is_never_slower_than_primaries_alone(case: tuple[np.ndarray, ...]) -> None:
    row, counts, ranks, price = case
    copies = Copies.of(row, counts.shape[1], ranks)
    ids = np.repeat(np.arange(counts.shape[1]), counts[0])[:, None, None]
    chosen = slot_tokens(ids, np.zeros(len(ids), int), row, counts.shape[1], ranks, "balanced", price)
    primaries = np.zeros_like(chosen)
    primaries[0, copies.slots[0, :, 0]] = counts[0]
    assert rank_times(chosen, ranks, price).max() <= rank_times(primaries, ranks, price).max()


@given(cases())
@settings(max_examples=100)
def test_without_a_price_the_busiest_rank_is_that_of_the_linear_program(case: tuple[np.ndarray, ...]) -> None:
    row, counts, ranks, _ = case
    experts, slots = counts.shape[1], row.shape[1]
    # Variables: tokens of each slot, and the busiest rank's load.
    on_rank = np.zeros((ranks, slots + 1))
    on_rank[np.arange(slots) // (slots // ranks), np.arange(slots)] = 1
    on_rank[:, -1] = -1
    of_expert = np.zeros((experts, slots + 1))
    of_expert[row[0], np.arange(slots)] = 1
    least = linprog(np.eye(slots + 1)[-1], on_rank, np.zeros(ranks), of_expert, counts[0]).fun
    quota = choose_copies(counts, Copies.of(row, experts, ranks), 0, whole_step=True)
    served = np.zeros(slots)
    np.add.at(served, Copies.of(row, experts, ranks).slots, quota[0][None])
    busiest = served.reshape(ranks, -1).sum(1).max()
    assert least - 1e-6 <= busiest <= 1.02 * least + 2


@given(cases(), st.booleans())
@settings(max_examples=100)
def test_the_tokens_of_a_batch_are_split_exactly_as_the_rule_says(
    case: tuple[np.ndarray, np.ndarray, int, int], whole: bool
) -> None:
    row, counts, ranks, price = case
    experts = counts.shape[1]
    ids = np.random.default_rng(0).permutation(np.repeat(np.arange(experts), counts[0]))[:, None]
    slots = serving_slots(ids, len(ids), row[0], experts, ranks, price, whole_step=whole)
    copies = Copies.of(row, experts, ranks)
    quota = np.zeros(row.shape[1], np.int64)
    np.add.at(quota, copies.slots[0], choose_copies(counts, copies, price, whole_step=whole)[0])
    assert np.bincount(slots.ravel(), minlength=row.shape[1]).tolist() == quota.tolist()
    assert (row[0, slots] == ids).all()


def test_an_expert_opens_eight_copies_at_most() -> None:
    row = np.zeros((1, 40), int)
    quota = choose_copies(np.array([[4000]]), Copies.of(row, 1, 40), 0, whole_step=True)
    assert quota[0, 0].tolist() == [500] * 8 + [0] * 32
