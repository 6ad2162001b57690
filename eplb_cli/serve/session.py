"""The processes of a session: what a server started, whatever groups it made of them, by the kernel's own lists."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["end_all", "holds", "processes_of"]

_ROUNDS, _ROUND_SECONDS = 500, 0.01
"""How long killed processes are waited for: one that the kernel does not let go must not hold eplb."""


def processes_of(session: int) -> list[int]:
    """The session's processes."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ValueError, OSError):  # no process, or one that has ended
            if os.getsid(int(folder.name)) == session:
                found.append(int(folder.name))
    return found


def holds(session: int, target: str) -> bool:
    """Whether a process of the session has `target` open: "socket:[INODE]", say."""
    for process in processes_of(session):
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{process}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    if str(descriptor.readlink()) == target:
                        return True
    return False


def end_all(session: int) -> None:
    """Kill every process of the session, and those that they start meanwhile."""
    for _ in range(_ROUNDS):
        alive = [process for process in processes_of(session) if not _is_ended(process)]
        if not alive:
            return
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_ROUND_SECONDS)


def _is_ended(process: int) -> bool:
    """Whether a process waits only for its parent to take notice."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    return True
