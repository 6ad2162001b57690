"""What the installed vLLM says of models and quantisations before anything is loaded, and the table that tells it."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.placement import Placement
from tests.conftest import REPOSITORY, Run

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("needs_vllm")]

FAMILIES = {
    file.stem: tomllib.loads(file.read_text())["architectures"]
    for file in sorted((REPOSITORY / "models").glob("*.toml"))
}
METHODS = {
    "awq": False, "awq_marlin": False, "gptq": False, "gptq_marlin": False, "moe_wna16": False, "fp8": True,
    "mxfp4": True, "modelopt_fp4": True, "compressed-tensors": True, "no-such-method": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> Any:
    """All questions to one process, since importing vLLM takes its time."""
    program = (
        "import json, sys\nfrom eplb_cli.vllm_plugin.arguments import method_runs_eplb, model_runs_eplb\n"
        "families, methods = json.loads(sys.stdin.read())\n"
        "print(json.dumps([{name: [model_runs_eplb(one) for one in names] for name, names in families.items()},"
        " {name: method_runs_eplb(name) for name in methods}, model_runs_eplb('NoSuchArchitecture')]))"
    )
    question = json.dumps([FAMILIES, list(METHODS)])
    run = subprocess.run(
        [sys.executable, "-P", "-c", program], input=question, capture_output=True, text=True, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_the_table_of_families_is_what_vllm_can_serve_with_copies(answers: Any) -> None:
    table = {}
    for line in (REPOSITORY / "docs" / "families.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 4:
            table |= {name.strip("` "): cells[3].split(" ")[0].strip(",") for name in cells[0].split(",")}
    found = {family: "yes" if all(each) else "no" for family, each in answers[0].items()}
    # The class for NVIDIA's GPUs can; that of the platform which this test runs on cannot.
    assert table.pop("deepseek_v4") == "NVIDIA"
    assert found.pop("deepseek_v4") in ("yes", "no")
    assert table == found
    assert {"yes", "no"} == set(found.values())


def test_methods_are_looked_up_in_vllm_s_own_registry(answers: Any) -> None:
    assert answers[1] == METHODS


def test_what_vllm_has_no_class_for_is_left_to_vllm(answers: Any) -> None:
    assert answers[2] is True


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"architectures": ["OlmoeForCausalLM"]}, "cannot run OlmoeForCausalLM under EPLB"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "cannot run awq under EPLB"),
    ],
)
def test_what_vllm_cannot_run_under_eplb_is_refused_before_it_loads(
    eplb: Callable[..., Run], tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 2,
        "hidden_size": 8, "moe_intermediate_size": 4, "intermediate_size": 4, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "dtype": "bfloat16", **changes,
    }  # fmt: skip
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    Placement.initial(8, 2, 2, [0, 1]).save(tmp_path / "plan.json")
    run = eplb("serve", tmp_path / "model", "--plan", tmp_path / "plan.json", "-tp", 2, "--dry-run")
    assert (run.code, message in run.err) == (1, True), run.err
    assert "converted with --layout stock, needs no EPLB" in run.err
