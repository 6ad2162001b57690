"""A fixture of each recorder in its own layout, and a test of each of its traps."""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from eplb_cli.errors import TraceError, UsageError
from eplb_cli.loads import ExpertLoads, ModelShape
from eplb_cli.placement import Placement
from eplb_cli.traces import RankDumps, ReadOptions, read_traces
from tests.test_traces_token_ids import random_ids, reference

MODEL = ModelShape("DeepseekV3ForCausalLM", 8, 2, 4, (1, 2, 3))
MAP = np.array([[0, 1, 2, 3, 4, 5, 6, 7, 0, 3], [7, 6, 5, 4, 3, 2, 1, 0, 7, 7], [0, 1, 2, 3, 4, 5, 6, 7, 1, 1]])


def read(*paths: Path, options: ReadOptions | None = None) -> ExpertLoads:
    return read_traces(paths, options or ReadOptions(MODEL)).loads


def backwards(folder: Path) -> list[Path]:
    """The files of a folder as nobody sorts them."""
    return sorted((path for path in folder.rglob("*") if path.is_file()), reverse=True)


def reader_of(loads: ExpertLoads) -> str:
    return loads.sources[0].reader


def folded(physical: np.ndarray, table: np.ndarray = MAP, experts: int = 8) -> np.ndarray:
    """[L, P] to [L, E] by the plain loop."""
    logical = np.zeros((len(table), experts), np.int64)
    for layer, row in enumerate(table):
        for slot, expert in enumerate(row):
            logical[layer, expert] += physical[layer, slot]
    return logical


def poisson(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).poisson(300, shape).astype(np.int64)


class TestSglangPasses:
    TABLE = np.concatenate([MAP[:1], MAP])

    def write(self, folder: Path, *, ranks: int = 2, first: int = 5, **more: Any) -> np.ndarray:
        counts = poisson(ranks, 3, 4, 10).astype(np.int32)
        counts[:, :, 0] = 0
        for rank in range(ranks):
            records = [
                {
                    "forward_pass_id": first + i,
                    "rank": rank,
                    "gatherer_key": "primary",
                    "global_physical_count": torch.from_numpy(counts[rank, i]),
                }
                | more
                for i in range(3)
            ]
            content = {"records": records, "last_physical_to_logical_map": torch.from_numpy(self.TABLE)}
            torch.save(content, folder / f"expert_distribution_recorder_1764400000.5_{rank}.pt")
        return counts

    def test_ranks_of_a_pass_add_up_and_fold_by_the_map(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        loads = read(tmp_path)
        assert [folded(c).tolist() for c in counts.sum(0)[:, 1:]] == loads.counts.tolist()
        assert (loads.window_ids.tolist(), reader_of(loads)) == ([5, 6, 7], "sglang-passes")

    def test_two_dumps_of_one_server_are_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        content = torch.load(tmp_path / "expert_distribution_recorder_1764400000.5_0.pt")
        content["more"] = 1
        torch.save(content, tmp_path / "expert_distribution_recorder_1764400001.5_0.pt")
        with pytest.raises(TraceError, match="pass 5 of rank 0 is there twice"):
            read(tmp_path)

    def rewrite(self, folder: Path, rank: int, change: Callable[[dict[str, Any]], None]) -> None:
        path = folder / f"expert_distribution_recorder_1764400000.5_{rank}.pt"
        content = torch.load(path)
        change(content)
        torch.save(content, path)

    def test_records_of_ranks_meet_by_pass_and_phase(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, positions=torch.arange(7))
        for rank in (0, 1):  # rank 0 recorded in another order and other phases, and lacks the pass 6
            self.rewrite(tmp_path, rank, lambda content: content["records"].reverse())
        self.rewrite(tmp_path, 0, lambda content: content["records"].pop(1))
        for rank, modes in ((0, (2, 1)), (1, (2, 2, 2))):
            self.rewrite(
                tmp_path,
                rank,
                lambda content, modes=modes: [
                    record.update(forward_mode=mode) for record, mode in zip(content["records"], modes, strict=True)
                ],
            )
        loads = read(*backwards(tmp_path))
        assert (loads.window_phase.tolist(), loads.window_ids.tolist()) == ([0, 2, 2], [5, 6, 7])
        counts[0, 1] = 0
        assert loads.counts.tolist() == [folded(c).tolist() for c in counts.sum(0)[:, 1:]]
        assert loads.tokens.tolist() == [14, 7, 14]
        assert "1 passes lack some ranks' records, the first is 6" in loads.warnings

    def test_gatherers_of_a_pass_add_up(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)

        def add(content: dict[str, Any]) -> None:
            content["records"] += [record | {"gatherer_key": "second"} for record in content["records"]]

        self.rewrite(tmp_path, 1, add)
        total = counts[0] + 2 * counts[1]
        assert read(tmp_path).counts.tolist() == [folded(c).tolist() for c in total[:, 1:]]

    def test_ranks_of_different_maps_are_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        self.rewrite(
            tmp_path, 1, lambda content: content["last_physical_to_logical_map"][2, :2].copy_(torch.tensor([6, 7]))
        )
        with pytest.raises(TraceError, match="its map differs from the other ranks' map") as caught:
            read(tmp_path)
        assert str(caught.value.file).endswith("_1.pt")

    def test_a_missing_rank_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, ranks=3)
        (tmp_path / "expert_distribution_recorder_1764400000.5_1.pt").unlink()
        with pytest.raises(TraceError, match=r"the files of ranks \[1\] are missing; ranks \[0, 2\]"):
            read(tmp_path)

    def test_one_ranks_file_alone_is_noticed(self, tmp_path: Path) -> None:
        self.write(tmp_path, ranks=1)
        notes = read_traces([tmp_path], ReadOptions(MODEL)).notes
        assert any("one rank's file only" in note for note in notes)

    def test_the_forward_mode_tells_the_phase(self, tmp_path: Path) -> None:
        self.write(tmp_path, forward_mode=2, positions=torch.arange(7))
        loads = read(tmp_path)
        assert (loads.phase, loads.tokens.tolist()) == ("decode", [14, 14, 14])

    def test_per_token_records_hold_ids_with_unused_places(self, tmp_path: Path) -> None:
        ids = np.full((4, 20, 8), -1, np.int32)
        ids[:, :, :2] = random_ids(20, 4, 2, 10).transpose(1, 0, 2)
        record = {"forward_pass_id": 0, "rank": 0, "topk_ids_of_layer": torch.from_numpy(ids), "forward_mode": 1}
        ids[0] = -1
        content = {"records": [record], "last_physical_to_logical_map": torch.from_numpy(self.TABLE)}
        torch.save(content, tmp_path / "expert_distribution_recorder_1.5_0.pt")
        loads = read(tmp_path)
        physical = np.stack([np.bincount(ids[i, :, :2].ravel(), minlength=10) for i in (1, 2, 3)])
        assert (loads.counts[0] == folded(physical)).all()
        assert loads.phase == "prefill"

    def test_the_map_in_the_file_needs_no_other(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        plan = Placement.initial(8, 2, 2, [1, 2, 3])
        with pytest.raises(UsageError, match="the recording holds its own map"):
            read(tmp_path, options=ReadOptions(MODEL, physical_to_logical=plan))


class TestSglangCsv:
    def write(self, folder: Path, rank: int, rows: list[tuple[int, int, int]], time: float = 1.5) -> Path:
        path = folder / f"expert_distribution_rank{rank}_timestamp{time}.csv"
        lines = "".join(f"{layer},{expert},{count}\n" for layer, expert, count in rows)
        path.write_text("layer_id,expert_id,count\n" + lines)
        return path

    def test_identical_dumps_of_four_ranks_give_the_bytes_of_one(self, tmp_path: Path) -> None:
        profiles = []
        for ranks in (4, 1):
            folder = tmp_path / str(ranks)
            folder.mkdir()
            for rank in range(ranks):
                self.write(folder, rank, [(1, expert, 50 + expert) for expert in range(8)])
            read(folder).save(tmp_path / "loads.safetensors")
            profiles.append((tmp_path / "loads.safetensors").read_bytes())
        assert profiles[0] == profiles[1]

    def test_absent_rows_are_zero_and_never_a_shift(self, tmp_path: Path) -> None:
        self.write(tmp_path, 0, [(1, 0, 5), (1, 6, 7), (2, 1, 3)])
        self.write(tmp_path, 1, [(1, 6, 2), (3, 7, 9)])
        loads = read(tmp_path)
        assert loads.layer_ids.tolist() == [1, 2, 3]
        assert loads.counts[0].tolist() == [[5, 0, 0, 0, 0, 0, 9, 0], [0, 3, 0, 0, 0, 0, 0, 0], [0] * 7 + [9]]

    def test_ranks_that_repeat_each_other_count_once(self, tmp_path: Path) -> None:
        for rank in range(4):
            self.write(tmp_path, rank, [(1, 0, 5), (1, 6, 7)])
        assert read(tmp_path).counts.sum() == 12
        assert read(tmp_path, options=ReadOptions(MODEL, rank_dumps=RankDumps.sum)).counts.sum() == 48

    def test_a_gap_in_the_ranks_is_refused_unless_summing_was_asked(self, tmp_path: Path) -> None:
        self.write(tmp_path, 0, [(1, 0, 5), (1, 3, 1)])
        self.write(tmp_path, 2, [(1, 0, 6)])
        with pytest.raises(TraceError, match=r"ranks \[1\] are missing"):
            read(tmp_path)
        loads = read(tmp_path, options=ReadOptions(MODEL, rank_dumps=RankDumps.sum))
        assert loads.counts.sum() == 12 and any("ranks [1] are missing" in w for w in loads.warnings)

    def test_later_dumps_are_windows(self, tmp_path: Path) -> None:
        for time in (1.5, 2.5):
            self.write(tmp_path, 0, [(1, 0, int(time)), (1, 3, 1)], time)
        assert read(tmp_path).counts[:, 0, 0].tolist() == [1, 2]

    def test_layers_absent_from_a_dump_are_zero_in_its_window(self, tmp_path: Path) -> None:
        self.write(tmp_path, 0, [(3, 1, 6), (1, 0, 5)], 1.5)
        self.write(tmp_path, 0, [(2, 2, 4), (3, 7, 9)], 2.5)
        loads = read(tmp_path)
        assert loads.layer_ids.tolist() == [1, 2, 3]
        assert loads.counts.sum(2).tolist() == [[5, 0, 6], [0, 4, 9]]

    def test_the_expert_count_must_be_given(self, tmp_path: Path) -> None:
        self.write(tmp_path, 0, [(1, 0, 5)])
        with pytest.raises(UsageError, match="how many experts"):
            read(tmp_path, options=ReadOptions())

    def test_without_a_layer_column_it_is_no_model_of_one_layer(self, tmp_path: Path) -> None:
        (tmp_path / "a.csv").write_text("expert_id,count\n0,3\n")
        with pytest.raises(TraceError, match="nearest: sglang-csv, but missing column layer_id"):
            read(tmp_path / "a.csv")

    @pytest.mark.parametrize("cell", ["x", "-1", "nan", "inf", "1.5"])
    def test_a_cell_that_is_no_count_names_its_row(self, tmp_path: Path, cell: str) -> None:
        path = self.write(tmp_path, 0, [(1, 0, 5)])
        path.write_text(path.read_text() + f"1,1,{cell}\n")
        with pytest.raises(TraceError, match=f"count is '{cell}'") as caught:
            read(tmp_path)
        assert caught.value.row == 3

    def test_an_expert_beyond_the_model_asks_for_the_map(self, tmp_path: Path) -> None:
        self.write(tmp_path, 0, [(1, 9, 5)])
        with pytest.raises(TraceError, match="expert 9 >= num_experts 8"):
            read(tmp_path)


class TestSglangResponses:
    def ids(self, rows: int) -> np.ndarray:
        ids = np.full((rows, 4, 2), 3, np.int32)
        ids[:, 1:] = random_ids(rows, 3, 2, 8)
        return ids

    def record(self, ids: np.ndarray, **meta: Any) -> dict[str, Any]:
        payload = base64.b64encode(np.ascontiguousarray(ids, "<i4").tobytes()).decode()
        return {"text": "..", "meta_info": {"id": "1", "routed_experts": payload} | meta}

    def test_bare_int32_takes_its_shape_from_the_model(self, tmp_path: Path) -> None:
        ids = self.ids(14)
        record = self.record(ids, prompt_tokens=10, completion_tokens=5, cached_tokens=3)
        (tmp_path / "a.json").write_text(json.dumps(record))
        loads = read(tmp_path / "a.json")
        assert (loads.counts[0] == reference(ids[3:10, 1:], 8)).all()
        assert (loads.counts[1] == reference(ids[10:, 1:], 8)).all()
        assert (loads.dropped, reader_of(loads)) == ({"cached_prefix_tokens": 3}, "sglang-response")

    def test_without_a_model_there_is_no_shape(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(json.dumps(self.record(self.ids(14))))
        with pytest.raises(UsageError, match="int32 without a shape"):
            read(tmp_path / "a.json", options=ReadOptions(ModelShape(None, 8)))

    def test_another_models_bytes_do_not_divide(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(json.dumps(self.record(self.ids(14)[:, :3])))
        with pytest.raises(TraceError, match="has 336 bytes; 4 hidden layers x top-k 2 make 32 bytes a token"):
            read(tmp_path / "a.json")

    def test_signs_that_are_not_of_base64_are_refused(self, tmp_path: Path) -> None:
        record = self.record(self.ids(14))
        record["meta_info"]["routed_experts"] = "#" + record["meta_info"]["routed_experts"]
        (tmp_path / "a.json").write_text(json.dumps(record))
        with pytest.raises(TraceError, match="routed_experts is not base64"):
            read(tmp_path / "a.json")

    def test_the_old_placeholder_of_prefill_is_named(self, tmp_path: Path) -> None:
        ids = self.ids(14)
        ids[:5] = 255
        (tmp_path / "a.json").write_text(json.dumps(self.record(ids)))
        with pytest.raises(TraceError, match="id 255 >= num_experts 8") as caught:
            read(tmp_path / "a.json")
        assert "--ignore-expert-id 255" in str(caught.value.hint)
        loads = read(tmp_path / "a.json", options=ReadOptions(MODEL, ignored_ids=((255, 255),)))
        assert loads.tokens.sum() == 9

    def test_lmdeploy_writes_a_nested_list(self, tmp_path: Path) -> None:
        ids = self.ids(14)
        lines = [json.dumps({"meta_info": {"routed_experts": ids.tolist()}}) for _ in range(2)]
        (tmp_path / "a.jsonl").write_text("\n".join(lines))
        assert (read(tmp_path / "a.jsonl").counts.sum(0) == 2 * reference(ids[:, 1:], 8)).all()


class TestTensorrtLlm:
    def write(self, folder: Path, *, experts: int = 8, ranks: int = 2, iterations: tuple[int, ...] = (100, 101, 103)):
        counts = poisson(ranks, len(iterations), 3, experts)
        (folder / "meta_info.json").write_text(json.dumps({"num_experts": experts, "num_experts_per_token": 2}))
        for rank in range(ranks):
            tensors = {
                f"{iteration}_{layer}": counts[rank, i, j]
                for i, iteration in enumerate(iterations)
                for j, layer in enumerate((1, 2, 3))
            }
            save_file(tensors, folder / f"rank{rank}.safetensors")
        return counts

    def test_ranks_add_up_and_a_missing_iteration_is_named(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        loads = read(tmp_path)
        assert (loads.counts == counts.sum(0)).all()
        assert (loads.window_ids.tolist(), loads.top_k) == ([100, 101, 103], 2)
        assert any("1 iteration missing between the first and the last: 102" in w for w in loads.warnings)

    def test_raw_ids_are_left_out(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        save_file({"100_1": np.zeros((5, 2), np.int32)}, tmp_path / "rank0_raw.safetensors")
        result = read_traces([tmp_path], ReadOptions(MODEL))
        assert (result.loads.counts == counts.sum(0)).all()
        assert any("rank0_raw.safetensors was left out" in note for note in result.notes)

    def test_slots_need_the_map_of_the_run(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, experts=10)
        with pytest.raises(TraceError, match="counts 10 physical slots, and the recording does not hold the map"):
            read(tmp_path)
        plan = Placement(MAP.astype(np.int32), np.array([1, 2, 3], np.int32), 8, 2)
        loads = read(tmp_path, options=ReadOptions(MODEL, physical_to_logical=plan))
        assert loads.counts.tolist() == [folded(c).tolist() for c in counts.sum(0)]

    def test_unproven_experts_are_pointed_out(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        warnings = read(tmp_path, options=ReadOptions()).warnings
        assert any("8 experts, which are slots if a load balancer was on" in warning for warning in warnings)

    def test_a_missing_rank_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, ranks=3)
        (tmp_path / "rank1.safetensors").unlink()
        with pytest.raises(TraceError, match=r"ranks \[1\] are missing"):
            read(tmp_path)

    def test_replicas_stand_for_all_ranks_that_the_meta_file_tells(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, ranks=1)
        (tmp_path / "rank0.safetensors").rename(tmp_path / "rank3.safetensors")
        for rank in (2, 1):
            (tmp_path / f"rank{rank}.safetensors").write_bytes((tmp_path / "rank3.safetensors").read_bytes())
        meta = {"num_experts": 8, "num_experts_per_token": 2, "ep_size": 4}
        (tmp_path / "meta_info.json").write_text(json.dumps(meta))
        assert (read(tmp_path).counts == counts[0]).all()

    def test_the_meta_file_may_tell_how_many_ranks_there_were(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        meta = {"num_experts": 8, "num_experts_per_token": 2, "ep_size": 4}
        (tmp_path / "meta_info.json").write_text(json.dumps(meta))
        with pytest.raises(TraceError, match=r"ranks \[2, 3\] are missing"):
            read(tmp_path)

    def test_tokens_are_told_by_their_own_files(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        for rank in range(2):
            tokens = {f"{iteration}_{layer}": 600 + rank for iteration in (100, 101, 103) for layer in (1, 2, 3)}
            (tmp_path / f"rank{rank}_numtokens.json").write_text(json.dumps(tokens))
        assert read(tmp_path).tokens.tolist() == [1201] * 3

    def test_tokens_of_an_iteration_are_those_of_its_fullest_layer(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, iterations=(100, 9))
        for rank in (1, 0):
            tokens = {f"{i}_{layer}": i + rank + layer % 3 for i in (100, 9) for layer in (1, 2, 3)}
            (tmp_path / f"rank{rank}_numtokens.json").write_text(json.dumps(tokens))
        loads = read(tmp_path)
        assert (loads.window_ids.tolist(), loads.tokens.tolist()) == ([9, 100], [23, 205])
        assert (loads.counts == counts.sum(0)[::-1]).all()
        (tmp_path / "rank0_numtokens.json").unlink()
        assert read(tmp_path).tokens.tolist() == (loads.counts.sum(2).max(1) // 2).tolist()

    def test_ranks_record_the_same_iterations(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        save_file({f"100_{layer}": poisson(8) for layer in (1, 2, 3)}, tmp_path / "rank1.safetensors")
        with pytest.raises(TraceError, match="iteration 101, layer 1 is not in every rank's file"):
            read(tmp_path)

    def test_ranks_that_repeat_each_other_count_once(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, ranks=1)
        for rank in (1, 2, 3):
            (tmp_path / f"rank{rank}.safetensors").write_bytes((tmp_path / "rank0.safetensors").read_bytes())
        result = read_traces([tmp_path], ReadOptions(MODEL))
        assert (result.loads.counts == counts[0]).all()
        assert len([note for note in result.notes if "is a replica of" in note]) == 3

    def test_a_rank_below_the_highest_is_missing_whatever_the_meta_file_tells(self, tmp_path: Path) -> None:
        self.write(tmp_path, ranks=4)
        (tmp_path / "rank2.safetensors").unlink()
        meta = {"num_experts": 8, "num_experts_per_token": 2, "ep_size": 2}
        (tmp_path / "meta_info.json").write_text(json.dumps(meta))
        with pytest.raises(TraceError, match=r"ranks \[2\] are missing; ranks \[0, 1, 3\]"):
            read(tmp_path)

    def test_the_recorders_top_k_gives_the_tokens(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        loads = read(tmp_path, options=ReadOptions(ModelShape(None, 8)))
        assert loads.tokens.tolist() == (counts.sum((0, 3)).max(1) // 2).tolist()

    def test_without_the_meta_file_nothing_is_guessed(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "meta_info.json").unlink()
        with pytest.raises(TraceError, match=r"meta_info\.json is missing"):
            read(tmp_path)

    def test_one_rank_file_finds_the_meta_beside_it(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, ranks=1)
        result = read_traces([tmp_path / "rank0.safetensors"], ReadOptions(MODEL))
        assert (result.loads.counts == counts[0]).all()
        assert any("one rank's file only" in note for note in result.notes)


class TestVllmLoadStats:
    def record(self, step: int, load: np.ndarray, table: np.ndarray = MAP) -> str:
        record = {"record_type": "eplb_load_stats", "version": 1, "step": step, "num_ranks": 2}
        return json.dumps(record | {"expert_load": load.tolist(), "p2l_map": table.tolist()})

    META = json.dumps({"record_type": "eplb_load_meta", "version": 1, "model": "m", "num_ranks": 2})

    def test_each_record_folds_by_its_own_map(self, tmp_path: Path) -> None:
        loads, other = poisson(2, 3, 10), MAP[:, ::-1].copy()
        lines = [self.META, self.record(10, loads[0]), self.record(20, loads[1], other)]
        (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
        found = read(tmp_path / "s.jsonl")
        assert found.counts.tolist() == [folded(loads[0]).tolist(), folded(loads[1], other).tolist()]
        assert (found.window_ids.tolist(), reader_of(found)) == ([10, 20], "vllm-load-stats")
        assert found.layer_ids.tolist() == [1, 2, 3]
        assert (read(tmp_path / "s.jsonl", options=ReadOptions()).counts == found.counts).all()

    def test_a_single_record_is_enough(self, tmp_path: Path) -> None:
        (tmp_path / "s.jsonl").write_text(self.record(10, poisson(3, 10)))
        assert read(tmp_path / "s.jsonl").num_windows == 1

    def test_the_cut_last_line_and_other_records_are_left_out_and_counted(self, tmp_path: Path) -> None:
        line = self.record(10, poisson(3, 10))
        session = '{"record_type": "session_metadata"}'
        (tmp_path / "s.jsonl").write_text(f"{session}\n{line}\n{line[:40]}")
        found = read(tmp_path / "s.jsonl")
        assert (found.num_windows, found.dropped) == (1, {"other_records": 1})
        assert any("the last line (3) is cut" in warning for warning in found.warnings)

    @pytest.mark.parametrize("kind", ["meta", "stats"])
    def test_a_newer_version_is_refused(self, tmp_path: Path, kind: str) -> None:
        lines = [self.META, self.record(10, poisson(3, 10))]
        row = ["meta", "stats"].index(kind)
        lines[row] = lines[row].replace('"version": 1', '"version": 2')
        (tmp_path / "s.jsonl").write_text("\n".join(lines))
        with pytest.raises(TraceError, match=f"eplb_load_{kind} has version 2; version 1 is known") as caught:
            read(tmp_path / "s.jsonl")
        assert caught.value.row == row + 1

    def test_two_recordings_in_one_file_are_refused(self, tmp_path: Path) -> None:
        line = self.record(10, poisson(3, 10))
        (tmp_path / "s.jsonl").write_text("\n".join([self.META, line, self.META, line]))
        with pytest.raises(TraceError, match="eplb_load_meta comes again"):
            read(tmp_path / "s.jsonl")

    def test_a_map_that_names_no_expert_is_refused(self, tmp_path: Path) -> None:
        table = MAP.copy()
        table[1, 4] = 8
        (tmp_path / "s.jsonl").write_text(self.record(10, poisson(3, 10), table))
        with pytest.raises(TraceError, match="the recorded map puts expert 8 into slot 4") as caught:
            read(tmp_path / "s.jsonl")
        assert caught.value.layer == 2

    def test_the_meta_record_stands_in_front(self, tmp_path: Path) -> None:
        (tmp_path / "s.jsonl").write_text("\n".join([self.record(10, poisson(3, 10)), self.META]))
        with pytest.raises(TraceError, match="eplb_load_meta comes after the first step") as caught:
            read(tmp_path / "s.jsonl")
        assert caught.value.row == 2

    def test_records_without_a_step_are_counted_from_0(self, tmp_path: Path) -> None:
        lines = [self.record(0, poisson(3, 10)).replace('"step": 0, ', "") for _ in range(3)]
        (tmp_path / "s.jsonl").write_text("\n".join([self.META, *lines]))
        assert read(tmp_path / "s.jsonl").window_ids.tolist() == [0, 1, 2]

    def test_a_map_of_another_shape_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "s.jsonl").write_text(self.record(10, poisson(3, 9)))
        with pytest.raises(TraceError, match=r"expert_load is \[3, 9\]; p2l_map is \[3, 10\]"):
            read(tmp_path / "s.jsonl")

    def test_slots_without_an_expert_count_nothing(self, tmp_path: Path) -> None:
        counts, table = poisson(3, 10), MAP.copy()
        table[1, 9] = -1
        (tmp_path / "s.jsonl").write_text(self.record(10, counts, table))
        counts[1, 9] = 0
        assert read(tmp_path / "s.jsonl").counts[0].tolist() == folded(counts).tolist()

    def test_a_missing_step_is_named(self, tmp_path: Path) -> None:
        lines = [self.record(step, poisson(3, 10)) for step in (10, 30, 40)]
        (tmp_path / "s.jsonl").write_text("\n".join(lines))
        assert any("1 recording missing" in warning for warning in read(tmp_path / "s.jsonl").warnings)

    @pytest.mark.parametrize("steps", [(10, 10, 20), (20, 10, 30), (10, 20, 20)])
    def test_steps_that_do_not_ascend_are_of_several_runs(self, tmp_path: Path, steps: tuple[int, ...]) -> None:
        lines = [self.record(step, poisson(3, 10, seed=i)) for i, step in enumerate(steps)]
        (tmp_path / "s.jsonl").write_text("\n".join(lines))
        loads = read(tmp_path / "s.jsonl")
        assert loads.window_ids.tolist() == list(steps)
        assert any("steps do not ascend; the file holds several runs" in warning for warning in loads.warnings)


class TestVllmRoutes:
    def lines(self, ids: np.ndarray, layers: tuple[int, ...] = (1, 2, 3), request: str = "r1") -> list[str]:
        return [
            json.dumps(
                {
                    "type": "route",
                    "req_id": request,
                    "token_idx": token,
                    "layer": layer,
                    "topk_ids": ids[token, row].tolist(),
                    "topk_weights": [0.5, 0.5],
                }
            )
            for token in range(len(ids))
            for row, layer in enumerate(layers)
        ]

    META = json.dumps({"type": "meta", "model_id": "m", "layers_logged": [1, 2, 3], "top_k": 2})

    def test_the_start_up_profile_run_is_dropped_and_counted(self, tmp_path: Path) -> None:
        ids = random_ids(50, 3, 2, 8)
        dummy = np.repeat(ids[:1], 200, 0)
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *self.lines(dummy), *self.lines(ids[1:])]) + "\n")
        loads = read(tmp_path / "r.jsonl")
        assert (loads.counts.sum(0) == reference(ids[1:], 8)).all()
        assert (loads.dropped, reader_of(loads)) == ({"startup_profile_rows": 200}, "vllm-routes")

    def test_runs_longer_than_a_block_are_dropped_whole(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eplb_cli.traces.vllm_routes.BLOCK_ROWS", 16)
        monkeypatch.setattr("eplb_cli.traces.files.CHUNK_BYTES", 2000)
        monkeypatch.setattr("eplb_cli.traces.jsonl.CHUNK_BYTES", 2000)
        ids = random_ids(60, 3, 2, 8)
        dummies = [np.repeat(ids[:1], 100, 0), np.repeat(ids[1:2], 33, 0)]
        lines = [self.META, *(line for dummy in dummies for line in self.lines(dummy)), *self.lines(ids[2:])]
        (tmp_path / "r.jsonl").write_text("\n".join(lines) + "\n")
        loads = read(tmp_path / "r.jsonl")
        assert (loads.counts.sum(0) == reference(ids[2:], 8)).all()
        assert loads.dropped == {"startup_profile_rows": 133}

    def test_a_run_that_ends_with_a_block_is_dropped_whole(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("eplb_cli.traces.vllm_routes.BLOCK_ROWS", 1)
        monkeypatch.setattr("eplb_cli.traces.jsonl.CHUNK_BYTES", 1500)
        ids = random_ids(12, 3, 2, 8)
        for run in range(2, 20):
            lines = [self.META, *self.lines(np.repeat(ids[:1], run, 0)), *self.lines(ids[1:])]
            (tmp_path / "r.jsonl").write_text("\n".join(lines) + "\n")
            loads = read(tmp_path / "r.jsonl")
            assert loads.dropped == ({"startup_profile_rows": run} if run >= 4 else {})
            assert loads.tokens.sum() == (11 if run >= 4 else 11 + run)

    def test_the_row_of_a_bad_id_is_the_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eplb_cli.traces.vllm_routes.BLOCK_ROWS", 1)
        monkeypatch.setattr("eplb_cli.traces.jsonl.CHUNK_BYTES", 1500)
        ids = random_ids(40, 3, 2, 8)
        ids[38, 1, 0] = 8
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *self.lines(ids)]))
        with pytest.raises(TraceError, match="id 8 >= num_experts 8 at column 0") as caught:
            read(tmp_path / "r.jsonl")
        assert (caught.value.row, caught.value.layer) == (38, 2)

    def test_real_tokens_that_repeat_later_stay(self, tmp_path: Path) -> None:
        ids = np.concatenate([random_ids(9, 3, 2, 8), np.repeat(random_ids(1, 3, 2, 8, 5), 30, 0)])
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *self.lines(ids)]))
        assert (read(tmp_path / "r.jsonl").counts.sum(0) == reference(ids, 8)).all()

    def test_layers_logged_one_after_the_other_line_up(self, tmp_path: Path) -> None:
        ids = random_ids(50, 3, 2, 8)
        lines = sorted(self.lines(ids), key=lambda line: json.loads(line)["layer"])
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *lines]))
        loads = read(tmp_path / "r.jsonl")
        assert (loads.counts.sum(0) == reference(ids, 8)).all() and loads.tokens.sum() == 50

    def test_the_cut_last_line_is_left_out_with_a_warning(self, tmp_path: Path) -> None:
        lines = self.lines(random_ids(50, 3, 2, 8))
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *lines, lines[0][:30]]))
        loads = read(tmp_path / "r.jsonl")
        assert loads.tokens.sum() == 50
        assert any("the last line (152) is cut" in warning for warning in loads.warnings)

    @pytest.mark.parametrize("bad", ['{"type": "route"', '{"type": "route", "layer": 1, "topk_ids": ["a"]}', "[1]"])
    def test_a_broken_line_is_named(self, tmp_path: Path, bad: str) -> None:
        lines = self.lines(random_ids(9, 3, 2, 8))
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *lines[:5], bad, *lines[5:]]))
        with pytest.raises(TraceError, match="is no route") as caught:
            read(tmp_path / "r.jsonl")
        assert caught.value.row == 7

    @pytest.mark.parametrize("chunk", [60, 500, 1 << 20])
    @pytest.mark.parametrize("bad", ['{"type": "route"', '{"type": "route", "layer": 1, "topk_ids": [1, 2, 3]}'])
    def test_lines_are_counted_on_over_batches(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, chunk: int
    ) -> None:
        monkeypatch.setattr("eplb_cli.traces.jsonl.CHUNK_BYTES", chunk)
        lines = self.lines(random_ids(9, 3, 2, 8))
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *lines[:20], bad, *lines[20:]]))
        with pytest.raises(TraceError) as caught:
            read(tmp_path / "r.jsonl")
        assert caught.value.row == (22 if chunk > 60 or "topk" not in bad else None)

    @pytest.mark.parametrize("bad", ['{"type": "route", "layer": "x", "topk_ids": [1, 2]}', "[1]"])
    def test_a_last_line_that_is_whole_and_no_route_is_not_left_out(self, tmp_path: Path, bad: str) -> None:
        lines = self.lines(random_ids(9, 3, 2, 8))
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *lines, bad]))
        with pytest.raises(TraceError, match="is no route") as caught:
            read(tmp_path / "r.jsonl")
        assert caught.value.row == 29

    def test_a_route_without_a_layer_is_refused(self, tmp_path: Path) -> None:
        lines = self.lines(random_ids(9, 3, 2, 8))
        (tmp_path / "r.jsonl").write_text(
            "\n".join([self.META, *lines, '{"type": "route", "topk_ids": [1, 2]}']) + "\n"
        )
        with pytest.raises(TraceError, match="layer -1 with 2 ids") as caught:
            read(tmp_path / "r.jsonl")
        assert caught.value.row == 29

    def test_records_of_other_types_are_counted(self, tmp_path: Path) -> None:
        ids = random_ids(9, 3, 2, 8)
        lines = self.lines(ids)
        other = '{"type": "step", "layer": 2, "topk_ids": [1, 2]}'
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *lines[:4], other, *lines[4:], other, self.META]))
        loads = read(tmp_path / "r.jsonl")
        assert (loads.dropped, loads.tokens.sum()) == ({"other_records": 2}, 9)
        assert (loads.counts.sum(0) == reference(ids, 8)).all()

    def test_lines_may_be_longer_than_a_chunk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eplb_cli.traces.jsonl.CHUNK_BYTES", 23)
        ids = random_ids(9, 3, 2, 8)
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *self.lines(ids)]))
        assert (read(tmp_path / "r.jsonl").counts.sum(0) == reference(ids, 8)).all()

    def test_rows_of_different_width_are_refused(self, tmp_path: Path) -> None:
        lines = self.lines(random_ids(9, 3, 2, 8))
        odd = json.dumps({"type": "route", "layer": 1, "topk_ids": [1, 2, 3]})
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *lines, odd]) + "\n")
        with pytest.raises(TraceError, match="layer 1 with 3 ids, others hold 2"):
            read(tmp_path / "r.jsonl")

    def test_processes_give_the_same_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        ids = random_ids(400, 3, 2, 8)
        (tmp_path / "r.jsonl").write_text("\n".join([self.META, *self.lines(ids)]) + "\n")
        monkeypatch.setattr("eplb_cli.traces.jsonl.PARALLEL_FROM_BYTES", 1)
        monkeypatch.setattr("eplb_cli.traces.jsonl.CHUNK_BYTES", 4000)
        windows = [reference(ids[start : start + 50], 8).tolist() for start in range(0, 400, 50)]
        assert read(tmp_path / "r.jsonl", options=ReadOptions(MODEL, window_tokens=50)).counts.tolist() == windows


class TestAscend:
    def test_a_bare_tensor_holds_the_moe_layers(self, tmp_path: Path) -> None:
        counts = poisson(3, 8)
        torch.save(torch.from_numpy(counts), tmp_path / "expert_load_view.pt")
        loads = read(tmp_path / "expert_load_view.pt")
        assert (loads.counts[0] == counts).all() and loads.layer_ids.tolist() == [1, 2, 3]


class TestMindie:
    CONFIG: ClassVar[dict[str, Any]] = {
        "num_moe_layers": 3,
        "collection_Interval": 8,
        "num_of_experts": 8,
        "num_of_selected_experts": [2],
        "num_dangling_shared_experts": 0,
    }

    def write(self, folder: Path, *, blocks: int = 2, slots: int = 8, layers: int = 3, **more: Any) -> np.ndarray:
        counts = poisson(blocks, layers, slots)
        stage = folder / "decode"
        stage.mkdir()
        (folder / "model_gen_config.json").write_text(json.dumps(self.CONFIG | more))
        for rank, columns in enumerate(np.split(counts, 2, axis=2)):
            rows = columns.reshape(-1, columns.shape[2])
            text = "\n".join(",".join(map(str, row)) for row in rows.tolist()) + "\n"
            (stage / f"decode_{rank}.csv").write_text(text)
            (stage / f"decode_{rank}_bak.csv").write_text(text)
            (stage / f"decode_topk_{rank}.csv").write_text("1,2\n")
        return counts

    def test_columns_of_all_ranks_stand_side_by_side(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        loads = read(tmp_path)
        assert (loads.counts == counts).all()
        assert (loads.phase, loads.top_k, reader_of(loads)) == ("decode", 2, "mindie")
        assert (read(tmp_path, options=ReadOptions()).counts == counts).all()
        assert all("_bak" not in source.name for source in loads.sources)
        assert (read(*backwards(tmp_path)).counts == counts).all()

    def test_separators_and_spaces_at_the_ends_of_a_row_are_no_cells(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        for file in (tmp_path / "decode").glob("decode_?.csv"):
            file.write_text("".join(f" {row}, \n" for row in file.read_text().splitlines()))
        assert (read(tmp_path).counts == counts).all()

    def test_both_stages_count(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, blocks=3)
        for rank in range(2):
            rows = (tmp_path / "decode" / f"decode_{rank}.csv").read_text().splitlines()
            (tmp_path / "decode" / f"prefill_{rank}.csv").write_text("\n".join(rows[3:6]))
        loads = read(tmp_path, options=ReadOptions())
        assert (loads.counts == counts[[1, 0, 1, 2]]).all()
        assert (loads.window_phase.tolist(), loads.top_k) == ([1, 2, 2, 2], 2)
        assert loads.tokens.tolist() == (loads.counts.sum(2).max(1) // 2).tolist()

    def test_ranks_with_equal_columns_are_no_replicas(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        text = (tmp_path / "decode" / "decode_0.csv").read_text()
        (tmp_path / "decode" / "decode_1.csv").write_text(text)
        assert read(tmp_path).num_experts == 8

    def test_the_config_names_the_map_in_force(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, slots=10, eplb_expert_map_file="/elsewhere/map.json")
        with pytest.raises(TraceError, match=r"the map in force, '/elsewhere/map\.json', is not here"):
            read(tmp_path)
        layers = [
            {
                "layer_id": i,
                "device_count": 2,
                "device_list": [
                    {"device_id": d, "device_expert": part.tolist()} for d, part in enumerate(np.split(row, 2))
                ],
            }
            for i, row in enumerate(MAP)
        ]
        (tmp_path / "map.json").write_text(json.dumps({"moe_layer_count": 3, "layer_list": layers}))
        loads = read(tmp_path / "decode")
        assert loads.counts.tolist() == [folded(c).tolist() for c in counts]

    def test_slots_without_a_map_are_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, slots=10)
        with pytest.raises(TraceError, match="counts 10 physical slots"):
            read(tmp_path)

    def test_a_map_that_the_user_gives_counts_where_slots_are_as_many_as_experts(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        rows = np.array([[1, 2, 3, 4, 5, 6, 7, 0], [7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 7, 6]], np.int32)
        plan = Placement(rows, np.array([1, 2, 3], np.int32), 8, 2)
        loads = read(tmp_path, options=ReadOptions(MODEL, physical_to_logical=plan))
        for layer, row in enumerate(rows):
            assert (loads.counts[:, layer, row] == counts[:, layer]).all()

    def test_a_draft_layer_follows_the_moe_layers(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, layers=4, blocks=1)
        loads = read(tmp_path)
        assert (loads.counts == counts[:, :3]).all()
        assert any("layers [4] lie beyond the model's last" in warning for warning in loads.warnings)

    def test_a_missing_rank_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "decode" / "decode_0.csv").unlink()
        with pytest.raises(TraceError, match=r"ranks \[0\] are missing"):
            read(tmp_path)

    @pytest.mark.parametrize("how", [RankDumps.sum, RankDumps.replicated])
    def test_columns_are_neither_added_nor_replicas(self, tmp_path: Path, how: RankDumps) -> None:
        self.write(tmp_path)
        (tmp_path / "decode" / "decode_0.csv").unlink()
        with pytest.raises(UsageError, match="neither added nor replicas"):
            read(tmp_path, options=ReadOptions(MODEL, rank_dumps=how))

    def test_a_cut_block_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, blocks=3)
        for rank in range(2):
            path = tmp_path / "decode" / f"decode_{rank}.csv"
            path.write_text("\n".join(path.read_text().splitlines()[:-2]))
        with pytest.raises(TraceError, match="7 rows are no whole number of blocks"):
            read(tmp_path)

    def test_shared_expert_ranks_are_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path, num_dangling_shared_experts=1)
        with pytest.raises(TraceError, match="num_dangling_shared_experts"):
            read(tmp_path)


class TestOmniInfer:
    def write(self, folder: Path, steps: tuple[int, ...] = (1, 2, 4), ranks: int = 2, slots: int = 8) -> np.ndarray:
        counts = poisson(len(steps), 3, slots)
        stage = folder / "decoder"
        stage.mkdir()
        for i, step in enumerate(steps):
            for rank, columns in enumerate(np.split(counts[i], ranks, axis=1)):
                text = "".join("".join(f"{value}\t" for value in row) + "\n" for row in columns.tolist())
                (stage / f"activation_counts_recordstep_{step}_rank_{rank}.txt").write_text(text)
        return counts

    def test_steps_of_all_ranks(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path)
        loads = read(tmp_path)
        assert (loads.counts == counts).all()
        assert (loads.phase, loads.window_ids.tolist(), reader_of(loads)) == ("decode", [1, 2, 4], "omni-infer")
        assert any("1 record step missing between the first and the last: 3" in w for w in loads.warnings)
        again = read(*backwards(tmp_path))
        assert (again.counts == counts).all() and again.window_ids.tolist() == [1, 2, 4]

    def test_the_clusters_dump_comes_from_rank_0_alone(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, ranks=1)
        assert (read(tmp_path).counts == counts).all()

    def test_a_step_that_lacks_a_rank_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path)
        (tmp_path / "decoder" / "activation_counts_recordstep_2_rank_1.txt").unlink()
        with pytest.raises(TraceError, match=r"step 2 lacks ranks \[1\]"):
            read(tmp_path)

    def test_slots_fold_by_the_given_plan(self, tmp_path: Path) -> None:
        counts = self.write(tmp_path, slots=10)
        plan = Placement(MAP.astype(np.int32), np.array([1, 2, 3], np.int32), 8, 2)
        loads = read(tmp_path, options=ReadOptions(MODEL, physical_to_logical=plan))
        assert loads.counts.tolist() == [folded(c).tolist() for c in counts]

    def test_the_log_holds_the_same_numbers(self, tmp_path: Path) -> None:
        counts = poisson(1, 3, 8)
        lines = [
            f"INFO [dump activation] decode step 7 in rank {rank} for layer {layer} get 4 experts data: "
            + " ".join(map(str, counts[0, layer, 4 * rank : 4 * rank + 4].tolist()))
            for rank in (1, 0)
            for layer in (2, 0, 1)
        ]
        (tmp_path / "server.log").write_text("hello\n" + "\n".join(lines) + "\n")
        loads = read(tmp_path / "server.log")
        assert (loads.counts == counts).all() and (loads.phase, loads.window_ids.tolist()) == ("decode", [7])

    def test_the_rounded_pipeline_files_are_not_counts(self, tmp_path: Path) -> None:
        (tmp_path / "topk_ids_count_decode.csv").write_text("1,2\n3,4\n")
        with pytest.raises(TraceError, match="divided by 128"):
            read(tmp_path)


class TestDlblas:
    def test_snapshots_of_one_rank_are_differenced(self, tmp_path: Path) -> None:
        steps = poisson(3, 3, 8)
        for rank in range(2):
            for step, counts in zip((10, 20, 100), steps.cumsum(0), strict=True):
                (tmp_path / f"rank{rank}_step{step}_experts_counts.json").write_text(json.dumps(counts.tolist()))
        result = read_traces([tmp_path], ReadOptions(MODEL))
        assert (result.loads.counts == steps[1:]).all()
        assert result.loads.window_ids.tolist() == [20, 100]
        assert result.loads.dropped == {"counters_before_recording": int(steps[0].sum())}
        assert any("all 2 ranks hold the same sums" in note for note in result.notes)
        again = read_traces(backwards(tmp_path), ReadOptions(MODEL)).loads
        assert (again.counts == steps[1:]).all()
        assert [source.name for source in again.sources] == [
            f"rank0_step{n}_experts_counts.json" for n in (10, 20, 100)
        ]

    def test_a_lone_snapshot_counts_from_the_start(self, tmp_path: Path) -> None:
        counts = poisson(3, 8)
        (tmp_path / "rank0_step10_experts_counts.json").write_text(json.dumps(counts.tolist()))
        assert (read(tmp_path).counts[0] == counts).all()

    def test_ranks_that_disagree_are_refused(self, tmp_path: Path) -> None:
        for rank in range(2):
            counts = poisson(3, 8, seed=rank)
            (tmp_path / f"rank{rank}_step10_experts_counts.json").write_text(json.dumps(counts.tolist()))
        with pytest.raises(TraceError, match="differs from rank 0's counts of step 10"):
            read(tmp_path)

    def test_each_ranks_own_load_adds_up(self, tmp_path: Path) -> None:
        counts = poisson(2, 3, 8)
        for rank in range(2):
            document = {f"layer_{layer}": counts[rank, i].tolist() for i, layer in enumerate((1, 2, 3))}
            (tmp_path / f"expert_load_rank{rank}.json").write_text(json.dumps(document))
        loads = read(tmp_path)
        assert (loads.counts[0] == counts.sum(0)).all() and reader_of(loads) == "dlblas-load"

    def test_layers_of_ranks_meet_by_number(self, tmp_path: Path) -> None:
        counts = poisson(2, 3, 8)
        for rank, layers in enumerate(((10, 9, 2), (2, 10, 9))):
            document = {f"layer_{layer}": counts[rank, (2, 9, 10).index(layer)].tolist() for layer in layers}
            (tmp_path / f"expert_load_rank{rank}.json").write_text(json.dumps(document))
        loads = read(tmp_path, options=ReadOptions())
        assert (loads.counts[0] == counts.sum(0)).all() and loads.layer_ids.tolist() == [2, 9, 10]
        document = {f"layer_{layer}": counts[0, 0].tolist() for layer in (2, 9, 11)}
        (tmp_path / "expert_load_rank1.json").write_text(json.dumps(document))
        with pytest.raises(TraceError, match="all ranks have the same layers"):
            read(tmp_path, options=ReadOptions())


class TestImatrix:
    def write(self, path: Path, counts: np.ndarray, names: tuple[str, ...] = ("gate", "up", "down")) -> None:
        from gguf import GGUFWriter

        writer = GGUFWriter(path, "imatrix")
        for row, layer in enumerate((1, 2, 3)):
            for name in names:
                own = counts[row].astype(np.float32).reshape(-1, 1)
                writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight.counts", own)
                writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight.in_sum2", np.zeros((8, 4), np.float32))
        writer.add_tensor("blk.0.ffn_up.weight.counts", np.full((1, 1), 999, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def test_one_of_the_three_projections_counts(self, tmp_path: Path) -> None:
        counts = poisson(3, 8)
        self.write(tmp_path / "imatrix.gguf", counts)
        loads = read(tmp_path / "imatrix.gguf")
        assert (loads.counts[0] == counts).all()
        assert (loads.layer_ids.tolist(), reader_of(loads)) == ([1, 2, 3], "llama-imatrix")

    def test_projections_that_differ_are_told(self, tmp_path: Path) -> None:
        from gguf import GGUFWriter

        writer = GGUFWriter(tmp_path / "imatrix.gguf", "imatrix")
        counts = poisson(3, 8).astype(np.float32)
        for row, layer in ((2, 3), (0, 1), (1, 2)):
            for name, more in (("up", float(layer == 2)), ("down", 0.0)):
                writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight.counts", (counts[row] + more).reshape(-1, 1))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        loads = read(tmp_path / "imatrix.gguf")
        assert (loads.counts[0] == counts).all()
        differ = [warning for warning in loads.warnings if "differ; ffn_down was counted" in warning]
        assert differ == ["imatrix.gguf: layer 2: ffn_up and ffn_down differ; ffn_down was counted"]

    def test_a_gguf_without_expert_counts_says_so(self, tmp_path: Path) -> None:
        self.write(tmp_path / "model.gguf", poisson(3, 8), names=())
        with pytest.raises(TraceError, match=r"nearest: llama-imatrix, but a GGUF without ffn_"):
            read(tmp_path / "model.gguf")

    def test_the_old_format_says_what_to_do(self, tmp_path: Path) -> None:
        (tmp_path / "imatrix.dat").write_bytes(b"\x01\0\0\0\x1b\0\0\0blk.1.ffn_gate_exps.weight\0\0")
        with pytest.raises(TraceError, match=r"the old \.dat format has one count for all experts"):
            read(tmp_path / "imatrix.dat")


class TestDs4Hits:
    def write(self, path: Path, counts: np.ndarray, rows: int, *, header: bool = True) -> None:
        lines = [
            f"{layer},{expert},{counts[i, expert]},{rows}" for i, layer in enumerate((1, 2, 3)) for expert in range(8)
        ]
        path.write_text("\n".join((["layer,expert,hits,layer_rows"] if header else []) + lines) + "\n")

    @pytest.mark.parametrize("header", [True, False])
    def test_hits_with_the_tokens_beside_them(self, tmp_path: Path, header: bool) -> None:
        counts = np.full((3, 8), 250)
        self.write(tmp_path / "hits.csv", counts, 1000, header=header)
        loads = read(tmp_path / "hits.csv", options=ReadOptions())
        assert (loads.counts[0] == counts).all()
        assert (loads.tokens.tolist(), loads.top_k, loads.layer_ids.tolist()) == ([1000], 2, [1, 2, 3])

    def test_hits_that_are_not_tokens_times_top_k_are_told(self, tmp_path: Path) -> None:
        self.write(tmp_path / "hits.csv", np.full((3, 8), 251), 1000)
        assert any("tokens x top-k = 2000" in warning for warning in read(tmp_path / "hits.csv").warnings)

    def test_tokens_are_those_of_the_fullest_layer(self, tmp_path: Path) -> None:
        rows = [
            f"{layer},{expert},{tokens // 4},{tokens}" for layer, tokens in ((3, 800), (1, 1000)) for expert in range(8)
        ]
        (tmp_path / "hits.csv").write_text("\n".join(["layer,expert,hits,layer_rows", *rows]))
        loads = read(tmp_path / "hits.csv", options=ReadOptions())
        assert (loads.tokens.tolist(), loads.top_k, loads.counts[0, :, 5].tolist()) == ([1000], 2, [250, 200])
        (tmp_path / "hits.csv").write_text("\n".join(["layer,expert,hits,layer_rows", *rows, "3,8,200,801"]))
        with pytest.raises(TraceError, match="layer_rows is 801; it was 800") as caught:
            read(tmp_path / "hits.csv", options=ReadOptions())
        assert (caught.value.layer, caught.value.row) == (3, 18)

    def test_experts_beyond_the_last_row_are_those_that_the_model_has(self, tmp_path: Path) -> None:
        self.write(tmp_path / "hits.csv", np.full((3, 8), 250), 1000)
        loads = read(tmp_path / "hits.csv", options=ReadOptions(ModelShape(None, 10)))
        assert loads.counts[0].tolist() == [[250] * 8 + [0, 0]] * 3

    def test_a_pair_there_twice_is_refused(self, tmp_path: Path) -> None:
        self.write(tmp_path / "hits.csv", np.full((3, 8), 250), 1000)
        path = tmp_path / "hits.csv"
        path.write_text(path.read_text() + "1,0,5,1000\n")
        with pytest.raises(TraceError, match="is there twice"):
            read(path)


class TestSmallerShapes:
    def test_saliency(self, tmp_path: Path) -> None:
        counts = np.full((3, 8), 250)
        layers = {str(layer): {"cnt": row.tolist(), "gate": []} for layer, row in zip((1, 2, 3), counts, strict=True)}
        document = {"arch": "glm-dsa", "n_expert": 8, "tokens": 1000, "layers": layers}
        (tmp_path / "a.json").write_text(json.dumps(document))
        loads = read(tmp_path / "a.json")
        assert (loads.counts[0] == counts).all() and loads.tokens.tolist() == [1000]
        assert not any("tokens x top-k" in warning for warning in loads.warnings)
        assert reader_of(loads) == "saliency-json"

    def test_json_laid_out_over_lines_is_one_document(self, tmp_path: Path) -> None:
        layers = {"1": {"cnt": [250, 150, 300, 100], "gate": []}}
        document = {"arch": "glm-dsa", "n_expert": 4, "tokens": 400, "layers": layers}
        (tmp_path / "a.json").write_text(json.dumps(document, indent=1))
        assert read(tmp_path / "a.json", options=ReadOptions()).counts.tolist() == [[[250, 150, 300, 100]]]

    def test_saliency_layers_are_numbers(self, tmp_path: Path) -> None:
        counts = poisson(3, 8)
        layers = {str(layer): {"cnt": counts[row].tolist()} for row, layer in ((2, 10), (1, 9), (0, 3))}
        (tmp_path / "a.json").write_text(json.dumps({"n_expert": 8, "layers": layers}))
        loads = read(tmp_path / "a.json", options=ReadOptions())
        assert (loads.counts[0] == counts).all() and loads.layer_ids.tolist() == [3, 9, 10]
        (tmp_path / "a.json").write_text(json.dumps({"n_expert": 9, "layers": layers}))
        with pytest.raises(TraceError, match="n_expert is 9; cnt has 8 numbers"):
            read(tmp_path / "a.json", options=ReadOptions())

    def test_heat_map_needs_the_expert_count(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text('{"1": {"1": 7641, "3": 17636}, "2": {"0": 25277}, "3": {"7": 25277}}')
        loads = read(tmp_path / "a.json")
        assert loads.counts[0, 0].tolist() == [0, 7641, 0, 17636, 0, 0, 0, 0]
        with pytest.raises(UsageError, match="how many experts"):
            read(tmp_path / "a.json", options=ReadOptions())

    def test_plumb_moe(self, tmp_path: Path) -> None:
        layers = [
            {
                "layer_id": layer,
                "experts": [{"expert_id": e, "token_count": 200 + e, "activation_fraction": 0.1} for e in range(8)],
            }
            for layer in (1, 2, 3)
        ]
        (tmp_path / "a.json").write_text(json.dumps({"layers": layers}))
        assert read(tmp_path / "a.json").counts[0].tolist() == [list(range(200, 208))] * 3
        assert read(tmp_path / "a.json", options=ReadOptions()).num_experts == 8
        layers[1]["experts"].pop()
        (tmp_path / "a.json").write_text(json.dumps({"layers": layers}))
        with pytest.raises(UsageError, match="how many experts"):
            read(tmp_path / "a.json", options=ReadOptions())

    def test_frequencies_are_not_counts(self, tmp_path: Path) -> None:
        (tmp_path / "a.json").write_text(json.dumps(np.full((3, 8), 0.125).tolist()))
        with pytest.raises(TraceError, match=r"load is 0\.125") as caught:
            read(tmp_path / "a.json")
        assert "frequencies" in str(caught.value.hint)

    def test_a_pickled_counter_is_refused(self, tmp_path: Path) -> None:
        import pickle

        (tmp_path / "a.pkl").write_bytes(pickle.dumps([Counter({1: 2})]))
        with pytest.raises(TraceError, match=r"unpickling runs whatever code|cannot be read as a torch file"):
            read(tmp_path / "a.pkl")

    def test_esft_writes_a_file_a_layer(self, tmp_path: Path) -> None:
        ids = random_ids(30, 3, 2, 8)
        for row, layer in enumerate((1, 2, 3)):
            lines = ["\t".join(map(str, picks)) + "\t\t0.5\t0.5" for picks in ids[:, row].tolist()]
            (tmp_path / f"layer_{layer}.txt").write_text("\n".join(lines) + "\n")
        loads = read(tmp_path)
        assert (loads.counts.sum(0) == reference(ids, 8)).all()
        assert (loads.tokens.sum(), loads.layer_ids.tolist(), reader_of(loads)) == (30, [1, 2, 3], "esft")
        assert (read(*backwards(tmp_path)).counts == loads.counts).all()

    def test_the_row_of_a_bad_id_is_the_esft_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("eplb_cli.traces.layer_files.LINES_A_BLOCK", 4)
        ids = random_ids(11, 3, 2, 8)
        ids[10, 2, 0] = 9
        for row, layer in enumerate((1, 2, 3)):
            lines = ["\t".join(map(str, picks)) + "\t\t0.5\t0.5" for picks in ids[:, row].tolist()]
            (tmp_path / f"layer_{layer}.txt").write_text("\n".join(lines))
        with pytest.raises(TraceError, match="id 9 >= num_experts 8") as caught:
            read(tmp_path)
        assert (caught.value.row, caught.value.layer) == (10, 3)

    def test_esft_lines_of_sequences_take_top_k_from_the_model(self, tmp_path: Path) -> None:
        ids = random_ids(30, 3, 2, 8)
        for row, layer in enumerate((1, 2, 3)):
            lines = [
                "\t".join(map(str, ids[i : i + 10, row].ravel())) + "\t\t" + "\t".join(["0.5"] * 20)
                for i in (0, 10, 20)
            ]
            (tmp_path / f"{layer}.txt").write_text("\n".join(lines) + "\n")
        assert (read(tmp_path).counts.sum(0) == reference(ids, 8)).all()

    def test_esft_layers_must_line_up(self, tmp_path: Path) -> None:
        for layer, lines in ((1, 3), (2, 2), (3, 3)):
            (tmp_path / f"layer_{layer}.txt").write_text("1\t2\t\t0.5\t0.5\n" * lines)
        with pytest.raises(TraceError, match="line 3 has different numbers of ids"):
            read(tmp_path)

    def test_step_writes_a_file_a_layer_and_iteration(self, tmp_path: Path) -> None:
        ids = random_ids(20, 3, 2, 8).astype(np.int64)
        for iteration in range(2):
            for row, layer in enumerate((1, 2, 3)):
                part = ids[10 * iteration : 10 * iteration + 10, row]
                np.savez(tmp_path / f"routing_iter_{iteration}_layer_{layer}.npz", data=part)
        loads = read(tmp_path)
        assert (loads.counts.sum(0) == reference(ids, 8)).all() and reader_of(loads) == "step-npz"

    def test_step_iterations_and_layers_go_by_number(self, tmp_path: Path) -> None:
        ids = random_ids(24, 3, 2, 8).astype(np.int64)
        for place, iteration in enumerate((2, 9, 10)):
            for row, layer in enumerate((1, 2, 3)):
                part = ids[8 * place : 8 * place + 8, row]
                np.savez(tmp_path / f"routing_iter_{iteration}_layer_{layer}.npz", data=part)
        options = ReadOptions(MODEL, window_tokens=8)
        loads = read(*backwards(tmp_path), options=options)
        assert loads.counts.tolist() == [reference(ids[i : i + 8], 8).tolist() for i in (0, 8, 16)]
        np.savez(tmp_path / "routing_iter_10_layer_3.npz", data=np.where(np.arange(8) == 5, 9, ids[16:, 2].T).T)
        with pytest.raises(TraceError, match="id 9 >= num_experts 8") as caught:
            read(tmp_path, options=options)
        assert (caught.value.row, caught.value.layer) == (21, 3)


class TestEplbRecording:
    HEADER: ClassVar[dict[str, Any]] = {
        "format": "eplb-recording",
        "version": 1,
        "run": "20260101-1",
        "model": "m",
        "architecture": "DeepseekV3ForCausalLM",
        "num_experts": 8,
        "top_k": 2,
        "layer_ids": [1, 2, 3],
        "window_steps": 100,
        "dp_rank": 0,
        "dp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "time": 1.0,
    }

    def write(self, folder: Path, windows: list[tuple[int, str, np.ndarray]], tail: str = "", **header: Any) -> None:
        header = self.HEADER | header
        lines = [json.dumps(header)]
        for window, phase, counts in windows:
            part = {"window": window, "phase": phase, "steps": 1, "tokens": int(counts[0].sum()) // 2, "dropped": 0}
            lines.append(json.dumps(part | {"time": 1.0, "counts": counts.tolist()}))
        name = f"{header['run']}-dp{header['dp_rank']}-pp{header['pp_rank']}.jsonl"
        (folder / name).write_text("\n".join(lines) + "\n" + tail)

    def test_parts_of_a_window_add_up_and_phases_stay_apart(self, tmp_path: Path) -> None:
        counts = np.full((3, 8), 200) + np.arange(3)[:, None]
        self.write(
            tmp_path, [(0, "prefill", counts), (0, "decode", counts), (0, "decode", counts), (1, "decode", counts)]
        )
        loads = read(tmp_path, options=ReadOptions())
        assert loads.window_phase.tolist() == [1, 2, 2]
        assert (loads.counts == np.stack([counts, 2 * counts, counts])).all()
        assert (loads.tokens.tolist(), loads.top_k, loads.model) == ([800, 1600, 800], 2, "DeepseekV3ForCausalLM")

    def test_data_parallel_ranks_add_up(self, tmp_path: Path) -> None:
        counts = poisson(2, 3, 8)
        for rank in range(2):
            self.write(tmp_path, [(0, "all", counts[rank])], dp_rank=rank, dp_size=2)
        assert (read(tmp_path).counts[0] == counts.sum(0)).all()

    def test_layers_of_pipeline_stages_join(self, tmp_path: Path) -> None:
        counts = poisson(3, 8)
        self.write(tmp_path, [(0, "all", counts[:2])], pp_rank=0, pp_size=2, layer_ids=[1, 2])
        self.write(tmp_path, [(0, "all", counts[2:])], pp_rank=1, pp_size=2, layer_ids=[3])
        assert (read(tmp_path).counts[0] == counts).all()

    def test_tokens_add_up_over_ranks_and_not_over_stages(self, tmp_path: Path) -> None:
        counts = poisson(2, 2, 3, 8)  # rank, window
        stages = ((1, [1]), (0, [2, 3]))  # the later stage holds the lower layer, and fewer tokens
        for rank in (1, 0):
            for stage, layers in stages:
                rows = counts[rank][:, [layer - 1 for layer in layers]] - 10 * stage
                windows = [(window, "all", rows[window]) for window in range(2)]
                self.write(tmp_path, windows, dp_rank=rank, dp_size=2, pp_rank=stage, pp_size=2, layer_ids=layers)
        loads = read(tmp_path)
        total = counts.sum(0)
        assert (loads.counts == total - np.array([20, 0, 0])[None, :, None]).all()
        assert loads.tokens.tolist() == (counts[:, :, 1].sum(2) // 2).sum(0).tolist()

    @pytest.mark.parametrize(
        ("header", "message"), [({"dp_size": 2}, r"ranks \[1\] are missing"), ({"pp_size": 2}, "lacks the files of")]
    )
    def test_missing_files_of_a_run_are_refused(self, tmp_path: Path, header: dict[str, int], message: str) -> None:
        self.write(tmp_path, [(0, "all", poisson(3, 8))], **header)
        with pytest.raises(TraceError, match=message):
            read(tmp_path)

    def test_a_killed_server_leaves_a_cut_last_line(self, tmp_path: Path) -> None:
        self.write(tmp_path, [(0, "all", poisson(3, 8)), (1, "all", poisson(3, 8))], tail='{"window": 2, "pha')
        loads = read(tmp_path)
        assert loads.num_windows == 2 and any("is cut" in warning for warning in loads.warnings)

    def test_a_recorder_that_stopped_says_why(self, tmp_path: Path) -> None:
        self.write(tmp_path, [(0, "all", poisson(3, 8))], tail='{"end": "size limit"}\n')
        assert any("the recorder stopped early: size limit" in warning for warning in read(tmp_path).warnings)

    def test_ids_without_an_expert_are_counted_over_all_parts(self, tmp_path: Path) -> None:
        self.write(tmp_path, [(0, "decode", poisson(3, 8)), (0, "prefill", poisson(3, 8)), (2, "all", poisson(3, 8))])
        (path,) = tmp_path.iterdir()
        path.write_text(path.read_text().replace('"dropped": 0', '"dropped": 3'))
        assert read(tmp_path).dropped == {"ids_without_expert": 9}

    @pytest.mark.parametrize(("key", "value"), [("num_experts", 16), ("top_k", 4), ("pp_size", 2), ("dp_size", 3)])
    def test_files_of_a_run_agree(self, tmp_path: Path, key: str, value: int) -> None:
        self.write(tmp_path, [(0, "all", poisson(3, 8))], dp_size=2)
        self.write(tmp_path, [(0, "all", poisson(3, 8))], **({"dp_rank": 1, "dp_size": 2} | {key: value}))
        with pytest.raises(TraceError, match=f"{key} is {value}; its run has"):
            read(tmp_path)

    def test_windows_that_are_missing_in_all_or_some_files_are_told(self, tmp_path: Path) -> None:
        for stage, layers, windows in ((0, [1, 2], (0, 1, 4)), (1, [3], (0, 4))):
            parts = [(window, "all", poisson(len(layers), 8)) for window in windows]
            self.write(tmp_path, parts, pp_rank=stage, pp_size=2, layer_ids=layers)
        warnings = read(tmp_path).warnings
        assert "2 windows missing between the first and the last: 2, 3" in warnings
        assert "1 of 3 windows lack some ranks' lines (idle or stopped ranks)" in warnings

    @pytest.mark.parametrize(
        "counts", [poisson(2, 8), poisson(3, 7), poisson(3, 8) / 2], ids=["layers", "experts", "floats"]
    )
    def test_a_part_of_another_shape_or_kind_is_refused(self, tmp_path: Path, counts: np.ndarray) -> None:
        self.write(tmp_path, [(0, "all", poisson(3, 8)), (1, "all", counts)])
        with pytest.raises(TraceError, match=f"counts are {re.escape(str(list(counts.shape)))}") as caught:
            read(tmp_path)
        assert (caught.value.row, caught.value.rule) == (3, "[3, 8]")

    def test_windows_come_in_order(self, tmp_path: Path) -> None:
        self.write(tmp_path, [(window, "all", poisson(3, 8)) for window in (1, 2, 1)])
        with pytest.raises(TraceError, match="window 1 comes after 2") as caught:
            read(tmp_path)
        assert caught.value.row == 4

    def test_runs_follow_each_other(self, tmp_path: Path) -> None:
        counts = poisson(2, 3, 8)
        for run in range(2):
            self.write(tmp_path, [(0, "all", counts[run])], run=f"run{run}")
        assert (read(tmp_path).counts == counts).all()

    def test_runs_of_two_models_have_no_name(self, tmp_path: Path) -> None:
        for run, (name, top_k) in enumerate((("A", 2), ("B", 2), ("B", 2))):
            (tmp_path / str(run)).mkdir()
            self.write(tmp_path / str(run), [(run, "all", poisson(3, 8))], architecture=name, top_k=top_k)
        assert read(tmp_path, options=ReadOptions()).model is None
        assert read(tmp_path / "2", tmp_path / "1", options=ReadOptions()).model == "B"

    def test_a_newer_version_is_refused_with_both(self, tmp_path: Path) -> None:
        self.write(tmp_path, [(0, "all", poisson(3, 8))], version=2)
        with pytest.raises(TraceError, match="recording version 2; this eplb reads version 1"):
            read(tmp_path)
