"""The fuzzer finds what it is there to find, and a short run of it finds nothing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from eplb_cli.errors import TraceError
from eplb_cli.traces.pipeline import as_recorded
from eplb_cli.traces.registry import READERS
from tests.fuzz import targets
from tests.fuzz.__main__ import DEFECTS, case_files, fuzz, run_case, write_case
from tests.fuzz.seeds import seeds


@pytest.mark.parametrize("target", targets.TARGETS)
def test_every_seed_is_valid(target: str, tmp_path: Path) -> None:
    for number, seed in enumerate(seeds(target)):
        folder = tmp_path / str(number)
        write_case(dict(seed), folder)
        targets.TARGETS[target](folder)


def test_a_case_is_the_same_each_time() -> None:
    assert [case_files("plans", 7)] * 2 == [case_files("plans", 7), case_files("plans", 7)]
    assert case_files("plans", 7) != case_files("plans", 8)


@pytest.mark.parametrize(
    ("read", "verdict"),
    [
        (lambda folder: None, "ok"),
        (lambda folder: _raise(TraceError("x", file=folder)), "refused"),
        (lambda folder: _raise(TraceError("x")), "nameless"),
        (lambda folder: _trip_a_reader(folder), "netted"),
        (lambda folder: _raise(KeyError("x")), "internal"),
        (lambda folder: _raise(TraceError("\ud800", file=folder)), "internal"),
        (lambda folder: os.kill(os.getpid(), signal.SIGKILL), "internal"),
        (lambda folder: bytearray(4 << 30), "memory"),
        (lambda folder: time.sleep(100), "hang"),
    ],
)
def test_each_kind_of_defect_is_told(
    read: object, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fuzz.__main__.WALL_SECONDS", 0.5 if verdict == "hang" else 60)
    monkeypatch.setitem(targets.TARGETS, "plans", read)  # type: ignore[arg-type]
    assert run_case("plans", tmp_path)[0] == verdict


def _raise(error: BaseException) -> None:
    raise error


def _trip_a_reader(folder: Path) -> None:
    with as_recorded(READERS[0], str(folder)):
        _raise(KeyError("x"))


def test_a_defect_is_kept_with_its_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(targets.TARGETS, "plans", lambda folder: _raise(KeyError("x")))  # type: ignore[arg-type]
    assert fuzz("plans", seconds=60, cases=1, first=3, out=tmp_path) == {"internal": 1}
    assert (tmp_path / "plans" / "3-internal" / "plan.json").read_bytes() == case_files("plans", 3)["plan.json"]
    assert "KeyError" in (tmp_path / "plans" / "3-internal.txt").read_text()
    assert json.loads((tmp_path / "plans" / "counts.json").read_text())["verdicts"] == {"internal": 1}


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_short_run_finds_nothing(target: str, tmp_path: Path) -> None:
    counts = fuzz(target, seconds=60, cases=20, out=tmp_path)
    assert not any(counts[defect] for defect in DEFECTS), [p.read_text() for p in tmp_path.rglob("*.txt")]
