"""Which fast tests reach which line: measured once a test file, kept in `.mutants/`, and again when the file changes.

`Reach.of` asks for what is missing; as a pytest plugin (`-p tests.mutants.reach`) this module measures it. Lines are
kept with the text that they were measured in, so that the map outlives edits of the product.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.slips import Place, Source

PACKAGE = "eplb_cli"
FAST = "not slow and not vllm"


@dataclass(frozen=True)
class Test:
    """A test that reached a line."""

    name: str
    seconds: float


@dataclass(frozen=True)
class Reach:
    """Tests by file and line, and the text that the lines belong to."""

    folder: Path
    measured: dict[str, dict[str, Any]]
    """For each test file: `digest`, `tests` [[name, seconds]], `failed` [names], `texts` {file: text's digest} and
    `lines` {file: {line: [places in tests]}}."""

    @classmethod
    def of(cls, checkout: Path, scratch: Path) -> Reach:
        """The map for `checkout`'s tests; measures, in the copy `scratch`, what changed since the last time."""
        folder = checkout / ".mutants"
        folder.mkdir(exist_ok=True)
        measured, stale = {}, []
        for path in sorted((checkout / "tests").glob("test_*.py")):
            name, digest = f"tests/{path.name}", _digest(path.read_bytes())
            kept = folder / f"{path.stem}.json"
            if kept.exists() and (found := json.loads(kept.read_text()))["digest"] == digest:
                measured[name] = found
            else:
                stale.append(name)
        if stale:
            print(f"measuring which lines {len(stale)} test files reach ...", flush=True)
            for name, found in _measure(scratch, stale, folder).items():
                measured[name] = found
                if found["failed"]:
                    print(f"left out, since they fail by themselves: {', '.join(found['failed'])}", flush=True)
                else:
                    found["digest"] = _digest((checkout / name).read_bytes())
                    (folder / f"{Path(name).stem}.json").write_text(json.dumps(found))
        return cls(folder, measured)

    def tests(self, sources: dict[str, Source], file: str, place: Place) -> list[Test]:
        """The tests that reach a place, quickest first."""
        if place.name is None:
            found = self._reaching(sources[file].text, file, place.lines)
        else:  # it runs at import: who runs a line that says its name?
            word = re.compile(rf"\b{re.escape(place.name)}\b")
            found = {}
            for other, source in sources.items():
                lines = [number for number, line in enumerate(source.text.splitlines(), 1) if word.search(line)]
                lines = [line for line in lines if other != file or line not in place.lines]
                for line in [*lines, *(_body(source, place.name) if other == file else ())]:
                    found |= self._reaching(source.text, other, [line])
        return [Test(name, seconds) for name, seconds in sorted(found.items(), key=lambda item: item[1])]

    def _reaching(self, text: str, file: str, lines: range | list[int]) -> dict[str, float]:
        found = {}
        for measured in self.measured.values():
            reached = measured["lines"].get(file)
            if reached is None:
                continue
            old_line = _old_lines(self.folder / f"{measured['texts'][file]}.py", text)
            for line in lines:
                for index in reached.get(str(old_line[line]), ()):
                    test, seconds = measured["tests"][index]
                    found[test] = seconds
        return found


def _body(source: Source, name: str) -> list[int]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return [statement.lineno for statement in node.body]
    return []


@cache
def _old_lines(path: Path, text: str) -> list[int]:
    """For each line of `text`, from 1, its number in the measured text, or that of the line it took the place of."""
    old, new = path.read_text().splitlines(), text.splitlines()
    numbers = [0] * (len(new) + 2)
    for tag, start, end, first, last in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for line in range(first, last):
            offset = line - first
            numbers[line + 1] = (start + offset if tag == "equal" else min(start + offset, max(end - 1, start))) + 1
    return numbers


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _measure(scratch: Path, files: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    with tempfile.TemporaryDirectory() as temporary:
        answer = Path(temporary) / "answer.json"
        environment = {
            **os.environ,
            "PYTHONPATH": str(scratch),
            "MUTANTS_REACH": str(answer),
            "COVERAGE_CORE": "ctrace",
        }
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "tests.mutants.reach",
                "-q",
                "-m",
                FAST,
                "-p",
                "no:cacheprovider",
                *files,
            ],
            cwd=scratch,
            env=environment,
            capture_output=True,
            text=True,
        )
        finished = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if done.returncode not in finished:
            raise SystemExit(f"The tests cannot be run:\n{done.stdout[-3000:]}{done.stderr[-2000:]}")
        found: dict[str, dict[str, Any]] = json.loads(answer.read_text())
    for path in (scratch / PACKAGE).rglob("*.py"):
        kept = folder / f"{_digest(path.read_bytes())}.py"
        kept.write_bytes(path.read_bytes())
    return {name: found.get(name, {"tests": [], "failed": [], "texts": {}, "lines": {}}) for name in files}


# As a pytest plugin -----------------------------------------------------------------------------------------------


class _Measuring:
    """Tells coverage whose work it sees: a test's, or a fixture's that several tests share."""

    def __init__(self, answer: Path) -> None:
        self.answer, self.seconds = answer, defaultdict(float)
        self.failed: set[str] = set()
        self.shared: dict[str, list[str]] = {}
        folder = answer.parent
        config = folder / "coveragerc"
        config.write_text(
            f"[run]\nparallel = true\nsource = {Path.cwd() / PACKAGE}\ndata_file = {folder / 'data'}\n"
            "context = ${MUTANTS_CONTEXT}\n"
            "disable_warnings = no-data-collected, module-not-imported, module-not-measured\n"
        )
        import coverage

        self.coverage = coverage.Coverage(config_file=str(config), context="")
        self.coverage.start()
        os.environ["COVERAGE_PROCESS_START"] = str(config)  # and the processes that tests start

    def _switch(self, context: str) -> str:
        before, os.environ["MUTANTS_CONTEXT"] = os.environ.get("MUTANTS_CONTEXT", ""), context
        self.coverage.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._switch(item.nodeid)
        definitions = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        self.shared[item.nodeid] = [_context(each) for several in definitions for each in several]
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        before = self._switch(_context(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self.coverage.combine([str(self.answer.parent)])
        data = self.coverage.get_data()
        tests_of = defaultdict(list)
        for test, contexts in self.shared.items():
            for context in {test, *contexts}:
                tests_of[context].append(test)
        found: dict[str, dict[str, Any]] = {}
        index = {}
        for test in self.shared:
            mine = found.setdefault(test.partition("::")[0], {"tests": [], "failed": [], "texts": {}, "lines": {}})
            if test in self.failed:
                mine["failed"].append(test)
                continue
            index[test] = len(mine["tests"])
            mine["tests"].append((test, round(self.seconds[test], 3)))
        for measured in data.measured_files():
            file, text = str(Path(measured).relative_to(Path.cwd())), _digest(Path(measured).read_bytes())
            for line, contexts in data.contexts_by_lineno(measured).items():
                for test in {test for context in contexts for test in tests_of[context]} - self.failed:
                    mine = found[test.partition("::")[0]]
                    mine["texts"][file] = text
                    mine["lines"].setdefault(file, {}).setdefault(str(line), []).append(index[test])
        self.answer.write_text(json.dumps(found))


def _context(fixture: pytest.FixtureDef[Any]) -> str:
    return f"fixture {fixture.baseid} {fixture.argname}"


if answer := os.environ.get("MUTANTS_REACH"):
    measuring = _Measuring(Path(answer))
    pytest_runtest_protocol = measuring.pytest_runtest_protocol
    pytest_fixture_setup = measuring.pytest_fixture_setup
    pytest_runtest_logreport = measuring.pytest_runtest_logreport
    pytest_sessionfinish = measuring.pytest_sessionfinish
