"""Run-time policies, and the placement that they change between steps."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import Rule
from eplb_cli.errors import UsageError
from eplb_cli.placement import Placement
from eplb_cli.planner.moves import keep_slots, moved_slots
from eplb_cli.planner.rebalancing import Rebalancer
from eplb_cli.planner.reference import deepseek_map

__all__ = ["LivePlacement", "Rebalance", "policies_of"]

IntArray = npt.NDArray[np.int64]
Rows = npt.NDArray[np.int32]
Policy = Callable[[IntArray, Rows], Rows]
"""From the summed window of loads [L, E] and the live map [L, P] to the next map."""
PolicyName = Literal["vllm", "eplb"]


@dataclass(frozen=True)
class Rebalance:
    """A run-time policy and its pace, as in vLLM's `--eplb-config`.

    Args:
        policy: "vllm", or "eplb" for `eplb serve --runtime-policy eplb`.
        window: steps whose loads the policy is given, the last before it is asked (`window_size`).
        interval: steps from one time to the next (`step_interval`).
    """

    policy: PolicyName
    window: int
    interval: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `vllm:1000/3000`.

        Raises:
            UsageError: it reads otherwise, or the window is longer than the interval.
        """
        found = re.fullmatch(r"(\w+):([0-9]{1,9})/([0-9]{1,9})", text)
        if found is None or found[1] not in get_args(PolicyName):
            raise UsageError(f"--rebalance {text!r}", rule="it must be like vllm:1000/3000 or eplb:1000/3000")
        window, interval = int(found[2]), int(found[3])
        if not 1 <= window <= interval:
            raise UsageError(
                f"--rebalance {text!r}: a window of {window} steps every {interval}",
                rule="a window has at least one step, and no more than there are between two rebalances: vLLM reads "
                "older ones by the placement of today",
            )
        return cls(found[1], window, interval)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.policy}:{self.window}/{self.interval}"


class LivePlacement:
    """A map [L, P] that a policy may change after each step; `planned` tells that `eplb serve` starts from it.

    Steps are counted as vLLM 0.32 does (distributed/eplb/eplb_state.py): the counter starts at three quarters of the
    interval, and at zero when `eplb serve` starts from a plan. A change takes place at once and as a whole; vLLM's own
    moves a layer a step when it is asynchronous.
    """

    def __init__(self, start: Placement, rebalance: Rebalance, policy: Policy, *, planned: bool) -> None:
        self.rows = start.physical_to_logical
        self.rebalances = self.moved = 0
        self._ep_size = start.ep_size
        self._rebalance = rebalance
        self._policy = policy
        self._planned = planned
        self._loads = np.zeros((start.num_layers, start.num_experts), np.int64)
        self._step = 0 if planned else rebalance.interval - rebalance.interval // 4

    def after_step(self, loads: IntArray) -> None:
        """Take a step's loads [L, E], and rebalance when it is time."""
        if self._rebalance.interval - self._step <= self._rebalance.window:
            self._loads += loads
        self._step += 1
        if self._step < self._rebalance.interval:
            return
        new = self._policy(self._loads, self.rows)
        if self._planned:  # the plugin keeps layers without load, see vllm_plugin/rebalancing.py; vLLM alone does not
            new = np.where(self._loads.sum(1, keepdims=True) > 0, new, self.rows)
        self.rebalances += 1
        self.moved += int(moved_slots(self.rows, new, self._ep_size).sum())
        self.rows = new.astype(np.int32)
        self._step = 0
        self._loads = np.zeros_like(self._loads)


def policies_of(
    rebalances: Sequence[Rebalance], num_groups: int
) -> tuple[str | None, Callable[[Rebalance, Placement, Rule, bool], Policy]]:
    """Whose algorithm stands for vLLM's policy, when it is asked for, and the maker of the policies.

    That is vLLM's own where it is installed, else the published algorithm, which vLLM's is equal to but for ties.
    `num_groups` are the router's expert groups: where they split over the nodes, vLLM keeps whole ones on a node. The
    maker takes the placement to start with, the rule that serves it, and whether it is a plan.
    """
    whose, vllms = _vllms(num_groups) if any(it.policy == "vllm" for it in rebalances) else (None, None)

    def make(rebalance: Rebalance, placement: Placement, rule: Rule, planned: bool) -> Policy:
        if rebalance.policy == "eplb" or vllms is None:
            return Rebalancer(placement.ep_size, planned, dispatch=rule).rebalance
        return vllms(placement)

    return whose, make


def _vllms(num_groups: int) -> tuple[str, Callable[[Placement], Policy]]:
    try:
        # vLLM logs to stdout while it is imported; a result stands alone there. A broken one fails in many ways.
        with contextlib.redirect_stdout(sys.stderr):
            import torch
            import vllm
            from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    except Exception:
        return "the published algorithm", lambda placement: _published(placement, num_groups)

    def installed(placement: Placement) -> Policy:
        def rebalance(loads: IntArray, rows: Rows) -> Rows:
            answer = DefaultEplbPolicy.rebalance_experts(
                torch.from_numpy(loads),
                placement.num_slots,
                num_groups,
                placement.num_nodes,
                placement.ep_size,
                torch.from_numpy(rows.astype(np.int64)),
            )
            # vLLM <= 0.18 answers with three maps.
            map_: Rows = (answer[0] if isinstance(answer, tuple) else answer).numpy().astype(np.int32)
            return map_

        return rebalance

    return f"vLLM {vllm.__version__}", installed


def _published(placement: Placement, num_groups: int) -> Policy:
    """The published algorithm, and experts that stay on their rank in the slots they had, as in vLLM."""

    def rebalance(loads: IntArray, rows: Rows) -> Rows:
        new = deepseek_map(loads, placement.num_slots, placement.ep_size, num_groups, placement.num_nodes)
        return keep_slots(rows.astype(np.int64), new.astype(np.int64), placement.ep_size).astype(np.int32)

    return rebalance
