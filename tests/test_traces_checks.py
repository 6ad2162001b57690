"""Warnings that a careful person would make, each with its numbers, and silence where there is nothing to say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_cli.errors import TraceError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.traces import ReadOptions, read_traces
from eplb_cli.traces.checks import dummy_windows, expected_loss, one_rank_of
from eplb_cli.traces.windows import WindowStore
from tests.test_traces_token_ids import random_ids

MODEL = ModelShape("M", 16, 4, 2, (0, 1))


def loads_of(counts: np.ndarray, top_k: int | None = 4) -> ExpertLoads:
    windows, layers, _ = counts.shape
    return ExpertLoads(
        counts.astype(np.int64), np.zeros(windows, np.int64), np.arange(layers, dtype=np.int32), top_k=top_k
    )


def skewed(total: float) -> ExpertLoads:
    weights = np.random.default_rng(0).lognormal(0, 1, (2, 64))
    return loads_of(np.random.default_rng(1).poisson(total * weights / weights.sum(1, keepdims=True))[None])


def test_few_tokens_promise_more_than_they_hold() -> None:
    found = expected_loss(skewed(400))
    assert found is not None
    ranks, promised, reached = found
    assert ranks == 8 and promised - reached > 0.02


def test_the_promise_holds_with_many_tokens() -> None:
    found = expected_loss(skewed(4_000_000))
    assert found is not None and 0 <= found[1] - found[2] < 0.002


def test_the_figure_is_the_same_on_every_run() -> None:
    assert expected_loss(skewed(400)) == expected_loss(skewed(400))


def test_the_warning_names_both_figures(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random_ids(40, 2, 4, 16))
    warnings = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.warnings
    assert any("would promise balancedness" in warning and "(bootstrap)" in warning for warning in warnings)


def test_plenty_of_tokens_need_no_word(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random_ids(20_000, 2, 4, 16))
    assert read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.warnings == ()


def test_a_dummy_batch_in_front_is_noticed(tmp_path: Path) -> None:
    ids = random_ids(20_000, 2, 4, 16)
    ids[:100] = ids[0]
    np.save(tmp_path / "a.npy", ids)
    warnings = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.warnings
    assert any("the first 100 tokens are routed alike in all layers" in warning for warning in warnings)


def test_dummy_windows_in_front_are_noticed(tmp_path: Path) -> None:
    counts = np.random.default_rng(0).poisson(300, (9, 2, 16))
    counts[:4] = 0
    counts[:4, :, [1, 5, 6, 7]] = 1200
    assert dummy_windows(loads_of(counts)) == 4
    np.save(tmp_path / "a.npy", counts)
    options = ReadOptions(MODEL)
    assert any("--skip-steps 4" in warning for warning in read_traces([tmp_path / "a.npy"], options).loads.warnings)
    assert dummy_windows(loads_of(counts[4:])) == 0
    assert dummy_windows(loads_of(counts[:4])) == 0


def test_a_moe_layer_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    ids = random_ids(200, 2, 4, 16)
    ids[:, 1] = 0
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(TraceError, match=r"layers \[1\] read as expert 0 in every pick: the recorder did not reach"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL))


def test_an_expert_picked_twice_by_a_token_is_noticed(tmp_path: Path) -> None:
    ids = random_ids(20_000, 2, 4, 16)
    ids[5:8] = 0
    np.save(tmp_path / "a.npy", ids)
    warnings = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.warnings
    assert any("of the first 8192 choices 6 name an expert twice" in warning for warning in warnings)


def test_a_placeholder_that_is_ignored_is_no_expert_picked_twice(tmp_path: Path) -> None:
    ids = random_ids(200, 2, 4, 16).astype(np.uint8)
    ids[:, :, 2:] = 255
    np.save(tmp_path / "a.npy", ids)
    loads = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL, ignore_expert_id=255)).loads
    assert loads.dropped == {"ignored_expert_ids": 800}
    assert not any("name an expert twice" in warning for warning in loads.warnings)


def test_repeated_prompts_are_noticed(tmp_path: Path) -> None:
    ids = random_ids(20_000, 2, 4, 16)
    ids[10_000:10_100] = ids[:100]
    np.savez(tmp_path / "a.npz", topk_ids=ids, seq_lens=np.array([10_000, 10_000]))
    warnings = read_traces([tmp_path / "a.npz"], ReadOptions(MODEL)).loads.warnings
    assert any("1 sequences begin as an earlier one does" in warning for warning in warnings)
    np.savez(tmp_path / "b.npz", topk_ids=ids[::-1], seq_lens=np.array([10_000, 10_000]))
    assert read_traces([tmp_path / "b.npz"], ReadOptions(MODEL)).loads.warnings == ()


def test_few_tokens_on_one_block_may_be_chance() -> None:
    counts = np.zeros((1, 1, 8))
    counts[..., :4] = 1
    assert one_rank_of(loads_of(counts)) is None
    assert one_rank_of(loads_of(20 * counts)) == (0, 2, "block")


def test_a_block_that_no_rank_holds_is_not_one_ranks() -> None:
    counts = np.zeros((1, 1, 8))
    counts[..., 1:5] = 100
    assert one_rank_of(loads_of(counts)) is None


@pytest.mark.parametrize("windows", [1, 4, 5, 8, 9, 33, 100])
def test_merged_windows_hold_their_neighbours(windows: int) -> None:
    parts = np.random.default_rng(0).integers(0, 99, (windows, 2, 3))
    store = WindowStore(2, 3, limit=4)
    for index, part in enumerate(parts):
        store.append(part, int(part.sum()), index)
    counts, tokens, ids = store.arrays()
    assert len(counts) <= 4 and store.merged == max(1, 2 ** int(np.ceil(np.log2(windows / 4))))
    starts = range(0, windows, store.merged)
    assert ids.tolist() == list(starts)
    assert [parts[i : i + store.merged].sum(0).tolist() for i in starts] == counts.tolist()
    assert tokens.tolist() == counts.sum((1, 2)).tolist()


def test_an_unbounded_store_keeps_every_window() -> None:
    store = WindowStore(1, 2, limit=None)
    for index in range(1000):
        store.append(np.full((1, 2), index), index, index)
    assert store.arrays()[2].tolist() == list(range(1000))
