"""python -m tests.fuzz [--target T ...] [--seconds S] [--cases N] [--case K]"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.mutations import mutate

__all__ = ["DEFECTS", "OUT", "fuzz", "main"]

OUT = Path(__file__).parents[2] / "build" / "fuzz"
DEFECTS = ("nameless", "netted", "internal", "memory", "hang")
MEMORY_BYTES = 1 << 30
"""What a case may ask for beyond what the imports take."""
CPU_SECONDS, WALL_SECONDS = 20, 60


def case_files(target: str, case: int) -> dict[str, bytes | str]:
    """The files of a case: bytes, or for special files "pipe", "folder", "zeros" or "nowhere"."""
    from tests.fuzz.seeds import seeds
    from tests.fuzz.targets import files_to_mutate

    rng = random.Random(f"{target}/{case}")
    if target not in _seeds:
        _seeds[target] = seeds(target)
    files: dict[str, bytes | str] = dict(rng.choice(_seeds[target]))
    names = files_to_mutate(target, sorted(files))
    if rng.random() < 0.02:
        files[rng.choice(names)] = rng.choice(("pipe", "folder", "zeros", "nowhere"))
        return files
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice(names)
        content = files[name]
        assert isinstance(content, bytes)
        files[name] = mutate(content, rng)
    return files


_seeds: dict[str, list[object]] = {}  # built once: forks share them


def write_case(files: dict[str, bytes | str], folder: Path) -> None:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content == "pipe":
            os.mkfifo(path)
        elif content == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if content == "zeros" else "/nowhere")


def judge(target: str, folder: Path) -> tuple[str, str]:
    """The verdict on a folder, and the text that goes with it."""
    from eplb_cli.errors import EplbError
    from tests.fuzz.targets import TARGETS, is_netted

    try:
        TARGETS[target](folder)
    except EplbError as error:
        if is_netted(error):
            return "netted", traceback.format_exc()
        text = str(error)
        text.encode()  # a lone surrogate could not be printed
        return ("refused" if error.file is not None or str(folder) in text else "nameless"), f"{text}\n{error.hint}"
    except MemoryError:
        return "memory", traceback.format_exc()
    except BaseException:
        return "internal", traceback.format_exc()
    return "ok", ""


def run_case(target: str, folder: Path) -> tuple[str, str]:
    """`judge` in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        signal.alarm(int(WALL_SECONDS) + 1)  # should the parent be gone by then
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (in_use + MEMORY_BYTES, in_use + MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            verdict, text = judge(target, folder)
            message = f"{verdict}\n{text}".encode("utf-8", "backslashreplace")
        except BaseException:
            message = b"internal\n" + traceback.format_exc().encode("utf-8", "backslashreplace")
        os.write(writer, message[:60_000])
        os._exit(0)
    os.close(writer)
    message, end, late = b"", time.monotonic() + WALL_SECONDS, False
    while not late:
        late = not select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]
        if late or not (piece := os.read(reader, 1 << 16)):
            break
        message += piece
    os.close(reader)
    if late:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if message:
        verdict, _, text = message.decode().partition("\n")
        return verdict, text
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if late or number == signal.SIGXCPU:
        return "hang", f"no answer within {CPU_SECONDS} s of computing and {WALL_SECONDS} s in all"
    return "internal", f"the process died of {signal.Signals(number).name}" if number else "the process ended early"


def fuzz(target: str, *, seconds: float, cases: int | None = None, first: int = 0, out: Path = OUT) -> Counter[str]:
    """Run cases until the time is over or `cases` are done; save what is a defect, and the counts."""
    from tests.fuzz import targets  # noqa: F401 - imported before the first fork

    out = out / target
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    counts: Counter[str] = Counter()
    started, case = time.monotonic(), first
    base = Path("/dev/shm") if Path("/dev/shm").is_dir() else None  # noqa: S108 - memory, not a predictable name
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        while time.monotonic() - started < seconds and (cases is None or case < first + cases):
            folder = Path(scratch) / "case"
            folder.mkdir()
            files = case_files(target, case)
            write_case(files, folder)
            verdict, text = run_case(target, folder)
            counts[verdict] += 1
            if verdict in DEFECTS:
                kept = out / f"{case}-{verdict}"
                write_case(files, kept)
                (out / f"{case}-{verdict}.txt").write_text(text)
            shutil.rmtree(folder)
            case += 1
    summary = {"cases": case - first, "seconds": round(time.monotonic() - started), "verdicts": dict(counts)}
    (out / "counts.json").write_text(json.dumps(summary, indent=1) + "\n")
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz, and print the counts; 1 when there is a defect."""
    from tests.fuzz.targets import TARGETS

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--target", action="append", choices=list(TARGETS))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--case", type=int, help="run this one again, in this process, and keep its files")
    given = parser.parse_args(argv)
    if given.case is not None:
        (target,) = given.target
        folder = OUT / target / f"again-{given.case}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_case(case_files(target, given.case), folder)
        sys.stdout.write(f"{folder}\n{': '.join(judge(target, folder))}\n")
        return 0
    failed = False
    for target in given.target or TARGETS:
        counts = fuzz(target, seconds=given.seconds, cases=given.cases, first=given.first)
        failed |= any(counts[defect] for defect in DEFECTS)
        shown = ", ".join(f"{verdict} {count:,}" for verdict, count in counts.most_common())
        sys.stdout.write(f"{target}: {sum(counts.values()):,} cases: {shown}\n")
        sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    os.environ.pop("EPLB_DEBUG", None)
    # One thread a case: a fork of many threads may wait for a lock that nobody holds.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    sys.exit(main())
