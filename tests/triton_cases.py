"""The kernels of the `balanced` rule: `python -m tests.triton_cases`, in a process of its own.

With TRITON_INTERPRET=1, which Triton reads when it is imported, it runs them beside torch. Without, it compiles them
for GPUs, of which none need be here: the compiler refuses what the interpreter lets pass.
"""

from __future__ import annotations

import os

import triton
from hypothesis import Phase, given, settings
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.interpreter import InterpreterBuilder

from eplb_cli.vllm_plugin import balanced_torch, balanced_triton
from tests.test_plugin_dispatch import EXAMPLE, Case, cases


def accept_masks() -> None:
    """The interpreter of Triton 3.9 wants the mask of an atomic as numpy booleans and does not make it so."""
    atomic = InterpreterBuilder.create_atomic_rmw

    def with_boolean_mask(self, op, pointer, value, mask, *rest):
        mask.data = mask.data.astype(bool)
        return atomic(self, op, pointer, value, mask, *rest)

    InterpreterBuilder.create_atomic_rmw = with_boolean_mask


def agree(case: Case, *, all_counted: bool = False, all_recorded: bool = False, record: bool = True) -> None:
    """Fails when any number differs."""
    ids, real = case.tensors()
    rows = {"counted": None if all_counted else real, "recorded": None if all_recorded else real}
    plain, kernel = case.layer(record=record), case.layer(record=record)
    expected = balanced_torch.map_and_record(ids, case.rule(), plain, **rows)
    assert balanced_triton.map_and_record(ids, case.rule(), kernel, **rows).tolist() == expected.tolist()
    for name in ("load", "served", "digest"):
        assert getattr(kernel, name).tolist() == getattr(plain, name).tolist(), name


@given(cases())
@settings(max_examples=40, deadline=None, database=None, phases=[Phase.generate])  # shrinking takes minutes here
def any_case(case: Case) -> None:
    agree(case)


BATCH = {"HAS_COUNTED": True, "BLOCK": balanced_triton.BLOCK, "COPIES": 8}
CONSTANTS = {
    "_count_and_order": {**BATCH, "WIDTH": 64, "ALL": 256},
    "_fill_and_scan": {
        **BATCH, "SURE": True, "SHARED": 32, "ROUNDS": 3, "PRIMARIES": -1, "EXPERTS": balanced_triton.EXPERTS,
        "RANKS": 32,
    },
    "_map": {**BATCH, "HAS_RECORDED": True, "TRIES": 8, "GOLDEN": balanced_torch.GOLDEN},
}  # fmt: skip
KINDS = {"ids": "*i32", "out": "*i32", "load": "*i32", "counted": "*i32", "recorded": "*i32", "record_enabled": "*i1"}
NUMBERS = {
    "numel", "top_k", "num_experts", "stride", "blocks", "ep_size", "per_rank", "price", "tries",
}  # fmt: skip


def compiles(name: str, target: GPUTarget) -> None:
    """Fails when a kernel is none for this GPU."""
    kernel = getattr(balanced_triton, name)
    constants = {key: value for key, value in CONSTANTS[name].items() if key in kernel.arg_names}
    kinds = {
        argument: "constexpr"
        if argument in constants
        else "i32"
        if argument in NUMBERS
        else KINDS.get(argument, "*i64")
        for argument in kernel.arg_names
    }
    warps = 1 if name == "_fill_and_scan" else 4
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
    assert triton.compile(source, target=target, options={"num_warps": warps}).asm


if __name__ == "__main__":
    if "TRITON_INTERPRET" not in os.environ:
        for target in (GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
            for name in CONSTANTS:
                compiles(name, target)
    else:
        accept_masks()
        for switches in ({"all_counted": True}, {"all_recorded": True}, {"record": False}):
            agree(EXAMPLE, **switches)
        any_case()
