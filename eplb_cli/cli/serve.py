"""`eplb serve`: start vLLM from a plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import FormatOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from eplb_cli.console import Console
    from eplb_cli.serve import Launch

__all__ = ["CONTEXT_SETTINGS", "EXAMPLES", "serve"]

EXAMPLES = (
    "eplb serve ./model-balanced --dry-run",
    "eplb serve Qwen/Qwen3-30B-A3B --plan plan.json --static -tp 4",
    "eplb serve ./model --plan plan.json -tp 2 -dp 4 -- --max-model-len 32768",
    "eplb serve ./model --record traces -tp 4 --enable-expert-parallel",
)

CONTEXT_SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="The model, or a folder that `eplb convert` wrote.")],
    plan: Annotated[
        Path | None, typer.Option("--plan", help="The plan. Default: the one inside a converted folder.")
    ] = None,
    static: Annotated[bool, typer.Option("--static", help="Never rebalance at run time.")] = False,
    record: Annotated[
        Path | None, typer.Option("--record", help="Write expert loads per window to this folder.", metavar="DIR")
    ] = None,
    record_steps: Annotated[int, typer.Option("--record-steps", help="Engine steps per recorded window.", min=1)] = 100,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the environment and the exact command, start nothing.")
    ] = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Start `vllm serve` balanced from the first token; flags that eplb does not know go to vLLM unchanged."""
    from eplb_cli.console import Console
    from eplb_cli.errors import UsageError
    from eplb_cli.serve import prepare

    console = Console(output_format)
    if model.startswith("-"):
        raise UsageError(f"{model} stands where the model should", rule="the model comes first: eplb serve MODEL ...")
    launch = prepare(
        model,
        plan,
        context.args,
        policy="static" if static else None,
        record=record,
        record_steps=record_steps,
        dry_run=dry_run,
    )
    for warning in launch.warnings:
        console.warn(warning)
    for note in launch.notes:
        console.note(note)
    if dry_run:
        console.result(launch.report(), launch.shell())
        return
    console.note(launch.shell())
    raise typer.Exit(_run(console, launch))


def _run(console: Console, launch: Launch) -> int:
    """Run vLLM to its end; returns its exit code."""
    from eplb_cli.serve import Server

    with Server(launch, output="inherit" if console.is_human else "stderr") as server, server.signals_forwarded():
        proof = server.wait_until_ready()
        if proof is None:
            console.warn("vLLM ended before it was ready")
        elif launch.proven_by_plugin:
            slots = f"{proof.slots}/{proof.slots} slots verified"
            console.note(f"plan in force on {proof.ranks} ranks, {slots} (sha256 {launch.plan_sha256})")
        return server.wait()
