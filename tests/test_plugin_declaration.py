"""What the plugin touches in vLLM is declared, and a vLLM without it is refused before anything happens."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import get_args

import numpy as np
import pytest
import torch

import eplb_cli.vllm_plugin
from eplb_cli.vllm_plugin.declaration import absent
from eplb_cli.vllm_plugin.vllm_parts import DISPENSABLE, PARTS, Task
from tests.vllm_cpu.two_ranks import plan

MODULES = sorted({place for part in PARTS for place in part.places.split()})


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The declared modules of the installed vLLM, in a folder of their own."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    folder = tmp_path_factory.mktemp("sources")
    for module in MODULES:
        base = Path(*module.split("."))
        for file in (base.with_suffix(".py"), base / "__init__.py"):
            if (Path(spec.origin).parents[1] / file).is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(Path(spec.origin).parents[1] / file, folder / file)
    (folder / "vllm/__init__.py").write_text("")
    return folder


def test_the_installed_vllm_has_every_part(sources: Path) -> None:
    assert [what for part, what in absent(sources, get_args(Task)) if not part.optional] == []


STATE = "vllm/distributed/eplb/eplb_state.py"
POLICY = "vllm/distributed/eplb/policy/default.py"
EXECUTE = "vllm/distributed/eplb/rebalance_execute.py"
WORKER = "vllm/v1/worker/worker_base.py"
ROUTER = "vllm/model_executor/layers/fused_moe/router/base_router.py"
RENAMES = {
    "the policy's live map": (POLICY, r"old_global_expert_indices", "old_map", "parameter `old_global_expert_indices`"),
    "the policy's loads": (POLICY, r"weight", "load", "parameter `weight`"),
    "the policy's method": (POLICY, r"rebalance_experts", "plan_experts", "DefaultEplbPolicy.rebalance_experts"),
    "an interval nobody reads": (
        STATE, r"(?<=>= )self\.expert_rearrangement_step_interval|self\.expert_rearrangement_step_interval(?=\n? +-)",
        "self.parallel_config.eplb_config.step_interval",
        "use of vllm.distributed.eplb.eplb_state.EplbState.expert_rearrangement_step_interval in EplbState.step",
    ),
    "the interval": (STATE, r"expert_rearrangement_step_interval", "interval", "step_interval"),
    "the step counter": (STATE, r"expert_rearrangement_step\b", "counter", "EplbState.expert_rearrangement_step"),
    "a policy nobody asks": (STATE, r"self\.policy\.rebalance_experts", "rebalance", "use of"),
    "a rearrangement nobody calls": (STATE, r"self\.rearrange\(", "shuffle(", "EplbState.rearrange in EplbState"),
    "add_model": (STATE, r"def add_model", "def register_model", "EplbState.add_model"),
    "add_model's config": (STATE, r"model_config", "config", "parameter `model_config`"),
    "the profile flag": (STATE, r"is_profile", "dry_run", "parameter `is_profile`"),
    "the slots' map": (STATE, r"physical_to_logical_map", "slots", "EplbModelState.physical_to_logical_map"),
    "the router's table": (STATE, r"logical_to_physical_map", "table", "logical_to_physical_map"),
    "the counts": (STATE, r"logical_replica_count", "counts", "logical_replica_count"),
    "the load": (STATE, r"expert_load_pass\b", "load_pass", "EplbModelState.expert_load_pass"),
    "the transfer": (EXECUTE, r"rearrange_expert_weights_inplace", "shuffle", "rearrange_expert_weights_inplace"),
    "the transfer's new map": (EXECUTE, r"new_global_expert_indices", "new", "parameter `new_global_expert_indices`"),
    "a model's weights": ("vllm/model_executor/models/interfaces.py", r"expert_weights", "experts", "expert_weights"),
    "the end of loading": (WORKER, r"initialize_from_config", "initialize", "WorkerWrapperBase.initialize_from_config"),
    "the step": (WORKER, r"def execute_model", "def run_model", "WorkerWrapperBase.execute_model"),
    "the capture": (ROUTER, r"self\.capture_fn(\(| is)", r"observe\1", "use of"),
    "a capture's setter": (ROUTER, r"set_capture_fn", "set_observer", "BaseRouter.set_capture_fn"),
    "the router's mapping": (ROUTER, r"_apply_eplb_mapping", "_map", "BaseRouter._apply_eplb_mapping"),
    "a mapping nobody asks": (ROUTER, r"self\._apply_eplb_mapping\(", "map_(", "BaseRouter._apply_eplb_mapping in"),
    "the real rows": (ROUTER, r"num_unpadded_tokens\b", "num_real_tokens", "parameter `num_unpadded_tokens`"),
    "the micro-batch": (ROUTER, r"dbo_current_ubatch_id\(\)", "0", "dbo_current_ubatch_id in"),
    "the group": ("vllm/distributed/parallel_state.py", r"def get_ep_group", "def ep_group", "get_ep_group"),
    "the config's reader": ("vllm/config/model.py", r"\bget_config\b", "read_config", "vllm.config.model.get_config"),
    "a file that is gone": (EXECUTE, None, None, "rebalance_execute.rearrange_expert_weights_inplace"),
}  # fmt: skip


def renamed(sources: Path, folder: Path, file: str, pattern: str | None, replacement: str | None) -> Path:
    shutil.copytree(sources, folder)
    if pattern is None or replacement is None:
        (folder / file).unlink()
        return folder
    text = (folder / file).read_text()
    changed = re.sub(pattern, replacement, text)
    assert changed != text
    (folder / file).write_text(changed)
    return folder


@pytest.mark.parametrize("name", RENAMES)
def test_a_rename_is_found(sources: Path, tmp_path: Path, name: str) -> None:
    file, pattern, replacement, expected = RENAMES[name]
    folder = renamed(sources, tmp_path / "vllm", file, pattern, replacement)
    found = [what for part, what in absent(folder, get_args(Task)) if not part.optional]
    assert any(expected in what for what in found), found


REGISTER = "import sys; from eplb_cli.vllm_plugin import register; register(); print(*sorted(sys.modules))"


def register(folder: Path, status: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process of a vLLM in `folder` says when it loads the plugin."""
    return subprocess.run(
        [sys.executable, "-c", REGISTER], capture_output=True, text=True, check=False,
        cwd=Path(eplb_cli.vllm_plugin.__file__).parents[2],
        env={**os.environ, "PYTHONPATH": str(folder), "EPLB_STATUS_DIR": str(status), **environment},
    )  # fmt: skip


def test_a_process_stops_before_it_imports_anything_and_says_why(sources: Path, tmp_path: Path) -> None:
    file, pattern, replacement, _ = RENAMES["the policy's live map"]
    folder = renamed(sources, tmp_path / "vllm", file, pattern, replacement)
    plan().save(tmp_path / "plan.json")
    run = register(folder, tmp_path / "status", EPLB_PLAN=str(tmp_path / "plan.json"))
    assert run.returncode == 1
    line = run.stderr.splitlines()[-1]
    assert re.search(
        r"ServeError: vLLM \S+ has no parameter `old_global_expert_indices` of "
        r"vllm\.distributed\.eplb\.policy\.default\.DefaultEplbPolicy\.rebalance_experts, which is needed to "
        "see loads and the live placement",
        run.stderr,
    ), line
    (record,) = (json.loads(file.read_text()) for file in (tmp_path / "status").iterdir())
    assert "old_global_expert_indices" in record["error"]


def test_what_can_be_spared_is_left_out_with_a_line(sources: Path, tmp_path: Path) -> None:
    folder = renamed(sources, tmp_path / "vllm", "vllm/v1/metrics/prometheus.py", "get_prometheus_registry", "registry")
    plan().save(tmp_path / "plan.json")
    run = register(folder, tmp_path / "status", EPLB_PLAN=str(tmp_path / "plan.json"))
    assert run.returncode == 0, run.stderr
    assert "has no vllm.v1.metrics.prometheus.get_prometheus_registry, so the plugin does not add gauges" in run.stderr
    assert not [name for name in run.stdout.split() if name.startswith("vllm")]


@pytest.mark.parametrize("part", [part for part in PARTS if part.task in DISPENSABLE], ids=lambda part: part.name)
def test_nothing_that_can_be_spared_is_required(part: object) -> None:
    assert vars(part)["optional"]


# Whatever the plugin's code touches is declared ---------------------------------------------------------------------

OURS = {
    "settings", "target", "placement", "plan", "stage", "rows", "live", "request", "window", "started", "wanted",
    "found", "ranks", "error", "problem", "known", "failure", "spec", "recorder", "right", "proof", "move",
    "rebalancing", "inspection", "loading", "warm_start", "_recorder", "stream", "partial", "file", "folder", "cls",
    "agreement", "each", "mapping", "random", "rule",
}  # fmt: skip
"""Variables that hold objects of eplb or of Python's library."""

GENERIC = {
    name
    for kind in (
        str, bytes, dict, list, set, tuple, int, Path, re.Match, torch.Tensor, np.ndarray, inspect.Signature,
        inspect.BoundArguments, inspect.Parameter, subprocess.Popen, ModuleType, type(lambda: 0),
    )
    for name in dir(kind)
}  # fmt: skip
"""Attributes of Python's, torch's and NumPy's own objects."""


def touches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each attribute that may be vLLM's, and of each import from vLLM."""
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        and not str(getattr(node, "module", None) or node.names[0].name).startswith("vllm")
        for alias in node.names
    }
    stores = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    fields = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    own = {node.attr for node in stores if ast.unparse(node.value) == "self"}
    own |= {field.id for field in fields if isinstance(field, ast.Name)}
    own |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vllm"):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.Attribute):
            root: ast.expr = node.value
            while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
                root = root.func if isinstance(root, ast.Call) else root.value
            name = root.id if isinstance(root, ast.Name) else ""
            if name in imported | OURS or (name == "self" and isinstance(node.value, ast.Name) and node.attr in own):
                continue
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            if isinstance(node.args[0], ast.Name) and node.args[0].id in imported | OURS:
                continue
            if isinstance(node.args[1], ast.Constant):
                yield node.lineno, node.args[1].value
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and "arguments" in ast.unparse(node.value)
        ):
            yield node.lineno, str(node.slice.value)


FOLDER = Path(eplb_cli.vllm_plugin.__file__).parent
ELSEWHERE = {
    "arguments.py", "environment.py", "declaration.py", "vllm_parts.py", "balanced_torch.py", "balanced_triton.py",
}  # fmt: skip
"""Run outside the server, or touch no vLLM."""

OTHERS = {
    "__spec__", "_initializing", "create_module", "exec_module",  # Python's imports
    "info", "warning", "critical", "flush", "write", "tell", "set", "check", "hexdigest",  # loggers, files, stores
    "modules", "named_modules",  # torch's modules
    "architectures", "text_config",  # transformers' configs
    "add_api_route", "headers", "add_metric", "register",  # FastAPI and Prometheus
    "eplb_plan", "eplb_placement", "has_eplb_gauges", "profiling", "was_asked", "rebalances",  # what the plugin adds
    "for_layers", "layer_ids", "physical_to_logical", "plan", "max_moves", "min_gain", "status_dir",  # its own data
    "dispatch", "module", "rebalance",  # its own data, and the planner's
}  # fmt: skip


@pytest.mark.parametrize("file", sorted(file.name for file in FOLDER.glob("*.py") if file.name not in ELSEWHERE))
def test_the_plugin_touches_nothing_undeclared(file: str) -> None:
    declared = {word for part in PARTS for name in part.name.split("|") for word in name.split(".")}
    declared |= {name for part in PARTS for name in part.takes} | {module.split(".")[-1] for module in MODULES}
    undeclared = [
        (line, name)
        for line, name in touches(ast.parse((FOLDER / file).read_text()))
        if name not in declared | GENERIC | OTHERS
    ]
    assert undeclared == []


def test_every_module_that_is_waited_for_is_declared() -> None:
    waited = set()
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "when_imported" and len(node.args) == 2:
                waited.add(ast.unparse(node.args[0]).strip("'").removeprefix("f'"))
    assert waited - {"vllm.model_executor.layers.fused_moe.{name}", "name"} <= set(MODULES)
