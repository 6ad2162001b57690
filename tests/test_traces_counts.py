"""Count matrices in every container, refused by layer and expert where a number cannot be a load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.placement import Placement
from eplb_cli.traces import Counters, RankDumps, ReadOptions, read_traces

COUNTS = np.random.default_rng(0).poisson(300, (3, 2, 16)).astype(np.int64)
MODEL = ModelShape("M", 16, 4, 5, (1, 3))


def write(path: Path, array: Any) -> Path:
    """One array in the container that the suffix names."""
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez(path, counts=array)
    elif path.suffix == ".json":
        path.write_text(json.dumps(array.tolist()))
    elif path.suffix == ".safetensors":
        save_file({"counts": np.ascontiguousarray(array)}, path)
    else:
        torch.save(torch.from_numpy(np.ascontiguousarray(array)), path)
    return path


SUFFIXES = [".npy", ".npz", ".json", ".safetensors", ".pt"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dtype", [np.int64, np.float32, np.float64, np.int32])
def test_every_container_and_number_type(tmp_path: Path, suffix: str, dtype: type) -> None:
    path = write(tmp_path / f"a{suffix}", COUNTS.astype(dtype))
    loads = read_traces([path], ReadOptions(MODEL)).loads
    assert (loads.counts == COUNTS).all()
    assert loads.layer_ids.tolist() == [1, 3]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_two_axes_are_one_window(tmp_path: Path, suffix: str) -> None:
    loads = read_traces([write(tmp_path / f"a{suffix}", COUNTS[0])], ReadOptions()).loads
    assert (loads.counts == COUNTS[:1]).all()
    assert loads.layer_ids.tolist() == [0, 1]


def test_the_content_decides_not_the_suffix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", COUNTS).rename(tmp_path / "a.json")
    assert (read_traces([path], ReadOptions()).loads.counts == COUNTS).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -1.0, 0.5])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_number_that_is_no_load_is_refused_by_layer_and_expert(tmp_path: Path, suffix: str, bad: float) -> None:
    counts = COUNTS.astype(np.float64)
    counts[1, 1, 7] = bad
    with pytest.raises(TraceError, match="loads must be whole numbers, finite and >= 0") as caught:
        read_traces([write(tmp_path / f"a{suffix}", counts)], ReadOptions(MODEL))
    assert (caught.value.layer, caught.value.expert) == (3, 7)
    assert f"load is {bad} in window 1" in str(caught.value)


def test_a_word_among_numbers_is_refused_by_place(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[[1, 2], [3, "x"]]')
    with pytest.raises(TraceError, match="load is 'x'") as caught:
        read_traces([tmp_path / "a.json"], ReadOptions())
    assert (caught.value.layer, caught.value.expert) == (1, 1)


def test_ragged_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[[1, 2], [3]]")
    with pytest.raises(TraceError, match=r"entry \[1\] has 1 values; entry \[0\] has 2"):
        read_traces([tmp_path / "a.json"], ReadOptions())


def test_counts_beyond_32_bits_stay_exact(tmp_path: Path) -> None:
    counts = COUNTS + 2**53 + 1
    loads = read_traces([write(tmp_path / "a.npy", counts)], ReadOptions(MODEL)).loads
    assert (loads.counts == counts).all()


def test_tokens_are_assignments_over_top_k(tmp_path: Path) -> None:
    counts = np.full((2, 2, 16), 25)
    assert read_traces([write(tmp_path / "a.npy", counts)], ReadOptions(MODEL)).loads.tokens.tolist() == [100, 100]
    assert read_traces([tmp_path / "a.npy"], ReadOptions()).loads.tokens.tolist() == [0, 0]


def test_side_arrays_name_layers_tokens_and_windows(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz", counts=COUNTS, layer_ids=np.array([4, 9]), tokens=np.full(3, 1200), window_ids=[7, 8, 11]
    )
    loads = read_traces([tmp_path / "a.npz"], ReadOptions()).loads
    assert (loads.layer_ids.tolist(), loads.tokens.tolist()) == ([4, 9], [1200] * 3)
    assert loads.window_ids.tolist() == [7, 8, 11]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_the_array_beside_its_side_arrays_needs_no_telling_name(tmp_path: Path, suffix: str) -> None:
    arrays = {
        "layer_ids": np.array([9, 4]),
        "tokens": np.array([70, 50, 60]),
        "window_ids": np.array([8, 2, 5]),
        "anything": COUNTS,
    }
    path = tmp_path / f"a{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays)
    elif suffix == ".pt":
        torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, path)
    else:
        save_file(arrays, path)
    loads = read_traces([path], ReadOptions()).loads
    assert (loads.counts == COUNTS[:, ::-1]).all()
    assert (loads.layer_ids.tolist(), loads.window_ids.tolist()) == ([4, 9], [8, 2, 5])
    assert loads.tokens.tolist() == [70, 50, 60]


def test_totals_are_compared_with_the_tokens_of_all_windows(tmp_path: Path) -> None:
    counts = np.stack([np.full((2, 16), 25), np.full((2, 16), 50)])
    for last, told in ((200, False), (199, True)):
        np.savez(tmp_path / "a.npz", counts=counts, tokens=np.array([100, last]))
        warnings = read_traces([tmp_path / "a.npz"], ReadOptions(MODEL)).loads.warnings
        assert any("2 layers do not hold tokens x top-k = 1196" in warning for warning in warnings) == told
        assert any("tokens x top-k" in warning for warning in warnings) == told


def test_layers_are_named_by_their_numbers(tmp_path: Path) -> None:
    counts = np.zeros((1, 3, 16), np.int64)
    counts[:, 0], counts[:, 2] = 500, 400
    np.savez(tmp_path / "a.npz", counts=counts, layer_ids=np.array([8, 4, 9]))
    model = ModelShape("M", 16, 4, 12, (3, 4, 6, 8, 9))
    warnings = read_traces([tmp_path / "a.npz"], ReadOptions(model)).loads.warnings
    assert "layer 4 has no load at all: the recorder did not reach them" in warnings
    assert "the recording lacks the model's MoE layers 3, 6" in warnings
    assert any("layer 9 has 6400 assignments, layer 8 has 8000" in warning for warning in warnings)
    counts[:, 2] = 500
    np.savez(tmp_path / "a.npz", counts=counts, layer_ids=np.array([8, 4, 9]))
    assert not any(
        "differ" in warning for warning in read_traces([tmp_path / "a.npz"], ReadOptions(model)).loads.warnings
    )


def test_windows_without_load_are_dropped_and_counted(tmp_path: Path) -> None:
    counts = COUNTS.copy()
    counts[1] = 0
    loads = read_traces([write(tmp_path / "a.npy", counts)], ReadOptions()).loads
    assert (loads.num_windows, loads.dropped) == (2, {"empty_windows": 1})
    assert loads.window_ids.tolist() == [0, 2]


def test_warm_up_steps_are_skipped(tmp_path: Path) -> None:
    loads = read_traces([write(tmp_path / "a.npy", COUNTS)], ReadOptions(skip_steps=2)).loads
    assert (loads.counts == COUNTS[2:]).all()
    assert loads.dropped == {"skipped_steps": 2}


def test_each_folder_is_a_recording_of_its_own(tmp_path: Path) -> None:
    for folder, factor in (("b", 9), ("a", 1)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "a.npy", factor * COUNTS.cumsum(0))
    paths = [tmp_path / "b", tmp_path / "a"]
    loads = read_traces(paths, ReadOptions(counters=Counters.cumulative, skip_steps=1)).loads
    assert loads.counts.tolist() == [(9 * COUNTS[2]).tolist(), COUNTS[2].tolist()]
    assert loads.window_ids.tolist() == [2, 2]
    before = 10 * int(COUNTS[0].sum())
    assert loads.dropped == {"counters_before_recording": before, "skipped_steps": 2}


def test_a_window_of_tokens_without_load_is_kept(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", counts=COUNTS * np.array([1, 0, 0])[:, None, None], tokens=np.array([9, 7, 0]))
    loads = read_traces([tmp_path / "a.npz"], ReadOptions()).loads
    assert (loads.tokens.tolist(), loads.dropped) == ([9, 7], {"empty_windows": 1})


def test_a_phase_that_was_not_recorded_is_the_users_word(tmp_path: Path) -> None:
    loads = read_traces([write(tmp_path / "a.npy", COUNTS)], ReadOptions(MODEL, phase=2)).loads
    assert (loads.phase, loads.num_windows) == ("decode", 3)
    assert "the trace does not tell prefill from decode; taken as decode, as --phase says" in loads.warnings


def test_a_profile_without_top_k_does_not_take_anothers(tmp_path: Path) -> None:
    for name, top_k in (("a", 4), ("b", None)):
        ExpertLoads(COUNTS, np.zeros(3, np.int64), np.array([1, 3], np.int32), top_k=top_k).save(tmp_path / name)
    assert read_traces([tmp_path / "a", tmp_path / "b"], ReadOptions()).loads.top_k == 4


def test_slots_taken_for_experts_ask_for_the_map(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", np.ones((2, 20), np.int64))
    with pytest.raises(TraceError, match="20 columns a layer, expected 16 experts") as caught:
        read_traces([path], ReadOptions(MODEL))
    assert "--physical-to-logical PLAN" in str(caught.value.hint)
    plan = Placement.initial(16, 4, 4, [1, 3])
    loads = read_traces([path], ReadOptions(MODEL, physical_to_logical=plan)).loads
    assert loads.counts.tolist() == [[[2] * 4 + [1] * 12] * 2]


def test_a_plan_of_another_width_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", np.ones((2, 20), np.int64))
    with pytest.raises(TraceError, match=r"20 columns a layer; the plan .* has 24 slots"):
        read_traces([path], ReadOptions(MODEL, physical_to_logical=Placement.initial(16, 8, 4, [1, 3])))


def test_the_plan_in_force_may_hold_more_layers_than_were_recorded(tmp_path: Path) -> None:
    rows = np.array([[3, 0, 1, 2, 3], [0, 1, 2, 3, 0], [2, 1, 0, 3, 1]], np.int32)
    plan = Placement(rows, np.array([2, 3, 7], np.int32), 4, 1)
    slots = np.array([[[1, 20, 300, 4000, 50000], [7, 60, 500, 4000, 30000]]])
    np.savez(tmp_path / "a.npz", counts=slots, layer_ids=np.array([7, 2]))
    loads = read_traces([tmp_path / "a.npz"], ReadOptions(physical_to_logical=plan)).loads
    assert loads.counts.tolist() == [[[60, 500, 4000, 30007], [300, 50020, 1, 4000]]]
    np.savez(tmp_path / "a.npz", counts=slots, layer_ids=np.array([7, 5]))
    model = ModelShape(None, 4, None, 9, (2, 5, 7))
    with pytest.raises(TraceError, match=r"the plan lacks layer 5 \(given as --physical-to-logical\)") as caught:
        read_traces([tmp_path / "a.npz"], ReadOptions(model, physical_to_logical=plan))
    assert caught.value.file == str(tmp_path / "a.npz")


def test_a_dense_layer_is_told_by_its_number(tmp_path: Path) -> None:
    for load in (0, 5):
        counts = COUNTS[:, [1, 0, 0]].copy()
        counts[:, 1] = 0
        counts[2, 1, 7] = load
        np.savez(tmp_path / "a.npz", counts=counts, layer_ids=np.array([3, 0, 1]))
        if load:
            with pytest.raises(TraceError, match="the model says the layer is dense") as caught:
                read_traces([tmp_path / "a.npz"], ReadOptions(MODEL))
            assert (caught.value.layer, caught.value.expert) == (0, 7)
        else:
            assert (read_traces([tmp_path / "a.npz"], ReadOptions(MODEL)).loads.counts == COUNTS).all()


def test_load_in_a_dense_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="the model says the layer is dense") as caught:
        read_traces([write(tmp_path / "a.npy", np.ones((5, 16), np.int64))], ReadOptions(MODEL))
    assert caught.value.layer == 0


@pytest.mark.parametrize("how", [slice(0, 16), slice(16, 32), slice(1, 64, 4)])
def test_one_ranks_dump_is_noticed(tmp_path: Path, how: slice) -> None:
    counts = np.zeros((1, 64), np.int64)
    counts[0, how] = 9
    path = write(tmp_path / "a.npy", counts)
    with pytest.raises(TraceError, match="48 of 64 experts have no load and the non-zeros form exactly rank") as caught:
        read_traces([path], ReadOptions())
    assert "is this one rank's dump?" in str(caught.value) and "--allow-zero-experts" in str(caught.value.hint)
    loads = read_traces([path], ReadOptions(allow_zero_experts=True)).loads
    assert any("48 of 64 experts were never hit" in warning for warning in loads.warnings)


def test_a_few_unhit_experts_are_a_warning_only(tmp_path: Path) -> None:
    counts = np.full((1, 64), 900)
    counts[0, [5, 9]] = 0
    loads = read_traces([write(tmp_path / "a.npy", counts)], ReadOptions()).loads
    assert loads.warnings == ("2 of 64 experts were never hit (in 1 of 1 layers)",)


def test_the_first_request_decides_nothing(tmp_path: Path) -> None:
    counts = np.bincount(np.arange(40) * 3, minlength=128)[None]
    loads = read_traces([write(tmp_path / "a.npy", counts)], ReadOptions()).loads
    assert any("picks per expert" in w and "held-out balancedness cannot be known" in w for w in loads.warnings)


def test_cumulative_counters_are_differenced(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", np.array([[[10, 20]], [[15, 40]]]))
    loads = read_traces([path], ReadOptions(counters=Counters.cumulative)).loads
    assert loads.counts.tolist() == [[[5, 20]]]
    assert loads.dropped == {"counters_before_recording": 30}


def test_tokens_beside_cumulative_counters_are_cumulative_too(tmp_path: Path) -> None:
    counts = np.array([[[10, 20]], [[15, 40]], [[16, 52]]])
    np.savez(tmp_path / "a.npz", counts=counts, tokens=np.array([30, 55, 68]), window_ids=np.array([4, 9, 7]))
    loads = read_traces([tmp_path / "a.npz"], ReadOptions(counters=Counters.cumulative)).loads
    assert (loads.tokens.tolist(), loads.window_ids.tolist()) == ([25, 13], [9, 7])


def test_counters_that_start_anew_in_each_file_are_noticed(tmp_path: Path) -> None:
    steps = np.random.default_rng(1).poisson(50, (5, 2, 128)).cumsum(0)
    for name, part in (("a.npy", steps), ("b.npy", steps + 1)):
        write(tmp_path / name, part)
    with pytest.raises(TraceError, match="no count ever falls"):
        read_traces([tmp_path], ReadOptions())


@pytest.mark.parametrize(("windows", "experts", "refused"), [(4, 86, True), (3, 256, False), (4, 85, False)])
def test_few_counts_may_grow_by_chance(tmp_path: Path, windows: int, experts: int, refused: bool) -> None:
    path = write(tmp_path / "a.npy", np.random.default_rng(1).poisson(50, (windows, 2, experts)).cumsum(0))
    if refused:
        with pytest.raises(TraceError, match="no count ever falls over 4 windows"):
            read_traces([path], ReadOptions())
    else:
        assert read_traces([path], ReadOptions()).loads.num_windows == windows


def test_a_counter_that_falls_is_not_cumulative(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npy", np.array([[[10, 20]], [[15, 19]]]))
    with pytest.raises(TraceError, match="the counter falls from 20 to 19 between windows 0 and 1") as caught:
        read_traces([path], ReadOptions(counters=Counters.cumulative))
    assert (caught.value.layer, caught.value.expert) == (0, 1)


def test_undeclared_cumulative_counters_are_noticed(tmp_path: Path) -> None:
    steps = np.random.default_rng(1).poisson(50, (6, 4, 64))
    path = write(tmp_path / "a.npy", steps.cumsum(0))
    with pytest.raises(TraceError, match="no count ever falls over 6 windows"):
        read_traces([path], ReadOptions())
    loads = read_traces([path], ReadOptions(counters=Counters.cumulative)).loads
    assert (loads.counts == steps[1:]).all()
    kept = read_traces([path], ReadOptions(counters=Counters.per_step)).loads
    assert (kept.counts == steps.cumsum(0)).all()


def test_dumps_named_after_ranks_are_added(tmp_path: Path) -> None:
    parts = np.random.default_rng(2).poisson(99, (3, 2, 16))
    paths = [write(tmp_path / f"load_rank{i}.npy", part) for i, part in enumerate(parts)]
    result = read_traces(paths, ReadOptions())
    assert (result.loads.counts == parts.sum(0)).all()
    assert result.notes == ("the dumps of 3 ranks were added",)


def test_files_without_rank_numbers_are_windows_unless_added(tmp_path: Path) -> None:
    parts = np.random.default_rng(2).poisson(99, (2, 2, 16))
    paths = [write(tmp_path / name, part) for name, part in zip(("x.npy", "y.npy"), parts, strict=True)]
    assert (read_traces(paths, ReadOptions()).loads.counts == parts).all()
    assert read_traces(paths, ReadOptions()).loads.window_ids.tolist() == [0, 1]
    added = read_traces(paths, ReadOptions(rank_dumps=RankDumps.sum)).loads
    assert (added.counts == parts.sum(0)).all()


def test_windows_are_numbered_on_over_the_files_of_a_folder(tmp_path: Path) -> None:
    parts = [COUNTS[:2], COUNTS[1:] + 1, COUNTS[:1] + 2]
    for name, part in zip(("dump10.npy", "dump9.npy", "dump2.npy"), parts, strict=True):
        write(tmp_path / name, part)
    loads = read_traces([tmp_path], ReadOptions()).loads
    assert (loads.counts == np.concatenate(parts[::-1])).all()
    assert loads.window_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("names", [("a_rank1", "b_rank1"), ("a_rank0", "a_rank1", "b_rank1"), ("a_rank0", "total")])
def test_two_dumps_of_one_rank_are_windows(tmp_path: Path, names: tuple[str, ...]) -> None:
    parts = np.random.default_rng(2).poisson(99, (len(names), 2, 16))
    paths = [write(tmp_path / f"{name}.npy", part) for name, part in zip(names, parts, strict=True)]
    assert (read_traces(paths, ReadOptions()).loads.counts == parts).all()


def test_tokens_of_ranks_add_up_when_all_tell(tmp_path: Path) -> None:
    for rank, told in enumerate(({"tokens": [5, 7, 9]}, {"tokens": [1, 2, 4]}, {})):
        np.savez(tmp_path / f"rank{rank}.npz", counts=COUNTS + rank, window_ids=[3, 5, 4], **told)
    paths = [tmp_path / f"rank{rank}.npz" for rank in (1, 0, 2)]
    two = read_traces(paths[:2], ReadOptions()).loads
    assert (two.tokens.tolist(), two.window_ids.tolist()) == ([6, 9, 13], [3, 5, 4])
    assert read_traces(paths, ReadOptions()).loads.tokens.tolist() == [0, 0, 0]


def test_rank_dumps_of_different_length_are_not_cut(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"rank{i}.npy", COUNTS[: 3 - i]) for i in range(2)]
    with pytest.raises(TraceError, match=r"counts are \[2, 2, 16\].*has \[3, 2, 16\]"):
        read_traces(paths, ReadOptions())


def test_identical_dumps_are_kept_once_and_make_the_same_file(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"rank{i}.npy", COUNTS) for i in range(4)]
    four, one = read_traces(paths, ReadOptions()), read_traces(paths[:1], ReadOptions())
    four.loads.save(tmp_path / "four")
    one.loads.save(tmp_path / "one")
    assert (tmp_path / "four").read_bytes() == (tmp_path / "one").read_bytes()
    assert len([note for note in four.notes if "replica" in note]) == 3
    summed = read_traces(paths, ReadOptions(rank_dumps=RankDumps.sum)).loads
    assert (summed.counts == 4 * COUNTS).all()


def test_equal_dumps_of_one_rank_are_two_windows(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}_rank1.npy", COUNTS[:1]) for name in "ba"]
    assert read_traces(paths, ReadOptions()).loads.num_windows == 2


def test_replicas_of_several_folders_agree(tmp_path: Path) -> None:
    for folder, more in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / folder).mkdir()
        write(tmp_path / folder / "dump.npy", COUNTS + more)
    options = ReadOptions(rank_dumps=RankDumps.replicated)
    assert (read_traces([tmp_path / "b", tmp_path / "a"], options).loads.counts == COUNTS).all()
    with pytest.raises(TraceError, match="differs from") as caught:
        read_traces([tmp_path], options)
    assert caught.value.file == str(tmp_path / "c" / "dump.npy")


def test_replicas_that_differ_are_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.npy", COUNTS), write(tmp_path / "b.npy", COUNTS + 1)]
    with pytest.raises(TraceError, match="differs from"):
        read_traces(paths, ReadOptions(rank_dumps=RankDumps.replicated))


def test_columns_as_many_as_the_plans_slots_are_counts(tmp_path: Path) -> None:
    plan = Placement.initial(16, 4, 4, [1, 3])
    slots = np.random.default_rng(0).poisson(300, (3, 2, 20))
    loads = read_traces([write(tmp_path / "a.npy", slots)], ReadOptions(physical_to_logical=plan)).loads
    assert (loads.counts[..., 4:] == slots[..., 4:16]).all()
    assert (loads.counts[..., :4] == slots[..., :4] + slots[..., 16:]).all()


def test_padding_twice_in_a_row_tells_nothing(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).random((80, 3, 16)).argsort(-1)[..., :4]
    ids[:, 0, 1:3] = -1
    with pytest.raises(TraceError, match="pass --model or --num-experts"):
        read_traces([write(tmp_path / "a.npy", ids)], ReadOptions())


def test_ids_and_counts_of_the_same_shape_are_told_apart(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).random((80, 2, 16)).argsort(-1)[..., :4]
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(TraceError, match=r"may be .tokens, layers, top-k. or .windows, layers, experts"):
        read_traces([tmp_path / "a.npy"], ReadOptions())
    assert read_traces([tmp_path / "a.npy"], ReadOptions(ModelShape(None, 16))).loads.tokens.sum() == 80
    assert read_traces([tmp_path / "a.npy"], ReadOptions(ModelShape(None, 4))).loads.num_windows == 80


@pytest.mark.parametrize("experts", [4, 8, 16])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float64])
def test_counts_of_few_experts_are_counts_without_being_told(tmp_path: Path, experts: int, dtype: type) -> None:
    counts = np.random.default_rng(0).integers(0, 1000, (6, 3, experts)).astype(dtype)
    loads = read_traces([write(tmp_path / "a.npy", counts)], ReadOptions()).loads
    assert (loads.counts == counts).all()


def test_ids_stored_as_floats_are_not_taken_for_counts(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).random((80, 2, 16)).argsort(-1)[..., :4].astype(np.float32)
    with pytest.raises(TraceError, match=r"may be .tokens, layers, top-k. or .windows, layers, experts"):
        read_traces([write(tmp_path / "a.npy", ids)], ReadOptions())
    with pytest.raises(TraceError, match="4 columns a layer, expected 16 experts"):
        read_traces([tmp_path / "a.npy"], ReadOptions(ModelShape(None, 16)))


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_an_array_named_counts_is_never_taken_for_ids(tmp_path: Path, suffix: str, dtype: type) -> None:
    counts = np.random.default_rng(0).integers(0, 16, (3, 2, 20)).astype(dtype)
    path = write(tmp_path / f"a{suffix}", counts)
    assert (read_traces([path], ReadOptions()).loads.counts == counts).all()
    with pytest.raises(TraceError, match="20 columns a layer, expected 16 experts"):
        read_traces([path], ReadOptions(ModelShape(None, 16)))


def test_a_single_number_is_no_matrix(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array(3))
    with pytest.raises(TraceError, match=r"int64 \[\] is not \[layers, experts\]"):
        read_traces([tmp_path / "a.npy"], ReadOptions())


def test_a_number_beyond_64_bits_is_refused_at_any_depth(tmp_path: Path) -> None:
    for content in ('{"counts": [99999999999999999999]}', '{"counts": [[1, 99999999999999999999]]}'):
        (tmp_path / "a.json").write_text(content)
        with pytest.raises(TraceError, match="load is 99999999999999999999; loads fit in 64 bits"):
            read_traces([tmp_path / "a.json"], ReadOptions())


def test_a_missing_file_is_no_default(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="no such file"):
        read_traces([tmp_path / "nope.json"], ReadOptions())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-LFS pointer"),
        (b"<!DOCTYPE html><html>", "is a web page"),
        (b"expert_id,count\n0,3\n", "is of no known recorder"),
        (b"\x93NUMPY\x01\x00", "damaged .npy header"),
        (b"PK\x03\x04broken", "damaged or cut archive"),
        (b'{"a": 1', "is not JSON"),
        (b'{"a": 1}', "is of no known recorder"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(TraceError, match=message):
        read_traces([tmp_path / "a"], ReadOptions())


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    torch.save({"logical_count": Trap()}, tmp_path / "a.pt")
    with pytest.raises(TraceError, match="unpickling runs whatever code"):
        read_traces([tmp_path / "a.pt"], ReadOptions())
    assert not (tmp_path / "sprung").exists()


def test_an_unknown_format_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean sglang-stat"):
        read_traces([Path("x")], ReadOptions(), trace_format="sglang-stats")


def test_a_readme_in_a_folder_is_left_out_and_named(tmp_path: Path) -> None:
    write(tmp_path / "a.npy", COUNTS)
    (tmp_path / "README.md").write_text("# Traces of May\n")
    result = read_traces([tmp_path], ReadOptions(MODEL))
    assert (result.loads.counts == COUNTS).all()
    assert any("README.md was left out" in note for note in result.notes)
    with pytest.raises(TraceError, match="is of no known recorder"):
        read_traces([tmp_path / "README.md"], ReadOptions(MODEL))


def test_a_damaged_trace_in_a_folder_is_not_left_out(tmp_path: Path) -> None:
    write(tmp_path / "a.npy", COUNTS)
    (tmp_path / "b.json").write_text("[[1, 2], [3")
    with pytest.raises(TraceError, match="is not JSON"):
        read_traces([tmp_path], ReadOptions(MODEL))
