"""Puts one-line mistakes into a copy of the checkout, one at a time, and runs the tests that reach the line.

python -m tests.mutants [FILE_OR_FOLDER ...] [--sample N] [--seed S] [--engines] [--jobs J]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.reach import FAST, PACKAGE, Reach, Test
from tests.mutants.slips import Slip, Source, changes, slips

CHECKOUT = Path(__file__).parents[2]
HERE = Path(__file__).parent
WANTED = 0.95
FIRST, MOST_SECONDS = 6, 150.0
"""The quickest tests are tried by themselves before the rest; tests beyond this time in all are left out."""

NOTICED, MISSED, TIMED_OUT, UNREACHED, EQUIVALENT, NEVER, GONE = (
    "noticed",
    "NOT NOTICED",
    "timed out",
    "only engine tests",
    "equivalent",
    "never run",
    "GONE",
)


@dataclass(frozen=True)
class Mutant:
    """A mistake to try; `tests` are those to run when no fast test reaches it."""

    slip: Slip
    tests: tuple[str, ...] = ()
    equivalent: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, and who noticed it or how many tests did not."""

    verdict: str
    words: str = ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("files", nargs="*", default=[PACKAGE], help="modules or folders to make mistakes in")
    parser.add_argument("--sample", type=int, default=60, help="made mistakes to try, each on a line of its own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-listed", action="store_true", help="leave out the mistakes listed in listed.toml")
    parser.add_argument("--engines", action="store_true", help="try those that only engine tests reach, with these")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()

    sources = {str(path.relative_to(CHECKOUT)): path.read_text() for path in sorted((CHECKOUT / PACKAGE).rglob("*.py"))}
    parsed = {file: Source(text) for file, text in sources.items()}
    chosen = {file for file in parsed if any(Path(file).is_relative_to(Path(name)) for name in given.files)}
    equivalent = _rows("equivalent.toml")
    mutants, gone = [], []
    for row in () if given.no_listed else _rows("listed.toml"):
        if row["file"] in chosen:
            found = _listed(parsed[row["file"]], row)
            mutants.append(found) if found else gone.append(row)
    mutants += _sample(parsed, sorted(chosen), given.sample, random.Random(given.seed), equivalent)

    judged: dict[str, Counter[str]] = defaultdict(Counter)
    with _copies(given.jobs) as copies:
        reach = Reach.of(CHECKOUT, copies[0])
        _preload()
        free: SimpleQueue[Path] = SimpleQueue()
        for copy in copies:
            free.put(copy)

        def judge(mutant: Mutant) -> Verdict:
            copy = free.get()
            try:
                return _judge(mutant, parsed, reach, copy, given.engines)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(given.jobs) as pool:
            for mutant, verdict in zip(mutants, pool.map(judge, mutants), strict=True):
                judged[_room(mutant.slip.file)][verdict.verdict] += 1
                print(_shown(mutant, verdict, parsed), flush=True)
    for row in gone:
        print(f"{GONE:17} {row['file']}: {row['old']!r} is not there, or not once ({row['meaning']})")
    counts = sum(judged.values(), Counter({GONE: len(gone)}))
    share = _share(counts)
    print(_table(judged))
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count))
    print(f"{share:.1%} of {_tried(counts)} noticed; wanted {WANTED:.0%}")
    return int(share < WANTED or bool(gone))


def _room(file: str) -> str:
    """The package that a module belongs to."""
    return str(Path(file).parent)


def _tried(counts: Counter[str]) -> int:
    return counts[NOTICED] + counts[TIMED_OUT] + counts[MISSED]


def _share(counts: Counter[str]) -> float:
    """The part of the tried mistakes that a test noticed; those that hang the tests are among them."""
    return 1 - counts[MISSED] / (_tried(counts) or 1)


def _table(judged: dict[str, Counter[str]]) -> str:
    """What became of the mistakes of each package, and of all, as Markdown."""
    rows = [*sorted(judged.items()), ("all", sum(judged.values(), Counter()))]
    lines = ["| package | tried | noticed | equivalent | share |", "| --- | --- | --- | --- | --- |"]
    for room, counts in rows:
        tried, share = _tried(counts), _share(counts)
        lines.append(f"| {room} | {tried} | {tried - counts[MISSED]} | {counts[EQUIVALENT]} | {share:.1%} |")
    return "\n".join(lines)


def _rows(name: str, kind: str = "mutant") -> list[dict]:
    return tomllib.loads((HERE / name).read_text()).get(kind, [])


def _listed(source: Source, row: dict) -> Mutant | None:
    old, new = row["old"], row["new"]
    if source.text.count(old) != 1:
        return None
    common = _common(old, new)
    start = len(source.text[: source.text.index(old)].encode())
    at = start + len(old[:common].encode())
    slip = Slip(row["file"], at, start + len(old.encode()), new[common:], row["meaning"])
    return Mutant(slip, tuple(row.get("tests", ())), row.get("equivalent"))


def _sample(
    sources: dict[str, Source], files: list[str], number: int, rng: random.Random, equivalent: list[dict]
) -> list[Mutant]:
    """`number` mistakes on lines that differ, every line as likely."""
    by_line: dict[tuple[str, int], list[Slip]] = defaultdict(list)
    for file in files:
        for slip in slips(file, sources[file].text):
            by_line[file, sources[file].line(slip.start)].append(slip)
    known = {(row["file"], row["old"], row["new"]): row["equivalent"] for row in equivalent}
    lines = sorted(by_line)
    rng.shuffle(lines)
    mutants: list[Mutant] = []
    for file, line in lines:
        if len(mutants) == number:
            break
        candidates = by_line[file, line]
        rng.shuffle(candidates)
        safe = (each for each in candidates if not dangerous(sources[file], each))
        slip = next((each for each in safe if changes(sources[file], each)), None)
        if slip:
            mutants.append(Mutant(slip, equivalent=known.get((file, *_diff(sources[file], slip)))))
    return sorted(mutants, key=lambda mutant: (mutant.slip.file, mutant.slip.start))


def dangerous(source: Source, slip: Slip) -> str | None:
    """Why a mistake must not be run: it changes what never.toml names."""
    for row in _rows("never.toml", "never"):
        if row["file"] == slip.file:
            functions = row.get("functions")
            if functions is None or any(source.within(slip.start, slip.end, name) for name in functions):
                return row["reason"]
    return None


def _diff(source: Source, slip: Slip) -> tuple[str, str]:
    """The changed lines before and after, as one text each, without the indent."""
    edited = source.with_edit(slip.start, slip.end, slip.new)
    before, after = source.text.splitlines(), edited.splitlines()
    head = _common(before, after)
    tail = _common(before[head:][::-1], after[head:][::-1])
    return tuple("\n".join(line.strip() for line in text[head : len(text) - tail]) for text in (before, after))


def _shown(mutant: Mutant, verdict: Verdict, sources: dict[str, Source]) -> str:
    source, slip = sources[mutant.slip.file], mutant.slip
    old, new = _diff(source, slip)
    lines = [f"{verdict.verdict:17} {slip.file}:{source.line(slip.start)}  {slip.meaning}  {verdict.words}".rstrip()]
    lines += [f"    - {line}" for line in old.splitlines()] + [f"    + {line}" for line in new.splitlines()]
    return "\n".join(lines)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """How many items the two begin with alike."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@contextlib.contextmanager
def _copies(number: int) -> Iterator[list[Path]]:
    """Copies of the checkout with shared/ beside each; gone afterwards."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=CHECKOUT,
        check=True,
        capture_output=True,
        text=True,
    )
    with tempfile.TemporaryDirectory(prefix="mutants-") as temporary:
        copies = []
        for index in range(number):
            copy = Path(temporary) / str(index) / "checkout"
            for name in filter(None, listed.stdout.split("\0")):
                if (CHECKOUT / name).is_file():
                    (copy / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(CHECKOUT / name, copy / name)
            if (CHECKOUT.parent / "shared").exists():
                (copy.parent / "shared").symlink_to(CHECKOUT.parent / "shared")
            copies.append(copy)
        yield copies


def _preload() -> None:
    """What every test imports, once for all the forks; never the package itself."""
    for name in ("hypothesis", "numba", "numpy", "scipy.optimize", "torch", "transformers"):
        importlib.import_module(name)
    assert not any(name.partition(".")[0] == PACKAGE for name in sys.modules)


def _judge(mutant: Mutant, sources: dict[str, Source], reach: Reach, copy: Path, engines: bool) -> Verdict:
    if mutant.equivalent:
        return Verdict(EQUIVALENT, mutant.equivalent)
    slip, source = mutant.slip, sources[mutant.slip.file]
    danger = dangerous(source, slip)
    if danger:
        return Verdict(NEVER, danger)
    tests = reach.tests(sources, slip.file, source.place(slip.start))
    rounds = [tests[:FIRST], _within(tests[FIRST:])]
    marked = FAST
    if not tests:
        if not (engines and mutant.tests):
            return Verdict(UNREACHED)
        rounds, marked = [[Test(name, 300.0) for name in mutant.tests]], ""
    path = copy / slip.file
    path.write_text(source.with_edit(slip.start, slip.end, slip.new))
    try:
        for some in filter(None, rounds):
            verdict = _run(copy, [test.name for test in some], marked, 60.0 + 5 * sum(test.seconds for test in some))
            if verdict:
                return verdict
    finally:
        path.write_text(source.text)
    return Verdict(MISSED, f"({sum(map(len, rounds))} of {len(tests)} tests)")


def _within(tests: list[Test]) -> list[Test]:
    """As many of the quickest as fit into the time."""
    total, some = 0.0, []
    for test in tests:
        total += test.seconds
        if total > MOST_SECONDS:
            break
        some.append(test)
    return some


def _run(copy: Path, tests: list[str], marked: str, limit: float) -> Verdict | None:
    """Run `tests` in a fork of this process, and say which one failed; None when all pass."""
    log = copy.parent / "log"
    child = os.fork()
    if child == 0:
        try:
            _become_pytest(copy, tests, marked, log)
        finally:
            os._exit(99)
    end = time.monotonic() + limit
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Verdict(TIMED_OUT, f"({limit:.0f} s)")
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what a test left behind
    if os.waitstatus_to_exitcode(status) == 0:
        return None
    failed = [line.split(" ", 2)[1] for line in log.read_text().splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return Verdict(NOTICED, f"by {failed[0]}" if failed else "")


def _become_pytest(copy: Path, tests: list[str], marked: str, log: Path) -> None:
    os.setsid()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(copy)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(CHECKOUT)))]
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ.pop("CI", None)
    import pytest

    code = pytest.main(
        [
            "-x",
            "-q",
            "-rfE",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-m",
            marked,
            *tests,
            f"--rootdir={copy}",
            "--hypothesis-seed=0",
            "--tb=no",
        ]
    )
    os._exit(int(code))


if __name__ == "__main__":
    raise SystemExit(main())
