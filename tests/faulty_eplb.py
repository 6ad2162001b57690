"""Runs eplb in a process in which one system call goes wrong: `python -m tests.faulty_eplb FAULT ARGUMENTS...`.

FAULT is `what:call:number[:argument]`: at the number-th use of os.<call> (`any` counts all of CALLS together)

    kill                 the process is killed (SIGKILL), as by the kernel or an operator
    EIO, EDQUOT, ...     the call fails with that error
    stop                 the process stops (SIGSTOP) until somebody lets it go on
    touch:..:FILE        another program writes to FILE
    fill:..:FOLDER       another program uses up all space of FOLDER's file system
    count                nothing; the number of calls is printed at the end

Everything else is the real program on a real file system.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eplb_cli.checkpoint import copier
from eplb_cli.cli import main

CALLS = ("pwritev", "write", "fsync", "fdatasync", "rename", "unlink", "mkdir", "preadv")


def act(what: str, argument: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "touch":
        with Path(argument).open("ab") as stream:
            stream.write(b"x")
    elif what == "fill":
        block = bytes(1 << 16)
        with Path(argument, "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(block)
        with Path(argument, "crumbs").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(block[:512])
    elif what != "count":
        raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)))


def run(fault: str, arguments: list[str]) -> int:
    what, call, number, *rest = fault.split(":", 3)
    seen = 0

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            if call in ("any", name):
                seen += 1
                if seen == int(number):
                    act(what, rest[0] if rest else "")
            return function(*args, **kwargs)

        return wrapper

    for name in CALLS:
        setattr(os, name, wrapped(name, getattr(os, name)))
    # Small steps, so that resuming inside a file is seen on small files.
    copier._STEP = 1 << 20
    code = main(arguments)
    if what == "count":
        sys.stdout.write(f"{seen}\n")
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1], sys.argv[2:]))
