"""The CPU shim of the tests decides nothing: what EPLB does under it is vLLM's own code and arithmetic."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm_cpu.engine import TP2, Engines, Served

pytestmark = pytest.mark.vllm


def python(code: str, **environment: str) -> str:
    """Run code in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="module")
def vllm_folder() -> Path:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None or find_spec("eplb_cpu_shim") is None:
        pytest.skip("vLLM's CPU build is not installed: sh tests/vllm_cpu/setup.sh PYTHON")
    return Path(spec.origin).parent


def test_it_is_asleep_unless_asked(vllm_folder: Path) -> None:
    python(
        "import sys, eplb_cpu_shim; eplb_cpu_shim.register(); assert not sys.meta_path[0].__module__.startswith('eplb')"
    )


def test_the_mapping_is_that_of_vllm_s_own_kernel(vllm_folder: Path, tmp_path: Path) -> None:
    """vLLM's Triton kernel, run by Triton's interpreter, against the shim's arithmetic."""
    pytest.importorskip("triton")
    source = (vllm_folder / "model_executor/layers/fused_moe/router/base_router.py").read_text()
    kernel = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "_eplb_map_and_record_i32_kernel"
    )
    # Triton reads a kernel's source from its file, so it is put into one.
    lines = source.splitlines()[kernel.decorator_list[0].lineno - 1 : kernel.end_lineno]
    module = "import triton\nimport triton.language as tl\n\n" + textwrap.dedent("\n".join(lines))
    (tmp_path / "kernel.py").write_text(module)
    python(
        f"""
        import sys, torch
        sys.path.insert(0, {str(tmp_path)!r})
        import kernel
        from triton.runtime.interpreter import InterpreterBuilder
        from eplb_cpu_shim import map_to_physical_and_record

        # The interpreter of Triton 3.9 wants this mask as numpy booleans and does not make it so.
        atomic = InterpreterBuilder.create_atomic_rmw

        def with_boolean_mask(self, op, pointer, value, mask, *rest):
            mask.data = mask.data.astype(bool)
            return atomic(self, op, pointer, value, mask, *rest)

        InterpreterBuilder.create_atomic_rmw = with_boolean_mask
        random = torch.Generator().manual_seed(0)
        for case in range(20):
            experts, spare, tokens, k = 16, 8, 1 + 13 * case, 4
            slots = torch.cat([torch.arange(experts), torch.randint(0, experts, (spare,), generator=random)])
            slots = slots[torch.randperm(experts + spare, generator=random)]
            table = torch.full((experts, 12), -1)
            count = torch.zeros(experts, dtype=torch.int64)
            for slot, expert in enumerate(slots.tolist()):
                table[expert, count[expert]] = slot
                count[expert] += 1
            ids = torch.randint(-1, experts, (tokens, k), generator=random, dtype=torch.int32)
            real, enabled = torch.tensor(max(0, tokens - 3), dtype=torch.int32), torch.tensor(case % 3 > 0)
            load = torch.zeros(experts + spare, dtype=torch.int32)
            mine = map_to_physical_and_record(ids, load, table, count, enabled, real)
            out, load_ = torch.empty(ids.numel(), dtype=torch.int32), torch.zeros(experts + spare, dtype=torch.int32)
            grid = (-(-ids.numel() // 256),)
            kernel._eplb_map_and_record_i32_kernel[grid](
                ids.contiguous(), count, table, out, load_, enabled, real, experts, table.shape[1],
                experts + spare, ids.numel(), k, HAS_NUM_UNPADDED=True, BLOCK_SIZE=256,
            )
            assert torch.equal(out.reshape(ids.shape), mine), case
            assert torch.equal(load_, load), case
        """,
        TRITON_INTERPRET="1",
    )


DECIDING = (
    "eplb_state.EplbState.step",
    "eplb_state.EplbState.rearrange",
    "eplb_state.EplbState.add_model",
    "eplb_state.EplbState.build_initial_global_physical_to_logical_map",
    "eplb_state._commit_eplb_maps",
    "eplb_state._move_to_workspace",
    "rebalance_execute.rearrange_expert_weights_inplace",
    "rebalance_execute.move_to_buffer",
    "rebalance_execute.move_from_buffer",
    "async_worker.transfer_run_periodically",
    "policy.default.DefaultEplbPolicy.rebalance_experts",
)


def test_everything_that_decides_is_vllm_s_own_code(vllm_folder: Path) -> None:
    """With the shim active and all modules loaded, these functions come from vLLM's files, and nothing wraps them."""
    found = python(
        f"""
        import importlib, inspect, os
        import eplb_cpu_shim
        eplb_cpu_shim.register()
        import vllm.v1.worker.cpu_model_runner
        for name in {DECIDING!r}:
            parts = name.split(".")
            thing, rest = None, parts
            for end in range(len(parts), 0, -1):
                try:
                    thing = importlib.import_module("vllm.distributed.eplb." + ".".join(parts[:end]))
                    rest = parts[end:]
                    break
                except ImportError:
                    pass
            for part in rest:
                thing = getattr(thing, part)
            function = inspect.unwrap(getattr(thing, "__func__", thing))
            print(name, function.__code__.co_filename)
        """,
        EPLB_CPU_SHIM="1",
    )
    lines = [line.split() for line in found.splitlines() if line.split()[0] in DECIDING]
    assert [name for name, _ in lines] == list(DECIDING)
    assert all(Path(file).is_relative_to(vllm_folder) for _, file in lines)


@pytest.mark.parametrize("name", ["qwen3", "llama4"])
def test_two_ranks_answer_like_one_without_the_shim(
    engines: Engines, vllm_models: dict[str, Served], name: str
) -> None:
    model = vllm_models[name]
    assert engines.run(model.folder, TP2)[0].rounds == engines.run(model.folder)[0].rounds


def test_the_plugin_is_asleep_unless_asked(vllm_folder: Path) -> None:
    code = """
        import sys
        import eplb_cli.vllm_plugin as plugin
        before = set(sys.modules), list(sys.meta_path)
        plugin.register()
        assert (set(sys.modules), list(sys.meta_path)) == before
        assert "numpy" not in sys.modules
    """
    python(inspect.cleandoc(textwrap.dedent(code)))
