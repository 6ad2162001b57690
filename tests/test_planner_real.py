"""Real routing: on windows it has not seen, the planner beats the reference, and each effort holds up."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from eplb_cli.loads import ExpertLoads
from eplb_cli.planner import Effort, PlanRequest, Strategy, make_plan, score

RECORDED = {
    "gpt-oss-20b": ("gptoss20b", 32, 8, 8),
    "DeepSeek-V2-Lite": ("esft_dsv2lite", 64, 16, 16),
}
"""Folder, experts, ranks and redundant experts."""


def halves(folder: Path, experts: int, tokens: int = 512) -> tuple[ExpertLoads, ExpertLoads]:
    """The first and the second half of every task's windows."""
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for file in sorted(folder.glob("*_topk.npz")):
        ids = np.load(file)["topk_ids"].astype(np.int64)
        windows = len(ids) // tokens
        counts = np.stack(
            [
                [np.bincount(part[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])]
                for part in np.split(ids[: windows * tokens], windows)
            ]
        )
        parts[0].append(counts[: windows // 2])
        parts[1].append(counts[windows // 2 :])
    first, second = (
        ExpertLoads(counts, np.full(len(counts), tokens), np.arange(counts.shape[1], dtype=np.int32))
        for counts in (np.concatenate(part) for part in parts)
    )
    return first, second


@pytest.mark.parametrize("model", RECORDED)
def test_unseen_windows_wait_less_than_under_the_references_plan(shared_data: Path, model: str) -> None:
    folder, experts, ranks, redundant = RECORDED[model]
    seen, unseen = halves(shared_data / folder, experts)

    def held_out(strategy: Strategy, effort: Effort = "fast") -> float:
        request = PlanRequest(ranks, redundant, strategy=strategy, effort=effort, folds=0)
        return score(make_plan(seen, request).placement, unseen).balancedness

    reference, fast, normal = held_out("deepseek"), held_out("windows"), held_out("windows", "normal")
    assert (1 - fast) <= 0.75 * (1 - reference)
    assert normal >= fast - 0.003
    assert held_out("stock", "normal") >= reference + 0.05


def test_folds_that_are_tasks_tell_what_a_task_never_recorded_would_cost(shared_data: Path) -> None:
    folder, experts, ranks, redundant = RECORDED["DeepSeek-V2-Lite"]
    seen, unseen = halves(shared_data / folder, experts)
    result = make_plan(seen, PlanRequest(ranks, redundant, folds=4, effort="fast"))
    assert result.balancedness.held_out is not None
    # The second halves are of tasks that were recorded; each fold is, near enough, a task that the others are not.
    assert result.balancedness.held_out < score(result.placement, unseen).balancedness - 0.1
