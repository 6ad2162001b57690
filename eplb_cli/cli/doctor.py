"""`eplb doctor`: what `eplb serve` would meet here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from eplb_cli.cli.options import FormatOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eplb_cli.doctor import Finding

__all__ = ["EXAMPLES", "doctor"]

EXAMPLES = ("eplb doctor", "eplb doctor --format json")

SIGNS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "problem": ("PROBLEM", "bold red")}


def doctor(output_format: FormatOption = OutputFormat.human) -> None:
    """Look at this environment: vLLM, the plugin, a GPU, variables. Exit code 1 when serving a plan would fail."""
    from eplb_cli.console import Console
    from eplb_cli.doctor import examine

    console = Console(output_format)
    findings = examine()
    healthy = all(finding.status != "problem" for finding in findings)
    console.result({"ok": healthy, "findings": [finding.as_dict() for finding in findings]}, *_lines(findings))
    if not healthy:
        raise typer.Exit(1)


def _lines(findings: list[Finding]) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        sign, style = SIGNS[finding.status]
        table.add_row(Text(sign, style=style), finding.name, Text(finding.found))
        if finding.hint:
            table.add_row("", "", Text(f"→ {finding.hint}", style="dim"))
    return [table]
