"""The processes of a session: what a server started, whatever groups it made of them, by the kernel's own lists."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

__all__ = ["end_all", "has_ended", "holds", "processes_of", "wait_for_end"]

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


def has_ended(leader: int) -> bool:
    """Whether a child of ours has ended. It is not waited for: its id is nobody else's until then."""
    try:
        return os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
    except ChildProcessError:  # the kernel was told to forget the children of this process
        return True


def wait_for_end(leader: int) -> None:
    """Sleep until a child of ours `has_ended`."""
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT)


def end_all(leader: int) -> None:
    """Kill every process of the session of `leader`, and those that they start meanwhile.

    Only while `leader` is a child of ours that leads a session of its own and was not waited for: its id then cannot
    have become another's, and its session holds its descendants alone. Else nothing is killed.
    """
    for _ in range(_ROUNDS):
        alive = [process for process in processes_of(leader) if _lives_in(leader, process)]
        if not alive or not _leads_a_session_of_ours(leader):
            return
        for process in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        time.sleep(_ROUND_SECONDS)


def _leads_a_session_of_ours(leader: int) -> bool:
    try:
        os.waitid(os.P_PID, leader, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # refused for all but our children
        return os.getsid(leader) == leader != os.getsid(0)
    except OSError:
        return False


def _lives_in(session: int, process: int) -> bool:
    """Whether a process is of the session by its own record, and not one that waits only to be taken notice of.

    Asked besides the list, so that no single mistake turns the kill against others' processes.
    """
    with contextlib.suppress(OSError):
        state, _, _, its_session, *_ = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return state not in "ZX" and int(its_session) == session
    return False
