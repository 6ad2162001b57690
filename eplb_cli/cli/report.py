"""`eplb report`: one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import DispatchOption, ForceOption, FormatOption, OutputOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from eplb_cli.report import ModelFacts

__all__ = ["EXAMPLES", "report"]

EXAMPLES = (
    "eplb report loads.safetensors plan.json -o report.html",
    "eplb report loads.safetensors plan.json --model Qwen/Qwen3-235B-A22B-FP8 -o report.html",
    "eplb report tuesday.safetensors old-plan.json new-plan.json -o report.html",
    "eplb report loads.safetensors plan.json --replay replay.json -o report.html",
    "eplb report loads.safetensors --ep-size 16 -o report.html",
)


def report(
    loads: Annotated[Path, typer.Argument(help="A profile.", metavar="LOADS")],
    plans: Annotated[
        list[Path] | None,
        typer.Argument(help="Plans, or converted folders that hold one; advice is on the first.", metavar="[PLAN]..."),
    ] = None,
    output: OutputOption = Path("report.html"),
    model: Annotated[
        str | None, typer.Option("--model", help="The model, for GiB and KV-cache tokens that copies cost.")
    ] = None,
    ep_size: Annotated[int | None, typer.Option("--ep-size", help="EP ranks, when no plan says them.", min=1)] = None,
    tensor_parallel_size: Annotated[
        int,
        typer.Option("-tp", "--tensor-parallel-size", help="Ranks that share a token's KV cache.", min=1),
    ] = 1,
    step_tokens: Annotated[
        int | None,
        typer.Option("--step-tokens", help="Tokens of one engine step over all ranks, for advice.", min=1),
    ] = None,
    dispatch: DispatchOption = None,
    replay: Annotated[
        Path | None,
        typer.Option("--replay", help="What `eplb replay --format json` wrote, to show as well.", metavar="FILE"),
    ] = None,
    force: ForceOption = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Write a page that shows loads and plans: one file, no network.

    With --format json, prints the page's numbers as well.
    """
    from eplb_cli.console import Console
    from eplb_cli.files import atomic_write, refuse_existing, sha256_of_file
    from eplb_cli.loads import ExpertLoads
    from eplb_cli.placement import Placement
    from eplb_cli.replay import Replay
    from eplb_cli.report import NamedPlan, make_report, render

    console = Console(output_format)
    refuse_existing(output, force=force)
    recorded = ExpertLoads.load(loads)
    named = [NamedPlan(str(plan), Placement.load(plan)) for plan in plans or []]
    facts, size_note = (None, None) if model is None else _facts(model, tensor_parallel_size)
    with console.progress() as progress:
        task = progress.add_task("Measuring", total=None)
        made = make_report(
            recorded,
            named,
            profile=str(loads),
            profile_sha256=sha256_of_file(loads),
            dispatch=None if dispatch is None else dispatch.value,
            ep_size=ep_size,
            model=facts,
            step_tokens=step_tokens,
            replayed=None if replay is None else Replay.load(replay),
            on_step=lambda what, done, of: progress.update(task, description=what, completed=done, total=of),
        )
    content = render(made).encode()
    with atomic_write(output, replace=force) as stream:
        stream.write(content)
    for warning in made.warnings:
        console.warn(warning)
    if size_note is not None:
        console.note(size_note)
    data = {"output": str(output), "bytes": len(content), **made.as_dict()}
    lines = [f"Wrote {output} ({len(content) / 1e6:.1f} MB)."]
    if made.advice is not None:
        lines.append(made.advice.verdict)
    elif not made.layouts:
        lines.append("Give a plan, or --ep-size, to see ranks as well.")
    console.result(data, *lines)


def _facts(name: str, tensor_parallel_size: int) -> tuple[ModelFacts, str | None]:
    """What is known of MODEL, and why sizes are estimates when they are."""
    from eplb_cli.checkpoint import Model
    from eplb_cli.report import ModelFacts

    model = Model.open(name)
    sizes = model.expert_bytes
    return ModelFacts(name, sizes.by_layer, model.kv_cache(tensor_parallel_size)), sizes.note
