"""`eplb serve` before vLLM starts: what it derives, what it refuses, and the command that comes of it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.errors import PlacementError, UsageError
from eplb_cli.metrics import initial_map
from eplb_cli.placement import Placement, Provenance
from eplb_cli.serve import prepare
from eplb_cli.serve.arguments import read_arguments
from eplb_cli.vllm_plugin.settings import Settings
from tests.conftest import Run

Eplb = Callable[..., Run]


def plan_of(
    path: Path,
    *,
    redundant: int = 4,
    ep_size: int = 2,
    nodes: int = 1,
    layers: tuple[int, ...] = (1, 2, 3, 4),
    provenance: Provenance | None = None,
) -> Path:
    row = initial_map(16, redundant)[::-1]
    rows, numbers = np.tile(row, (len(layers), 1)), np.array(layers, np.int32)
    Placement(rows, numbers, 16, ep_size, nodes, provenance or Provenance()).save(path)
    return path


READER = """
import contextlib, json, sys
from eplb_cli.vllm_plugin.arguments import main
for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
        answer = main(json.loads(line))
    print(json.dumps(answer, default=str), flush=True)
"""


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[dict[str, Any]], dict[str, Any]]]:
    """The installed vLLM, which reads every command of these tests in one process: importing it takes seconds."""
    process: subprocess.Popen[str] | None = None
    errors = tmp_path_factory.mktemp("reader") / "errors"

    def read(question: dict[str, Any]) -> dict[str, Any]:
        nonlocal process
        if process is None:
            with errors.open("w") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", READER],
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream, text=True,
                )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline() or pytest.fail(errors.read_text()))
        return answer

    yield read
    if process is not None:
        process.communicate()


@pytest.fixture(autouse=True)
def one_process_for_all_questions(
    reader: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(module: str, question: dict[str, Any]) -> dict[str, Any]:
        assert module == "eplb_cli.vllm_plugin.arguments"
        return reader(question)

    monkeypatch.setattr("eplb_cli.serve.launch.ask", ask)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return plan_of(tmp_path / "plan.json")


REFUSED = {
    "EP size from PCP": (["-tp", "2", "-pcp", "2"], "the plan is for 2 EP ranks, TP 2 x PCP 2 is 4"),
    "EP size from TP": (["-tp", "4"], "the plan is for 2 EP ranks, TP 4 is 4; TP x DP must be 2"),
    "EP size from TP x DP": (["--tensor-parallel-size=2", "-dp", "2"], "TP 2 x DP 2 is 4"),
    "EP size with underscores": (["--tensor_parallel_size", "4"], "TP 4 is 4"),
    "R without --enable-eplb": (
        ["-tp", "2", "--eplb-config", '{"num_redundant_experts": 4}'],
        "num_redundant_experts is 4 without --enable-eplb; add --enable-eplb",
    ),
    "R dotted without --enable-eplb": (
        ["-tp", "2", "--eplb-config.num_redundant_experts", "4"],
        "num_redundant_experts is 4 without --enable-eplb",
    ),
    "EPLB without EP": (["-tp", "2", "--enable-eplb"], "--enable-eplb without --enable-expert-parallel"),
    "EPLB off": (["-tp", "2", "--no-enable-eplb"], "the plan has 4 redundant experts; add --enable-eplb"),
    "EP off": (["-tp", "2", "--no-enable-expert-parallel"], "the plan is for expert parallelism over 2 ranks"),
    "another R": (
        ["-tp", "2", "--enable-eplb", "--enable-expert-parallel", "--eplb-config", '{"num_redundant_experts": 2}'],
        "the plan has 4 redundant experts, --eplb-config says 2",
    ),
    "elastic EP": (["-tp", "2", "--enable-elastic-ep"], "a plan is for a fixed number of ranks"),
    "round robin": (["-tp", "2", "--expert-placement-strategy", "round_robin"], "the plan says where experts are"),
    "another loader": (["-tp", "2", "--load-format", "sharded_state"], "--load-format sharded_state"),
    "weight transfer": (["-tp", "2", "--weight-transfer-config", "{}"], "weights cannot be replaced under a plan"),
    "a price that nobody weighs": (["-tp", "2", "--copy-cost-tokens", "9"], "a price that --dispatch balanced weighs"),
    "broken JSON": (["-tp", "2", "--eplb-config", "{"], "--eplb-config is not JSON"),
    "no number": (["-tp", "two"], "invalid int value: 'two'"),
}


@pytest.mark.parametrize("arguments, message", REFUSED.values(), ids=REFUSED.keys())
def test_a_contradiction_is_one_line_and_a_usage_error(
    eplb: Eplb, tiny_qwen3_moe: Path, plan: Path, arguments: list[str], message: str
) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan, *arguments)
    assert run.code == 2
    assert message in run.err
    assert [line[:6] for line in run.err.splitlines()] in (["Error:"], ["Error:", "Hint: "])


@pytest.mark.parametrize("arguments", [["--static", "-tp", "2", "--eplb-config.step_interval", "10"]])
def test_static_and_an_interval_contradict(eplb: Eplb, tiny_qwen3_moe: Path, plan: Path, arguments: list[str]) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan, *arguments)
    assert (run.code, "--static and step_interval" in run.err) == (2, True)


def test_neither_plan_nor_recording_is_a_usage_error(eplb: Eplb, tiny_qwen3_moe: Path) -> None:
    assert eplb("serve", tiny_qwen3_moe).code == 2


def test_a_plan_over_nodes_wants_tp_and_dp(eplb: Eplb, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan_of(tmp_path / "plan.json", nodes=2))
    assert (run.code, "say how with --tensor-parallel-size" in run.err) == (2, True)


@pytest.mark.parametrize(
    "layers, message",
    [((1, 2, 3), "layer 4: the plan lacks the MoE layers [4]"), ((1, 2, 3, 4, 5), "has the layers [5]")],
)
def test_a_plan_of_other_layers_is_refused(
    eplb: Eplb, tiny_qwen3_moe: Path, tmp_path: Path, layers: tuple[int, ...], message: str
) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan_of(tmp_path / "plan.json", layers=layers))
    assert (run.code, message in run.err) == (1, True)


def test_a_plan_of_another_model_is_refused(eplb: Eplb, tiny_llama4_text: Path, plan: Path) -> None:
    run = eplb("serve", tiny_llama4_text, "--plan", plan)
    assert (run.code, "the plan has 16 experts, Llama4ForCausalLM has 8" in run.err) == (1, True)


def test_a_broken_plan_is_refused(eplb: Eplb, tiny_qwen3_moe: Path, plan: Path) -> None:
    document = json.loads(plan.read_text())
    document["layers"][2]["physical_to_logical"][5] = 16
    plan.write_text(json.dumps(document))
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan)
    assert (run.code, "layer 3, rank 0: slot 5 holds expert 16; experts are 0..15" in run.err) == (1, True)


def test_a_missing_plan_is_refused(eplb: Eplb, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", tmp_path / "nope.json")
    assert (run.code, "no such file" in run.err) == (1, True)


def test_a_converted_folder_refuses_another_plan(tiny_qwen3_moe: Path, tmp_path: Path, eplb: Eplb, plan: Path) -> None:
    own = plan_of(tmp_path / "own.json", redundant=2)
    assert eplb("convert", tiny_qwen3_moe, own, "--layout", "physical", "-o", tmp_path / "out").code == 0
    with pytest.raises(PlacementError, match="not the plan that the checkpoint was converted with"):
        prepare(str(tmp_path / "out"), plan, ["-tp", "2"])


def test_a_physical_checkpoint_is_served_by_its_own_plan(
    tiny_qwen3_moe: Path, tmp_path: Path, eplb: Eplb, plan: Path
) -> None:
    assert eplb("convert", tiny_qwen3_moe, plan, "--layout", "physical", "-o", tmp_path / "out").code == 0
    launch = prepare(str(tmp_path / "out"), None, ["-tp", "2"], dry_run=True)
    assert launch.layout == "physical"
    assert "--enable-eplb" in launch.command


def test_an_expert_twice_on_a_rank_is_refused(tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    row = [0, *range(16), 1, 2, 3]
    Placement(np.tile(np.array(row, np.int32), (4, 1)), np.arange(1, 5, dtype=np.int32), 16, 2).save(tmp_path / "p")
    with pytest.raises(PlacementError, match="holds the expert more than once"):
        prepare(str(tiny_qwen3_moe), tmp_path / "p", ["-tp", "2"], dry_run=True)


def test_missing_smoke_prompts_stop_before_anything_starts(eplb: Eplb, tiny_qwen3_moe: Path, plan: Path) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan, "-tp", 2, "--smoke", plan.parent / "nope.txt", "--dry-run")
    assert (run.code, "nope.txt" in run.err) == (2, True)


def test_a_dry_run_prints_a_command_to_paste(eplb: Eplb, tiny_qwen3_moe: Path, plan: Path) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan, "--static", "--dry-run", "--port", "9000", "--", "-tp", "2")
    assert run.code == 0, run.err
    words = shlex.split(run.out)
    environment = dict(word.split("=", 1) for word in words[: words.index("serve") - 1])
    assert environment["EPLB_PLAN"] == str(plan)
    assert environment["EPLB_RUNTIME_POLICY"] == "static"
    assert "eplb" in environment["VLLM_PLUGINS"].split(",")
    command = words[words.index("serve") :]
    assert command[:6] == ["serve", str(tiny_qwen3_moe), "--port", "9000", "-tp", "2"]
    assert command[6:-1] == ["--enable-expert-parallel", "--enable-eplb", "--eplb-config"]
    assert json.loads(command[-1]) == {
        "num_redundant_experts": 4,
        "step_interval": 1_000_000_000,
        "use_async": False,
        "window_size": 1,
    }


def test_a_dry_run_shows_the_rule_that_chooses_copies(eplb: Eplb, tiny_qwen3_moe: Path, plan: Path) -> None:
    serve = ("serve", tiny_qwen3_moe, "--plan", plan, "--dry-run", "--format", "json", "-tp", "2")
    run = eplb(*serve, "--dispatch", "balanced", "--copy-cost-tokens", "90")
    assert run.json["dispatch"] == "balanced"
    assert run.json["environment"]["EPLB_DISPATCH"] == "balanced"
    assert run.json["environment"]["EPLB_COPY_COST_TOKENS"] == "90"
    assert any("chosen by each step's load" in note for note in run.json["notes"])
    default = eplb(*serve)
    assert default.json["dispatch"] == "hash"
    assert "EPLB_DISPATCH" not in default.json["environment"]
    assert any("chosen by vLLM's hash" in note for note in default.json["notes"])


def test_a_plan_for_another_rule_is_served_with_a_warning(eplb: Eplb, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    made_for = Provenance(dispatch="balanced", balancedness={"after": 0.9876, "even": 0.7654})
    plan = plan_of(tmp_path / "plan.json", provenance=made_for)
    serve = ("serve", tiny_qwen3_moe, "--plan", plan, "--dry-run", "--format", "json", "-tp", "2")
    warned = [line for line in eplb(*serve).json["warnings"] if "--dispatch balanced" in line]
    assert len(warned) == 1
    assert "0.9876" in warned[0]
    assert "0.7654 when copies share evenly" in warned[0]
    assert not [line for line in eplb(*serve, "--dispatch", "balanced").json["warnings"] if "made for" in line]


def test_a_plan_without_copies_leaves_nothing_to_choose(eplb: Eplb, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    plan = plan_of(tmp_path / "plan.json", redundant=0)
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan, "--dry-run", "-tp", "2", "--dispatch", "balanced")
    assert (run.code, "--dispatch balanced without copies in the plan" in run.err) == (2, True)


@pytest.mark.usefixtures("needs_vllm")
def test_what_vllm_s_own_parser_refuses_does_not_start(eplb: Eplb, tiny_qwen3_moe: Path, plan: Path) -> None:
    run = eplb("serve", tiny_qwen3_moe, "--plan", plan, "-tp", "2", "--max-modle-len", "256")
    assert (run.code, "refuses the arguments" in run.err, "--max-modle-len" in run.err) == (1, True, True)


def test_a_relabelled_checkpoint_without_copies_needs_no_eplb(eplb: Eplb, tiny_qwen3_moe: Path, tmp_path: Path) -> None:
    assert eplb("convert", tiny_qwen3_moe, plan_of(tmp_path / "p.json", redundant=0), "-o", tmp_path / "out").code == 0
    run = eplb("serve", tmp_path / "out", "--dry-run", "--format", "json")
    assert run.code == 0, run.err
    assert run.json["environment"] == {"PYTHONSAFEPATH": "1"}
    assert run.json["command"][1:] == [
        "serve",
        str(tmp_path / "out"),
        "--enable-expert-parallel",
        "--tensor-parallel-size",
        "2",
    ]
    assert run.json["layout"] == "stock"


def test_arguments_are_read_as_vllm_writes_them(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("tensor_parallel_size: 8\nenable_eplb: true\nserved-model-name: [a, b]\n")
    read = read_arguments(
        [
            "--config",
            str(config),
            "--data_parallel_size=2",
            "--eplb-config.step-interval=7",
            "--eplb_config",
            '{"a": 1}',
        ]
    )
    assert (read.tensor_parallel_size, read.data_parallel_size, read.enable_eplb) == (8, 2, True)
    assert read.eplb_config == {"step_interval": 7, "a": 1}
    assert read.rest == ("--data-parallel-size=2", "--config", str(config))
    assert {"tensor_parallel_size", "data_parallel_size"} <= read.given
    assert "pipeline_parallel_size" not in read.given


def test_the_command_line_overrides_the_config_file_wherever_it_stands(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text('tensor-parallel-size: 8\nport: 9000\neplb-config: {"a": 1, "b": 2}\n')
    for arguments in (["-tp", "2", f"--config={config}"], ["--config", str(config), "-tp", "2"]):
        read = read_arguments([*arguments, "--eplb-config.a", "7"])
        assert (read.tensor_parallel_size, read.port, read.eplb_config) == (2, 9000, {"a": 7, "b": 2})
    with pytest.raises(UsageError, match="no such file"):
        read_arguments(["--config", str(tmp_path / "none.yaml")])


def test_values_of_the_config_file_are_switches_lists_objects_and_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "enable-eplb: false\nheadless: true\nuds: null\nhost: ::1\nmiddleware: [a, b]\n"
        "eplb-config: {use_async: false}\n"
    )
    read = read_arguments(["--config", str(tmp_path / "c.yaml")])
    assert (read.enable_eplb, read.headless, read.uds, read.host) == (False, True, None, "::1")
    assert read.eplb_config == {"use_async": False}
    assert read.given >= {"enable_eplb", "headless", "host"} and "uds" not in read.given


def test_a_stock_checkpoint_runs_under_eplb_where_the_user_asks_for_it(
    eplb: Eplb, tiny_qwen3_moe: Path, tmp_path: Path
) -> None:
    assert eplb("convert", tiny_qwen3_moe, plan_of(tmp_path / "p.json", redundant=0), "-o", tmp_path / "out").code == 0
    asked = eplb("serve", tmp_path / "out", "--dry-run", "--format", "json", "--", "-ep", "--enable-eplb")
    assert asked.code == 0, asked.err
    assert asked.json["command"][3:6] == ["-ep", "--enable-eplb", "--tensor-parallel-size"]
    assert json.loads(asked.json["command"][-1]) == {"num_redundant_experts": 0}
    assert asked.json["environment"]["EPLB_LAYOUT"] == "stock"


def test_ray_workers_get_the_variables_and_plugins_that_are_named_stay_named(
    eplb: Eplb, tiny_qwen3_moe: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    run = eplb(
        "serve", tiny_qwen3_moe, "--plan", plan, "--dry-run", "--format", "json", "-tp", "2",
        "--distributed-executor-backend", "ray",
    )  # fmt: skip
    assert run.json["environment"]["VLLM_PLUGINS"] == "mine,eplb"
    assert run.json["environment"]["VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"] == "EPLB_"
    assert any("each needs eplb installed" in note for note in run.json["notes"])


def test_settings_survive_the_environment(tmp_path: Path) -> None:
    settings = Settings(
        plan=tmp_path / "p",
        layout="physical",
        policy="static",
        status_dir=tmp_path,
        record_dir=tmp_path,
        record_steps=7,
    )
    assert Settings.from_environment(settings.environment()) == settings
    assert Settings.from_environment({}) == Settings()
