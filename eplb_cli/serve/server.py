"""A running `vllm serve`: watched until every rank has proven the plan, stopped when one cannot, signals passed on."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eplb_cli.errors import ServeError
from eplb_cli.serve.arguments import EngineArguments
from eplb_cli.serve.launch import Launch
from eplb_cli.vllm_plugin.settings import VARIABLES
from eplb_cli.vllm_plugin.status import read_records

__all__ = ["InForce", "Server"]

POLL_SECONDS = 0.25


@dataclass(frozen=True)
class InForce:
    """Proof from the ranks: the plan on how many of them, and how many slots."""

    ranks: int
    slots: int


@dataclass
class Server:
    """A running `vllm serve`, ended when the block is left.

    Args:
        launch: what to start.
        output: where vLLM's standard output goes: "inherit", or "stderr" when ours must stay clean.
        log: a file for all of vLLM's output, in place of `output`.
    """

    launch: Launch
    output: Literal["inherit", "stderr"] = "inherit"
    log: Path | None = None
    process: subprocess.Popen[bytes] = field(init=False)
    status_dir: Path = field(init=False)

    def __enter__(self) -> Server:
        arguments = self.launch.arguments
        if not arguments.headless and self.is_healthy():
            raise ServeError(
                f"another server answers at {arguments.uds or f'port {arguments.port}'} already",
                rule="its answers would be taken for this one's",
                hint="Stop it, or choose another --port.",
            )
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
                preexec_fn=_end_with_parent,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.status_dir, ignore_errors=True)

    def stop(self, patience: float = 30.0) -> None:
        """End vLLM and everything it started: politely first."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @contextlib.contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Pass signals to vLLM, which ends in its own way; the exit code is then its."""
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
        before = {}
        for name in names:
            number = getattr(signal, name)
            before[number] = signal.signal(number, lambda received, _: self._forward(received))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def wait(self) -> int:
        """vLLM's exit code; 128 + n when signal n ended it."""
        code = self.process.wait()
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
                self.stop()
                raise ServeError(
                    "vLLM came up without the plan",
                    rule="every EP rank must report it",
                    hint="Is eplb installed in the environment that vLLM runs in, on every node?",
                )
            if self.process.poll() is not None:
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
            if self.process.poll() is not None:
                return False
            time.sleep(POLL_SECONDS)
        self._require_recording()
        return True

    def _records(self) -> list[dict[str, Any]]:
        """What the ranks have reported; stops the server when one reports a failure."""
        records = list(read_records(self.status_dir))
        failed = [record for record in records if "error" in record]
        if failed:
            self.stop(patience=10.0)
            raise ServeError(failed[0]["error"], hint="vLLM was stopped; its log above has the details.")
        return records

    def _proof(self, records: Sequence[Mapping[str, Any]]) -> InForce | None:
        stages: dict[int, dict[int, Mapping[str, Any]]] = {}
        for record in records:
            for rank in record.get("ranks", ()):
                stages.setdefault(rank["pp_rank"], {})[rank["ep_rank"]] = rank
        ranks = [rank for stage in stages.values() for rank in stage.values()]
        here = self.launch.arguments.nnodes == 1 and not self.launch.arguments.headless
        if not ranks or (here and len(stages) < self.launch.stages):
            return None
        if any(len(stage) != self.launch.ep_size for stage in stages.values()):
            return None
        if any(rank["plan_sha256"] != self.launch.plan_sha256 for rank in ranks):
            self.stop()
            raise ServeError("a rank runs another plan", rule="all must run the one that was checked")
        return InForce(len(ranks), sum(rank["slots_verified"] for rank in ranks))

    def _require_recording(self) -> None:
        settings = self.launch.settings
        if settings is None or settings.record_dir is None or self.launch.arguments.headless:
            return
        if not any(settings.record_dir.glob(f"{settings.record_run}-*.jsonl")):
            self.stop()
            raise ServeError(
                "vLLM came up without the recorder", file=settings.record_dir,
                hint="Is eplb installed in the environment that vLLM runs in?",
            )  # fmt: skip

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None, timeout: float = 600.0) -> Any:
        """Send a request to the server; returns the parsed JSON answer, or None for an empty one.

        Raises:
            OSError: no answer, or one that is not a success.
        """
        arguments = self.launch.arguments
        connection = _connection(arguments, timeout)
        headers = {"Content-Type": "application/json"}
        key = arguments.api_key or os.environ.get("VLLM_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
        except OSError:
            raise
        except Exception as error:  # http.client's own errors
            raise OSError(str(error)) from error
        finally:
            connection.close()
        if response.status >= 300:
            raise OSError(f"{method} {path}: {response.status} {content[:200].decode(errors='replace')}")
        return json.loads(content) if content else None

    def is_healthy(self) -> bool:
        """True when the server answers requests."""
        try:
            self.request("GET", "/health", timeout=2.0)
        except OSError:
            return False
        return True


def _end_with_parent() -> None:
    """Ask the kernel to end vLLM when eplb is killed, so that it does not stay behind unwatched."""
    set_parent_death_signal = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def _connection(arguments: EngineArguments, timeout: float) -> Any:
    """An HTTP connection to the address that vLLM was told to listen on."""
    import http.client
    import socket
    import ssl

    if arguments.uds:

        class UnixConnection(http.client.HTTPConnection):
            def connect(self) -> None:
                self.sock = socket.socket(socket.AF_UNIX)
                self.sock.settimeout(timeout)
                self.sock.connect(arguments.uds)

        return UnixConnection("localhost", timeout=timeout)
    host = arguments.host if arguments.host not in (None, "", "0.0.0.0", "::") else "127.0.0.1"  # noqa: S104
    if arguments.ssl_certfile:
        # Our own server on our own machine; its certificate is for its public name.
        context = ssl._create_unverified_context()  # noqa: S323
        return http.client.HTTPSConnection(host, arguments.port, timeout=timeout, context=context)
    return http.client.HTTPConnection(host, arguments.port, timeout=timeout)
