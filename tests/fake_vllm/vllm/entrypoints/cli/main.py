"""`vllm serve`: does what the JSON object in FAKE_VLLM says, by its keys:

log: write what happens there; ignore: names of signals that have no effect; worker: start one, in a process group of
its own, and write its id there; records: status records to write; exit: end with this code; recording: lines of a
recording to write; deaf: never listen; silent: accept connections and say nothing; healthy_after: number of requests to
/health that fail first; answers: what to answer to paths; tokens: before an answer ends by itself; order: prompts in
the order in which they are answered; wrong_under_plan: answer otherwise under a plan.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm.entrypoints.cli.serve import FlexibleArgumentParser, ServeSubcommand

__all__ = ["main"]

PLAN = json.loads(os.environ.get("FAKE_VLLM", "{}"))
LOCK = threading.Lock()


def log(event: str) -> None:
    """Note an event, for the test to wait for."""
    if "log" in PLAN:
        with LOCK, Path(PLAN["log"]).open("a") as stream:
            stream.write(f"{event}\n")


class Handler(BaseHTTPRequestHandler):
    """vLLM's paths."""

    fails = PLAN.get("healthy_after", 0)

    def do_GET(self) -> None:
        """Health, models, and what the test says."""
        log(f"GET {self.path} {self.headers.get('Authorization')}")
        if self.path == "/health" and Handler.fails:
            Handler.fails -= 1
            self.answer(503, "")
        elif self.path in PLAN.get("answers", {}):
            self.answer(200, PLAN["answers"][self.path])
        elif self.path == "/v1/models":
            self.answer(200, json.dumps({"data": [{"id": "m"}]}))
        else:
            self.answer(200, "")

    def do_POST(self) -> None:
        """An answer whose tokens tell the prompt; later prompts are answered sooner."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        log(f"POST {self.path} {body['prompt']}")
        if self.path in PLAN.get("answers", {}):
            self.answer(200, PLAN["answers"][self.path])
            return
        self.wait_for_turn(body["prompt"])
        count = body["max_tokens"] if body.get("ignore_eos") else min(body["max_tokens"], PLAN.get("tokens", 3))
        suffix = ":eplb" if "EPLB_PLAN" in os.environ and PLAN.get("wrong_under_plan") else ""
        tokens = [f"{body['prompt']}{suffix}:{index}" for index in range(count)]
        logprobs = {"tokens": tokens, "top_logprobs": [{token: -0.5} for token in tokens]}
        self.answer(200, json.dumps({"choices": [{"logprobs": logprobs}]}))

    def wait_for_turn(self, prompt: str) -> None:
        """Hold the first of the prompts in `order` until the others were answered."""
        order = PLAN.get("order", [])
        while prompt in order and order[0] != prompt:
            time.sleep(0.01)

    def answer(self, code: int, content: str) -> None:
        """Send, and let the next in `order` go on."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content.encode())
        self.wfile.flush()
        if self.command == "POST" and PLAN.get("order"):
            PLAN["order"].pop(0)

    def log_message(self, *_: object) -> None:
        """Nothing."""


class Server(ThreadingHTTPServer):
    """Over TCP of either family, or a Unix socket."""

    daemon_threads = True

    def server_bind(self) -> None:
        """Bind as vLLM does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)


def main() -> None:
    """The command."""
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers())
    given = parser.parse_args()
    log(f"start {json.dumps(sys.argv[1:])}")
    log(f"environment {json.dumps({name: value for name, value in os.environ.items() if 'EPLB' in name})}")
    log(f"process {os.getpid()} path {json.dumps(sys.path)}")
    for name in ("SIGINT", "SIGTERM", "SIGUSR1"):

        def received(number: int, _: Any) -> None:
            log(f"signal {signal.Signals(number).name}")
            if signal.Signals(number).name not in PLAN.get("ignore", ()):
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

        signal.signal(getattr(signal, name), received)
    if "worker" in PLAN:
        worker = subprocess.Popen(
            [sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"],
            process_group=0,
        )
        Path(PLAN["worker"]).write_text(str(worker.pid))
    if "EPLB_STATUS_DIR" in os.environ:
        for name, record in PLAN.get("records", {}).items():
            partial = Path(os.environ["EPLB_STATUS_DIR"]) / f".{name}"
            partial.write_text(record if isinstance(record, str) else json.dumps(record))
            partial.rename(partial.with_name(f"{name}.json"))
    if "exit" in PLAN:
        sys.exit(PLAN["exit"])
    if PLAN.get("recording") and "EPLB_RECORD_DIR" in os.environ:
        file = Path(os.environ["EPLB_RECORD_DIR"]) / f"{os.environ['EPLB_RECORD_RUN']}-0.jsonl"
        file.write_text("\n".join(map(json.dumps, PLAN["recording"])) + "\n")
    if PLAN.get("deaf"):
        log("deaf")
        while True:
            signal.pause()
    family = socket.AF_UNIX if given.uds else socket.AF_INET6 if ":" in (given.host or "") else socket.AF_INET
    Server.address_family = family
    server = Server(given.uds or (given.host or "", given.port), Handler)
    log("listening")
    if PLAN.get("silent"):
        while True:
            server.socket.accept()
            log("accepted")
    server.serve_forever()


if __name__ == "__main__":
    main()
