"""Warnings that a careful person would make, each with its numbers, and silence where there is nothing to say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_cli.errors import TraceError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.traces import ReadOptions, read_traces
from eplb_cli.traces.checks import dummy_windows, expected_loss, one_rank_of
from eplb_cli.traces.layers import resolve_layers
from eplb_cli.traces.protocol import Counters, LayerAxis
from eplb_cli.traces.windows import WindowStore
from tests.test_traces_recorders import poisson
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


@pytest.mark.parametrize(("more", "told"), [(0, False), (4, False), (1, True)])
def test_assignments_that_top_k_does_not_divide_are_told(tmp_path: Path, more: int, told: bool) -> None:
    counts = np.full((1, 2, 16), 250)
    counts[0, 1, 3] += more
    np.save(tmp_path / "a.npy", counts)
    warnings = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.warnings
    assert ("assignments are not a multiple of top-k 4 in every layer" in warnings) == told


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
    counts[2:4, 1] = 300
    assert dummy_windows(loads_of(counts)) == 2


def test_a_moe_layer_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    ids = random_ids(200, 2, 4, 16)
    ids[:, 1] = 0
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(TraceError, match=r"layer 1 reads as expert 0 in every pick: the recorder did not reach"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL))


def test_expert_0_may_be_every_tokens_first_pick(tmp_path: Path) -> None:
    ids = 1 + random_ids(200, 2, 4, 15)
    ids[:, 1, 0] = 0
    np.save(tmp_path / "a.npy", ids)
    assert read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.counts[:, 1, 0].sum() == 200


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
    loads = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL, ignored_ids=((255, 255),))).loads
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
@pytest.mark.parametrize("limit", [4, 5])
def test_merged_windows_hold_their_neighbours(windows: int, limit: int) -> None:
    parts = np.random.default_rng(0).integers(0, 99, (windows, 2, 3))
    store = WindowStore(2, 3, limit)
    for index, part in enumerate(parts):
        store.append(part, int(part.sum()), index)
    counts, tokens, ids = store.arrays()
    assert len(counts) <= limit and store.merged == max(1, 2 ** int(np.ceil(np.log2(windows / limit))))
    starts = range(0, windows, store.merged)
    assert ids.tolist() == list(starts)
    assert [parts[i : i + store.merged].sum(0).tolist() for i in starts] == counts.tolist()
    assert tokens.tolist() == counts.sum((1, 2)).tolist()


def test_an_unbounded_store_keeps_every_window() -> None:
    store = WindowStore(1, 2, limit=None)
    for index in range(1000):
        store.append(np.full((1, 2), index), index, index)
    assert store.arrays()[2].tolist() == list(range(1000))


def constant(first: list[int], tokens: int = 60) -> np.ndarray:
    return np.tile(np.array(first, np.uint8), (tokens, 2, 1))


@pytest.mark.parametrize(("first", "experts"), [([0], "expert 0"), ([0, 0], "expert 0"), ([3, 3], "expert 3")])
def test_a_buffer_that_was_never_filled_is_refused(tmp_path: Path, first: list[int], experts: str) -> None:
    np.save(tmp_path / "b.npy", random_ids(60, 2, len(first), 16).astype(np.uint8))
    np.save(tmp_path / "a.npy", constant(first))
    model = ModelShape("M", 16, len(first), 9, (4, 5))
    with pytest.raises(TraceError, match=f"a.npy: layers 4-5 read as {experts} in every pick") as caught:
        read_traces([tmp_path / "b.npy", tmp_path / "a.npy"], ReadOptions(model))
    assert "monolithic MoE kernels" in str(caught.value)


def test_a_buffer_of_the_first_k_ids_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", constant([0, 1, 2, 3]))
    with pytest.raises(TraceError, match="layers 0-1 read as experts 0-3 in every pick of the first 60 tokens"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL))


def test_one_layer_of_a_top_1_model_may_send_all_to_one_expert(tmp_path: Path) -> None:
    ids = random_ids(4000, 2, 1, 16).astype(np.uint8)
    ids[:, 1] = 7
    np.save(tmp_path / "a.npy", ids)
    loads = read_traces([tmp_path / "a.npy"], ReadOptions(ModelShape("M", 16, 1, 9, (4, 8)))).loads
    assert any(warning.startswith("layer 8: all load is on one expert") for warning in loads.warnings)


def test_counts_in_one_column_of_every_layer_are_refused(tmp_path: Path) -> None:
    counts = np.zeros((3, 2, 16), np.int64)
    counts[:, 0, 5], counts[:, 1, 2] = 40, 41
    np.save(tmp_path / "a.npy", counts)
    with pytest.raises(TraceError, match=r"a\.npy, layer 0, expert 5: layers 0-1 send everything to a single expert"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL))


def test_dead_counts_beside_live_ones_are_refused_by_their_own_name(tmp_path: Path) -> None:
    live = poisson(2, 3, 8)
    dead = np.zeros_like(live)
    dead[..., 5] = 40
    np.save(tmp_path / "a.npy", live)
    np.save(tmp_path / "b.npy", dead)
    with pytest.raises(TraceError, match=r"/b\.npy, layer 0, expert 5: layers 0-2 send everything"):
        read_traces([tmp_path], ReadOptions())
    few = np.zeros_like(live)
    few[..., 5] = 31  # two windows of 31 picks: a quiet file may look like that
    np.save(tmp_path / "b.npy", few)
    assert read_traces([tmp_path], ReadOptions()).loads.counts.sum() == live.sum() + few.sum()


def test_a_counter_may_begin_with_a_dummy_batch(tmp_path: Path) -> None:
    live = poisson(1, 3, 8)
    warm_up = np.zeros_like(live)
    warm_up[..., 5] = 100
    np.save(tmp_path / "a.npy", warm_up)
    np.save(tmp_path / "b.npy", warm_up + live)
    assert read_traces([tmp_path], ReadOptions(counters=Counters.cumulative)).loads.counts.tolist() == live.tolist()


@pytest.mark.parametrize(("factor", "told"), [(1, False), (2, True), (61, True)])
def test_counts_times_a_constant_are_noticed(tmp_path: Path, factor: int, told: bool) -> None:
    np.save(tmp_path / "a.npy", factor * np.random.default_rng(0).poisson(9000, (3, 2, 16)))
    warnings = read_traces([tmp_path / "a.npy"], ReadOptions(MODEL)).loads.warnings
    assert any(f"every count is a multiple of {factor}:" in warning for warning in warnings) == told


def test_two_equal_requests_are_two_and_two_equal_ranks_are_one(tmp_path: Path) -> None:
    ids = random_ids(60, 2, 4, 16)
    for folder, names in (("requests", "ab"), ("ranks", ("rank1", "rank0"))):
        (tmp_path / folder).mkdir()
        for name in names:
            np.save(tmp_path / folder / f"{name}.npy", ids)
    two = read_traces([tmp_path / "requests"], ReadOptions(MODEL))
    assert two.loads.tokens.sum() == 120 and any("both were counted" in note for note in two.notes)
    assert read_traces([tmp_path / "ranks"], ReadOptions(MODEL)).loads.tokens.sum() == 60


def test_placeholders_may_be_several_and_ranges(tmp_path: Path) -> None:
    ids = random_ids(60, 2, 4, 16).astype(np.int32)
    ids[:20, :, 0], ids[20:30, :, 1], ids[50:, :, 2] = 255, 256, 511
    np.save(tmp_path / "a.npy", ids)
    options = ReadOptions(MODEL, ignored_ids=((256, 511), (255, 255)))
    assert read_traces([tmp_path / "a.npy"], options).loads.dropped == {"ignored_expert_ids": 80}
    with pytest.raises(TraceError, match="id 255 >= num_experts 16"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL, ignored_ids=((256, 511),)))
    with pytest.raises(TraceError, match="id 511 >= num_experts 16"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL, ignored_ids=((255, 510),)))


@pytest.mark.parametrize(
    ("axis", "positions", "layers", "beyond"),
    [
        (LayerAxis.absolute([5, 3, 0, 1]), [3, 1], [1, 3], (5,)),
        (LayerAxis.absolute([3, 7, 1, 5]), [2, 0], [1, 3], (5, 7)),
        (LayerAxis(5), [1, 3], [1, 3], ()),
        (LayerAxis(2, ordinal=True), [0, 1], [1, 3], ()),
        (LayerAxis(3, ordinal=True), [0, 1], [1, 3], (5,)),
    ],
)
def test_rows_are_told_by_the_models_layers(
    axis: LayerAxis, positions: list[int], layers: list[int], beyond: tuple[int, ...]
) -> None:
    rows = resolve_layers(axis, ModelShape(None, 8, None, 5, (1, 3)), "a")
    assert (rows.positions.tolist(), rows.layer_ids.tolist(), rows.beyond) == (positions, layers, beyond)


@pytest.mark.parametrize("axis", [LayerAxis(5, ordinal=True), LayerAxis(3), LayerAxis(6)])
def test_rows_that_fit_no_count_of_layers_are_refused(axis: LayerAxis) -> None:
    with pytest.raises(TraceError, match=f"the layer axis has {axis.length} rows"):
        resolve_layers(axis, ModelShape(None, 8, None, 5, (1, 3)), "a")


def test_without_moe_layers_ids_end_at_the_hidden_layers() -> None:
    assert resolve_layers(LayerAxis(5), ModelShape(None, 8, None, 5), "a").layer_ids.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(TraceError, match="the layer axis has 4 rows; the model has 5 hidden layers"):
        resolve_layers(LayerAxis(4), ModelShape(None, 8, None, 5), "a")
    rows = resolve_layers(LayerAxis.absolute([5, 4, 0]), ModelShape(None, 8, None, 5), "a")
    assert (rows.positions.tolist(), rows.layer_ids.tolist(), rows.beyond) == ([2, 1], [0, 4], (5,))


@pytest.mark.parametrize(
    ("hit", "found"),
    [
        ([1, 5, 9, 13], (1, 4, "stride")),
        ([3, 7, 11, 15], (3, 4, "stride")),
        ([12, 13, 14, 15], (3, 4, "block")),
        ([0, 1, 2, 4], None),
        ([2, 5, 8, 11], None),
        ([2, 3, 4, 5], None),
        ([1, 5, 9], None),
    ],
)
def test_one_ranks_experts_are_a_block_or_a_stride(hit: list[int], found: tuple[int, int, str] | None) -> None:
    counts = np.zeros((2, 1, 16))
    counts[0, 0, hit[:2]], counts[1, 0, hit[2:]] = 50, 70
    assert one_rank_of(loads_of(counts)) == found
