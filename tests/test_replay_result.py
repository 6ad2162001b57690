"""The document of a replay is read back strictly: it may come from anyone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from eplb_cli.errors import TraceError
from eplb_cli.replay import PhaseSteps, Replay, Row

DECODE = Row("decode", "p.json", "hash", "vllm:1/2", 0.75, 1.2, 1.4, 1.5, 9.5, 3, 80.0, 2, 7, (0.5, 1.0))
PREFILL = Row("prefill", "p.json", "hash", "vllm:1/2", 0.8, 1.1, 1.2, 1.25, 11.0, 4, 90.0, 2, 7, (0.7, 0.9, 0.8))
STEPS = (PhaseSteps("decode", 4, (1, 3)), PhaseSteps("prefill", 6, (2, 4, 6)))
REPLAY = Replay((DECODE, PREFILL), STEPS, 64, 1, 90, "vLLM 0.32.0", ("odd",))


def saved(folder: Path, document: object) -> Path:
    path = folder / "replay.json"
    path.write_text(json.dumps(document))
    return path


def test_a_replay_reads_as_it_was_written(tmp_path: Path) -> None:
    assert Replay.load(saved(tmp_path, REPLAY.as_dict())) == REPLAY


@pytest.mark.parametrize(
    "change, problem",
    [
        (lambda d: d.update(format="eplb-plan"), "is not a replay"),
        (lambda d: d.update(version=2), "has version 2; this eplb reads version 1"),
        (lambda d: d.update(rows=[]), "rows is []; it must be a list of 1 to"),
        (lambda d: d.update(rows=[7]), r"rows[0] is 7; it must be an object"),
        (lambda d: d.update(phases=None), "phases is None; it must be a list"),
        (lambda d: d["phases"][0].update(phase="sleep"), "phases[0]: phase is 'sleep'"),
        (lambda d: d["phases"][0].update(first_steps=[3, 1]), "first_steps is [3, 1]; steps follow each other, from 1"),
        (lambda d: d["phases"][0].update(first_steps=list(range(1, 42))), "it must be a list of 1 to 40 numbers"),
        (lambda d: d["rows"][0].update(curve=[1.0]), "curve is [1.0]; it must be a list of 2 numbers"),
        (lambda d: d["rows"][0].update(curve=[1.0, 1.5]), "curve is [1.0, 1.5]; it must be numbers, 0 to 1"),
        (lambda d: d["rows"][0].update(balancedness=True), "balancedness is True; it must be a number"),
        (lambda d: d["rows"][0].update(phase="all"), "phase is all; the steps are of decode, prefill"),
        (lambda d: d["rows"][0].update(plan=5), "plan is 5; it must be a text"),
        (lambda d: d["rows"][0].pop("max_over_mean"), "max_over_mean is None; it must be an object"),
        (lambda d: d["rows"][0].update(moved_slots=-1), "moved_slots is -1; it must be a whole number, 0 or more"),
        (lambda d: d["rows"][0].update(step_time="1"), "step_time is '1'; it must be a number"),
        (lambda d: d.update(step_tokens=2**70), "step_tokens is"),
        (lambda d: d.update(warnings=[1]), "warnings is [1]; it must be a list of texts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(tmp_path: Path, change: Any, problem: str) -> None:
    document = copy.deepcopy(REPLAY.as_dict())
    change(document)
    with pytest.raises(TraceError) as caught:
        Replay.load(saved(tmp_path, document))
    assert problem in str(caught.value) and "replay.json" in str(caught.value)


def test_a_document_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="it must be an object"):
        Replay.load(saved(tmp_path, [1]))
