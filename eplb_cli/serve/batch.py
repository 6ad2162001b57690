"""Records the expert loads of a batch of prompts: a server with the recorder, the prompts, and the end."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eplb_cli.errors import OutputError, ServeError
from eplb_cli.files import rename_exclusive
from eplb_cli.serve.launch import prepare
from eplb_cli.serve.requests import answer_all, read_prompts
from eplb_cli.serve.server import Server
from eplb_cli.untrusted import parse_json

__all__ = ["Recording", "record_batch"]

QUIET_SECONDS = 2.5
"""The recorder writes what it has after a second without a step; files that rest this long are complete."""


@dataclass(frozen=True)
class Recording:
    """What a batch left: files, windows, and tokens by phase over all data parallel ranks."""

    prompts: int
    files: int
    windows: int
    prefill_tokens: int
    decode_tokens: int
    mixed_tokens: int
    seconds: float

    def report(self) -> dict[str, Any]:
        """As printed by `--format json`."""
        return asdict(self)


def record_batch(
    model: str,
    prompts: Path,
    output: Path,
    arguments: Sequence[str],
    *,
    max_tokens: int,
    concurrency: int,
    record_steps: int,
    force: bool,
    note: Callable[[str], None] = lambda text: None,
) -> Recording:
    """Serve `model` with the recorder, send all prompts, and leave the recording in the folder `output`.

    The folder appears when all is done; until then it has a name of its own, `<output>.*.partial`. vLLM's log stays
    beside it, as `<output>.*.vllm.log`, only when something fails, and so does what was recorded until then.

    Raises:
        UsageError: the prompts or arguments are unusable.
        OutputError: `output` exists and `force` was not given.
        ServeError: vLLM does not come up with the recorder, or does not answer.
    """
    requests = read_prompts(prompts)
    if os.path.lexists(output) and not force:
        raise OutputError("the output exists already", file=output, hint="Pass --force to replace it.")
    if not output.absolute().parent.is_dir():
        raise OutputError("the output's folder does not exist", file=output)
    partial = output.with_name(f"{output.name}.{uuid.uuid4().hex[:8]}.partial")
    log = partial.with_suffix(".vllm.log")
    launch = prepare(model, None, arguments, record=partial, record_steps=record_steps)
    started = time.monotonic()
    note(launch.shell())
    partial.mkdir()
    try:
        with Server(launch, log=log) as server:
            if not server.wait_until_healthy():
                raise ServeError(f"vLLM ended with exit code {server.wait()}", file=log, hint="The log says why.")
            answer_all(server, requests, max_tokens=max_tokens, concurrency=concurrency)
            _wait_for_rest(partial)
        recording = _sum_up(partial, len(requests), time.monotonic() - started)
        _put_in_place(partial, output, force=force)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.rmdir()  # unless something was recorded
        raise
    log.unlink()
    return recording


def _put_in_place(partial: Path, output: Path, *, force: bool) -> None:
    if force and os.path.lexists(output):
        if output.is_dir() and not output.is_symlink():
            shutil.rmtree(output)
        else:
            output.unlink()
    try:
        rename_exclusive(partial, output)
    except FileExistsError as error:
        raise OutputError(
            "appeared while eplb was running; it was left alone", file=output, hint=f"The recording is in {partial}."
        ) from error


def _wait_for_rest(folder: Path) -> None:
    sizes, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_SECONDS:
        now = sum(file.stat().st_size for file in folder.glob("*.jsonl"))
        if now != sizes:
            sizes, since = now, time.monotonic()
        time.sleep(0.1)


def _sum_up(folder: Path, prompts: int, seconds: float) -> Recording:
    files = sorted(folder.glob("*.jsonl"))
    tokens = {"prefill": 0, "decode": 0, "all": 0}
    windows = set()
    for file in files:
        _, *lines = (parse_json(line, ServeError, file=file) for line in file.read_text().splitlines())
        for line in lines:
            if "end" in line:
                raise ServeError("the recording reached its size limit", file=file, hint="Record fewer prompts a run.")
            tokens[line["phase"]] += line["tokens"]
            windows.add(line["window"])
    if not sum(tokens.values()):
        raise ServeError("nothing was recorded", file=folder)
    return Recording(
        prompts, len(files), len(windows), tokens["prefill"], tokens["decode"], tokens["all"], round(seconds, 1)
    )
