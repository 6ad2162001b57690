"""Recorded tokens replayed as engine steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.errors import PlacementError, TraceError
from eplb_cli.loads import PHASES
from eplb_cli.placement import Placement
from eplb_cli.replay import LANE_TOKENS, Step, replay_traces, steps_of
from eplb_cli.traces import RecordedTokens
from tests.conftest import Run

LAYERS = np.array([1, 4], np.int32)
# Layer 1: experts 0..3, spare copies of 0 and 3. Layer 4: another order, copies of 2 and 1.
PLAN = Placement(np.array([[1, 0, 3, 2, 3, 0], [3, 2, 1, 1, 0, 2]], np.int32), LAYERS, 4, 2)


def block(ids: object, phase: str = "all") -> RecordedTokens:
    return RecordedTokens(np.asarray(ids, np.int32), LAYERS, PHASES.index(phase))


def numbered(start: int, stop: int) -> np.ndarray:
    """Tokens that tell their place: [n, 2, 1]."""
    return np.repeat(np.arange(start, stop)[:, None, None], 2, 1)


def places(steps: list[Step]) -> list[list[int]]:
    return [step.ids[:, 0, 0].tolist() for step in steps]


def test_prefill_steps_take_tokens_as_they_come_across_blocks() -> None:
    steps = list(steps_of([block(numbered(0, 5)), block(numbered(5, 11))], 4, 2))
    assert places(steps) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert steps[0].source.tolist() == [0, 0, 1, 1]


def test_decode_steps_take_one_token_of_each_lane() -> None:
    steps = list(steps_of([block(numbered(0, 3 * LANE_TOKENS + 8), "decode")], 3, 2))
    assert places(steps)[:2] == [[0, 64, 128], [1, 65, 129]]
    assert places(steps)[LANE_TOKENS:] == [[192, 194, 196], [193, 195, 197]]
    assert steps[0].source.tolist() == [0, 1, 0]


def test_phases_are_never_in_one_step() -> None:
    blocks = [block(numbered(0, 3), "prefill"), block(numbered(100, 103)), block(numbered(3, 5), "prefill")]
    steps = list(steps_of(blocks, 2, 1))
    assert places(steps) == [[0, 1], [100, 101], [2, 3]]
    assert [PHASES[step.phase] for step in steps] == ["prefill", "all", "prefill"]


def trace(folder: Path, ids: object) -> Path:
    path = folder / "ids.npy"
    np.save(path, np.asarray(ids, np.uint8))
    return path


# Four steps of two tokens, k = 2, layer 1 then layer 4.
IDS = [
    [[0, 3], [2, 1]], [[0, 3], [2, 1]],
    [[0, 1], [2, 3]], [[0, 2], [1, 3]],
    [[1, 2], [0, 3]], [[1, 2], [0, 3]],
    [[3, 0], [3, 2]], [[2, 0], [0, 2]],
]  # fmt: skip


def test_figures_worked_out_by_hand(tmp_path: Path) -> None:
    replayed = replay_traces([("p", PLAN)], [trace(tmp_path, IDS)], rules=["even"], step_tokens=2, price=10)
    row = replayed.rows[-1]
    # Layer 1, ranks {1, 0, 3} and {2, 3, 0}, steps 1 to 4 (ids 0033, 0102, 1212, 3020):
    #   rank 0 has 2, 1 + 1, 2, 1.5 of 4.
    # Layer 4, ranks {3, 2, 1} and {1, 0, 2}, (2121, 2313, 0303, 3202): rank 0 has 2, 3, 2, 2.
    peaks = [[2, 2], [2, 3], [2, 2], [2.5, 2]]
    assert row.balancedness == pytest.approx(16 / 17.5, abs=1e-9)
    assert [row.ratio_p50, row.ratio_worst] == pytest.approx([(1 + 4.5 / 4) / 2, 5 / 4], abs=1e-9)
    # Active slots of the ranks: layer 1 [2 2] [2 2] [1 1] [2 3]; layer 4 [2 2] [3 2] [1 1] [2 2].
    assert row.active_mean == pytest.approx((4 + 4 + 2 + 5 + 4 + 5 + 2 + 4) / 8, abs=1e-9)
    assert row.active_max == 3
    times = [[22, 22], [22, 33], [12, 12], [32.5, 22]]
    assert row.step_time == pytest.approx(np.mean(times), abs=1e-9)
    assert np.sum(peaks) == 17.5
    assert (replayed.steps, replayed.step_tokens, replayed.batches) == (4, 2, 1)


def test_vllms_own_layouts_come_first(tmp_path: Path) -> None:
    replayed = replay_traces([("p", PLAN)], [trace(tmp_path, IDS)], rules=["balanced", "hash"], step_tokens=4)
    assert [(row.plan, row.dispatch) for row in replayed.rows] == [
        ("none", "hash"),
        ("initial", "hash"),
        ("p", "balanced"),
        ("p", "hash"),
    ]
    # Without copies: ranks {0, 1} and {2, 3}. Two steps; layer 1 has 4 + 4 picks of 0..1, then 4 + 3 of 8.
    assert replayed.rows[0].balancedness == pytest.approx(16 / (5 + 5 + 4 + 5), abs=1e-9)
    assert all(row.step_time is None for row in replayed.rows)


def test_balancing_by_load_beats_the_hash_on_skewed_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    ids = np.stack([rng.choice(4, (4096, 1), p=[0.45, 0.05, 0.2, 0.3]) for _ in range(2)], 1)
    by_rule = {
        row.dispatch: row.balancedness
        for row in replay_traces(
            [("p", PLAN)], [trace(tmp_path, ids)], rules=["even", "hash", "balanced"], step_tokens=512
        ).rows[2:]
    }
    assert by_rule["balanced"] > 0.99 > by_rule["even"]
    assert by_rule["hash"] == pytest.approx(by_rule["even"], abs=0.01)


def test_another_engines_rule_asks_which_rank_a_token_comes_from(tmp_path: Path) -> None:
    # Expert 0 is on both ranks. Every rank serves its own tokens of it: all of rank 1 in the first step.
    placement = Placement(np.array([[1, 0, 0, 2]], np.int32), LAYERS[:1], 3, 2)
    path = trace(tmp_path, [[[1]], [[2]], [[0]], [[0]], [[0]], [[2]], [[1]], [[2]]])
    replayed = replay_traces([("p", placement)], [path], rules=["sglang"], step_tokens=4, batches=2)
    # 1, 2 | 0, 0: rank 0 has 1, rank 1 has 1 + 2. Then 0, 2 | 1, 2: ranks 0 and 1 have 1 + 1 each.
    assert replayed.rows[-1].balancedness == pytest.approx(4 / (3 + 2), abs=1e-9)
    assert replayed.rows[-1].dispatch == "sglang"


def test_the_command_prints_the_documented_object(eplb: Callable[..., Run], tmp_path: Path) -> None:
    PLAN.save(tmp_path / "p.json")
    path = trace(tmp_path, IDS)
    run = eplb("replay", tmp_path / "p.json", "--trace", path, "--step-tokens", 2, "--copy-cost-tokens", 3, "-dp", 2,
               "--format", "json")  # fmt: skip
    assert run.code == 0, run.err
    assert run.json.keys() == {
        "format", "version", "rows", "phases", "steps", "step_tokens", "data_parallel_size", "copy_cost_tokens",
        "vllms_policy", "warnings",
    }  # fmt: skip
    assert run.json["phases"] == [{"phase": "all", "steps": 4, "first_steps": [1, 2, 3, 4]}]
    assert run.json["data_parallel_size"] == 2
    for row in run.json["rows"]:
        assert row.keys() == {
            "phase", "plan", "dispatch", "rebalance", "balancedness", "max_over_mean", "active_copies", "step_time",
            "rebalances", "moved_slots", "curve",
        }  # fmt: skip
        assert row["max_over_mean"].keys() == {"p50", "p95", "worst"}
        assert row["active_copies"].keys() == {"mean", "max"}
    assert [row["plan"] for row in run.json["rows"]] == ["none", "initial", *[str(tmp_path / "p.json")] * 2]
    assert json.loads(run.out)["rows"][2]["dispatch"] == "hash"
    human = eplb("replay", tmp_path / "p.json", "--trace", path, "--step-tokens", 2)
    assert "balancedness = sum of" in human.out


def test_the_figures_of_phases_are_apart(tmp_path: Path) -> None:
    """Two sequences of four tokens of prompt, all of expert 0, and two of decode: of expert 0, and of 2."""
    ids = np.array([[[expert]] * 2 for expert in [0] * 6 + [0] * 4 + [2] * 2], np.uint8)
    path = tmp_path / "two.npz"
    np.savez(path, topk_ids=ids, seq_lens=[6, 6], prompt_lens=[4, 4], layer_ids=LAYERS)
    replayed = replay_traces([("p", PLAN)], [path], rules=["hash"], step_tokens=2)
    assert [(phase.phase, phase.steps) for phase in replayed.phases] == [("prefill", 4), ("decode", 2)]
    figures = {(row.phase, row.plan): row.balancedness for row in replayed.rows}
    # Without copies, ranks {0, 1} and {2, 3}: all prefill on one; each decode step has one token for each.
    assert (figures["prefill", "none"], figures["decode", "none"]) == (0.5, 1.0)
    assert [row.phase for row in replayed.rows] == ["prefill"] * 3 + ["decode"] * 3
    assert replay_traces([("p", PLAN)], [path], rules=["hash"], step_tokens=2, phase=2).rows[0].balancedness == 1.0


def test_a_curve_says_where_each_stretch_begins(tmp_path: Path) -> None:
    """41 steps: all on one rank, then all even."""
    ids = [[[0], [0]]] * 40 + [[[0], [0]], [[2], [2]]] * 21
    replayed = replay_traces([("p", PLAN)], [trace(tmp_path, ids)], rules=["hash"], step_tokens=2)
    assert replayed.phases[0].first_steps == tuple(range(1, 42, 2))
    assert replayed.rows[0].curve == (0.5,) * 10 + (1.0,) * 11


def test_what_cannot_be_replayed_is_refused(tmp_path: Path, eplb: Callable[..., Run]) -> None:
    path = trace(tmp_path, IDS)
    with pytest.raises(TraceError, match="fewer tokens than one step; a step has 9"):
        replay_traces([("p", PLAN)], [path], rules=["hash"], step_tokens=9)
    other = Placement.initial(6, 0, 2, LAYERS)
    with pytest.raises(PlacementError, match="places 6 experts; p places 4"):
        replay_traces([("p", PLAN), ("q", other)], [path], rules=["hash"], step_tokens=2)
    with pytest.raises(PlacementError, match="lacks layer 4"):
        replay_traces([("p", PLAN), ("q", PLAN.for_layers([1]))], [path], rules=["hash"], step_tokens=2)
    ids = np.array(IDS)
    ids[5, 1, 0] = 4
    with pytest.raises(TraceError, match=r"layer 4, row 5: id 4; ids are 0\.\.3"):
        replay_traces([("p", PLAN)], [trace(tmp_path, ids)], rules=["hash"], step_tokens=2)
    counts = tmp_path / "counts.npy"
    np.save(counts, np.arange(24).reshape(3, 2, 4) * 1000)
    with pytest.raises(TraceError, match="holds counts of a whole window"):
        replay_traces([("p", PLAN)], [counts], rules=["hash"], step_tokens=2)
