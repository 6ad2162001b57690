"""Run-time policies replayed: when they are asked, what they are given, and what it does to the steps."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.cli.replay import BARS
from eplb_cli.errors import UsageError
from eplb_cli.placement import Placement
from eplb_cli.planner.moves import moved_slots
from eplb_cli.planner.reference import deepseek_map
from eplb_cli.replay import Rebalance, Replay, replay_traces
from eplb_cli.replay.policies import LivePlacement, policies_of
from tests.conftest import Run

LAYERS = np.array([0, 1], np.int32)
EXPERTS, RANKS = 8, 4
START = Placement.initial(EXPERTS, 4, RANKS, LAYERS)


@pytest.fixture
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without vLLM."""
    monkeypatch.setitem(sys.modules, "vllm", None)


def loads_of(step: int) -> np.ndarray:
    return np.full((len(LAYERS), EXPERTS), 10**step, np.int64)


def asked(pace: Rebalance, steps: int, *, planned: bool) -> list[tuple[int, int]]:
    """(step, the policy's loads of an expert) each time it is asked; step i brings 10**i tokens."""
    seen: list[tuple[int, int]] = []

    def policy(loads: np.ndarray, rows: np.ndarray) -> np.ndarray:
        seen.append((step, int(loads[0, 0])))
        return rows

    live = LivePlacement(START, pace, policy, planned=planned)
    for step in range(1, steps + 1):
        live.after_step(loads_of(step))
    assert live.rebalances == len(seen)
    return seen


def test_a_plan_is_rebalanced_after_whole_intervals_by_the_last_steps() -> None:
    assert asked(Rebalance("vllm", 2, 4), 9, planned=True) == [(4, 11_000), (8, 110_000_000)]


def test_vllms_own_start_is_rebalanced_after_a_quarter_of_the_interval() -> None:
    """vLLM 0.32's counter starts at three quarters; the window holds what there has been."""
    assert asked(Rebalance("vllm", 4, 8), 10, planned=False) == [(2, 110), (10, 11_110_000_000)]


def test_a_rebalance_takes_effect_in_the_next_step_and_its_moves_are_counted() -> None:
    turned = START.physical_to_logical[:, ::-1].copy()
    live = LivePlacement(START, Rebalance("vllm", 1, 2), lambda loads, rows: turned, planned=True)
    live.after_step(loads_of(1))
    assert (live.rows == START.physical_to_logical).all() and live.moved == 0
    live.after_step(loads_of(1))
    assert (live.rows == turned).all()
    assert live.moved == moved_slots(START.physical_to_logical, turned, RANKS).sum() > 0


@pytest.mark.parametrize("planned", [True, False])
def test_a_layer_without_load_stays_under_a_plan(planned: bool) -> None:
    turned = START.physical_to_logical[:, ::-1].copy()
    live = LivePlacement(START, Rebalance("vllm", 1, 1), lambda loads, rows: turned, planned=planned)
    loads = loads_of(1)
    loads[0] = 0
    live.after_step(loads)
    assert (live.rows[0] == (START.physical_to_logical[0] if planned else turned[0])).all()
    assert (live.rows[1] == turned[1]).all()


@pytest.mark.parametrize(
    "text", ["vllm", "vllm:10", "vllm:0/5", "vllm:6/5", "mine:1/2", "vllm:1/2/3", "vllm:-1/2", "vllm: 1/2", ""]
)
def test_what_is_no_policy_and_pace_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--rebalance"):
        Rebalance.parse(text)


def test_a_policy_and_pace_reads_as_it_is_written() -> None:
    assert Rebalance.parse("eplb:1000/3000") == Rebalance("eplb", 1000, 3000)
    assert str(Rebalance("vllm", 5, 5)) == "vllm:5/5"


def ranks_of(rows: np.ndarray) -> np.ndarray:
    """What each rank holds, whatever its order."""
    return np.sort(rows.reshape(len(rows), RANKS, -1), 2)


def test_without_vllm_the_published_algorithm_stands_for_it(no_vllm: None) -> None:
    whose, policy_of = policies_of([Rebalance("vllm", 1, 1)], 1)
    assert whose == "the published algorithm"
    loads = np.random.default_rng(1).integers(1, 1000, (len(LAYERS), EXPERTS))
    rows = policy_of(Rebalance("vllm", 1, 1), START, "hash", False)(loads, START.physical_to_logical)
    assert (ranks_of(rows) == ranks_of(deepseek_map(loads, 12, RANKS))).all()


def test_vllms_own_policy_and_the_published_algorithm_give_every_rank_the_same(needs_vllm: None) -> None:
    """In one process of its own: vLLM is heavy, and changes how a process logs."""
    code = (
        "import sys\n"
        "import numpy as np\n"
        "from eplb_cli.placement import Placement\n"
        "from eplb_cli.planner.moves import moved_slots\n"
        "from eplb_cli.replay.policies import Rebalance, _published, policies_of\n"
        "start = Placement.initial(64, 16, 8, np.arange(5), )\n"
        "whose, policy_of = policies_of([Rebalance('vllm', 1, 1)], 8)\n"
        "assert whose.startswith('vLLM '), whose\n"
        "policy = policy_of(Rebalance('vllm', 1, 1), start, 'hash', False)\n"
        "rows = start.physical_to_logical\n"
        "for seed in range(5):\n"
        "    loads = np.random.default_rng(seed).permutation(5 * 64).reshape(5, 64) * 7 + 1\n"
        "    new, ours = policy(loads, rows), _published(start, 8)(loads, rows)\n"
        "    ranks = [np.sort(each.reshape(5, 8, -1), 2) for each in (new, ours)]\n"
        "    assert (ranks[0] == ranks[1]).all()\n"
        "    assert (moved_slots(rows, new, 8) == moved_slots(rows, ours, 8)).all()\n"
        "    rows = new\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout == ""  # a result stands alone there


def skewed_trace(folder: Path, steps: int = 64, tokens: int = 512) -> Path:
    """Experts 0 and 1 get most: vLLM's start layout has both on rank 0."""
    rng = np.random.default_rng(3)
    ids = rng.choice(EXPERTS, (steps * tokens, 2, 1), p=[0.35, 0.25, *[0.4 / 6] * 6])
    path = folder / "ids.npy"
    np.save(path, ids.astype(np.uint8))
    return path


@pytest.mark.parametrize("policy", ["vllm", "eplb"])
def test_rows_tell_start_and_policy_and_what_was_gained_for_how_many_moves(
    policy: str, no_vllm: None, tmp_path: Path
) -> None:
    loads = np.array([[35, 25, *[7] * 6]] * 2)
    plan = Placement(deepseek_map(loads, 12, RANKS), LAYERS, EXPERTS, RANKS)
    pace = Rebalance.parse(f"{policy}:8/16")
    replayed = replay_traces(
        [("p", plan)], [skewed_trace(tmp_path)], rules=["hash"], step_tokens=512, rebalances=[pace]
    )
    rows = {(row.plan, row.rebalance): row for row in replayed.rows}
    assert list(rows) == [("none", None), ("initial", None), ("p", None), ("initial", str(pace)), ("p", str(pace))]
    stays, start = rows["initial", None], rows["initial", str(pace)]
    # From vLLM's start: four steps as they were, then better; rebalanced after steps 4, 20, 36 and 52.
    assert start.curve[:2] == stays.curve[:2] and min(start.curve[4:]) > max(stays.curve)
    assert (start.rebalances, rows["p", str(pace)].rebalances) == (4, 4)
    assert start.moved_slots > 0 == stays.moved_slots == stays.rebalances
    # From the plan: better from the first step.
    assert rows["p", str(pace)].curve[0] == rows["p", None].curve[0] > start.curve[0]
    if policy == "eplb":
        assert rows["p", str(pace)].moved_slots == 0  # steady traffic that it is planned for


def test_a_policy_of_vllm_is_not_replayed_under_another_engines_rule(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--rebalance with --dispatch sglang; the policies are those of a server of"):
        replay_traces(
            [("p", START)],
            [skewed_trace(tmp_path)],
            rules=["hash", "sglang"],
            step_tokens=512,
            rebalances=[Rebalance("eplb", 1, 1)],
        )


def test_a_start_without_copies_is_rebalanced_too(no_vllm: None, tmp_path: Path) -> None:
    plan = Placement.initial(EXPERTS, 0, RANKS, LAYERS)
    replayed = replay_traces(
        [("p", plan)], [skewed_trace(tmp_path)], rules=["hash"], step_tokens=512, rebalances=[Rebalance("vllm", 8, 16)]
    )
    assert [(row.plan, row.rebalances) for row in replayed.rows] == [("none", 0), ("p", 0), ("initial", 4), ("p", 4)]


def test_the_command_shows_figures_and_curves_in_80_columns(
    eplb: Callable[..., Run], no_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    START.save(tmp_path / "p.json")
    words = ["replay", tmp_path / "p.json", "--trace", skewed_trace(tmp_path), "--step-tokens", 512]
    run = eplb(*words, "--copy-cost-tokens", 9, "--rebalance", "vllm:8/16", "--rebalance", "eplb:8/16")
    assert run.code == 0, run.err
    lines = run.out.splitlines()
    assert max(len(line) for line in lines if not line.startswith(("64 steps", "Balancedness"))) <= 80
    assert sum(bool(set(BARS) & set(line)) for line in lines) == 10  # every row has its curve
    assert "vllm: the policy of the published algorithm" in run.err
    refused = eplb(*words, "--rebalance", "vllm:16/8")
    assert refused.code == 2 and "a window of 16 steps every 8" in refused.err


def test_a_replay_is_read_back_as_it_was_written(eplb: Callable[..., Run], no_vllm: None, tmp_path: Path) -> None:
    START.save(tmp_path / "p.json")
    run = eplb("replay", tmp_path / "p.json", "--trace", skewed_trace(tmp_path), "--rebalance", "vllm:1/2",
               "--copy-cost-tokens", 7, "--format", "json")  # fmt: skip
    (tmp_path / "replay.json").write_text(run.out)
    assert Replay.load(tmp_path / "replay.json").as_dict() == run.json


@pytest.mark.slow
def test_memory_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    """Four times the tokens, 31 and 123 MB, in the same memory."""
    START.save(tmp_path / "p.json")
    peaks = []
    for tokens in (960_000, 3_840_000):
        path = tmp_path / f"{tokens}.npy"
        np.save(path, np.random.default_rng(0).integers(0, EXPERTS, (tokens, 2, 16), np.uint8))
        command = [sys.executable, "-m", "tests.peak_memory", "replay", tmp_path / "p.json", "--trace", path]
        command += ["--step-tokens", "6000", "--dispatch", "hash", "--rebalance", "eplb:4/8", "--format", "quiet"]
        run = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600, check=True)
        peaks.append(int(run.stdout))
    assert peaks[1] - peaks[0] < 10e6, peaks
