"""Options that several commands share, spelled once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from eplb_cli.console import OutputFormat

__all__ = ["Dispatch", "DispatchOption", "ForceOption", "FormatOption", "OutputOption", "Phase"]


class Phase(StrEnum):
    """Which part of the traffic is taken."""

    all = "all"
    prefill = "prefill"
    decode = "decode"


class Dispatch(StrEnum):
    """Which copy of an expert serves a token (docs/dispatch.md)."""

    even = "even"
    hash = "hash"
    balanced = "balanced"
    sglang = "sglang"
    vllm_ascend = "vllm-ascend"
    tensorrt_llm = "tensorrt-llm"


FormatOption = Annotated[
    OutputFormat, typer.Option("--format", help="human: tables; json: one object on stdout; quiet: nothing on stdout.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace the output when it exists.")]
OutputOption = Annotated[Path, typer.Option("-o", "--output", help="Where to write the result.")]
DispatchOption = Annotated[
    Dispatch | None,
    typer.Option(
        "--dispatch",
        metavar="|".join(Dispatch),
        help="The rule that chooses among an expert's copies. Default: the (first) plan's own, else even.",
    ),
]
