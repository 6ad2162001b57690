"""`eplb profile`: traces of any known recorder into a profile of loads."""

from __future__ import annotations

import re
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eplb_cli.cli.options import ForceOption, FormatOption, OutputOption, Phase
from eplb_cli.console import Console, OutputFormat
from eplb_cli.errors import UsageError, spans

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.console import RenderableType

    from eplb_cli.loads import ExpertLoads, ModelShape

__all__ = ["EXAMPLES", "profile"]

EXAMPLES = (
    "eplb profile routed_experts.npy --model Qwen/Qwen3-30B-A3B -o loads.safetensors",
    "eplb profile traces/ --num-experts 128 --window-tokens 512 -o loads.safetensors",
    "eplb profile expert_distribution_recorder_1764400000.1.pt --model ./model -o loads.safetensors",
    "eplb profile physical.npy --num-experts 128 --physical-to-logical plan.json -o loads.safetensors",
)


class RankDumpsChoice(StrEnum):
    """How files of several ranks combine."""

    auto = "auto"
    sum = "sum"
    replicated = "replicated"


class CountersChoice(StrEnum):
    """Whether counts go on from the window before."""

    auto = "auto"
    per_step = "per-step"
    cumulative = "cumulative"


def profile(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Files or folders of a recorder.")],
    output: OutputOption,
    model: Annotated[
        str | None,
        typer.Option(help="Folder, config.json or repository id: tells experts, top-k and which layers are MoE."),
    ] = None,
    num_experts: Annotated[int | None, typer.Option(min=1, help="Logical experts, without a model.")] = None,
    trace_format: Annotated[
        str, typer.Option(metavar="auto|NAME", help="Read every file as this recorder's, instead of by its content.")
    ] = "auto",
    window_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Cut per-token traces into windows of this many tokens. Default: 1024, doubled until at most 1024 "
            "windows remain. Recorded steps stay windows.",
        ),
    ] = None,
    phase: Annotated[Phase, typer.Option(help="Keep the windows of one phase only.")] = Phase.all,
    skip_steps: Annotated[
        int, typer.Option(min=0, help="Leave out this many steps (windows) at the start of each recording: warm-up.")
    ] = 0,
    ignore_expert_id: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID|FIRST-LAST", help="Drop this placeholder id, or these, and report how many. May be repeated."
        ),
    ] = None,
    physical_to_logical: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="The plan in force when physical ids or slots were recorded.")
    ] = None,
    rank_dumps: Annotated[
        RankDumpsChoice,
        typer.Option(
            help="Files of several ranks, told by their names: auto adds them, and keeps identical ones once."
        ),
    ] = RankDumpsChoice.auto,
    counters: Annotated[
        CountersChoice, typer.Option(help="Whether a window's counts go on from the window before.")
    ] = CountersChoice.auto,
    prompt_rows: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens of the prompt at the start of each sequence, when the trace does not tell."),
    ] = None,
    allow_zero_experts: Annotated[
        bool, typer.Option("--allow-zero-experts", help="Accept loads that look like one rank's share.")
    ] = False,
    force: ForceOption = False,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Read traces of any known recorder into a profile: tokens per window, MoE layer and expert."""
    from eplb_cli.files import refuse_existing
    from eplb_cli.loads import PHASES
    from eplb_cli.placement import Placement
    from eplb_cli.traces import Counters, RankDumps, ReadOptions, read_traces

    console = Console(output_format)
    refuse_existing(output, force=force)
    options = ReadOptions(
        model=_shape(model, num_experts),
        window_tokens=window_tokens,
        phase=PHASES.index(phase.value),
        skip_steps=skip_steps,
        ignored_ids=tuple(map(_id_range, ignore_expert_id or ())),
        physical_to_logical=None if physical_to_logical is None else Placement.load(physical_to_logical),
        rank_dumps=RankDumps(rank_dumps.value),
        counters=Counters(counters.value),
        prompt_rows=prompt_rows,
        allow_zero_experts=allow_zero_experts,
    )
    with console.progress() as progress:
        task = progress.add_task("Reading", total=None)
        result = read_traces(
            traces,
            options,
            trace_format=trace_format,
            advance=lambda count: progress.advance(task, count),
            expect=lambda total: progress.update(task, total=total),
        )
    loads = result.loads
    for warning in (*loads.warnings, *result.notes):
        console.warn(warning)
    loads.save(output, replace=force)
    summary = _summary(loads, result.notes)
    console.result(summary, *(_tables(loads, summary, output) if console.is_human else ()))


def _id_range(text: str) -> tuple[int, int]:
    """`256-511` as (256, 511), `255` as (255, 255)."""
    from eplb_cli.errors import UsageError

    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if first > last:
        raise UsageError(f"--ignore-expert-id {text}", rule="an id or a range is expected, such as 255 or 256-511")
    return first, last


def _shape(model: str | None, num_experts: int | None) -> ModelShape | None:
    from eplb_cli.loads import ModelShape

    if model is None:
        return None if num_experts is None else ModelShape(None, num_experts)
    from eplb_cli.checkpoint import Model

    shape = Model.open(model).shape
    if num_experts is not None and num_experts != shape.num_experts:
        raise UsageError(
            f"--num-experts {num_experts} contradicts --model {model}", rule=f"it has {shape.num_experts} experts"
        )
    return shape


def _summary(loads: ExpertLoads, notes: tuple[str, ...]) -> dict[str, Any]:
    ratio = _max_over_mean(loads)
    known = loads.num_windows > 0
    worst = int(ratio.argmax()) if known else None
    return {
        "windows": loads.num_windows,
        "layers": loads.num_layers,
        "layer_ids": loads.layer_ids.tolist(),
        "num_experts": loads.num_experts,
        "top_k": loads.top_k,
        "tokens": int(loads.tokens.sum()),
        "assignments": int(loads.counts.sum()),
        "dropped": dict(sorted(loads.dropped.items())),
        "sources": [{"name": s.name, "sha256": s.sha256, "reader": s.reader} for s in loads.sources],
        "warnings": [*loads.warnings, *notes],
        "max_over_mean": {
            "mean": float(ratio.mean()) if known else None,
            "worst": float(ratio[worst]) if worst is not None else None,
            "worst_layer": int(loads.layer_ids[worst]) if worst is not None else None,
        },
    }


def _max_over_mean(loads: ExpertLoads) -> npt.NDArray[np.float64]:
    """Largest over mean expert load of the summed counts, for each layer."""
    from eplb_cli.metrics import max_over_mean

    return max_over_mean(loads.counts.sum(0).astype(float))


def _tables(loads: ExpertLoads, summary: dict[str, Any], output: Path) -> list[RenderableType]:
    from rich.table import Table

    facts = Table(show_header=False, box=None, pad_edge=False)
    skew = summary["max_over_mean"]
    readers = sorted({source.reader for source in loads.sources})
    known = loads.num_windows > 0
    rows = {
        "Written": str(output),
        "Sources": f"{len(loads.sources)} ({', '.join(readers)})",
        "Windows": f"{loads.num_windows} ({loads.phase}){_span(loads)}",
        "MoE layers": f"{loads.num_layers} ({spans(summary['layer_ids'])})",
        "Experts": f"{loads.num_experts}, top-k {loads.top_k or 'unknown'}",
        "Tokens": f"{summary['tokens']:,}" if summary["tokens"] or not known else "not told by the recorder",
        "Assignments": f"{summary['assignments']:,}",
        "Dropped": ", ".join(f"{k} {v:,}" for k, v in summary["dropped"].items()) or "nothing",
    }
    if known:
        rows["Max/mean expert load"] = (
            f"{skew['mean']:.2f} on average over layers, {skew['worst']:.2f} at worst (layer {skew['worst_layer']})"
        )
    for name, value in rows.items():
        facts.add_row(name, value)
    if not known:
        return [facts]
    return [facts, "", "Most skewed layers (strip: load of expert groups against the hottest)", _skew_map(loads)]


def _span(loads: ExpertLoads) -> str:
    """The recorder's numbers of the first and the last window."""
    return f", numbered {loads.window_ids.min()} to {loads.window_ids.max()}" if loads.num_windows else ""


HEAT = " .:-=+*#%@"
HEAT_COLUMNS = 40


def _skew_map(loads: ExpertLoads) -> RenderableType:
    """Layers with the largest skew: experts as a heat strip (hottest of each group), and the hottest experts."""
    import numpy as np
    from rich.table import Table

    totals = loads.counts.sum(0).astype(float)
    ratio = _max_over_mean(loads)
    shown = np.sort(np.argsort(-ratio, kind="stable")[:12])
    groups = np.array_split(np.arange(loads.num_experts), min(HEAT_COLUMNS, loads.num_experts))
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("max/mean", justify="right", no_wrap=True)
    table.add_column(f"experts 0..{loads.num_experts - 1}", no_wrap=True)
    table.add_column("hottest", no_wrap=True)
    for row in shown:
        load = totals[row]
        peak = load.max() or 1.0
        strip = "".join(HEAT[min(int(load[g].max() / peak * (len(HEAT) - 1)), len(HEAT) - 1)] for g in groups)
        hottest = np.argsort(-load, kind="stable")[:3]
        table.add_row(str(loads.layer_ids[row]), f"{ratio[row]:.2f}", strip, ", ".join(map(str, hottest)))
    return table
