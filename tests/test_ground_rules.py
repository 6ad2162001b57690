"""The ground rules stop what they are there for: skips in CI, and whatever a test leaves behind."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ground_rules import SHARED_MEMORY, _unused, mounts_below

REPOSITORY = Path(__file__).parents[1]


def run(folder: Path, test: str, *arguments: str, ci: str = "true") -> tuple[int, str]:
    """Run one test, given as text, under the ground rules alone."""
    (folder / "test_it.py").write_text(f"import pytest\n\n{test}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.ground_rules", "--basetemp", "base", *arguments],
        cwd=folder,
        env={**os.environ, "CI": ci, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("test", "arguments", "passes"),
    [
        ("def test(): pytest.skip('no reason')", (), False),
        ("pytest.importorskip('no_such_module')\ndef test(): pass", (), False),
        ("@pytest.fixture\ndef f(): pytest.skip('vLLM is not installed')\ndef test(f): pass", (), False),
        ("def test(): pytest.skip('vLLM is not installed')", ("--lacking", "vllm"), True),
        ("def test(): pytest.skip('vLLM is not installed')", ("--lacking", "chromium"), False),
        ("def test(): pytest.skip('the wheel of vLLM 0.1.0 cannot be fetched: no route')", (), True),
        ("@pytest.mark.xfail\ndef test(): assert False", (), True),
    ],
)
def test_in_ci_a_skip_is_a_failure_unless_it_may(
    tmp_path: Path, test: str, arguments: tuple[str, ...], passes: bool
) -> None:
    code, said = run(tmp_path, test, *arguments)
    assert (code == 0) == passes, said


def test_elsewhere_tests_may_skip(tmp_path: Path) -> None:
    code, said = run(tmp_path, "def test(): pytest.skip('no reason')", ci="")
    assert code == 0 and "1 skipped" in said


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ("import tempfile; tempfile.mkdtemp(prefix='forgotten-')", "in the temporary folder: forgotten-"),
        ("import pathlib; (pathlib.Path.home() / '.forgotten').touch()", "in the home folder: .forgotten"),
        ("import subprocess; subprocess.Popen(['sleep', '60'])", "sleep 60"),
        ("open('/dev/shm/forgotten', 'w').close()", "shared memory /dev/shm/forgotten"),
    ],
)
def test_what_a_test_leaves_behind_fails(tmp_path: Path, leaves: str, said: str) -> None:
    code, output = run(tmp_path, f"def test():\n    {leaves}\n")
    Path("/dev/shm/forgotten").unlink(missing_ok=True)  # noqa: S108
    for process in re.findall(r"process (\d+): sleep", output):
        os.kill(int(process), signal.SIGKILL)
    assert code == 1 and "1 passed, 1 error" in output and said in output


def test_a_semaphore_that_another_process_uses_is_nobodys_to_remove() -> None:
    before = set(SHARED_MEMORY.iterdir())
    lock = multiprocessing.get_context("spawn").Lock()
    made = {path for path in set(SHARED_MEMORY.iterdir()) - before if path.name.startswith("sem.mp-")}
    assert made
    assert not _unused(made) & {path for path in made if path.exists()}
    del lock


def test_a_mount_is_left_behind_when_it_lies_in_the_tests_folder(tmp_path: Path) -> None:
    mounts = ["proc /proc proc rw 0 0", f"tmpfs {tmp_path}/a\\040b tmpfs rw 0 0", "tmpfs /elsewhere tmpfs rw 0 0"]
    assert mounts_below(tmp_path, "\n".join(mounts)) == [f"{tmp_path}/a b"]


def test_what_cleans_up_passes(tmp_path: Path) -> None:
    lines = ("import tempfile", "tempfile.TemporaryFile().close()", "(tmp_path / 'mine').touch()")
    code, said = run(tmp_path, "def test(tmp_path):\n    " + "\n    ".join(lines))
    assert code == 0, said
