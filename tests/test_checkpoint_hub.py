"""Repository ids: the local cache, and what is said when it lacks one. A real client against a local server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from eplb_cli.checkpoint.hub import locate_config
from eplb_cli.errors import CheckpointError
from tests.checkpoints import qwen3_moe, random_rows, read_checkpoint, save_plan

COMMIT = "0123456789abcdef0123456789abcdef01234567"

ANSWERS = {
    "/org/gated-no-login/": (401, "GatedRepo"),
    "/org/gated-no-access/": (403, "GatedRepo"),
    "/org/private-or-missing/": (401, ""),
    "/org/missing/": (404, "RepoNotFound"),
    "/org/forbidden/": (403, ""),
    "/org/no-config/": (404, "EntryNotFound"),
    "/org/broken/": (500, ""),
}


class Hub(BaseHTTPRequestHandler):
    """Answers like the hub, with the status that the repository's name asks for."""

    def do_HEAD(self) -> None:
        self.respond(body=False)

    def do_GET(self) -> None:
        self.respond(body=True)

    def respond(self, *, body: bool) -> None:
        status, code = next((answer for path, answer in ANSWERS.items() if self.path.startswith(path)), (200, ""))
        content = json.dumps(qwen3_moe().config).encode() if status == 200 else b""
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 200:
            self.send_header("ETag", '"abc"')
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


Command = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def command(tmp_path: Path, endpoint: str) -> Command:
    """Run eplb in a process of its own, whose hub is the local server and whose cache is empty."""

    def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        variables = {**os.environ, "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": endpoint, "HF_TOKEN": ""}
        variables |= environment
        text = [sys.executable, "-m", "eplb_cli", *map(str, arguments)]
        return subprocess.run(text, env=variables, capture_output=True, text=True, timeout=120, check=False)

    return run


IN_TURN = """
import contextlib, io, json, sys
from eplb_cli.cli import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = main(words)
    print(json.dumps([code, said.getvalue()]))
"""

WHY = {
    "org/gated-no-login": ("is gated, and no valid login was sent (401)", "hf auth login"),
    "org/gated-no-access": ("is gated, and this login has no access to it (403)", "Request access at"),
    "org/private-or-missing": ("does not exist, or is private", "hf auth login"),
    "org/missing": ("does not exist on the hub (404)", "Check the spelling"),
    "org/forbidden": ("access is forbidden to this login (403)", "hf auth whoami"),
    "org/no-config": ("has no config.json (404)", "Look at"),
    "org/there": ("is no folder here and not in the local cache", "hf download org/there"),
}
NO_FOLDERS = ("/absent", "./absent/model", "no-such-folder")


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory, endpoint: str) -> dict[str, str]:
    """What is said of each model that cannot be had, by one process: a start takes longer than all refusals."""
    folder = tmp_path_factory.mktemp("refused")
    plan = save_plan(folder / "plan.json", random_rows([1, 2], 0))
    models = (*WHY, *NO_FOLDERS)
    commands = [["convert", model, str(plan), "-o", str(folder / "out")] for model in models]
    variables = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, "HF_TOKEN": ""}
    text = [sys.executable, "-c", IN_TURN, json.dumps(commands)]
    run = subprocess.run(text, env=variables, capture_output=True, text=True, timeout=120, check=True)
    answers = [json.loads(line) for line in run.stdout.splitlines()]
    assert [code for code, _ in answers] == [1] * len(models)
    assert not list(folder.glob("out*"))
    return {model: said for model, (_, said) in zip(models, answers, strict=True)}


@pytest.mark.parametrize("repository", WHY)
def test_why_a_repository_cannot_be_had(refused: dict[str, str], repository: str) -> None:
    text = refused[repository]
    assert f"Error: {repository}" in text
    assert all(part in text for part in WHY[repository]), text
    assert "Traceback" not in text


@pytest.mark.parametrize("model", NO_FOLDERS)
def test_what_is_neither_a_folder_nor_an_id(refused: dict[str, str], model: str) -> None:
    assert "no such folder" in refused[model]


def test_a_hub_out_of_reach_and_a_forbidden_network_are_told_apart(tmp_path: Path, command: Command) -> None:
    plan = save_plan(tmp_path / "plan.json", random_rows([1, 2], 0))
    arguments = ("convert", "org/there", plan, "-o", tmp_path / "out")
    unreachable = command(*arguments, HF_ENDPOINT="http://127.0.0.1:9")
    assert unreachable.returncode == 1
    assert "the hub cannot be reached" in unreachable.stderr
    offline = command(*arguments, HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
    assert offline.returncode == 1
    assert "HF_HUB_OFFLINE=1 forbids" in offline.stderr
    assert "hf download org/there" in offline.stderr


def test_a_config_alone_is_fetched(tmp_path: Path, endpoint: str) -> None:
    code = "from eplb_cli.checkpoint import Model; print(Model.open('org/there').shape.moe_layer_ids)"
    variables = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": endpoint, "HF_TOKEN": ""}
    run = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert run.stdout == "(1, 2)\n", run.stderr
    # The second time it comes from the cache.
    variables |= {"HF_ENDPOINT": "http://127.0.0.1:9"}
    again = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=False)
    assert again.stdout == "(1, 2)\n", again.stderr


def cached(home: Path, repository: str) -> Path:
    """A repository in the hub's cache: blobs, and a snapshot of relative links; returns the snapshot."""
    base = home / "hub" / f"models--{repository.replace('/', '--')}"
    files = qwen3_moe().save(home / "plain", shards=2)
    snapshot = base / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir()
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text(COMMIT)
    for number, file in enumerate(sorted(files.iterdir())):
        blob = base / "blobs" / f"{number:064d}"
        file.rename(blob)
        blob.chmod(0o444)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return snapshot


@pytest.mark.parametrize("link", [[], ["--link"]])
def test_a_repository_in_the_cache_converts_offline_and_its_blobs_stay(
    tmp_path: Path, command: Command, link: list[str]
) -> None:
    snapshot = cached(tmp_path / "hf", "org/model")
    blobs = snapshot.parents[1] / "blobs"
    before = {blob: (blob.stat().st_mtime_ns, blob.stat().st_mode, blob.read_bytes()) for blob in blobs.iterdir()}
    rows = random_rows([1, 2], 0)
    plan = save_plan(tmp_path / "plan.json", rows)
    run = command("convert", "org/model", plan, "-o", tmp_path / "out", *link, HF_HUB_OFFLINE="1")
    assert run.returncode == 0, run.stderr
    assert read_checkpoint(tmp_path / "out") == qwen3_moe().expected(rows, "stock")
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))
    assert {
        blob: (blob.stat().st_mtime_ns, blob.stat().st_mode, blob.read_bytes()) for blob in blobs.iterdir()
    } == before
    record = json.loads((tmp_path / "out" / "eplb_provenance.json").read_text())
    assert record["source"]["revision"] == COMMIT
    assert command("verify", "org/model", tmp_path / "out", HF_HUB_OFFLINE="1").returncode == 0


def test_a_dangling_link_is_named(tmp_path: Path, command: Command) -> None:
    snapshot = cached(tmp_path / "hf", "org/model")
    link = snapshot / "model-00002-of-00002.safetensors"
    link.resolve().unlink()
    plan = save_plan(tmp_path / "plan.json", random_rows([1, 2], 0))
    run = command("convert", "org/model", plan, "-o", tmp_path / "out", HF_HUB_OFFLINE="1")
    assert run.returncode == 1
    assert "model-00002-of-00002.safetensors: is a link to" in run.stderr
    assert "which does not exist" in run.stderr
    assert "hf download" in run.stderr


def test_a_misspelt_path_is_not_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="models/absent: no such folder"):
        locate_config("models/absent")
