"""`eplb convert`: write a checkpoint whose experts lie as a plan says."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import ForceOption, FormatOption, OutputOption
from eplb_cli.console import Console, OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eplb_cli.checkpoint.convert import Estimate
    from eplb_cli.checkpoint.layout import OutputShard

EXAMPLES = (
    "eplb convert Qwen/Qwen3-30B-A3B plan.json -o Qwen3-30B-A3B-balanced",
    "eplb convert ./Llama-4-Scout plan.json -o ./Llama-4-Scout-balanced --dry-run",
    "eplb convert ./Qwen3-235B-A22B plan.json -o ./Qwen3-235B-slots --layout physical",
)


class LayoutName(StrEnum):
    """Values of --layout."""

    stock = "stock"
    physical = "physical"


def convert(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or repository id (in the local cache) of the model.")
    ],
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="plan.json, or a converted folder that holds one.")],
    output: OutputOption,
    layout: Annotated[
        LayoutName,
        typer.Option(
            help="stock: experts renumbered, runs on every engine, needs a plan of the stock form; "
            "physical: all slots in plan order, each rank's in files of its own, needs eplb's vLLM plugin."
        ),
    ] = LayoutName.stock,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print what would be written, write nothing.")
    ] = False,
    force: ForceOption = False,
    resume: Annotated[
        bool,
        typer.Option("--resume/--no-resume", help="Go on from what an interrupted run left, or start afresh."),
    ] = True,
    link: Annotated[
        bool,
        typer.Option("--link", help="Hard-link shards that do not change; editing them then edits the source too."),
    ] = False,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            help="Largest weight file, like 5GB. Default: the source's files (stock), 5GB (physical).",
        ),
    ] = None,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Write a checkpoint whose experts lie as PLAN says: same function, balanced from the first token.

    All checks run before the first byte is written; the source is never touched; OUT appears whole or not at all.
    An interrupted run goes on where it stopped when the same command is given again.
    """
    from dataclasses import asdict

    from rich.text import Text

    from eplb_cli.checkpoint.convert import prepare
    from eplb_cli.checkpoint.layout import Layout, shard_limit
    from eplb_cli.errors import UsageError

    console = Console(output_format)
    max_shard_bytes = None
    if max_shard_size is not None:
        try:
            max_shard_bytes = shard_limit(max_shard_size)
        except (ValueError, KeyError):
            raise UsageError(f"--max-shard-size {max_shard_size!r}", rule="a size like 5GB, 500MB or 2GiB") from None
    conversion = prepare(
        model, plan, output, Layout(layout.value), force=force, link=link, max_shard_bytes=max_shard_bytes
    )
    for warning in conversion.warnings:
        console.warn(warning)
    for note in conversion.notes:
        console.note(note)
    estimate = conversion.estimate()
    if dry_run:
        # Run by hand before a long night: what is missing must be seen, but the plan of work is the result.
        data = {
            "layout": layout.value,
            "files": estimate.files,
            "bytes_read": 0,
            "bytes_written": 0,
            "bytes_cloned": 0,
            "extra_bytes": estimate.extra_bytes,
            "seconds": 0.0,
            "verified_tensors": 0,
            "dry_run": True,
            "estimate": asdict(estimate),
            "shards": [{"file": shard.name, "bytes": shard.size} for shard in conversion.rewrite.shards],
        }
        console.result(data, *_dry_run_lines(conversion.rewrite.shards, estimate))
        if estimate.bytes_missing:
            console.warn(f"the target lacks {estimate.bytes_missing:,} bytes; the run would stop before the first byte")
        return
    conversion.require_space()
    total = sum(shard.size for shard in conversion.rewrite.shards)
    with console.transfer("converting", total) as advance:
        result = conversion.run(resume=resume, progress=advance)
    lines = (
        f"{output}: {result.files} files, {_size(total)} of weights in {result.seconds:.1f} s "
        f"({_size(result.bytes_written)} written, {_size(result.bytes_cloned)} shared with the source)",
        f"layout {layout.value}; copies of experts add {_size(result.extra_bytes)}; "
        f"{result.verified_tensors} tensors checked by sample",
        f"prove every byte: eplb verify {shlex.quote(model)} {shlex.quote(str(output))} --level full",
    )
    console.result(
        asdict(result),
        *(Text(line, no_wrap=True, overflow="ignore") for line in lines),
    )


def _dry_run_lines(shards: Sequence[OutputShard], estimate: Estimate) -> tuple[RenderableType, ...]:
    """Table of files and the sums below it."""
    from rich.table import Table

    table = Table("file", "bytes", box=None, pad_edge=False)
    for shard in shards:
        table.add_row(shard.name, f"{shard.size:,}")
    return (
        table,
        f"{estimate.files} files, {estimate.bytes_total:,} bytes; copies of experts add {estimate.extra_bytes:,}",
        f"up to {estimate.bytes_cloned:,} bytes shared with the source",
        f"space needed {estimate.bytes_needed:,} bytes, free {estimate.bytes_free:,}",
    )


def _size(count: int) -> str:
    """Bytes in decimal units, as disks are sold."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} bytes"
