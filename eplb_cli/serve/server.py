"""A running `vllm serve`: watched until every rank has proven the plan, stopped when one cannot, signals passed on."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eplb_cli.errors import ServeError
from eplb_cli.serve.address import Connection, require_free
from eplb_cli.serve.launch import Launch
from eplb_cli.serve.session import end_all, has_ended, wait_for_end
from eplb_cli.untrusted import parse_json
from eplb_cli.vllm_plugin.settings import VARIABLES
from eplb_cli.vllm_plugin.status import read_records

__all__ = ["InForce", "Server"]

POLL_SECONDS = 0.25
END_POLL_SECONDS = 0.05
HEALTH_SECONDS = 2.0
MOST_ANSWER_BYTES = 64 << 20
"""Largest answer that is read; log probabilities of thousands of tokens need a few MB."""
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class InForce:
    """Proof from the ranks: the plan on how many of them, and how many slots."""

    ranks: int
    slots: int


@dataclass
class Server:
    """A running `vllm serve`, ended when the block is left; until then it gets the signals that eplb gets.

    Args:
        launch: what to start.
        output: where vLLM's standard output goes: "inherit", or "stderr" when ours must stay clean.
        log: a file for all of vLLM's output, in place of `output`.
        patience: seconds that vLLM has to end by itself when it is stopped.
    """

    launch: Launch
    output: Literal["inherit", "stderr"] = "inherit"
    log: Path | None = None
    patience: float = 30.0
    process: subprocess.Popen[bytes] = field(init=False)
    status_dir: Path = field(init=False)
    _handlers: dict[signal.Signals, Any] = field(init=False)

    def __enter__(self) -> Server:
        if not self.launch.arguments.headless:
            require_free(self.launch.arguments)
        self.status_dir = Path(tempfile.mkdtemp(prefix="eplb-status-"))
        # Variables of another run must not reach this one.
        environment = {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}
        environment |= self.launch.environment
        if self.launch.settings is not None:
            environment[VARIABLES["status_dir"]] = str(self.status_dir)
        stdout: Any = {"inherit": None, "stderr": sys.stderr.fileno()}[self.output] if self.log is None else None
        with contextlib.ExitStack() as stack:
            stderr = None
            if self.log is not None:
                stdout = stderr = stack.enter_context(self.log.open("ab"))
            self.process = subprocess.Popen(
                self.launch.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                # A group of its own: a terminal's Ctrl-C reaches eplb, which passes it on once.
                start_new_session=True,
                preexec_fn=functools.partial(_end_with_parent, os.getpid()),
            )
        self._handlers = {number: signal.signal(number, self._forward) for number in FORWARDED}
        return self

    def __exit__(self, *_: object) -> None:
        # Signals are passed on to the last: one that ended eplb here would leave vLLM's workers behind.
        self.stop()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        shutil.rmtree(self.status_dir, ignore_errors=True)

    def stop(self) -> None:
        """End vLLM and everything it started: politely first."""
        if not self.has_ended():
            self._forward(signal.SIGTERM, None)
            patience_ends = time.monotonic() + self.patience
            while not self.has_ended() and time.monotonic() < patience_ends:
                time.sleep(END_POLL_SECONDS)
        if self.process.returncode is None:
            # Before vLLM is waited for: its id stands for its session no longer than that.
            end_all(self.process.pid)
        self.process.wait()

    def has_ended(self) -> bool:
        """Whether vLLM has ended; what it started may go on until `stop`."""
        return self.process.returncode is not None or has_ended(self.process.pid)

    def _forward(self, number: int, _: object) -> None:
        """Pass a signal to vLLM, which ends in its own way; the exit code is then its."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)  # Popen's own way would wait for a process that has ended

    def wait(self) -> int:
        """vLLM's exit code, once all it started has ended too; 128 + n when signal n ended it."""
        if self.process.returncode is None:
            wait_for_end(self.process.pid)
        self.stop()
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def wait_for_proof(self) -> InForce | None:
        """Wait until every rank has proven the plan, which is before the server answers; None when vLLM ended first.

        Raises:
            ServeError: a rank reports a failure, or the server answers although the plan is not in force.
        """
        while True:
            # Asked before the records are read: a server that answers has written all of them.
            answers = not self.launch.arguments.headless and self.is_healthy()
            records = self._records()
            proof = self._proof(records)
            if proof is not None:
                return proof
            if answers:
                raise ServeError(
                    "vLLM came up without the plan",
                    rule="every EP rank must report it",
                    hint="Is eplb installed in the environment that vLLM runs in, on every node?",
                )
            if self.has_ended():
                self._records()  # a failure written just before the end
                return None
            time.sleep(POLL_SECONDS)

    def wait_until_healthy(self) -> bool:
        """Wait until the server answers requests, with the recorder where one was asked for; False when it ended first.

        A headless node answers nobody; it counts as healthy.

        Raises:
            ServeError: a rank reports a failure, or the recorder is missing.
        """
        while not self.launch.arguments.headless and not self.is_healthy():
            self._records()
            if self.has_ended():
                return False
            time.sleep(POLL_SECONDS)
        self._require_recording()
        return True

    def _records(self) -> list[dict[str, Any]]:
        """What the ranks have reported.

        Raises:
            ServeError: a rank reports a failure.
        """
        records = list(read_records(self.status_dir))
        failed = [record for record in records if "error" in record]
        if failed:
            raise ServeError(str(failed[0]["error"]), hint="vLLM was stopped; its log above has the details.")
        return records

    def _proof(self, records: Sequence[Mapping[str, Any]]) -> InForce | None:
        """The proof, when the records of all EP ranks of all pipeline stages are there.

        Raises:
            ServeError: a rank runs another plan.
        """
        try:
            reported = [rank for record in records for rank in record.get("ranks", ())]
            ranks = {
                (rank["pp_rank"], rank["ep_rank"]): (rank["plan_sha256"], rank["slots_verified"]) for rank in reported
            }
        except (LookupError, TypeError) as error:
            raise ServeError(f"a status record lacks {error}", file=self.status_dir) from None
        stages = {stage for stage, _ in ranks}
        if self.launch.arguments.nnodes == 1 and not self.launch.arguments.headless:
            # All stages are on this machine.
            stages = set(range(self.launch.stages))
        if not ranks or ranks.keys() != {(stage, rank) for stage in stages for rank in range(self.launch.ep_size)}:
            return None
        if any(plan != self.launch.plan_sha256 for plan, _ in ranks.values()):
            raise ServeError("a rank runs another plan", rule="all must run the one that was checked")
        return InForce(len(ranks), sum(slots for _, slots in ranks.values()))

    def _require_recording(self) -> None:
        settings = self.launch.settings
        if settings is None or settings.record_dir is None or self.launch.arguments.headless:
            return
        if not any(settings.record_dir.glob(f"{settings.record_run}-*.jsonl")):
            raise ServeError(
                "vLLM came up without the recorder", file=settings.record_dir,
                hint="Is eplb installed in the environment that vLLM runs in?",
            )  # fmt: skip

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600.0) -> Any:
        """Send a request to the server; returns the parsed JSON answer, or None for an empty one.

        Raises:
            OSError: no answer, or one that is not a success.
            ServeError: the answer is not JSON, or not from the server that was started.
        """
        content = self._exchange(method, path, None if body is None else json.dumps(body), timeout)
        return parse_json(content, ServeError, file=path, finite=False) if content else None

    def _exchange(self, method: str, path: str, body: str | None, timeout: float) -> bytes:
        arguments = self.launch.arguments
        headers = {"Content-Type": "application/json"}
        key = arguments.api_key or os.environ.get("VLLM_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            with contextlib.closing(Connection(arguments, self.process.pid, timeout)) as connection:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                content = response.read(MOST_ANSWER_BYTES + 1)
        except http.client.HTTPException as error:
            raise OSError(f"{method} {path}: {type(error).__name__}: {error}") from error
        if len(content) > MOST_ANSWER_BYTES:
            raise OSError(f"{method} {path}: an answer of more than {MOST_ANSWER_BYTES:,} bytes")
        if response.status >= 300:
            raise OSError(f"{method} {path}: {response.status} {content[:200].decode(errors='replace')}")
        return content

    def is_healthy(self) -> bool:
        """True when the server answers requests.

        Raises:
            ServeError: another process answers in its place.
        """
        try:
            self._exchange("GET", "/health", None, timeout=HEALTH_SECONDS)
        except OSError:
            return False
        return True


def _end_with_parent(parent: int) -> None:
    """Ask the kernel to end vLLM when eplb is killed, so that it does not stay behind unwatched."""
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
    if os.getppid() != parent:  # killed before the kernel was asked
        os._exit(1)
