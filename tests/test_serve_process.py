"""`eplb serve` and `eplb record` with a small server in vLLM's place: signals, ends, proofs, answers, impostors."""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eplb_cli.errors import OutputError, ServeError, UsageError
from eplb_cli.metrics import initial_map
from eplb_cli.placement import Placement
from eplb_cli.serve import InForce, Launch, Server, prepare, without_plan
from eplb_cli.serve import server as server_module
from eplb_cli.serve import session as session_module
from eplb_cli.serve.address import Connection, require_free
from eplb_cli.serve.arguments import read_arguments
from eplb_cli.serve.batch import record_batch
from eplb_cli.serve.requests import answer_all
from eplb_cli.vllm_plugin.settings import Settings
from tests.vllm_cpu.engine import free_port

FAKE = Path(__file__).parent / "fake_vllm"
SHA = "5a" * 32


@dataclass
class Fake:
    """A scenario for the server, and the events that it wrote."""

    folder: Path
    port: int

    @property
    def log(self) -> Path:
        """Where the server writes."""
        return self.folder / "events"

    def environment(self, **scenario: Any) -> dict[str, str]:
        """Variables that put the server in vLLM's place."""
        path = os.pathsep.join([str(FAKE), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, "FAKE_VLLM": json.dumps({"log": str(self.log), **scenario})}

    def events(self, start: str = "") -> list[str]:
        """The events so far that start so."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith(start)]

    def wait_for(self, start: str, count: int = 1) -> None:
        """Wait for events."""
        for _ in range(6000):
            if len(self.events(start)) >= count:
                return
            time.sleep(0.01)
        pytest.fail(f"no {start!r} among {self.events()}: {(self.folder / 'err').read_text()}")

    def launch(self, *arguments: str, **scenario: Any) -> Launch:
        """A launch that has passed all checks: 2 EP ranks on 2 pipeline stages."""
        given = read_arguments(["--port", str(self.port), *arguments])
        return Launch(
            command=(sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", "model", *given.rest),
            environment=self.environment(**scenario),
            settings=Settings(plan=self.folder / "plan.json"),
            layout="source",
            plan_sha256=SHA,
            ep_size=2,
            stages=2,
            num_redundant_experts=0,
            arguments=given,
        )


@pytest.fixture
def fake(tmp_path: Path) -> Fake:
    return Fake(tmp_path, free_port())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.01)
    monkeypatch.delenv("VLLM_API_KEY", raising=False)


def ended(process: int) -> bool:
    """Wait for the end of a process that is not our child; False when it lives on."""
    try:
        descriptor = os.pidfd_open(process)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 60)[0])
    finally:
        os.close(descriptor)


def process_of(fake: Fake) -> int:
    fake.wait_for("process ")
    return int(fake.events("process ")[-1].split()[1])


# --- `eplb serve` as a process -----------------------------------------------------------------------------------


def records(*, stages: int = 1, sha: str = SHA, ranks: int = 2) -> dict[str, Any]:
    """The record of each stage, of ranks in no order."""
    return {
        f"stage{stage}": {
            "ranks": [
                {"pp_rank": stage, "ep_rank": rank, "plan_sha256": sha, "slots_verified": 10 + rank}
                for rank in reversed(range(ranks))
            ]
        }
        for stage in range(stages)
    }


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    placement = Placement(np.tile(initial_map(16, 4)[::-1], (4, 1)), np.arange(1, 5, dtype=np.int32), 16, 2)
    placement.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


@contextmanager
def eplb(fake: Fake, *arguments: object, command: str = "serve", **scenario: Any) -> Iterator[subprocess.Popen[str]]:
    """An `eplb` of its own session, as a terminal would start it; its output goes to `<folder>/out` and `err`."""
    words = [sys.executable, "-P", "-m", "eplb_cli", command, *map(str, arguments), "--port", str(fake.port)]
    with (fake.folder / "out").open("w") as out, (fake.folder / "err").open("w") as err:
        process = subprocess.Popen(
            words, stdout=out, stderr=err, text=True, start_new_session=True,
            env={**os.environ, **fake.environment(**scenario), "TMPDIR": str(fake.folder)},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def in_force(plan: Path) -> dict[str, Any]:
    return records(sha=Placement.load(plan).map_sha256)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_vllm_and_its_exit_code_is_ours(
    fake: Fake, tiny_qwen3_moe: Path, plan: Path, number: signal.Signals
) -> None:
    with eplb(fake, tiny_qwen3_moe, "--plan", plan, "-tp", 2, records=in_force(plan)) as process:
        fake.wait_for("GET /health")
        process.send_signal(number)
        assert process.wait() == 128 + number
    assert fake.events("signal") == [f"signal {number.name}"]
    assert "plan in force on 2 ranks, 21/21 slots verified" in (fake.folder / "err").read_text()


def test_ctrl_c_in_a_terminal_reaches_vllm_once_each_time(fake: Fake, tiny_qwen3_moe: Path, plan: Path) -> None:
    with eplb(fake, tiny_qwen3_moe, "--plan", plan, "-tp", 2, records=in_force(plan), ignore=["SIGINT"]) as process:
        fake.wait_for("GET /health")
        for times in (1, 2):
            os.killpg(process.pid, signal.SIGINT)
            fake.wait_for("signal SIGINT", times)
        process.terminate()
        assert process.wait() == 143
    assert fake.events("signal") == ["signal SIGINT", "signal SIGINT", "signal SIGTERM"]


def test_an_exit_code_of_vllm_is_ours(fake: Fake, tiny_qwen3_moe: Path, plan: Path) -> None:
    with eplb(fake, tiny_qwen3_moe, "--plan", plan, "-tp", 2, exit=7) as process:
        assert process.wait() == 7
    assert "vLLM ended before it was ready" in (fake.folder / "err").read_text()


def test_vllm_ends_with_an_eplb_that_is_killed(fake: Fake, tiny_qwen3_moe: Path, plan: Path) -> None:
    with eplb(fake, tiny_qwen3_moe, "--plan", plan, "-tp", 2, records=in_force(plan)) as process:
        fake.wait_for("GET /health")
        vllm = process_of(fake)
        process.kill()
        assert ended(vllm)
    assert fake.events("signal") == ["signal SIGTERM"]


def test_variables_of_another_run_reach_neither_the_parser_nor_vllm(
    fake: Fake, tiny_qwen3_moe: Path, plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPLB_RECORD_DIR", str(fake.folder / "other"))
    with eplb(fake, tiny_qwen3_moe, "--plan", plan, "-tp", 2, exit=0) as process:
        process.wait()
    asked, started = fake.events("parser")
    assert "EPLB_RECORD_DIR" not in asked + started
    assert "'EPLB_PLAN', 'EPLB_STATUS_DIR'" in started


def prompts_file(folder: Path) -> Path:
    (folder / "prompts").write_text("first\nsecond\nthird\n")
    return folder / "prompts"


def test_smoke_compares_with_a_server_without_eplb(fake: Fake, tiny_qwen3_moe: Path, plan: Path) -> None:
    arguments = (tiny_qwen3_moe, "--plan", plan, "-tp", 2, "--smoke", prompts_file(fake.folder))
    with eplb(fake, *arguments, records=in_force(plan)) as process:
        while "smoke: 3/3 prompts" not in (fake.folder / "err").read_text():
            assert process.poll() is None, (fake.folder / "err").read_text()
        process.terminate()
        process.wait()
    plain, planned = (json.loads(event.partition(" ")[2]) for event in fake.events("start"))
    port = ["--port", str(fake.port)]
    assert plain == ["serve", str(tiny_qwen3_moe), "-tp", "2", *port, "--enable-expert-parallel"]
    assert planned[-3:] == ["--enable-eplb", "--eplb-config", '{"num_redundant_experts": 4}']


def test_smoke_stops_a_server_that_answers_otherwise(fake: Fake, tiny_qwen3_moe: Path, plan: Path) -> None:
    arguments = (tiny_qwen3_moe, "--plan", plan, "-tp", 2, "--smoke", prompts_file(fake.folder))
    with eplb(fake, *arguments, records=in_force(plan), wrong_under_plan=True) as process:
        assert process.wait() == 1
    assert "row 1: smoke: 3 of 3 prompts are answered differently" in (fake.folder / "err").read_text()
    assert ended(process_of(fake))


# --- a server of this process ------------------------------------------------------------------------------------


def test_workers_of_any_group_end_with_the_server(fake: Fake) -> None:
    with Server(fake.launch(worker=str(fake.folder / "worker"))):
        fake.wait_for("listening")
    assert ended(int((fake.folder / "worker").read_text()))


def test_workers_end_with_a_server_that_ended_by_itself(fake: Fake) -> None:
    with Server(fake.launch(exit=3, worker=str(fake.folder / "worker"))) as server:
        assert server.wait() == 3
        assert ended(int((fake.folder / "worker").read_text()))


def test_a_server_that_does_not_end_politely_is_killed(fake: Fake) -> None:
    with Server(fake.launch(ignore=["SIGTERM"], worker=str(fake.folder / "worker")), patience=0.1) as server:
        fake.wait_for("listening")
    assert server.wait() == 128 + signal.SIGKILL
    assert ended(int((fake.folder / "worker").read_text()))
    assert not server.status_dir.exists()


def test_handlers_of_signals_are_put_back(fake: Fake) -> None:
    before = {number: signal.getsignal(number) for number in server_module.FORWARDED}
    with Server(fake.launch(deaf=True)):
        assert signal.getsignal(signal.SIGHUP) != before[signal.SIGHUP]
    assert {number: signal.getsignal(number) for number in before} == before


def test_the_proof_is_of_every_rank_of_every_stage(fake: Fake) -> None:
    with Server(fake.launch(records=records(stages=2), healthy_after=10**9)) as server:
        assert server.wait_for_proof() == InForce(4, 42)


BROKEN_PROOFS = {
    "no record": ({}, "vLLM came up without the plan"),
    "one stage only": (records(stages=1), "vLLM came up without the plan"),
    "a rank is missing": (records(stages=2, ranks=1), "vLLM came up without the plan"),
    "a rank too many": (records(stages=2, ranks=3), "vLLM came up without the plan"),
    "another plan": (records(stages=2, sha="a5" * 32), "a rank runs another plan"),
    "another plan on one stage": (
        {**records(stages=2), "stage1": records(stages=2, sha="a5" * 32)["stage1"]},
        "a rank runs another plan",
    ),
    "a record that cannot be read": ({"stage0": "{"}, "stage0.json: is not JSON"),
    "a record of another kind": ({"stage0": "[]"}, "stage0.json: is no status record"),
    "a rank of another kind": ({"stage0": {"ranks": [{"pp_rank": 0}]}}, "a status record lacks 'ep_rank'"),
    "a failure": ({**records(stages=2), "rank3": {"error": "slot 7 is wrong"}}, "slot 7 is wrong"),
}


@pytest.mark.parametrize("found, message", BROKEN_PROOFS.values(), ids=BROKEN_PROOFS.keys())
def test_a_server_without_the_whole_proof_is_stopped(fake: Fake, found: dict[str, Any], message: str) -> None:
    with pytest.raises(ServeError, match=message), Server(fake.launch(records=found)) as server:
        server.wait_for_proof()
    assert server.process.poll() is not None


def test_a_failure_written_at_the_very_end_is_told(fake: Fake) -> None:
    launch = fake.launch(records={"rank1": {"error": "out of memory"}}, exit=1)
    with pytest.raises(ServeError, match="out of memory"), Server(launch) as server:
        server.process.wait()
        server.wait_for_proof()


def test_a_server_that_ends_has_no_proof(fake: Fake) -> None:
    with Server(fake.launch(exit=3)) as server:
        assert server.wait_for_proof() is None
        assert server.wait_until_healthy() is False
        assert server.wait() == 3


def test_on_several_nodes_the_stages_of_others_are_not_waited_for(fake: Fake) -> None:
    launch = fake.launch(records=records(stages=1), healthy_after=10**9)
    launch.arguments.values["nnodes"] = 2  # type: ignore[index]
    with Server(launch) as server:
        assert server.wait_for_proof() == InForce(2, 21)


def test_a_slow_server_is_waited_for(fake: Fake) -> None:
    with Server(fake.launch(healthy_after=3)) as server:
        assert server.wait_until_healthy()
    assert len(fake.events("GET /health")) == 4


def test_a_silent_server_is_not_healthy(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "HEALTH_SECONDS", 0.2)
    with Server(fake.launch(silent=True)) as server:
        fake.wait_for("listening")
        assert not server.is_healthy()
        assert fake.events("accepted")


def test_a_recorder_that_is_missing_stops_the_server(fake: Fake) -> None:
    launch = replace(fake.launch(), settings=Settings(record_dir=fake.folder, record_run="r"))
    with pytest.raises(ServeError, match="vLLM came up without the recorder"), Server(launch) as server:
        server.wait_until_healthy()
    (fake.folder / "r-0.jsonl").touch()
    with Server(launch) as server:
        assert server.wait_until_healthy()


def test_answers_are_whole_and_in_the_order_of_the_prompts(fake: Fake) -> None:
    requests = [{"prompt": prompt} for prompt in ("a", "b", "c")]
    with Server(fake.launch(order=["c", "a", "b"], tokens=2)) as server:
        server.wait_until_healthy()
        answers = answer_all(server, requests, max_tokens=3, concurrency=3)
    assert [answer.tokens for answer in answers] == [(f"{p}:0", f"{p}:1", f"{p}:2") for p in "abc"]


STRANGE = {
    "not JSON": "<html>",
    "nested": "[" * 100_000,
    "a list": "[]",
    "no choices": "{}",
    "null": '{"choices": [{"logprobs": null}]}',
    "no alternatives": '{"choices": [{"logprobs": {"tokens": ["a"], "top_logprobs": [null]}}]}',
    "fewer alternatives": '{"choices": [{"logprobs": {"tokens": ["a", "b"], "top_logprobs": [{"a": 0}]}}]}',
    "text for a number": '{"choices": [{"logprobs": {"tokens": ["a"], "top_logprobs": [{"a": "x"}]}}]}',
    "empty": "",
}


@pytest.mark.parametrize("answer", STRANGE.values(), ids=STRANGE.keys())
def test_a_strange_answer_is_an_error_of_the_server(fake: Fake, answer: str) -> None:
    with Server(fake.launch(answers={"/v1/completions": answer})) as server:
        server.wait_until_healthy()
        with pytest.raises(ServeError):
            answer_all(server, [{"prompt": "a"}], max_tokens=1)


@pytest.mark.parametrize("answer", ["", "[]", '{"data": []}', '{"data": {"0": 1}}'])
def test_a_server_that_names_no_model_is_told(fake: Fake, answer: str) -> None:
    with Server(fake.launch(answers={"/v1/models": answer})) as server:
        server.wait_until_healthy()
        with pytest.raises(ServeError, match="names no model"):
            answer_all(server, [{"prompt": "a"}], max_tokens=1)


def test_an_endless_answer_is_not_read_to_its_end(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_ANSWER_BYTES", 1000)
    with Server(fake.launch(answers={"/a": f'"{"x" * 998}"', "/b": f'"{"x" * 999}"'})) as server:
        server.wait_until_healthy()
        assert len(server.request("GET", "/a")) == 998
        with pytest.raises(OSError, match="more than 1,000 bytes"):
            server.request("GET", "/b")


def test_the_key_goes_to_the_server_that_was_started(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "other")
    with Server(fake.launch("--api-key", "secret")) as server:
        assert server.wait_until_healthy()
    assert set(fake.events("GET")) == {"GET /health Bearer secret"}


# --- whose processes are ended -----------------------------------------------------------------------------------


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ids of processes that would be killed in one round; none is."""
    ids: set[int] = set()
    monkeypatch.setattr(session_module, "_ROUNDS", 1)
    monkeypatch.setattr(os, "kill", lambda process, _: ids.add(process))
    return ids


@contextmanager
def family(*, own_session: bool) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A child, its worker in a process group of its own, and its worker in a session of its own; until stdin closes."""
    worker = "[sys.executable, '-c', 'import sys; sys.stdin.read()']"
    program = (
        f"import subprocess, sys\na = subprocess.Popen({worker}, process_group=0)\n"
        f"b = subprocess.Popen({worker}, start_new_session=True)\n"
        "print(a.pid, b.pid, flush=True)\nsys.stdin.read(), a.wait(), b.wait()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=own_session
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        grouped, apart = map(int, child.stdout.readline().split())
        yield child, grouped, apart
        child.stdin.close()


@pytest.mark.parametrize("every", ["processes_of", "_lives_in"])
def test_either_of_two_looks_spares_who_is_not_of_the_session(
    killed: set[int], monkeypatch: pytest.MonkeyPatch, every: str
) -> None:
    everybody = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    with family(own_session=True) as (child, grouped, apart):
        found = [*everybody, child.pid, grouped, apart]
        monkeypatch.setattr(
            session_module, every, {"processes_of": lambda _: found, "_lives_in": lambda *_: True}[every]
        )
        session_module.end_all(child.pid)
    assert killed == {child.pid, grouped}


def test_only_a_session_that_a_child_of_ours_leads_is_ended(killed: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    with family(own_session=True) as (child, grouped, apart), family(own_session=False) as (same_session, *_):
        monkeypatch.setattr(session_module, "processes_of", lambda _: [child.pid, grouped])
        monkeypatch.setattr(session_module, "_lives_in", lambda *_: True)
        for leader in (0, 1, -1, os.getpid(), os.getppid(), os.getsid(0), grouped, apart, same_session.pid):
            session_module.end_all(leader)
        assert not killed
        session_module.end_all(child.pid)
        assert killed == {child.pid, grouped}
        killed.clear()
    # Waited for: its id may be another's by now.
    session_module.end_all(child.pid)
    assert not killed


# --- whose address it is -----------------------------------------------------------------------------------------


def listener(family: socket.AddressFamily, where: Any) -> socket.socket:
    sock = socket.socket(family)
    sock.bind(where)
    sock.listen()
    return sock


@pytest.mark.parametrize("place", ["any", "127.0.0.1", "0.0.0.0", "localhost", "::1", "uds"])  # noqa: S104
def test_an_address_is_found_free_and_the_server_at_it_is_known(fake: Fake, place: str) -> None:
    arguments = {"any": [], "uds": ["--uds", str(fake.folder / "s")]}.get(place, ["--host", place])
    with Server(fake.launch(*arguments)) as server:
        assert server.wait_until_healthy()


@pytest.mark.parametrize("host", [None, "127.0.0.1", "0.0.0.0", "localhost", "::1", "::"])  # noqa: S104
def test_a_port_that_is_taken_is_refused_before_anything_starts(fake: Fake, host: str | None) -> None:
    holder = "::1" if ":" in (host or "") else "127.0.0.1"
    family = socket.AF_INET6 if ":" in holder else socket.AF_INET
    with listener(family, (holder, fake.port)), pytest.raises(ServeError, match=f"port {fake.port}: Address already"):
        Server(fake.launch(*([] if host is None else ["--host", host]))).__enter__()
    assert not fake.events()


def test_addresses_that_cannot_be(fake: Fake) -> None:
    (fake.folder / "s").touch()
    with pytest.raises(ServeError, match="exists already"):
        require_free(read_arguments(["--uds", str(fake.folder / "s")]))
    for port in ("0", "65536", "-1"):
        with pytest.raises(UsageError, match=r"a port is 1\.\.65535"):
            require_free(read_arguments([f"--port={port}"]))
    for host in ("no.such.host.invalid", "300.1.1.1", "::x", "a" * 300):
        with pytest.raises(ServeError, match="vLLM cannot listen on"):
            require_free(read_arguments(["--host", host, "--port", str(fake.port)]))


@pytest.mark.parametrize("place", ["any", "::1", "uds"])
def test_an_impostor_that_takes_the_address_after_the_check_is_sent_nothing(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    families = {"any": socket.AF_INET, "::1": socket.AF_INET6, "uds": socket.AF_UNIX}
    arguments = {"any": [], "::1": ["--host", "::1"], "uds": ["--uds", str(fake.folder / "s")]}[place]
    where = {"any": ("127.0.0.1", fake.port), "::1": ("::1", fake.port), "uds": str(fake.folder / "s")}[place]
    impostors = []

    def check_and_lose(given: Any) -> None:
        require_free(given)
        impostors.append(listener(families[place], where))

    monkeypatch.setattr(server_module, "require_free", check_and_lose)
    monkeypatch.setattr(server_module, "HEALTH_SECONDS", 0.5)
    with Server(fake.launch("--api-key", "secret", *arguments, deaf=True)) as server:
        [impostor] = impostors
        if place != "uds":
            # The connection waits in the impostor's queue: nobody's yet, so nothing is sent.
            assert not server.is_healthy()
            waiting, _ = impostor.accept()
            assert waiting.recv(100) == b""
        accepting = subprocess.Popen(
            [sys.executable, "-c", "import socket, sys\ns, _ = socket.socket(fileno=0).accept()\n"
             "sys.stdout.buffer.write(s.recv(100))"],
            stdin=impostor.fileno(), stdout=subprocess.PIPE,
        )  # fmt: skip
        monkeypatch.setattr(server_module, "HEALTH_SECONDS", 60.0)
        with pytest.raises(ServeError, match="another process answers at"):
            server.wait_for_proof()
        assert accepting.communicate()[0] == b""
        impostor.close()


@pytest.mark.parametrize(
    "host, asked",
    [(None, "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("10.1.2.3", "10.1.2.3")],  # noqa: S104
)
def test_a_server_on_all_addresses_is_asked_at_this_machine_s(host: str | None, asked: str) -> None:
    given = read_arguments([] if host is None else ["--host", host])
    assert Connection(given, 0, 1.0).host == asked


# --- a batch that is recorded ------------------------------------------------------------------------------------

RECORDING = [
    {"version": 1},
    {"phase": "prefill", "tokens": 5, "window": 3},
    {"phase": "decode", "tokens": 7, "window": 3},
    {"phase": "all", "tokens": 11, "window": 8},
]


def record(fake: Fake, monkeypatch: pytest.MonkeyPatch, output: Path, *, force: bool = False, **scenario: Any) -> Any:
    monkeypatch.setattr("eplb_cli.serve.batch.QUIET_SECONDS", 0.0)
    for name, value in fake.environment(**scenario).items():
        monkeypatch.setenv(name, value)
    return record_batch(
        "no/model", prompts_file(fake.folder), output, ["--port", str(fake.port)],
        max_tokens=2, concurrency=2, record_steps=4, force=force,
    )  # fmt: skip


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline", "needs_vllm")
def test_a_batch_leaves_its_recording_and_nothing_else(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    output = fake.folder / "loads"
    (fake.folder / "loads.partial").mkdir()
    (fake.folder / "loads.partial" / "mine").touch()
    found = record(fake, monkeypatch, output, recording=RECORDING)
    assert (found.prompts, found.files, found.windows) == (3, 1, 2)
    assert (found.prefill_tokens, found.decode_tokens, found.mixed_tokens) == (5, 7, 11)
    assert [file.read_text() for file in output.iterdir()] == ["\n".join(map(json.dumps, RECORDING)) + "\n"]
    assert sorted(path.name for path in fake.folder.glob("loads*")) == ["loads", "loads.partial"]
    assert (fake.folder / "loads.partial" / "mine").exists()
    assert len(fake.events("POST")) == 3


@pytest.mark.usefixtures("offline", "needs_vllm")
@pytest.mark.parametrize(
    "scenario, message",
    [
        ({"exit": 4}, "vLLM ended with exit code 4"),
        ({"recording": RECORDING[:1]}, "nothing was recorded"),
        ({"recording": [*RECORDING, {"end": "full"}]}, "the recording reached its size limit"),
        ({}, "vLLM came up without the recorder"),
    ],
)
def test_a_batch_that_fails_leaves_no_output(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, scenario: dict[str, Any], message: str
) -> None:
    with pytest.raises(ServeError, match=message):
        record(fake, monkeypatch, fake.folder / "loads", **scenario)
    assert not (fake.folder / "loads").exists()
    assert len(list(fake.folder.glob("loads.*.partial"))) == ("recording" in scenario)


@pytest.mark.usefixtures("offline", "needs_vllm")
@pytest.mark.parametrize("force", [False, True])
def test_an_output_that_appears_meanwhile_is_replaced_only_by_force(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    output = fake.folder / "loads"
    monkeypatch.setattr("eplb_cli.serve.batch._wait_for_rest", lambda _: (output.mkdir(), (output / "mine").touch()))
    if force:
        record(fake, monkeypatch, output, force=True, recording=RECORDING)
        assert not (output / "mine").exists()
    else:
        with pytest.raises(OutputError, match="appeared while eplb was running"):
            record(fake, monkeypatch, output, recording=RECORDING)
        assert (output / "mine").exists()


# --- the folder that eplb is started in --------------------------------------------------------------------------

HOSTILE = ("torch", "vllm", "random", "multiprocessing", "sitecustomize", "usercustomize", "eplb_cli", "json", "numpy")


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder whose modules tell when they are run."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write({name!r} + chr(10))\n")
    return folder


def run_in(folder: Path, environment: dict[str, str], *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*map(str, words)], cwd=folder, env={**os.environ, **environment}, text=True, capture_output=True, check=False
    )


EPLB = (sys.executable, "-P", "-c", "import sys; from eplb_cli.cli import run; sys.argv[0] = 'eplb'; run()")


@pytest.mark.usefixtures("needs_vllm")
def test_no_command_runs_a_module_of_the_current_folder(
    fake: Fake, hostile: Path, tiny_qwen3_moe: Path, plan: Path
) -> None:
    environment = fake.environment(exit=0)
    model = (tiny_qwen3_moe, "--plan", plan, "-tp", 2)
    dry = run_in(hostile, environment, *EPLB, "serve", *model, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert run_in(hostile, environment, *EPLB, "serve", *model, "--port", fake.port).returncode == 0
    assert "cannot be imported" in run_in(hostile, environment, *EPLB, "doctor").stdout
    assert run_in(hostile, environment, "sh", "-c", dry.stdout).returncode == 0
    assert len(fake.events("start")) == 2
    assert not (fake.folder / "ran").exists()
    # What this guards against; coverage.py may have imported smaller modules before:
    run_in(hostile, {}, sys.executable, "-c", "import torch")
    assert (fake.folder / "ran").read_text() == "torch\n"


@pytest.mark.usefixtures("offline")
def test_what_a_server_starts_runs_no_module_of_the_current_folder_either(
    fake: Fake, hostile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As multiprocessing's spawn does: `python -c`, with the folder first on the path of whoever does not say no."""
    for name, value in fake.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(hostile)
    given = prepare("no/model", None, ["--port", str(fake.port)], record=fake.folder / "r", dry_run=True)
    subprocess.run([sys.executable, "-c", "import random"], env={**os.environ, **given.environment}, check=True)
    assert not (fake.folder / "ran").exists()


def test_names_in_commands_are_quoted(fake: Fake, tiny_qwen3_moe: Path, plan: Path) -> None:
    evil = fake.folder / "a; touch ran $(id) 'x'"
    evil.symlink_to(tiny_qwen3_moe)
    plan.rename(fake.folder / "p; touch ran")
    run = run_in(fake.folder, fake.environment(), *EPLB, "serve", evil, "--plan", "p; touch ran", "--dry-run")
    words = shlex.split(run.stdout)
    assert words[words.index("serve") + 1] == str(evil)
    assert f"EPLB_PLAN={fake.folder / 'p; touch ran'}" in words


def test_the_baseline_overrides_what_a_config_file_asks_for(fake: Fake) -> None:
    (fake.folder / "c.yaml").write_text("enable-eplb: true\n")
    plain = without_plan(fake.launch("--config", str(fake.folder / "c.yaml"), "--enable-eplb"), "other")
    assert plain.command[4:] == (
        "serve", "other", "--port", str(fake.port), "--config", str(fake.folder / "c.yaml"),
        "--no-enable-eplb", "--eplb-config", '{"num_redundant_experts": 0}',
    )  # fmt: skip
    assert (plain.settings, plain.plan_sha256) == (None, None)
