"""`eplb replay`: recorded tokens as engine steps, under plans and rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import Dispatch, FormatOption, Phase
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from eplb_cli.dispatch import Rule
    from eplb_cli.loads import ModelShape
    from eplb_cli.replay import Replay

__all__ = ["EXAMPLES", "replay"]

EXAMPLES = (
    "eplb replay plan.json --trace routed_experts/ --step-tokens 8192",
    "eplb replay r0.json r16.json --trace routed_experts/ --step-tokens 256 --copy-cost-tokens 90",
    "eplb replay plan.json --trace routed_experts/ --rebalance vllm:1000/3000 --rebalance eplb:1000/3000",
    "eplb replay plan.json --trace decode.npy --phase decode --data-parallel-size 8 --format json",
)


BARS = "▁▂▃▄▅▆▇█"


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
    rebalance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY:WINDOW/INTERVAL",
            help="Replay run-time EPLB as well, from vLLM's start layout and from each plan. vllm:1000/3000: vLLM's "
            "policy, every 3000 steps by the loads of the last 1000; eplb:1000/3000: eplb's. Repeat it for several.",
        ),
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
    from eplb_cli.replay import Rebalance, replay_traces

    console = Console(output_format)
    rebalances = [Rebalance.parse(text) for text in dict.fromkeys(rebalance or ())]
    shape, num_groups = (None, 1) if model is None else _model(model)
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
            rebalances=rebalances,
            num_groups=num_groups,
            phase=PHASES.index(phase.value),
            model=shape,
            trace_format=trace_format,
            advance=lambda count: progress.advance(task, count),
            expect=lambda total: progress.update(task, total=total),
        )
    for warning in result.warnings:
        console.warn(warning)
    if result.vllms_policy is not None:
        console.note(f"vllm: the policy of {result.vllms_policy}.")
    console.result(result.as_dict(), *(_tables(result) if console.is_human else ()))


def _model(name: str) -> tuple[ModelShape, int]:
    """The model's sizes, and its router's expert groups."""
    from eplb_cli.checkpoint import Model

    model = Model.open(name)
    return model.shape, model.num_expert_groups


def _tables(result: Replay) -> list[RenderableType]:
    """Figures, phase by phase; then, where placements change, how they went from the first step to the last."""
    timed, moving = result.price is not None, any(row.rebalance for row in result.rows)
    rows = list(enumerate(result.rows, 1))
    parts: list[RenderableType] = []
    for phase in result.phases:
        if phase.phase != "all":
            parts.append(f"{phase.phase}: {phase.steps} steps")
        table = _table("plan", "dispatch", *(["rebalance"] if moving else []))
        for name in ("balanced-\nness", "max/mean\np50", "\np95", "active\ncopies", *(["step time\n(tokens)"] * timed)):
            table.add_column(name, justify="right", no_wrap=True)
        for number, row in rows:
            if row.phase == phase.phase:
                cells = [str(number), row.plan, row.dispatch]
                cells += [(row.rebalance or "").replace(":", "\n")] if moving else []
                cells += [f"{row.balancedness:.4f}", f"{row.ratio_p50:.3f}", f"{row.ratio_p95:.3f}"]
                cells += [f"{row.active_mean:.1f}", *([] if row.step_time is None else [f"{row.step_time:.1f}"])]
                table.add_row(*cells)
        parts.append(table)
    batches = "one batch" if result.batches == 1 else f"{result.batches} batches"
    explained = (
        f"{result.steps} steps of {result.step_tokens} tokens in {batches}. balancedness = sum of the mean rank's "
        "tokens / sum of the busiest rank's, over steps and layers; 1 is perfect. max/mean: a step's, over its layers. "
        "active copies: slots of a layer that serve any token in a step."
    )
    if timed:
        explained += f" step time: a layer's slowest rank, {result.price} per active copy + 1 per token."
    return [*parts, explained, *(_curves(result) if moving else [])]


def _curves(result: Replay) -> list[RenderableType]:
    """Balancedness from the first step to the last, a line a row, on one scale; and what was moved for it."""
    values = [value for row in result.rows for value in row.curve]
    low, high = min(values), max(values)
    table = _table()
    table.add_column("first", no_wrap=True)
    table.add_column(f"{low:.3f} to {high:.3f}", no_wrap=True)
    table.add_column("last", no_wrap=True)
    table.add_column("moved slots", justify="right", no_wrap=True)
    for number, row in enumerate(result.rows, 1):
        bars = "".join(BARS[round((value - low) / ((high - low) or 1.0) * (len(BARS) - 1))] for value in row.curve)
        moved = "" if row.rebalance is None else f"{row.moved_slots:,}"
        table.add_row(str(number), f"{row.curve[0]:.3f}", bars, f"{row.curve[-1]:.3f}", moved)
    return ["", table, "Balancedness of the rows above, as the steps went: each bar is a stretch of them."]


def _table(*texts: str) -> Table:
    """A table whose rows are numbered, with columns for texts that may be long."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
    table.add_column("", justify="right", no_wrap=True)
    for name in texts:
        table.add_column(name, overflow="fold", min_width=None if name == "plan" else 9)
    return table
