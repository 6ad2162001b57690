"""`eplb replay`: recorded tokens as engine steps, under plans and rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import Dispatch, FormatOption, Phase
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eplb_cli.dispatch import Rule
    from eplb_cli.loads import ModelShape
    from eplb_cli.replay import Replay

__all__ = ["EXAMPLES", "replay"]

EXAMPLES = (
    "eplb replay plan.json --trace routed_experts/ --step-tokens 8192",
    "eplb replay r0.json r16.json --trace routed_experts/ --step-tokens 256 --copy-cost-tokens 90",
    "eplb replay plan.json --trace decode.npy --phase decode --data-parallel-size 8 --format json",
)


def replay(
    plans: Annotated[list[Path], typer.Argument(help="Plans, or converted folders that hold one.", metavar="PLAN...")],
    trace: Annotated[
        list[Path], typer.Option("--trace", help="Files or folders with the experts of every token.", metavar="TRACE")
    ],
    step_tokens: Annotated[
        int, typer.Option("--step-tokens", min=1, help="Tokens of an engine step, over all ranks.", metavar="N")
    ] = 1024,
    dispatch: Annotated[
        list[Dispatch] | None,
        typer.Option(
            metavar="|".join(Dispatch),
            help="Which copy serves a token: hash, what vLLM does; balanced, by load; even, equal parts; another "
            "engine's rule. Repeat it for several; default: hash and balanced.",
        ),
    ] = None,
    data_parallel_size: Annotated[
        int,
        typer.Option(
            "-dp", "--data-parallel-size", min=1, help="Batches a step has; each chooses by itself. 1: ranks share one."
        ),
    ] = 1,
    copy_cost_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens that take as long as reading one more expert's weights.", metavar="X"),
    ] = None,
    phase: Annotated[Phase, typer.Option(help="Replay one phase only; names it where the trace does not.")] = Phase.all,
    model: Annotated[
        str | None, typer.Option("--model", help="Tells which layers the trace holds, where it does not.")
    ] = None,
    trace_format: Annotated[
        str, typer.Option(metavar="auto|NAME", help="Read every file as this recorder's, instead of by its content.")
    ] = "auto",
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Replay recorded tokens as engine steps, and show what each step waits for."""
    from eplb_cli.console import Console
    from eplb_cli.loads import PHASES
    from eplb_cli.placement import Placement
    from eplb_cli.replay import replay_traces

    console = Console(output_format)
    named = [(str(plan), Placement.load(plan)) for plan in plans]
    rules: list[Rule] = [choice.value for choice in dispatch or (Dispatch.hash, Dispatch.balanced)]
    with console.progress() as progress:
        task = progress.add_task("Replaying", total=None)
        result = replay_traces(
            named,
            trace,
            rules=list(dict.fromkeys(rules)),
            step_tokens=step_tokens,
            batches=data_parallel_size,
            price=copy_cost_tokens,
            phase=PHASES.index(phase.value),
            model=None if model is None else _shape(model),
            trace_format=trace_format,
            advance=lambda count: progress.advance(task, count),
            expect=lambda total: progress.update(task, total=total),
        )
    for warning in result.warnings:
        console.warn(warning)
    console.result(result.as_dict(), *(_table(result) if console.is_human else ()))


def _shape(model: str) -> ModelShape:
    from eplb_cli.checkpoint import Model

    return Model.open(model).shape


def _table(result: Replay) -> list[RenderableType]:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("plan", "dispatch"):
        table.add_column(name, overflow="fold")
    for name in ("balanced-\nness", "max/mean\np50", "\np95", "active\ncopies"):
        table.add_column(name, justify="right", no_wrap=True)
    timed = result.price is not None
    if timed:
        table.add_column("step time\n(tokens)", justify="right", no_wrap=True)
    for row in result.rows:
        cells = [row.plan, row.dispatch, f"{row.balancedness:.4f}", f"{row.ratio_p50:.3f}", f"{row.ratio_p95:.3f}"]
        cells.append(f"{row.active_mean:.1f}")
        if row.step_time is not None:
            cells.append(f"{row.step_time:.1f}")
        table.add_row(*cells)
    batches = "one batch" if result.batches == 1 else f"{result.batches} batches"
    return [
        table,
        f"{result.steps} steps of {result.step_tokens} tokens in {batches}. balancedness = sum of the mean rank's "
        "tokens / sum of the busiest rank's, over steps and layers; 1 is perfect. max/mean: a step's, over its layers. "
        "active copies: slots of a layer that serve any token in a step."
        + (f" step time: a layer's slowest rank, {result.price} per active copy + 1 per token." if timed else ""),
    ]
