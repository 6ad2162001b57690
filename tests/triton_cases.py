"""Runs the kernels of the `balanced` rule by Triton's interpreter, beside torch: `TRITON_INTERPRET=1 python -m ...`

A process of its own, because Triton decides when it is imported whether it interprets.
"""

from __future__ import annotations

from hypothesis import given, settings
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
@settings(max_examples=40, deadline=None, database=None)
def any_case(case: Case) -> None:
    agree(case)


if __name__ == "__main__":
    accept_masks()
    for switches in ({"all_counted": True}, {"all_recorded": True}, {"record": False}):
        agree(EXAMPLE, **switches)
    any_case()
