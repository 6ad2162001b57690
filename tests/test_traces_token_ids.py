"""Per-token expert ids: counted exactly, padding and placeholders told apart from errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.loads import ModelShape
from eplb_cli.placement import Placement
from eplb_cli.traces import ReadOptions, open_recordings, read_traces
from eplb_cli.traces.arrays import array_kind
from eplb_cli.traces.bit_counting import count_sets
from eplb_cli.traces.counting import BadExpertIdError, Loop, count_token_ids
from eplb_cli.traces.tokens import recorded_tokens

MODEL = ModelShape("Qwen3MoeForCausalLM", 8, 2, 5, (1, 3))


def random_ids(tokens: int, layers: int, k: int, experts: int, seed: int = 0) -> np.ndarray:
    """Distinct picks, uint8 [tokens, layers, k]."""
    rng = np.random.default_rng(seed)
    return rng.random((tokens, layers, experts)).argsort(-1)[..., :k].astype(np.uint8)


def reference(ids: np.ndarray, experts: int) -> np.ndarray:
    """Counts [layers, experts] by the plain loop."""
    counts = np.zeros((ids.shape[1], experts), np.int64)
    for token in ids:
        for layer, picks in enumerate(token):
            for pick in picks:
                if pick >= 0:
                    counts[layer, pick] += 1
    return counts


def save(path: Path, array: np.ndarray) -> Path:
    np.save(path, array)
    return path


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int16, np.int32, np.int64, ">i4"])
def test_counts_equal_the_plain_loop(tmp_path: Path, dtype: object) -> None:
    ids = random_ids(30, 2, 2, 8)
    loads = read_traces([save(tmp_path / "a.npy", ids.astype(dtype))], ReadOptions(MODEL)).loads
    assert (loads.counts.sum(0) == reference(ids, 8)).all()
    assert loads.layer_ids.tolist() == [1, 3]
    assert (loads.tokens.sum(), loads.top_k, loads.model) == (30, 2, "Qwen3MoeForCausalLM")


@settings(max_examples=60)
@example(np.int8, 200, 5, [], 0)
@example(np.uint8, 128, 5, [(60, 70), (100, 200)], 0)
@given(
    st.sampled_from([np.uint8, np.uint16, np.int8, np.int64]),
    st.integers(1, 300),
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=2),
    st.integers(0, 2**32 - 1),
)
def test_the_compiled_loop_equals_numpy(
    dtype: type, experts: int, tokens: int, ignored: list[tuple[int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    high = min(np.iinfo(dtype).max, experts + bool(ignored))
    low = -1 if np.issubdtype(dtype, np.signedinteger) else 0
    ids = rng.integers(low, high, (tokens, 3, 4), endpoint=bool(rng.integers(2))).astype(dtype)
    layers = np.array([0, 2])

    def run(loop: Loop) -> tuple[object, ...]:
        try:
            tally = count_token_ids(ids, layers, experts, tuple(ignored), loop)
        except BadExpertIdError as bad:
            return bad.row, bad.layer, bad.column, bad.value
        return tally.counts.tolist(), tally.tokens, tally.padding_rows, tally.padding_ids, tally.ignored_ids

    assert run(Loop.compiled) == run(Loop.numpy)
    assert run(Loop.sets) == run(Loop.numpy)


@pytest.mark.parametrize("loop", Loop)
def test_all_values_of_a_byte_may_be_experts(loop: Loop) -> None:
    ids = np.arange(256, dtype=np.uint8).reshape(64, 1, 4)
    assert count_token_ids(ids, np.array([0]), 256, loop=loop).counts.tolist() == [[1] * 256]
    assert count_token_ids(ids, np.array([0]), 257, loop=loop).counts.tolist() == [[1] * 256 + [0]]
    with pytest.raises(BadExpertIdError) as caught:
        count_token_ids(ids, np.array([0]), 255, loop=loop)
    assert (caught.value.row, caught.value.column, caught.value.value) == (63, 3, 255)


@pytest.mark.parametrize(("top_k", "kind"), [(64, "ids"), (65, "counts")])
def test_more_than_64_bytes_a_layer_are_no_ids(top_k: int, kind: str) -> None:
    sample = random_ids(9, 2, top_k, 128)
    assert array_kind(sample.shape, sample.dtype, sample, ReadOptions(ModelShape(None, 128))) == kind


@pytest.mark.parametrize("k", [4, 8])
@pytest.mark.parametrize("tokens", [16, 17, 31, 32, 1000, 65_535])
def test_sets_equal_the_plain_counts(k: int, tokens: int) -> None:
    ids = np.tile(random_ids(997, 3, k, 128), (tokens // 997 + 1, 1, 1))[:tokens]
    layers = np.array([0, 2])
    expected = np.stack([np.bincount(ids[:, layer].ravel(), minlength=128) for layer in layers])
    assert (count_sets(ids, layers) == expected).all()


def test_counters_of_sets_reach_their_last_bit() -> None:
    ids = np.tile(np.arange(8, dtype=np.uint8), (65_535, 1, 1))
    assert count_sets(ids, np.array([0]))[0].tolist() == [65_535] * 8 + [0] * 120


@pytest.mark.parametrize("row", [3, 99])
@pytest.mark.parametrize("bad", [128, 255])
def test_ids_that_no_set_holds_are_left_to_the_other_loop(row: int, bad: int) -> None:
    ids = random_ids(100, 3, 8, 128)
    ids[row, 1, 2] = bad
    assert count_sets(ids, np.array([0, 1])) is None
    assert count_sets(ids, np.array([0, 2])) is not None


@pytest.mark.parametrize("row", [3, 99])
def test_a_pick_made_twice_is_left_to_the_other_loop(row: int) -> None:
    ids = random_ids(100, 3, 8, 128)
    ids[row, 1, 2] = ids[row, 1, 3]
    tally = count_token_ids(ids, np.array([1]), 128, loop=Loop.sets)
    assert (count_sets(ids, np.array([1])) is None) == (row < 96)
    assert (tally.counts[0] == np.bincount(ids[:, 1].ravel(), minlength=128)).all()


def test_column_major_arrays_read_the_same(tmp_path: Path) -> None:
    ids = random_ids(30, 2, 2, 8)
    loads = read_traces([save(tmp_path / "a.npy", np.asfortranarray(ids))], ReadOptions(MODEL)).loads
    assert (loads.counts.sum(0) == reference(ids, 8)).all()


def test_dense_layers_go_by_the_models_rule(tmp_path: Path) -> None:
    ids = np.zeros((40, 5, 2), np.uint8)
    ids[:, [1, 3]] = random_ids(40, 2, 2, 8)
    loads = read_traces([save(tmp_path / "a.npy", ids)], ReadOptions(MODEL)).loads
    assert loads.layer_ids.tolist() == [1, 3]
    assert (loads.counts.sum(0) == reference(ids[:, [1, 3]], 8)).all()


def test_a_layer_of_zeros_is_not_guessed_to_be_dense(tmp_path: Path) -> None:
    ids = random_ids(40, 3, 2, 8)
    ids[:, 1] = 0
    with pytest.raises(TraceError, match=r"layer 1 reads as expert 0 in every pick") as caught:
        read_traces([save(tmp_path / "a.npy", ids)], ReadOptions(ModelShape(None, 8)))
    assert "--model" in str(caught.value.hint)


def test_an_axis_that_is_neither_count_is_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has 4 rows; the model has 2 MoE layers and 5 hidden layers"):
        read_traces([save(tmp_path / "a.npy", random_ids(9, 4, 2, 8))], ReadOptions(MODEL))


def test_padding_is_dropped_and_counted(tmp_path: Path) -> None:
    ids = random_ids(10, 2, 2, 8).astype(np.int32)
    ids[7:] = -1
    ids[0, 1, 1] = -1
    loads = read_traces([save(tmp_path / "a.npy", ids)], ReadOptions(MODEL)).loads
    assert loads.tokens.sum() == 7
    assert loads.dropped == {"padding_ids": 1, "padding_rows": 3}
    assert (loads.counts.sum(0) == reference(ids, 8)).all()


def test_an_id_out_of_range_names_its_place_and_asks_for_the_map(tmp_path: Path) -> None:
    ids = random_ids(3000, 2, 2, 8)
    ids[2100, 1, 1] = 9
    with pytest.raises(TraceError) as caught:
        read_traces([save(tmp_path / "a.npy", ids)], ReadOptions(MODEL))
    error = caught.value
    assert (error.file, error.layer, error.row) == (str(tmp_path / "a.npy"), 3, 2100)
    assert "id 9 >= num_experts 8 at column 1" in str(error)
    assert "Are these physical ids?" in str(error.hint) and "--physical-to-logical PLAN" in str(error.hint)


@pytest.mark.parametrize("order", [np.ascontiguousarray, np.asfortranarray])
def test_the_row_of_a_bad_id_is_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Any) -> None:
    monkeypatch.setattr("eplb_cli.traces.arrays.ROWS_BYTES", 8 * 10)  # rows of 10 bytes: blocks of 8 tokens
    ids = random_ids(30, 5, 2, 8)
    ids[29, 3, 1] = 9
    with pytest.raises(TraceError, match="id 9 >= num_experts 8 at column 1") as caught:
        read_traces([save(tmp_path / "a.npy", order(ids))], ReadOptions(MODEL, window_tokens=3))
    assert (caught.value.row, caught.value.layer) == (29, 3)


def test_a_bad_id_in_a_dense_layer_is_nobodys_business(tmp_path: Path) -> None:
    ids = random_ids(20, 5, 2, 8)
    ids[:, 0] = 200
    assert read_traces([save(tmp_path / "a.npy", ids)], ReadOptions(MODEL)).loads.tokens.sum() == 20


def test_the_placeholder_255_is_an_error_until_it_is_ignored(tmp_path: Path) -> None:
    ids = random_ids(50, 2, 6, 128)
    ids = np.concatenate([ids, np.full((50, 2, 2), 255, np.uint8)], 2)
    path = save(tmp_path / "a.npy", ids)
    model = ModelShape(None, 128, None, None, (0, 1))
    with pytest.raises(TraceError, match="id 255 >= num_experts 128 at column 6") as caught:
        read_traces([path], ReadOptions(model))
    assert "--ignore-expert-id 255" in str(caught.value.hint)
    loads = read_traces([path], ReadOptions(model, ignored_ids=((255, 255),))).loads
    assert loads.dropped == {"ignored_expert_ids": 50 * 2 * 2}
    assert (loads.counts.sum(0) == reference(ids[..., :6], 128)).all()


def test_physical_ids_fold_through_the_plan(tmp_path: Path) -> None:
    rows = np.array([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0, 3, 3]], np.int32)
    plan = Placement(rows, np.array([1, 3], np.int32), 4, 2)
    physical = random_ids(60, 2, 2, 6)
    options = ReadOptions(ModelShape(None, 4, 2, 5, (1, 3)), physical_to_logical=plan)
    loads = read_traces([save(tmp_path / "a.npy", physical)], options).loads
    logical = np.stack([rows[i][physical[:, i]] for i in range(2)], 1)
    assert (loads.counts.sum(0) == reference(logical, 4)).all()


def test_the_plan_alone_names_layers_and_experts(tmp_path: Path) -> None:
    plan = Placement.initial(4, 2, 2, [1, 3])
    options = ReadOptions(physical_to_logical=plan)
    loads = read_traces([save(tmp_path / "a.npy", random_ids(60, 2, 2, 6))], options).loads
    assert (loads.layer_ids.tolist(), loads.num_experts) == ([1, 3], 4)


def test_windows_have_the_asked_number_of_tokens_and_run_on_over_files(tmp_path: Path) -> None:
    a, b = random_ids(10, 2, 2, 8), random_ids(7, 2, 2, 8, 1)
    paths = [save(tmp_path / "a.npy", a), save(tmp_path / "b.npy", b)]
    loads = read_traces(paths, ReadOptions(MODEL, window_tokens=4)).loads
    assert loads.tokens.tolist() == [4, 4, 4, 4, 1]
    joined = np.concatenate([a, b])
    assert (loads.counts[2] == reference(joined[8:12], 8)).all()
    assert loads.window_ids.tolist() == [0, 1, 2, 3, 4]


def test_skipped_steps_are_windows_of_the_start(tmp_path: Path) -> None:
    ids = random_ids(10, 2, 2, 8)
    options = ReadOptions(MODEL, window_tokens=4, skip_steps=1)
    loads = read_traces([save(tmp_path / "a.npy", ids)], options).loads
    assert (loads.tokens.tolist(), loads.dropped) == ([4, 2], {"skipped_tokens": 4})
    assert (loads.counts.sum(0) == reference(ids[4:], 8)).all()


def test_skipped_tokens_run_on_over_blocks_and_each_folder_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eplb_cli.traces.arrays.ROWS_BYTES", 3 * 4)  # rows of 4 bytes: blocks of 3 tokens
    parts = [random_ids(14, 2, 2, 8, seed) for seed in range(2)]
    for folder, ids in zip("ba", parts, strict=True):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "a.npy", ids)
    options = ReadOptions(MODEL, window_tokens=4, skip_steps=2)
    loads = read_traces([tmp_path / "b", tmp_path / "a"], options).loads
    kept = np.concatenate([ids[8:] for ids in parts])
    assert loads.counts.tolist() == [reference(kept[i : i + 4], 8).tolist() for i in (0, 4, 8)]
    assert (loads.tokens.tolist(), loads.dropped) == ([4, 4, 4], {"skipped_tokens": 16})
    assert not any("windows hold" in warning for warning in loads.warnings)


def test_windows_of_each_phase_have_numbers_of_their_own(tmp_path: Path) -> None:
    ids = random_ids(20, 2, 2, 8)
    np.savez(tmp_path / "a.npz", topk_ids=ids, seq_lens=np.array([11, 9]), prompt_lens=np.array([8, 3]))
    loads = read_traces([tmp_path / "a.npz"], ReadOptions(MODEL, window_tokens=4)).loads
    assert loads.window_phase.tolist() == [1, 1, 1, 2, 2, 2]
    assert (loads.window_ids.tolist(), loads.tokens.tolist()) == ([0, 1, 2, 0, 1, 2], [4, 4, 3, 4, 4, 1])
    decode = np.concatenate([ids[8:11], ids[14:]])
    assert (loads.counts[4] == reference(decode[4:8], 8)).all()


def test_many_windows_become_fewer_larger_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.traces.pipeline.MAX_TOKEN_WINDOWS", 4)
    monkeypatch.setattr("eplb_cli.traces.pipeline.DEFAULT_WINDOW_TOKENS", 10)
    ids = random_ids(95, 2, 2, 8)
    loads = read_traces([save(tmp_path / "a.npy", ids)], ReadOptions(MODEL)).loads
    assert loads.tokens.tolist() == [40, 40, 15]
    assert [reference(ids[i : i + 40], 8).tolist() for i in (0, 40, 80)] == loads.counts.tolist()
    assert "windows hold 40 tokens, so that they stay few" in loads.warnings


def test_an_empty_trace_contributes_nothing_and_is_named(tmp_path: Path) -> None:
    model = ModelShape(None, 128, 8, 48, tuple(range(48)))
    paths = [save(tmp_path / "empty.npy", np.zeros((0, 48, 8), np.uint8))]
    loads = read_traces(paths, ReadOptions(model)).loads
    assert (loads.num_windows, loads.num_layers, loads.num_experts) == (0, 48, 128)
    assert any("empty.npy holds no token" in warning for warning in loads.warnings)
    paths.append(save(tmp_path / "full.npy", random_ids(20, 48, 8, 128)))
    assert read_traces(paths, ReadOptions(model)).loads.tokens.tolist() == [20]


def test_without_an_expert_count_the_question_is_asked(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not say how many experts"):
        read_traces([save(tmp_path / "a.npy", random_ids(20, 2, 2, 8))], ReadOptions())


def test_a_cut_file_says_so(tmp_path: Path) -> None:
    path = save(tmp_path / "a.npy", random_ids(20, 2, 2, 8))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(TraceError, match="is cut: its header promises 80 bytes of data, 72 are there"):
        read_traces([path], ReadOptions(MODEL))


def test_objects_inside_an_array_are_never_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}], object), allow_pickle=True)
    with pytest.raises(TraceError, match="pickled Python objects"):
        read_traces([tmp_path / "a.npy"], ReadOptions(MODEL))


def test_an_archive_names_its_layers(tmp_path: Path) -> None:
    ids = random_ids(12, 2, 2, 8)
    np.savez_compressed(tmp_path / "a.npz", topk_ids=ids, layer_ids=np.array([7, 4]), seq_lens=np.array([5, 7]))
    loads = read_traces([tmp_path / "a.npz"], ReadOptions(ModelShape(None, 8))).loads
    assert loads.layer_ids.tolist() == [4, 7]
    assert (loads.counts.sum(0) == reference(ids, 8)[::-1]).all()


def test_an_archive_of_another_models_experts_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", topk_ids=random_ids(12, 2, 2, 8), num_experts=np.array(16))
    with pytest.raises(TraceError, match="was recorded with 16 experts; the model has 8"):
        read_traces([tmp_path / "a.npz"], ReadOptions(MODEL))


def test_sequence_lengths_must_add_up(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", topk_ids=random_ids(12, 2, 2, 8), seq_lens=np.array([5, 5]))
    with pytest.raises(TraceError, match="seq_lens add up to 10; the trace has 12 tokens"):
        read_traces([tmp_path / "a.npz"], ReadOptions(MODEL))


def test_prompt_rows_are_the_prefill_of_each_sequence(tmp_path: Path) -> None:
    ids = random_ids(20, 2, 2, 8)
    np.savez(tmp_path / "a.npz", topk_ids=ids, seq_lens=np.array([12, 8]))
    decode = read_traces([tmp_path / "a.npz"], ReadOptions(MODEL, phase=2, prompt_rows=6)).loads
    wanted = np.concatenate([ids[6:12], ids[18:]])
    assert (decode.counts.sum(0) == reference(wanted, 8)).all()
    assert (decode.phase, decode.dropped) == ("decode", {"other_phase_tokens": 12})
    both = read_traces([tmp_path / "a.npz"], ReadOptions(MODEL, prompt_rows=6)).loads
    assert both.window_phase.tolist() == [1, 2]
    assert both.tokens.tolist() == [12, 8]


def test_turns_of_a_session_count_new_rows_only(tmp_path: Path) -> None:
    first, new = random_ids(100, 2, 2, 8), random_ids(400, 2, 2, 8, 1)
    ids = np.concatenate([first, first, new])
    np.savez(tmp_path / "a.npz", topk_ids=ids, seq_lens=np.array([100, 500]), session_ids=np.array([7, 7]))
    loads = read_traces([tmp_path / "a.npz"], ReadOptions(MODEL)).loads
    assert loads.dropped == {"repeated_prefix_tokens": 100}
    assert (loads.counts.sum(0) == reference(np.concatenate([first, new]), 8)).all()


def test_a_repeated_turn_is_neither_prefill_nor_decode_again(tmp_path: Path) -> None:
    # Of each session: turns as (length, prompt). The second turn of 7 is shorter than the first, the third prompt is
    # shorter than what the session has seen, and the sessions alternate.
    turns = [(7, 40, 25), (3, 30, 30), (7, 25, 10), (3, 50, 20), (7, 60, 35)]
    ids = random_ids(205, 2, 2, 8)
    sessions, lengths, prompts = (np.array(column) for column in zip(*turns, strict=True))
    np.savez(tmp_path / "a.npz", topk_ids=ids, seq_lens=lengths, prompt_lens=prompts, session_ids=sessions)
    loads = read_traces([tmp_path / "a.npz"], ReadOptions(MODEL)).loads
    assert loads.dropped == {"repeated_prefix_tokens": 25 + 30 + 40}
    assert (loads.window_phase.tolist(), loads.tokens.tolist()) == ([1, 2], [25 + 30, 15 + 20 + 20])
    assert (loads.counts[0] == reference(np.concatenate([ids[:25], ids[40:70]]), 8)).all()
    assert (loads.counts[1] == reference(np.concatenate([ids[25:40], ids[125:145], ids[185:]]), 8)).all()


def test_stretches_go_on_where_a_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.traces.arrays.ROWS_BYTES", 4 * 4)  # rows of 4 bytes: blocks of 4 tokens
    np.savez(
        tmp_path / "a.npz",
        topk_ids=random_ids(14, 2, 2, 8),
        seq_lens=np.array([5, 0, 9]),
        prompt_lens=np.array([4, 0, 2]),
    )
    [(reader, recording)] = open_recordings([tmp_path / "a.npz"], ReadOptions(MODEL))
    blocks = [(block.first_row, len(block.ids), block.phase) for block in reader.read(recording)]
    assert blocks == [(0, 4, 1), (4, 1, 2), (5, 2, 1), (7, 1, 2), (8, 4, 2), (12, 2, 2)]


@pytest.mark.parametrize("folders", [("x", "x"), ("x", "y")])
def test_traces_of_different_top_k_have_none(tmp_path: Path, folders: tuple[str, str]) -> None:
    for folder, top_k in zip(folders, (2, 4), strict=True):
        (tmp_path / folder).mkdir(exist_ok=True)
        save(tmp_path / folder / f"{top_k}.npy", random_ids(9, 2, top_k, 8))
    paths = [tmp_path / folders[0], tmp_path / folders[1]][: len(set(folders))]
    assert read_traces(paths, ReadOptions(ModelShape(None, 8))).loads.top_k is None
    assert read_traces([tmp_path / "x" / "2.npy"], ReadOptions(ModelShape(None, 8))).loads.top_k == 2


def test_single_tokens_keep_their_phase_layer_and_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eplb_cli.traces.arrays.ROWS_BYTES", 4 * 4)  # rows of 4 bytes: blocks of 4 tokens
    path, ids = tmp_path / "a.npz", random_ids(11, 2, 2, 8)

    def recorded(phase: int, layers: list[int], second: list[int] | None = None) -> list[tuple[int, int]]:
        np.savez(path, topk_ids=ids, layer_ids=layers, seq_lens=[11], prompt_lens=[6])
        paths = [path]
        if second:
            paths.append(tmp_path / "b" / "b.npz")
            paths[1].parent.mkdir(exist_ok=True)
            np.savez(paths[1], topk_ids=ids, layer_ids=second)
        options = ReadOptions(ModelShape(None, 8), phase=phase)
        found = list(recorded_tokens(open_recordings(paths, options), options))
        assert all(tokens.layer_ids.tolist() == sorted(layers) for tokens in found)
        order = np.argsort(layers)
        wanted = ids[:, order][{0: slice(None), 1: slice(6), 2: slice(6, None)}[phase]]
        if not second:
            assert (np.concatenate([tokens.ids for tokens in found]) == wanted).all()
        return [(tokens.phase, len(tokens.ids)) for tokens in found]

    assert recorded(0, [7, 4]) == [(1, 4), (1, 2), (2, 2), (2, 3)]
    assert recorded(2, [7, 4], [4, 7]) == [(2, 2), (2, 3), (2, 4), (2, 4), (2, 3)]
    with pytest.raises(TraceError, match=r"holds layers 4, 8; before came layers 4, 7"):
        recorded(0, [7, 4], [8, 4])
    ids[9, 0, 1] = 8
    with pytest.raises(TraceError, match="id 8") as caught:
        recorded(0, [7, 4])
    assert (caught.value.row, caught.value.layer) == (9, 7)


def test_files_of_different_layers_do_not_merge(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", topk_ids=random_ids(9, 2, 2, 8), layer_ids=np.array([1, 3]))
    np.savez(tmp_path / "b.npz", topk_ids=random_ids(9, 1, 2, 8), layer_ids=np.array([3]))
    with pytest.raises(TraceError, match=r"holds layers \[3\].*a.npz holds layers \[1, 3\]"):
        read_traces([tmp_path / "a.npz", tmp_path / "b.npz"], ReadOptions(ModelShape(None, 8)))


def test_an_archive_of_one_array_needs_no_name(tmp_path: Path) -> None:
    ids = random_ids(12, 2, 2, 8)
    np.savez(tmp_path / "a.npz", ids)
    assert (read_traces([tmp_path / "a.npz"], ReadOptions(MODEL)).loads.counts.sum(0) == reference(ids, 8)).all()
