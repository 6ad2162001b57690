"""`eplb verify`: prove a converted checkpoint against its source."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eplb_cli.cli.options import FormatOption
from eplb_cli.console import Console, OutputFormat

EXAMPLES = (
    "eplb verify Qwen/Qwen3-30B-A3B Qwen3-30B-A3B-balanced",
    "eplb verify ./Llama-4-Scout ./Llama-4-Scout-balanced --level sample",
    "eplb verify ./Qwen3-235B-A22B ./Qwen3-235B-slots --plan plan.json --format json",
)


MOST_SHOWN = 10
"""Problems printed for people; one is enough to distrust a checkpoint, all are in the JSON."""


class LevelName(StrEnum):
    """Values of --level."""

    headers = "headers"
    sample = "sample"
    full = "full"


def verify(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Folder or repository id (in the local cache) that was converted.")
    ],
    output: Annotated[Path, typer.Argument(help="The converted folder.", metavar="OUT")],
    level: Annotated[
        LevelName,
        typer.Option(
            help="headers: names, shapes, index, config, side files; sample: also a page of every tensor and expert "
            "row; full: every byte of both sides."
        ),
    ] = LevelName.full,
    plan: Annotated[
        Path | None, typer.Option("--plan", help="The plan that OUT must follow. Default: the one that lies in it.")
    ] = None,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Prove that every tensor of OUT is the source's bytes that the plan names; exit code 1 when it is not."""
    from rich.text import Text

    from eplb_cli.checkpoint.classify import classify
    from eplb_cli.checkpoint.source import Checkpoint
    from eplb_cli.checkpoint.verify import Level
    from eplb_cli.checkpoint.verify import verify as prove
    from eplb_cli.placement import Placement

    console = Console(output_format)
    placement = None if plan is None else Placement.load(plan)
    checkpoint = Checkpoint.open(source)
    classified = classify(checkpoint.config, checkpoint.tensors, stored_experts=checkpoint.config.shape.num_experts)
    for warning in classified.warnings:
        console.warn(warning)
    total = sum(entry.nbytes for entry in checkpoint.tensors.values()) if level is LevelName.full else None
    with console.transfer("comparing", total) as advance:
        report = prove(checkpoint, output, placement, Level(level.value), classified=classified, progress=advance)
    verdict = "right" if report.ok else "WRONG"
    shown = list(report.problems[:MOST_SHOWN])
    if len(report.problems) > MOST_SHOWN:
        shown.append("... and more; --format json lists them")
    lines = (*shown, f"{output}: {verdict}; {report.tensors} tensors proven at level {level.value}")
    console.result(
        {"ok": report.ok, "level": level.value, "tensors": report.tensors, "problems": list(report.problems)},
        # Names hold brackets and are pasted into other commands: no markup, no line breaks.
        *(Text(line, no_wrap=True, overflow="ignore") for line in lines),
    )
    if not report.ok:
        raise typer.Exit(1)
