"""`eplb plan` as scripts and people call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from eplb_cli.loads import ExpertLoads
from eplb_cli.placement import Placement
from tests.conftest import Run

Eplb = Callable[..., Run]
KEYS = {
    "strategy",
    "ep_size",
    "num_nodes",
    "num_experts",
    "num_redundant_experts",
    "slots_per_rank",
    "dispatch",
    "seed",
    "seconds",
    "balancedness",
    "max_over_mean",
    "worst_layer",
    "moves",
    "extra_gib_per_rank",
    "confidence",
    "warnings",
    "advice",
}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    counts = rng.poisson(200 * rng.lognormal(0.0, 0.7, (3, 16)), (12, 3, 16))
    loads = ExpertLoads(counts.astype(np.int64), np.full(12, 800), np.array([1, 3, 5], np.int32), top_k=4)
    loads.save(tmp_path / "loads.safetensors")
    return tmp_path / "loads.safetensors"


def test_the_plan_is_written_and_its_json_has_the_contracts_keys(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    run = eplb(
        "plan", profile, "-tp", 2, "-dp", 2, "--num-redundant-experts", 4, "--format", "json", "-o", tmp_path / "p"
    )
    assert run.code == 0
    assert run.json.keys() == KEYS
    assert run.json["balancedness"].keys() == {"before", "after", "held_out", "bound"}
    assert run.json["max_over_mean"].keys() == {"before", "after", "held_out"}
    assert run.json["worst_layer"].keys() == {"layer_id", "before", "after"}
    assert (run.json["ep_size"], run.json["slots_per_rank"]) == (4, 5)
    placement = Placement.load(tmp_path / "p")
    assert placement.provenance.balancedness == run.json["balancedness"]
    assert placement.provenance.profile_sha256 is not None


@pytest.mark.parametrize(
    ("rule", "following"),
    [
        ("balanced", "eplb serve MODEL --plan PLAN --dispatch balanced"),
        ("sglang", "eplb export PLAN --to sglang -o OUT"),
    ],
)
def test_a_plan_for_a_rule_says_so_and_leads_to_who_follows_it(
    eplb: Eplb, profile: Path, rule: str, following: str
) -> None:
    options = ("--ep-size", 4, "--num-redundant-experts", 4, "--effort", "fast", "--dry-run", "--dispatch", rule)
    out = " ".join(eplb("plan", profile, *options).out.split())
    assert f"Figures are for copies chosen by the rule {rule}." in out
    assert f"Next: {following}" in out
    assert "this plan, copies used evenly" in out


def test_two_runs_write_the_same_bytes(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert eplb("plan", profile, "--ep-size", 4, "-o", tmp_path / name).code == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_people_see_definition_held_out_and_the_next_step_within_80_columns(eplb: Eplb, profile: Path) -> None:
    run = eplb("plan", profile, "--ep-size", 4, "--dry-run")
    assert "balancedness = sum of the mean rank load" in run.out
    assert "held out (5 folds)" in run.out
    assert "Next: eplb convert" in run.out
    assert max(map(len, run.out.splitlines())) <= 80


def test_quiet_prints_nothing_and_dry_run_writes_nothing(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    run = eplb("plan", profile, "--ep-size", 4, "--dry-run", "--format", "quiet", "-o", tmp_path / "plan.json")
    assert (run.code, run.out) == (0, "")
    assert not (tmp_path / "plan.json").exists()


def test_an_existing_output_is_kept_without_force(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("mine")
    assert eplb("plan", profile, "--ep-size", 4, "-o", tmp_path / "plan.json").code == 1
    assert (tmp_path / "plan.json").read_text() == "mine"
    assert eplb("plan", profile, "--ep-size", 4, "-o", tmp_path / "plan.json", "--force").code == 0


def test_several_profiles_join_along_windows(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    eplb("plan", profile, profile, "--ep-size", 4, "--strategy", "windows", "-o", tmp_path / "p")
    run = eplb("score", tmp_path / "p", profile, profile, "--format", "json")
    assert run.json["windows"] == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "the number of EP ranks is not given"),
        (["--ep-size", 4, "-tp", 8], "--ep-size 4 is not -tp 8 x -dp 1 = 8"),
        (["--ep-size", 3, "--num-redundant-experts", 0], "16 + 0 experts do not divide over 3 ranks; smallest valid"),
        (["--ep-size", 16, "--num-nodes", 3], "16 ranks do not split over 3 nodes; use 1, 2, 4, 8 or 16"),
        (["--ep-size", 4, "--num-redundant-experts", "some"], "--num-redundant-experts 'some'; it must be"),
        (["--ep-size", 4, "--strategy", "hierarchical"], "--strategy 'hierarchical' is not known; use auto"),
        (["--ep-size", 4, "--explain", 2], "layer 2 is not among the loads' layers; they are 1, 3, 5"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_line_and_exit_2(
    eplb: Eplb, profile: Path, tmp_path: Path, options: list[object], message: str
) -> None:
    run = eplb("plan", profile, *options, "-o", tmp_path / "plan.json")
    assert run.code == 2
    assert message in run.err.splitlines()[0]
    assert not (tmp_path / "plan.json").exists()


def test_missing_loads_are_no_reason_to_invent_some(eplb: Eplb, tmp_path: Path) -> None:
    run = eplb("plan", tmp_path / "nope.safetensors", "--ep-size", 4, "-o", tmp_path / "plan.json")
    assert run.code == 1
    assert "no such file" in run.err


def test_explain_shows_one_layers_packing(eplb: Eplb, profile: Path) -> None:
    out = eplb("plan", profile, "--ep-size", 4, "--num-redundant-experts", 4, "--explain", 3, "--dry-run").out
    assert "Layer 3:" in out
    assert "2. Packing, largest share first" in out
    assert out.count("on rank") == 20


def test_check_accepts_a_plan(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    eplb("plan", profile, "--ep-size", 4, "--strategy", "stock", "-o", tmp_path / "plan.json")
    run = eplb("plan", "--check", tmp_path / "plan.json", "--format", "json")
    assert run.code == 0
    assert run.json["ok"] is True
    assert run.json["stock_form"] is True


@pytest.mark.parametrize("damage", ["expert out of range", "expert missing", "ragged layer", "foreign file"])
def test_check_refuses_a_plan_that_breaks_a_rule(eplb: Eplb, profile: Path, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "plan.json"
    eplb("plan", profile, "--ep-size", 4, "-o", path)
    document = json.loads(path.read_text())
    row = document["layers"][1]["physical_to_logical"]
    if damage == "expert out of range":
        row[0] = 16
    elif damage == "expert missing":
        row[0] = row[1]
    elif damage == "ragged layer":
        row.append(0)
    else:
        document = {"moe_layer_count": 1, "layer_list": [{"device_list": [{"device_expert": [3, 3]}]}]}
    path.write_text(json.dumps(document))
    run = eplb("plan", "--check", path)
    assert run.code == 1
    assert str(path) in run.err
    if damage != "foreign file":
        assert "layer 3" in run.err


def test_a_plan_that_does_not_hold_out_is_not_recommended(eplb: Eplb, tmp_path: Path) -> None:
    counts = np.zeros((4, 1, 8), np.int64)
    counts[np.arange(4), 0, [0, 5, 2, 7]] = 1000
    loads = ExpertLoads(counts, np.full(4, 1000), np.array([0], np.int32))
    loads.save(tmp_path / "loads.safetensors")
    run = eplb("plan", tmp_path / "loads.safetensors", "--ep-size", 4, "--dry-run")
    assert "Not worth it" in run.out and "Next: eplb convert" not in run.out


def test_profiles_mix_by_weight(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    mixed = eplb("plan", f"{profile}*0.7", f"{profile}*0.3", "--ep-size", 4, "-o", tmp_path / "mixed")
    assert mixed.code == 0
    eplb("plan", profile, profile, "--ep-size", 4, "-o", tmp_path / "joined")
    digests = [Placement.load(tmp_path / name).provenance.profile_sha256 for name in ("mixed", "joined")]
    assert digests[0] != digests[1]


@pytest.mark.parametrize(
    ("names", "message"), [(["{}*much"], "the weight 'much' is not a number"), (["{}*0.7", "{}"], "weigh all of them")]
)
def test_weights_that_say_nothing_are_refused(eplb: Eplb, profile: Path, names: list[str], message: str) -> None:
    run = eplb("plan", *(name.format(profile) for name in names), "--ep-size", 4, "--dry-run")
    assert run.code == 2
    assert message in run.err


def test_moves_are_bounded_by_number_or_share_and_the_curve_is_shown(eplb: Eplb, profile: Path, tmp_path: Path) -> None:
    eplb("plan", profile, "--ep-size", 4, "--strategy", "mean", "-o", tmp_path / "first.json")
    for limit, most in (("3", 3), ("10%", 4)):
        options = ["--previous", tmp_path / "first.json", "--max-moves", limit, "--dry-run"]
        run = eplb("plan", profile, "--ep-size", 4, *options, "--format", "json")
        assert run.json["moves"] <= most
        assert run.json["trade_off"][0]["moves"] == 0
    shown = eplb("plan", profile, "--ep-size", 4, "--previous", tmp_path / "first.json", "--dry-run").out
    assert "moved slots" in shown
    assert eplb("plan", profile, "--ep-size", 4, "--previous", tmp_path / "first.json", "--max-moves", "-1").code == 2


def test_auto_redundancy_shows_the_table_it_chose_from(eplb: Eplb, profile: Path) -> None:
    run = eplb("plan", profile, "--ep-size", 4, "--num-redundant-experts", "auto", "--effort", "fast", "--dry-run")
    assert "GiB per rank" in run.out
    assert "R = " in run.err


def test_node_policies_are_laid_side_by_side(eplb: Eplb, profile: Path) -> None:
    options = ["--num-nodes", 2, "--num-groups", 4, "--node-policy", "strict", "--dry-run"]
    run = eplb("plan", profile, "--ep-size", 4, *options)
    assert all(word in run.out for word in ("off-home load", "flat", "relaxed", "strict"))
    data = eplb("plan", profile, "--ep-size", 4, *options, "--format", "json").json
    assert [option["policy"] for option in data["node_policies"]] == ["flat", "relaxed", "strict"]


def test_one_processor_and_one_blas_thread_write_the_same_bytes(eplb: Eplb, tmp_path: Path) -> None:
    counts = np.random.default_rng(1).poisson(
        300 * np.random.default_rng(2).lognormal(0.0, 0.8, (40, 32)), (24, 40, 32)
    )
    loads = ExpertLoads(counts.astype(np.int64), np.full(24, 800), np.arange(40, dtype=np.int32))
    loads.save(tmp_path / "wide.safetensors")
    options = ["plan", tmp_path / "wide.safetensors", "--ep-size", 8, "--num-redundant-experts", 8, "--folds", 2]
    assert eplb(*options, "-o", tmp_path / "many.json").code == 0
    code = (
        "import os, sys; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from eplb_cli.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *map(str, options), "-o", str(tmp_path / "one.json")]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "many.json").read_bytes()


def test_check_refuses_an_expert_twice_on_a_rank(eplb: Eplb, tmp_path: Path) -> None:
    Placement(np.array([[0, 0, 1, 2]], np.int32), np.array([3], np.int32), 3, 2).save(tmp_path / "plan.json")
    run = eplb("plan", "--check", tmp_path / "plan.json")
    assert run.code == 1
    assert "layer 3, rank 0, expert 0: the rank holds the expert more than once" in run.err


@pytest.mark.parametrize("sizes", [("-tp", 0), ("-dp", 0), ("-tp", -2, "-dp", -2), ("-tp", 4, "-dp", 0)])
def test_parallel_sizes_are_at_least_one(eplb: Eplb, profile: Path, sizes: tuple[object, ...]) -> None:
    assert eplb("plan", profile, *sizes, "--dry-run").code == 2


@pytest.mark.parametrize(("redundant", "layout"), [(0, "stock"), (4, "physical")])
def test_the_next_step_is_one_that_convert_accepts(
    eplb: Eplb, profile: Path, tmp_path: Path, redundant: int, layout: str
) -> None:
    run = eplb(
        "plan", profile, "--ep-size", 4, "--num-redundant-experts", redundant, "--strategy", "windows",
        "-o", tmp_path / "p",
    )  # fmt: skip
    assert f"--layout {layout} -o OUT" in " ".join(run.out.split())
