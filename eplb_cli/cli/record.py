"""`eplb record`: expert loads of a batch of prompts."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from eplb_cli.cli.options import ForceOption, FormatOption, OutputOption
from eplb_cli.console import OutputFormat

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "record"]

EXAMPLES = (
    "eplb record Qwen/Qwen3-30B-A3B --prompts prompts.txt -o traces -tp 4 --enable-expert-parallel",
    "eplb record ./model --prompts chats.jsonl -o traces --max-tokens 512 --concurrency 64",
)

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}


def record(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    prompts: Annotated[
        Path,
        typer.Option("--prompts", help="One prompt a line, or JSON lines with `prompt` or `messages`.", metavar="FILE"),
    ],
    output: OutputOption,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Tokens generated for each prompt.", min=1)] = 128,
    concurrency: Annotated[int, typer.Option("--concurrency", help="Prompts under way at once.", min=1)] = 32,
    record_steps: Annotated[int, typer.Option("--record-steps", help="Engine steps per recorded window.", min=1)] = 100,
    force: ForceOption = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Run prompts through vLLM and record which experts serve them; `eplb profile` reads the folder."""
    from eplb_cli.console import Console
    from eplb_cli.serve.batch import record_batch

    console = Console(output_format)
    recording = record_batch(
        model,
        prompts,
        output,
        context.args,
        max_tokens=max_tokens,
        concurrency=concurrency,
        record_steps=record_steps,
        force=force,
        note=console.note,
    )
    console.result(
        recording.report(),
        f"{output}: {recording.prompts} prompts; {recording.prefill_tokens} prefill and {recording.decode_tokens} "
        f"decode tokens in {recording.windows} windows",
        f"next: eplb profile {shlex.quote(str(output))} --model {shlex.quote(model)} -o loads.safetensors",
    )
