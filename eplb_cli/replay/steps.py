"""Recorded tokens put into engine steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eplb_cli.loads import PHASES
from eplb_cli.traces import RecordedTokens

__all__ = ["LANE_TOKENS", "Step", "steps_of"]

IntArray = npt.NDArray[np.int64]

DECODE = PHASES.index("decode")
LANE_TOKENS = 64
"""Tokens of a sequence that follow each other in as many decode steps."""


@dataclass(frozen=True, eq=False)
class Step:
    """The tokens of one engine step: logical ids [n, L, k] with -1 for none, the batch of each token [n], and the
    phase, an index into PHASES."""

    ids: npt.NDArray[np.integer]
    source: IntArray
    phase: int


def steps_of(blocks: Iterable[RecordedTokens], step_tokens: int, batches: int) -> Iterator[Step]:
    """Put consecutive tokens into steps of `step_tokens`, each phase by itself.

    A prefill step takes tokens as they follow each other, cut into one stretch for each batch. A decode step takes one
    token of each of `step_tokens` sequences: the trace is dealt out in lanes of LANE_TOKENS, which advance together,
    and lanes go to the batches in turn. What does not fill a step at the end is left out.
    """
    held: dict[int, list[npt.NDArray[np.integer]]] = {}
    amount: dict[int, int] = {}
    for block in blocks:
        phase = block.phase
        held.setdefault(phase, []).append(block.ids)
        amount[phase] = amount.get(phase, 0) + len(block.ids)
        batch = step_tokens * (LANE_TOKENS if phase == DECODE else 1)
        if amount[phase] >= batch:
            tokens = np.concatenate(held[phase])
            whole = len(tokens) // batch * batch
            for start in range(0, whole, batch):
                yield from _steps(tokens[start : start + batch], phase, step_tokens, batches)
            held[phase], amount[phase] = [tokens[whole:]], len(tokens) - whole
    for phase in sorted(held):
        tokens = np.concatenate(held[phase])
        yield from _steps(tokens[: len(tokens) // step_tokens * step_tokens], phase, step_tokens, batches)


def _steps(tokens: npt.NDArray[np.integer], phase: int, step_tokens: int, batches: int) -> Iterator[Step]:
    lanes = np.arange(step_tokens)
    if phase == DECODE:
        by_lane = tokens.reshape(step_tokens, -1, *tokens.shape[1:])
        for place in range(by_lane.shape[1]):
            yield Step(by_lane[:, place], lanes % batches, phase)
    else:
        for start in range(0, len(tokens), step_tokens):
            yield Step(tokens[start : start + step_tokens], lanes * batches // step_tokens, phase)
