"""What every test keeps to: in CI none skips unless it may, and none leaves anything behind."""

from __future__ import annotations

import os
import re
import stat
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = [
    "nothing_left_behind",
    "pytest_addoption",
    "pytest_itemcollected",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
]

MAY_SKIP = {
    r"the wheel of vLLM \S+ cannot be fetched": "the package index may be out of reach; no other test asks it",
}
"""Reasons of skips that CI accepts, with the reason why."""

LACKS = {
    "vllm": r"vLLM is not installed|vLLM's CPU build is not installed|could not import '(vllm|triton)"
    r"|module 'triton' has __version__",
    "transformers": r"could not import 'transformers'",
    "chromium": r"no chromium here",
    "filesystems": r"mkfs\.\w+ is not installed",
    "shared-data": r"the shared data folder is not beside this checkout",
}
"""What a machine may say it lacks (`--lacking vllm`), with the reasons of the skips that this explains."""

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written to

OTHERS_FOLDERS = {".cache", ".rustup"}
"""What tools keep in a home folder: caches, and rustup's own, made when pip asks for the compiler's version."""

SESSION = "EPLB_TEST_SESSION"
"""Every process that a test starts inherits this variable, and is found by it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--lacking", action="append", choices=LACKS, default=[], help="what is not here; without it a skip fails in CI"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Engines share one process that has vLLM imported, and both cores: `--dist loadgroup` runs them one by one.

    The starts on two ranks share one run of both. Marked as soon as it is collected: pytest-xdist reads the groups
    before any hook of these tests sees the whole list.
    """
    if item.get_closest_marker("vllm"):
        item.add_marker(pytest.mark.xdist_group("engines"))
    elif "starts" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.xdist_group("starts"))


def may_skip(reason: str, lacking: list[str]) -> bool:
    """Whether CI accepts a skip."""
    return any(re.search(pattern, reason) for pattern in (*MAY_SKIP, *(LACKS[name] for name in lacking)))


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if os.environ.get("CI") != "true" or not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not may_skip(reason, config.getoption("lacking")):
        report.outcome = "failed"
        report.longrepr = f"In CI a skip is a failure: {reason}\ntests/ground_rules.py lists what may skip."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    _refuse_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    _refuse_skip(report, collector.config)
    return report


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A home and a temporary folder of the session's own; fails when files, mounts, memory or processes are left."""
    folder = tmp_path_factory.mktemp("session")
    home, temporary = folder / "home", folder / "tmp"
    home.mkdir()
    temporary.mkdir()
    session = f"{SESSION}={uuid.uuid4().hex}"
    memory = set(SHARED_MEMORY.iterdir())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "HF_HOME"):
            patch.delenv(name, raising=False)
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(home / ".cache" / "torch"))  # else in the temporary folder
        patch.setenv("TMPDIR", str(temporary))
        patch.setattr(tempfile, "tempdir", str(temporary))
        patch.setenv(*session.split("="))
        yield
    deadline = time.monotonic() + 5
    while (processes := _processes(session)) and time.monotonic() < deadline:
        time.sleep(0.1)  # the last ones are on their way out
    left = [
        *(f"process {pid}: {command}" for pid, command in processes.items()),
        *(f"mount {place}" for place in mounts_below(tmp_path_factory.getbasetemp(), Path("/proc/mounts").read_text())),
        *(f"in the temporary folder: {path.name}" for path in temporary.iterdir() if not _is_vllms(path)),
        *(f"in the home folder: {path.name}" for path in home.iterdir() if path.name not in OTHERS_FOLDERS),
        *(f"shared memory {path}" for path in _unused(set(SHARED_MEMORY.iterdir()) - memory) if not _is_vllms(path)),
    ]
    for path in _unused(set(SHARED_MEMORY.iterdir()) - memory):
        if _is_vllms(path):
            path.unlink(missing_ok=True)
    assert not left, "the tests left behind:\n" + "\n".join(sorted(left)[:50])


def _is_vllms(path: Path) -> bool:
    """Whether vLLM's CPU build made it: sockets between its processes, and memory that its ranks share. They stay when
    its workers are ended before it has cleaned up, which a server that is killed with its session always is."""
    return path.is_socket() or path.name.startswith(("vllm_dist_", "psm_", "sem.mp-"))


def _processes(session: str) -> dict[int, str]:
    """Processes whose environment names the session, but this one and Python's own helpers."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if session.encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
        except OSError:  # another user's, or gone
            continue
    found.pop(os.getpid(), None)
    return {pid: command for pid, command in found.items() if "multiprocessing.resource_tracker" not in command}


def mounts_below(folder: Path, mounts: str) -> list[str]:
    """Mount points inside `folder`, from the text of /proc/mounts, which writes a space as \\040."""
    places = [line.split()[1].encode().decode("unicode_escape") for line in mounts.splitlines()]
    return [place for place in places if Path(place).is_relative_to(folder)]


def _unused(segments: set[Path]) -> set[Path]:
    """Of these segments of shared memory, those that no process has mapped: other programs run, too.

    Told by inode: a semaphore is mapped under the name that it had before it got its own. Folders there are no
    segments: a fuzzing run keeps its cases in one, perhaps beside these tests.
    """
    found = {}
    for path in segments:
        try:
            status = path.lstat()
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(status.st_mode):
            found[f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}", str(status.st_ino)] = path
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text()
        except OSError:
            continue
        for line in text.splitlines():
            device, inode = line.split(maxsplit=5)[3:5]
            found.pop((device, inode), None)
    return set(found.values())
