"""The report: its numbers against the planner's and the metrics' own, its text, and that it needs nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.checkpoint.kv_cache import kv_cache_per_token
from eplb_cli.errors import PlacementError, UsageError
from eplb_cli.loads import ExpertLoads, Source
from eplb_cli.metrics import balancedness, rank_loads
from eplb_cli.placement import Placement
from eplb_cli.planner import PlanRequest, make_plan
from eplb_cli.report import ModelFacts, NamedPlan, Report, make_report, render
from tests.conftest import Run
from tests.test_replay_result import REPLAY

CONFIG = {"num_hidden_layers": 6, "num_key_value_heads": 2, "head_dim": 64, "torch_dtype": "bfloat16"}
DIGEST = "ab" * 32


def skewed_loads(windows: int = 24, layers: int = 4, experts: int = 16) -> ExpertLoads:
    """Experts of log-normal popularity that drifts over the windows; decoder layers 1, 3, 5, ..."""
    rng = np.random.default_rng(7)
    popularity = rng.lognormal(0, 0.9, (layers, experts)) * rng.lognormal(0, 0.4, (windows, layers, experts))
    counts = rng.poisson(popularity * 400).astype(np.int64)
    return ExpertLoads(
        counts,
        np.full(windows, 3200),
        np.arange(1, 2 * layers, 2, dtype=np.int32),
        window_ids=np.arange(100, 100 + windows),
        top_k=2,
        sources=(Source("monday.npz", DIGEST, "npz"),),
        dropped={"warm-up steps": 4},
        warnings=("expert 3 of layer 5 had no load",),
    )


@pytest.fixture(scope="module")
def loads() -> ExpertLoads:
    return skewed_loads()


@pytest.fixture(scope="module")
def placement(loads: ExpertLoads) -> Placement:
    return make_plan(loads, PlanRequest(4, 4), DIGEST).placement


@pytest.fixture(scope="module")
def report(loads: ExpertLoads, placement: Placement) -> Report:
    model = ModelFacts("org/model", dict.fromkeys((1, 3, 5, 7), 2**28), kv_cache_per_token(CONFIG))
    return make_report(
        loads, [NamedPlan("plan.json", placement)], profile="loads.st", profile_sha256=DIGEST, model=model
    )


@pytest.fixture(scope="module")
def page(report: Report) -> str:
    return render(report)


def test_layouts_are_measured_as_the_planner_measures_them(report: Report, placement: Placement) -> None:
    recorded = placement.provenance.balancedness
    assert report.plan is not None
    assert report.plan.balancedness == pytest.approx(recorded["after"], abs=1e-6)
    assert report.layouts[report.plan.initial].balancedness == pytest.approx(recorded["before"], abs=1e-6)
    assert report.plan.bound == pytest.approx(recorded["bound"], abs=1e-6)


def test_layers_and_windows_and_ranks_are_parts_of_the_same_loads(
    report: Report, loads: ExpertLoads, placement: Placement
) -> None:
    ranks = rank_loads(placement.physical_to_logical, loads.counts, 4)
    assert report.plan is not None
    assert report.plan.rank_loads == pytest.approx(ranks.sum(0))
    assert report.plan.per_layer == pytest.approx([balancedness(ranks[:, layer]) for layer in range(4)])
    assert report.plan.per_window == pytest.approx([balancedness(window) for window in ranks])


def test_windows_in_pieces_give_the_same_figures(
    loads: ExpertLoads, placement: Placement, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eplb_cli.report.data.CHUNK_WINDOWS", 7)
    again = make_report(loads, [NamedPlan("plan.json", placement)], profile="loads.st", profile_sha256=DIGEST)
    assert again.plan is not None and report.plan is not None
    assert again.plan.balancedness == pytest.approx(report.plan.balancedness)
    assert again.plan.per_layer == pytest.approx(report.plan.per_layer)


def test_held_out_points_are_those_of_plans_made_without_their_block(loads: ExpertLoads, report: Report) -> None:
    request = PlanRequest(4, 4, strategy="windows", effort="fast", folds=0)
    others = np.ones(24, bool)
    others[:4] = False  # the first of five blocks of 24 windows
    made = make_plan(loads.select_windows(others), request).placement
    ranks = rank_loads(made.physical_to_logical, loads.counts[:4], 4)
    assert report.held_out_per_window is not None
    assert report.held_out_per_window[:4] == pytest.approx([balancedness(window) for window in ranks])


def test_the_curves_figures_are_the_planners(loads: ExpertLoads, report: Report) -> None:
    for step in report.redundancy:
        request = PlanRequest(4, step.num_redundant_experts, strategy="windows", effort="fast")
        figures = make_plan(loads, request).balancedness
        assert (step.after, step.held_out) == (figures.after, figures.held_out)


def test_the_curve_starts_at_the_smallest_valid_redundancy_and_holds_the_plans(report: Report) -> None:
    sizes = [step.num_redundant_experts for step in report.redundancy]
    assert sizes == [0, 4, 8, 16, 32]
    assert report.redundancy_strategy == "windows"


def test_the_curve_prices_each_step(report: Report) -> None:
    cache = kv_cache_per_token(CONFIG)
    assert cache is not None
    for step in report.redundancy:
        nbytes = step.num_redundant_experts * 4 * 2**28 / 4
        assert step.extra_gib_per_rank == nbytes / 2**30
        assert step.kv_cache_tokens == cache.tokens(nbytes)


def test_the_layout_without_copies_is_shown_too(report: Report) -> None:
    assert [(layout.kind, layout.num_redundant_experts) for layout in report.layouts] == [
        ("initial", 4),
        ("initial", 0),
        ("plan", 4),
    ]


def test_a_plan_from_other_loads_is_scored_as_held_out(loads: ExpertLoads, placement: Placement) -> None:
    other = make_report(loads, [NamedPlan("p", placement)], profile="l", profile_sha256="cd" * 32)
    assert other.plan is not None and other.plan.in_sample is False
    assert other.held_out_per_window == pytest.approx(other.plan.per_window)
    assert "made from another file" in render(other)


def test_another_file_that_may_hold_the_same_windows_earns_no_better_verdict(
    loads: ExpertLoads, placement: Placement
) -> None:
    """A plan of several joined profiles has seen the windows of each, and its digest does not tell."""
    other = make_report(loads, [NamedPlan("p", placement)], profile="l", profile_sha256="cd" * 32)
    promised = placement.provenance.balancedness["held_out"]
    assert promised is not None and other.plan is not None and promised < other.plan.balancedness
    assert other.advice is not None and f"in {100 * (1 - promised):.1f} % with this plan" in other.advice.verdict


def test_a_plan_that_names_no_loads_is_not_called_held_out(loads: ExpertLoads, placement: Placement) -> None:
    anonymous = replace(placement, provenance=replace(placement.provenance, profile_sha256=None))
    other = make_report(loads, [NamedPlan("p", anonymous)], profile="l", profile_sha256=DIGEST)
    assert other.plan is not None and other.plan.in_sample is None
    assert "does not say which loads" in render(other)


def test_layers_that_a_plan_lacks_are_left_out_and_named(loads: ExpertLoads) -> None:
    short = Placement.initial(16, 0, 4, [1, 3, 9])
    made = make_report(loads, [NamedPlan("short.json", short)], profile="l", profile_sha256=DIGEST)
    assert made.layer_ids.tolist() == [1, 3]
    assert "short.json lacks layers 5, 7: left out of rank views" in made.warnings
    assert "no loads for layers 9 of short.json" in made.warnings


def test_a_plan_of_another_model_is_refused(loads: ExpertLoads) -> None:
    with pytest.raises(PlacementError, match="places 8 experts, the loads are of 16"):
        make_report(loads, [NamedPlan("p", Placement.initial(8, 0, 4, [1]))], profile="l", profile_sha256=DIGEST)


def test_ranks_that_contradict_the_plan_are_refused(loads: ExpertLoads, placement: Placement) -> None:
    with pytest.raises(UsageError, match="is for 4 ranks, not 8"):
        make_report(loads, [NamedPlan("p", placement)], profile="l", profile_sha256=DIGEST, ep_size=8)


def test_many_windows_are_drawn_as_few_points() -> None:
    made = make_report(skewed_loads(windows=1001), [], profile="l", profile_sha256=DIGEST, ep_size=2)
    assert len(made.window_ids) == len(made.layouts[0].per_window) == 400
    assert made.window_ids[0] == 100


@pytest.mark.parametrize("windows", [0, 1])
def test_loads_of_hardly_any_windows_make_a_page(windows: int) -> None:
    few = skewed_loads().select_windows(slice(0, windows))
    assert "Expert loads of" in render(make_report(few, [], profile="l", profile_sha256=DIGEST, ep_size=2))


def test_a_layer_without_load_is_perfectly_balanced_and_not_a_nan(loads: ExpertLoads) -> None:
    counts = loads.counts.copy()
    counts[:, 2] = 0
    made = make_report(replace(loads, counts=counts), [], profile="l", profile_sha256=DIGEST, ep_size=4)
    assert made.layouts[0].per_layer[2] == 1.0
    json.dumps(made.as_dict(), allow_nan=False)


def test_a_replay_is_shown_as_it_was_written(loads: ExpertLoads, eplb: Callable[..., Run], tmp_path: Path) -> None:
    loads.save(tmp_path / "l")
    (tmp_path / "replay.json").write_text(json.dumps(REPLAY.as_dict()))
    run = eplb("report", tmp_path / "l", "--replay", tmp_path / "replay.json", "-o", tmp_path / "r", "--format", "json")
    assert run.code == 0, run.err
    assert run.json["replay"] == REPLAY.as_dict()
    page = (tmp_path / "r").read_text()
    assert "<td>vllm:1/2</td><td>7</td>" in page and "vllm: the policy of vLLM 0.32.0" in page
    (tmp_path / "replay.json").write_text("{}")
    refused = eplb("report", tmp_path / "l", "--replay", tmp_path / "replay.json", "-o", tmp_path / "r2")
    assert refused.code == 1 and "is not a replay" in refused.err and not (tmp_path / "r2").exists()


def test_without_a_replay_there_is_no_part_for_it(report: Report, page: str) -> None:
    assert report.as_dict()["replay"] is None and "replay-title" not in page


class Links(HTMLParser):
    """Everything in a page that a browser would fetch or follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [
            (tag, value or "") for name, value in attrs if name in ("src", "href", "srcset", "data", "action")
        ]


def test_the_page_refers_to_nothing_outside_itself(page: str) -> None:
    links = Links()
    links.feed(page)
    assert links.found == [("a", "#main")]


def test_the_page_forbids_the_browser_to_fetch_anything(page: str) -> None:
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'") and "http" not in policy[1]


def test_the_page_is_small_and_the_same_every_time(report: Report, page: str) -> None:
    assert len(page.encode()) < 3_000_000
    assert page == render(report)


def test_the_numbers_are_in_the_page(report: Report, page: str) -> None:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data and json.loads(data[1]) == json.loads(json.dumps(report.as_dict()))


def test_names_and_warnings_cannot_become_markup(loads: ExpertLoads, placement: Placement) -> None:
    evil = '</script><img src=x onerror="alert(1)">'
    made = make_report(
        replace(loads, warnings=(evil,), dropped={evil: 1}, sources=(Source(evil, evil, evil),)),
        [NamedPlan(evil, placement)],
        profile=evil,
        profile_sha256=DIGEST,
        model=ModelFacts(evil, {}, None),
    )
    page = render(made)
    assert "<img" not in page.replace(evil.replace("<", "&lt;"), "")
    links = Links()
    links.feed(page)
    assert links.found == [("a", "#main")]


def test_control_characters_are_escaped_in_the_page(loads: ExpertLoads, placement: Placement) -> None:
    """Also U+2028, which ends a line of a script, and the mark that makes text run from right to left."""
    evil = "a\x1b[2J\u202eb\u2028c"
    made = make_report(
        replace(loads, warnings=(evil,), dropped={evil: 1}, sources=(Source(evil, evil, evil),), model=evil),
        [NamedPlan(evil, placement)],
        profile=evil,
        profile_sha256=DIGEST,
    )
    page = render(made)
    text = page[: page.index('<script type="application/json"')]
    assert not any(char in text for char in "\x1b\u202e\u2028")
    assert text.count("a\\x1b[2J\\u202eb\\u2028c") >= 5
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data and json.loads(data[1])["warnings"][0] == "a\\x1b[2J\\u202eb\\u2028c"


@pytest.mark.parametrize(
    "words",
    [
        "sum of the mean rank load over the sum of the max rank load",
        "Worth it: ranks wait",
        "held out when it was made",
        "warm-up steps",
        "expert 3 of layer 5 had no load",
        "eplb convert org/model plan.json --layout physical -o converted",
        "KV-cache tokens it displaces",
    ],
)
def test_what_the_page_says(page: str, words: str) -> None:
    assert words in page


Eplb = Callable[..., Run]


@pytest.fixture
def files(loads: ExpertLoads, placement: Placement, tmp_path: Path) -> tuple[Path, Path]:
    loads.save(tmp_path / "loads.safetensors")
    placement.save(tmp_path / "plan.json")
    return tmp_path / "loads.safetensors", tmp_path / "plan.json"


def test_the_command_writes_the_page_and_prints_its_numbers(
    eplb: Eplb, files: tuple[Path, Path], tmp_path: Path
) -> None:
    run = eplb("report", *files, "-o", tmp_path / "r.html", "--format", "json")
    assert run.code == 0
    written = (tmp_path / "r.html").read_bytes()
    assert run.json["output"] == str(tmp_path / "r.html") and run.json["bytes"] == len(written)
    assert run.json["profile"]["layer_ids"] == [1, 3, 5, 7]
    assert len(run.json["hottest"][0]) == 5
    assert "expert 3 of layer 5 had no load" in run.err


def test_people_get_the_verdict(eplb: Eplb, files: tuple[Path, Path], tmp_path: Path) -> None:
    assert "Worth it" in eplb("report", *files, "-o", tmp_path / "r.html").out


def test_loads_alone_make_a_page_and_the_next_step_is_told(
    eplb: Eplb, files: tuple[Path, Path], tmp_path: Path
) -> None:
    run = eplb("report", files[0], "-o", tmp_path / "r.html")
    assert run.code == 0 and "--ep-size" in run.out
    assert "eplb plan" in (tmp_path / "r.html").read_text()


def test_an_existing_page_is_not_replaced_unasked(eplb: Eplb, files: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "r.html").write_text("mine")
    assert eplb("report", *files, "-o", tmp_path / "r.html").code == 1
    assert (tmp_path / "r.html").read_text() == "mine"
    assert eplb("report", *files, "-o", tmp_path / "r.html", "--force").code == 0


@pytest.mark.parametrize("broken", [0, 1])
def test_bad_input_leaves_nothing_behind(eplb: Eplb, files: tuple[Path, Path], tmp_path: Path, broken: int) -> None:
    files[broken].write_bytes(b"{}")
    run = eplb("report", *files, "-o", tmp_path / "r.html")
    assert run.code == 1 and str(files[broken]) in run.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loads.safetensors", "plan.json"]


def test_a_model_prices_the_copies(eplb: Eplb, files: tuple[Path, Path], tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **CONFIG,
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_hidden_layers": 8,
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = eplb("report", *files, "--model", tmp_path / "config.json", "-o", tmp_path / "r.html", "--format", "json")
    assert run.code == 0
    plan = run.json["layouts"][-1]
    # 4 copies of 3 x 64 x 32 bfloat16 weights in each of 4 layers, over 4 ranks.
    assert plan["extra_gib_per_rank"] == pytest.approx(4 * 4 * 3 * 64 * 32 * 2 / 4 / 2**30, abs=1e-6)
