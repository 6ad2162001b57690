"""The `balanced` rule inside vLLM: torch and Triton choose as the plain rule does, id for id."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eplb_cli.dispatch import serving_slots
from eplb_cli.errors import ServeError
from eplb_cli.vllm_plugin import balanced_torch
from eplb_cli.vllm_plugin.balanced_torch import Layer, Rule
from eplb_cli.vllm_plugin.dispatching import Agreement, is_due


@dataclass(frozen=True)
class Case:
    """A batch, a map, and what the plain rule says."""

    ids: np.ndarray
    real: int
    row: np.ndarray
    experts: int
    ranks: int
    price: int
    whole: bool
    width: int

    def expected(self, real: int | None = None) -> np.ndarray:
        """The serving slots [n, k], by NumPy."""
        rows = self.real if real is None else real
        return serving_slots(self.ids, rows, self.row, self.experts, self.ranks, self.price, whole_step=self.whole)

    def rule(self) -> Rule:
        return Rule.on("cpu", self.ranks, len(self.row), self.price, whole_step=self.whole)

    def layer(self, *, record: bool = True) -> Layer:
        """vLLM's tables: an expert's slots in no order, as its policies may write them."""
        table = np.full((self.experts, self.width), -1)
        count = np.zeros(self.experts, np.int64)
        for slot in np.random.default_rng(len(self.row)).permutation(len(self.row)):
            table[self.row[slot], count[self.row[slot]]] = slot
            count[self.row[slot]] += 1
        slots = len(self.row)
        return Layer(
            torch.from_numpy(table),
            torch.from_numpy(count),
            torch.zeros(slots, dtype=torch.int32),
            torch.tensor(record),
            torch.zeros(slots, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
        )

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids and the number of real rows, as vLLM has them."""
        return torch.from_numpy(self.ids.astype(np.int32)), torch.tensor(self.real, dtype=torch.int32)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any map, twins and experts of many copies too; ids with -1, and rows of padding."""
    ranks, room = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    slots = ranks * room
    experts = draw(st.one_of(st.integers(1, slots), st.integers(max(1, slots - 4), slots)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = rng.permutation(np.r_[np.arange(experts), rng.integers(0, experts, slots - experts)])
    tokens, top_k = draw(st.integers(1, 300)), draw(st.integers(1, min(4, experts)))
    # Load that is uneven, as routers make it.
    ids = rng.choice(experts, (tokens, top_k), p=rng.dirichlet(np.full(experts, draw(st.sampled_from([0.1, 1.0])))))
    ids[rng.random(ids.shape) < draw(st.sampled_from([0.0, 0.1]))] = -1
    return Case(
        ids,
        draw(st.integers(0, tokens)),
        row,
        experts,
        ranks,
        draw(st.sampled_from([0, 1, 3, 20])),
        draw(st.booleans()),
        draw(st.sampled_from([slots - experts + 1, 1024])),
    )


def choose(case: Case, layer: Layer) -> np.ndarray:
    """What torch chooses."""
    ids, real = case.tensors()
    return balanced_torch.map_and_record(ids, case.rule(), layer, counted=real, recorded=real).numpy()


@given(cases())
@settings(max_examples=300)
def test_torch_chooses_as_the_plain_rule(case: Case) -> None:
    assert choose(case, case.layer()).tolist() == case.expected().tolist()


@given(cases())
@settings(max_examples=50)
def test_each_real_token_is_counted_once_and_padding_never(case: Case) -> None:
    layer = case.layer()
    slots = choose(case, layer)[: case.real]
    tokens = np.bincount(slots[slots >= 0], minlength=len(case.row))
    assert layer.load.tolist() == tokens.tolist()
    assert layer.served.tolist() == tokens.tolist()


EXAMPLE = Case(
    np.array([[0, 1], [0, 2], [0, -1], [0, 1], [0, 2], [2, 0]]), 5, np.array([0, 1, 2, 0]), 3, 2, 0, True, 1024
)
"""Expert 0 is in slots 0 and 3, which is a spare place; 1 is beside the first, 2 beside the second."""


def test_tokens_go_to_the_copies_in_the_order_of_the_batch() -> None:
    # Ranks have 2 tokens of 1 and 2 of 2; 0's five are split 3 and 2, and the sixth row is padding.
    assert choose(EXAMPLE, EXAMPLE.layer()).tolist() == [[0, 1], [0, 2], [0, -1], [3, 1], [3, 2], [2, 0]]


def test_the_switch_stops_vllms_counter_and_not_ours() -> None:
    layer = EXAMPLE.layer(record=False)
    choose(EXAMPLE, layer)
    assert layer.load.tolist() == [0, 0, 0, 0]
    assert layer.served.tolist() == [3, 2, 2, 2]


def test_loads_are_added_to_what_was_there() -> None:
    layer = EXAMPLE.layer()
    choose(EXAMPLE, layer)
    choose(EXAMPLE, layer)
    assert layer.load.tolist() == [6, 4, 4, 4]


def test_without_a_number_of_rows_all_are_tokens() -> None:
    ids, _ = EXAMPLE.tensors()
    layer = EXAMPLE.layer()
    slots = balanced_torch.map_and_record(ids, EXAMPLE.rule(), layer, counted=None, recorded=None)
    assert slots.tolist() == EXAMPLE.expected(6).tolist()
    assert int(layer.load.sum()) == int((EXAMPLE.ids >= 0).sum())


def test_a_gathered_batch_is_chosen_whole_while_vllm_records_its_own_rows() -> None:
    ids, _ = EXAMPLE.tensors()
    layer = EXAMPLE.layer()
    own = torch.tensor(2, dtype=torch.int32)
    slots = balanced_torch.map_and_record(ids, EXAMPLE.rule(), layer, counted=None, recorded=own)
    assert slots.tolist() == EXAMPLE.expected(6).tolist()
    assert int(layer.load.sum()) == 4


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_keep_their_dtype(dtype: torch.dtype) -> None:
    ids, real = EXAMPLE.tensors()
    chosen = balanced_torch.map_and_record(ids.to(dtype), EXAMPLE.rule(), EXAMPLE.layer(), counted=real, recorded=real)
    assert chosen.dtype == dtype


def test_an_empty_batch_stays_empty() -> None:
    ids = torch.empty((0, 2), dtype=torch.int32)
    layer = EXAMPLE.layer()
    assert balanced_torch.map_and_record(ids, EXAMPLE.rule(), layer, counted=None, recorded=None).shape == (0, 2)


def test_a_map_that_is_changed_in_place_is_used_at_once() -> None:
    layer = EXAMPLE.layer()
    choose(EXAMPLE, layer)
    moved = Case(**{**vars(EXAMPLE), "row": np.array([2, 0, 0, 1])})
    layer.logical_to_physical.copy_(moved.layer().logical_to_physical)
    layer.replica_count.copy_(moved.layer().replica_count)
    assert choose(EXAMPLE, layer).tolist() == moved.expected().tolist()


@given(cases(), st.integers(0, 2**32 - 1))
@settings(max_examples=100)
def test_the_digest_differs_when_one_id_does(case: Case, seed: int) -> None:
    rng = np.random.default_rng(seed)
    other = case.ids.copy()
    at = rng.integers(len(other)), rng.integers(other.shape[1])
    other[at] = (other[at] + 1 + rng.integers(max(1, case.experts - 1))) % case.experts
    different = Case(**{**vars(case), "ids": other})
    mine, theirs = case.layer(), different.layer()
    real = slice(0, case.real)
    same = (choose(case, mine)[real] == choose(different, theirs)[real]).all()
    assert torch.equal(mine.digest, theirs.digest) == same


def test_torch_compiles_it_whole() -> None:
    """No value is read back, and nothing depends on one: the compiler finds one graph."""
    ids, real = EXAMPLE.tensors()
    rule, layer = EXAMPLE.rule(), EXAMPLE.layer()

    def step(ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        return balanced_torch.map_and_record(ids, rule, layer, counted=real, recorded=real)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    assert compiled(ids, real).tolist() == EXAMPLE.expected().tolist()


def agreement(*, shared: bool, served: list[list[int]], digests: list[int]) -> Agreement:
    """One rank's numbers of two layers on two ranks of two slots."""
    tokens, sums = torch.tensor(served), torch.tensor(digests)[:, None]
    return Agreement([3, 5], [], tokens, sums, shared, False, 2)


def test_ranks_of_one_batch_that_chose_alike_have_its_loads() -> None:
    mine = agreement(shared=True, served=[[1, 2, 3, 4], [0, 0, 5, 5]], digests=[7, 8])
    numbers = mine.own(is_dummy=False)
    assert mine.loads([numbers, numbers]).tolist() == [[3, 7], [0, 10]]


def test_ranks_of_one_batch_that_chose_differently_are_named() -> None:
    mine = agreement(shared=True, served=[[1, 2, 3, 4], [0, 0, 5, 5]], digests=[7, 8])
    other = agreement(shared=True, served=[[1, 2, 3, 4], [0, 0, 5, 5]], digests=[7, 9])
    with pytest.raises(ServeError, match="ranks 0 and 1 have sent tokens to different copies") as caught:
        mine.loads([mine.own(is_dummy=False), other.own(is_dummy=False)])
    assert (caught.value.layer, caught.value.rank) == (5, 1)


def test_batches_of_their_own_may_differ_and_are_added_up() -> None:
    mine = agreement(shared=False, served=[[1, 2, 3, 4], [0, 0, 5, 5]], digests=[7, 8])
    other = agreement(shared=False, served=[[1, 0, 0, 0], [0, 1, 0, 0]], digests=[1, 2])
    idle = agreement(shared=False, served=[[9, 9, 9, 9], [9, 9, 9, 9]], digests=[1, 2])
    everyone = [mine.own(is_dummy=False), other.own(is_dummy=False), idle.own(is_dummy=True)]
    assert mine.loads(everyone).tolist() == [[4, 7], [1, 10]]


def test_the_first_steps_are_compared_and_then_every_hundredth() -> None:
    assert [step for step in range(1, 301) if is_due(step)] == [*range(1, 11), 100, 200, 300]


def in_triton(**environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `tests.triton_cases` in a process of its own."""
    # The interpreter of releases older than any vLLM's that the plugin is for lacks what the kernels use.
    pytest.importorskip("triton", minversion="3.5")
    return subprocess.run(
        [sys.executable, "-m", "tests.triton_cases"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def test_triton_chooses_as_torch() -> None:
    """The kernels in Triton's interpreter: the same ids, loads and digests."""
    run = in_triton(TRITON_INTERPRET="1")
    assert run.returncode == 0, run.stderr[-3000:]


@pytest.mark.slow
def test_triton_compiles_the_kernels_for_gpus(tmp_path: Path) -> None:
    run = in_triton(TRITON_CACHE_DIR=str(tmp_path))
    assert run.returncode == 0, run.stderr[-3000:]
