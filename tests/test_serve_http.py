"""`eplb serve` and `eplb record` as users run them: a process of their own, a real vLLM behind HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eplb_cli.errors import ServeError
from eplb_cli.serve import Server, prepare
from eplb_cli.serve.arguments import EngineArguments
from eplb_cli.serve.requests import answer_all
from tests.vllm_cpu.engine import ENVIRONMENT, PROMPTS, SHIM, TP2, Engines, Served, free_plan, free_port

pytestmark = pytest.mark.vllm

SMALL = (
    "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "8", "--max-num-batched-tokens", "256",
    "--enforce-eager", "--no-enable-prefix-caching",
)  # fmt: skip
FAST_REBALANCES = ("--eplb-config", '{"communicator": "torch_gloo", "step_interval": 20, "window_size": 10}')
EPLB_ON = ("--enable-expert-parallel", "--enable-eplb")


class Client(Server):
    """The requests of a Server, to one that somebody else started."""

    def __init__(self, port: int, starter: int) -> None:
        vllm = int(Path(f"/proc/{starter}/task/{starter}/children").read_text().split()[0])
        self.process = SimpleNamespace(pid=vllm)  # type: ignore[assignment]
        self.launch = _Address(EngineArguments((), {}, frozenset(), {"port": port, "host": None, "uds": None}))  # type: ignore[assignment]


class _Address:
    def __init__(self, arguments: EngineArguments) -> None:
        object.__setattr__(
            arguments, "values", {**arguments.values, "ssl_certfile": None, "api_key": None, "headless": None}
        )
        self.arguments = arguments


@contextmanager
def eplb_serve(folder: Path, *arguments: object) -> Iterator[tuple[subprocess.Popen[str], Client, Path]]:
    """`eplb serve ARGUMENTS` in the background, waited for until it says that the plan is in force."""
    port = free_port()
    log = folder / "serve.log"
    command = [sys.executable, "-m", "eplb_cli", "serve", *map(str, arguments), *SMALL, "--port", str(port)]
    with log.open("w") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, text=True, env={**os.environ, **ENVIRONMENT, **SHIM}
        )
    try:
        while "plan in force on" not in log.read_text():
            if process.poll() is not None:
                pytest.fail(f"eplb serve ended with {process.returncode}:\n{log.read_text()[-4000:]}")
            time.sleep(0.2)
        client = Client(port, process.pid)
        while not client.is_healthy():
            assert process.poll() is None, log.read_text()[-4000:]
            time.sleep(0.2)
        yield process, client, log
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(60)


def eplb_command(arguments: list[object]) -> subprocess.CompletedProcess[str]:
    """An `eplb` command to its end, without the shim."""
    command = [sys.executable, "-m", "eplb_cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False)


def tokens_of(client: Client, prompts: tuple[str, ...] = PROMPTS, *, max_tokens: int = 16) -> list[list[int]]:
    answers = answer_all(client, [{"prompt": prompt} for prompt in prompts], max_tokens=max_tokens)
    return [[int(token.removeprefix("token_id:")) for token in answer.tokens] for answer in answers]


def raw(client: Client, path: str) -> str:
    import urllib.request

    url = f"http://127.0.0.1:{client.launch.arguments.port}{path}"
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read().decode())


def test_qwen3_is_served_from_the_plan(vllm_models: dict[str, Served], engines: Engines, tmp_path: Path) -> None:
    """Smoke comparison first, then the plan's server: tokens, the live placement, the metrics, the end."""
    model = vllm_models["qwen3"]
    plan = free_plan(model)
    plan.save(tmp_path / "plan.json")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS[:3]))
    expected = engines.run(model.folder, TP2)[0].rounds[0]
    with eplb_serve(
        tmp_path, model.folder, "--plan", tmp_path / "plan.json", "-tp", 2, "--smoke", tmp_path / "prompts.txt",
        *FAST_REBALANCES, *EPLB_ON,
    ) as (process, client, log):  # fmt: skip
        while "prompts give the same tokens" not in log.read_text():
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        text = log.read_text()
        assert f"plan in force on 2 ranks, 80/80 slots verified (sha256 {plan.map_sha256})" in text
        assert "smoke: 3/3 prompts give the same tokens without EPLB" in text
        for _ in range(2):
            assert tokens_of(client) == expected
        placement = json.loads(raw(client, "/eplb/placement?full=true"))
        assert placement["consistent"]
        assert [rank["ep_rank"] for rank in placement["ranks"]] == [0, 1]
        assert {rank["plan_sha256"] for rank in placement["ranks"]} == {plan.map_sha256}
        assert placement["last_rebalance"]["slots_moved"] > 0
        assert not placement["as_planned"]
        assert "eplb:slots_verified 80.0" in raw(client, "/metrics")
        assert 'eplb:balancedness{placement="after"}' in raw(client, "/metrics")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_llama4_on_data_parallel_ranks_under_our_policy(
    vllm_models: dict[str, Served], engines: Engines, tmp_path: Path
) -> None:
    model = vllm_models["llama4"]
    plan = free_plan(model)
    plan.save(tmp_path / "plan.json")
    expected = engines.run(model.folder, TP2)[0].rounds[0]
    with eplb_serve(
        tmp_path, model.folder, "--plan", tmp_path / "plan.json", "-dp", 2, "--runtime-policy", "eplb",
        "--record", tmp_path / "loads", *FAST_REBALANCES, *EPLB_ON,
    ) as (process, client, log):  # fmt: skip
        assert f"plan in force on 2 ranks, 20/20 slots verified (sha256 {plan.map_sha256})" in log.read_text()
        for _ in range(2):
            assert tokens_of(client) == expected
        # byte-level prompts, one token a byte; the last generated token is never run
        wanted = 2 * sum(len(prompt) + 15 for prompt in PROMPTS)
        while recorded_tokens(tmp_path / "loads") < wanted:  # an idle server writes what it has
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert recorded_tokens(tmp_path / "loads") == wanted


def recorded_tokens(folder: Path) -> int:
    """The tokens of all whole lines of a recording."""
    lines = [line for file in folder.iterdir() for line in file.read_text().splitlines(keepends=True)[1:]]
    return sum(json.loads(line)["tokens"] for line in lines if line.endswith("\n"))


def test_a_server_without_the_plugin_is_stopped(
    vllm_models: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**ENVIRONMENT, **SHIM}.items():
        monkeypatch.setenv(name, value)
    model = vllm_models["qwen3"]
    free_plan(model).save(tmp_path / "plan.json")
    arguments = [*SMALL, *EPLB_ON, "-tp", "2", "--port", str(free_port()), *FAST_REBALANCES]
    launch = prepare(str(model.folder), tmp_path / "plan.json", arguments)
    excluded = replace(launch, environment={**launch.environment, "VLLM_PLUGINS": "eplb_cpu_shim"})
    refused = pytest.raises(ServeError, match="vLLM came up without the plan")
    with refused, Server(excluded, log=tmp_path / "log") as server:
        server.wait_for_proof()
    assert server.process.poll() is not None


def test_a_failure_inside_vllm_is_one_line(vllm_models: dict[str, Served], tmp_path: Path) -> None:
    """EPLB without the shim: vLLM itself refuses; the exit code is vLLM's."""
    model = vllm_models["qwen3"]
    free_plan(model).save(tmp_path / "plan.json")
    arguments = ["serve", model.folder, "--plan", tmp_path / "plan.json", "-tp", 2, "--port", free_port(), *SMALL]
    run = eplb_command(arguments)
    assert run.returncode == 1
    assert "Expert parallelism load balancing is only supported" in run.stdout + run.stderr
    assert "vLLM ended before it was ready" in run.stderr


def test_a_batch_is_recorded_and_profiled(vllm_models: dict[str, Served], tmp_path: Path) -> None:
    model = vllm_models["qwen3"]
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS]
    chat: Any = {"messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "prompts.jsonl").write_text("\n".join([*lines, json.dumps(chat)]))
    arguments = [
        "record", model.folder, "--prompts", tmp_path / "prompts.jsonl", "-o", tmp_path / "loads", "--max-tokens", 9,
        "--format", "json", "--port", free_port(), *SMALL,
    ]  # fmt: skip
    run = eplb_command(arguments)
    assert run.returncode == 0, run.stderr[-3000:]
    report = json.loads(run.stdout)
    chat_prompt = len("user: hi\nassistant: ")
    assert report["prompts"] == len(PROMPTS) + 1
    assert report["prefill_tokens"] == sum(map(len, PROMPTS)) + chat_prompt
    assert report["decode_tokens"] == (len(PROMPTS) + 1) * 8
    assert report["mixed_tokens"] == 0
    assert [file.suffix for file in (tmp_path / "loads").iterdir()] == [".jsonl"]
    assert not list(tmp_path.glob("loads.*"))
    again = eplb_command(arguments)
    assert (again.returncode, "the output exists already" in again.stderr) == (1, True)
