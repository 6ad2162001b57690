"""eplb in a process of its own in which one system call goes wrong, and the record of the calls that it made.

A fault is `what:call:number[:argument]`: at the number-th use of <call> (`any` counts together all of CALLS that change
something), before it is made,

    kill                 the process is killed (SIGKILL), as by the kernel or an operator
    EIO, EDQUOT, ...     the call fails with that error
    stop                 the process stops (SIGSTOP) until somebody lets it go on
    touch:..:FILE        another program writes to FILE
    make:..:FOLDER       another program makes FOLDER, with a file in it
    fill:..:FOLDER       another program uses up all space of FOLDER's file system
    none                 nothing: `none:any:0`

Everything else is the real program on a real file system.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import rich.progress  # noqa: F401 - before the forks, not in each
import typer.main

from eplb_cli import files
from eplb_cli.checkpoint import convert as _convert  # noqa: F401 - likewise
from eplb_cli.checkpoint import copying
from eplb_cli.cli import app, main

CALLS = {
    "pwritev": os,
    "write": os,
    "fsync": os,
    "ftruncate": os,
    "mkdir": os,
    "unlink": os,
    "rmdir": os,
    "preadv": os,
    "link": os,
    "ioctl": fcntl,
    "_reserve": copying,
    "_renameat2": files,
}


@dataclass(frozen=True)
class Call:
    """A system call: its name, the files it touched as they were called then, and what it wrote."""

    name: str
    paths: tuple[str, ...]
    text: str = ""


@dataclass(frozen=True)
class Run:
    """A process that runs eplb, or has run it."""

    pid: int
    folder: Path

    def wait(self) -> Done:
        """What came of it."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        texts = [(self.folder / name).read_text() for name in ("out", "err", "calls")]
        shutil.rmtree(self.folder)
        calls = [Call(name, tuple(paths), text) for name, paths, text in map(json.loads, texts[2].splitlines())]
        return Done(code, texts[0], texts[1], calls)


@dataclass(frozen=True)
class Done:
    """Exit code (negative: the signal), what was printed, and the calls in order."""

    code: int
    out: str
    err: str
    calls: list[Call]


def start(fault: str, arguments: list[str], *, sync: bool = True, swap: bool = True, buffer: int = 1 << 20) -> Run:
    """Start eplb in a fork of this process.

    Args:
        fault: see above.
        arguments: the command line.
        sync: false leaves out the waiting for the device, which no killed process needs.
        swap: false takes the file system for one that knows no flags of renameat2.
        buffer: bytes of one write, and of the steps from which a killed run goes on.
    """
    command = _command()
    folder = Path(tempfile.mkdtemp(prefix="eplb-run-"))
    for name in ("out", "err", "calls"):
        (folder / name).touch()
    with warnings.catch_warnings():
        # Threads of other tests are not used after the fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return Run(pid, folder)
    code = 70
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / name, os.O_WRONLY), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        typer.main.get_command = lambda _: command
        _install(fault, folder / "calls", sync=sync, swap=swap)
        copying._BUFFER = copying._STEP = buffer
        code = main(arguments)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@cache
def _command() -> Any:
    """The command line, built here with all that it imports; every fork would do it anew, for most of its time."""
    with contextlib.redirect_stderr(io.StringIO()):
        main(["convert", ".", os.devnull, "-o", "."])
    return typer.main.get_command(app)


def _install(fault: str, log: Path, *, sync: bool, swap: bool) -> None:
    what, call, number, *rest = fault.split(":", 3)
    seen = 0
    stream = log.open("a", buffering=1)

    def wrapped(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            text = bytes(args[1]).decode(errors="replace") if name == "write" else ""
            if name == "_reserve":
                text = str(args[1])
            paths = [_path(arg) for arg in args[:2] if not isinstance(arg, bytes | memoryview | list)]
            stream.write(json.dumps([name, [path for path in paths if path], text]) + "\n")
            if call == name or (call == "any" and name not in ("preadv", "ioctl")):
                seen += 1
                if seen == int(number):
                    _act(what, rest[0] if rest else "")
            if (name == "fsync" and not sync) or (name == "_renameat2" and not swap):
                return False
            return function(*args, **kwargs)

        return wrapper

    for name, module in CALLS.items():
        setattr(module, name, wrapped(name, getattr(module, name)))


def _path(argument: Any) -> str:
    """The path that a call's argument names."""
    if isinstance(argument, int):
        with contextlib.suppress(OSError):
            return str(Path(f"/proc/self/fd/{argument}").readlink())
        return ""
    return str(argument) if isinstance(argument, str | Path) else ""


def _act(what: str, argument: str) -> None:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif what == "touch":
        with Path(argument).open("ab") as stream:
            stream.write(b"x")
    elif what == "make":
        Path(argument).mkdir(exist_ok=True)
        Path(argument, "mine.txt").write_text("keep")
    elif what == "fill":
        block = bytes(1 << 16)
        with Path(argument, "filler").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(block)
        with Path(argument, "crumbs").open("wb", buffering=0) as stream, contextlib.suppress(OSError):
            while True:
                stream.write(block[:512])
    elif what != "none":
        raise OSError(getattr(errno, what), os.strerror(getattr(errno, what)))
