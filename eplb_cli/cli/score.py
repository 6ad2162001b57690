"""`eplb score`: any plan on any loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eplb_cli.cli.options import Dispatch, FormatOption
from eplb_cli.console import OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType

    from eplb_cli.planner import Score

__all__ = ["EXAMPLES", "score"]

EXAMPLES = (
    "eplb score plan.json loads.safetensors",
    "eplb score converted_model/ tomorrow.safetensors --format json",
    "eplb score plan.json loads.safetensors --dispatch sglang",
)


def score(
    plan: Annotated[Path, typer.Argument(help="A plan, or a converted folder that holds one.", metavar="PLAN")],
    loads: Annotated[
        list[Path], typer.Argument(help="Profiles; several join along their windows.", metavar="LOADS...")
    ],
    dispatch: Annotated[
        Dispatch,
        typer.Option("--dispatch", metavar="|".join(Dispatch), help="The rule that chooses among an expert's copies."),
    ] = Dispatch.even,
    output_format: FormatOption = OutputFormat.human,
) -> None:
    """Score a plan on loads."""
    from eplb_cli.console import Console
    from eplb_cli.loads import ExpertLoads, concatenate
    from eplb_cli.placement import Placement
    from eplb_cli.planner import score as score_placement

    console = Console(output_format)
    placement = Placement.load(plan)
    joined = concatenate([ExpertLoads.load(path) for path in loads])
    scored = score_placement(placement, joined, dispatch.value)
    planned = placement.provenance.dispatch
    if planned not in (None, dispatch.value):
        console.note(f"The plan is made for the rule {planned}; --dispatch {planned} scores it under that.")
    for warning in scored.warnings:
        console.warn(warning)
    console.result(scored.as_dict(), *_table(scored))


def _table(scored: Score) -> list[RenderableType]:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("layer")
    table.add_column("balancedness", justify="right")
    table.add_column("max/mean", justify="right")
    worst = sorted(scored.per_layer, key=lambda entry: (entry[1], entry[0]))[:5]
    for layer, value in worst:
        table.add_row(str(layer), f"{value:.4f}", f"{1 / value:.3f}")
    return [
        Text(
            f"balancedness {scored.balancedness:.4f} over {scored.windows} windows"
            + (f" of {scored.tokens} tokens" if scored.tokens else "")
            + f"; {scored.balancedness_of_mean:.4f} on the loads summed over windows.\n"
            f"max/mean of a layer in a window: mean {scored.max_over_mean:.3f}, "
            f"95th percentile {scored.max_over_mean_p95:.3f}, worst {scored.max_over_mean_worst:.3f}.\n"
            "balancedness = sum of the mean rank load / sum of the max rank load, over windows "
            f"and layers; 1 is perfect. Copies chosen by the rule {scored.dispatch}.\n\nLeast balanced layers"
        ),
        table,
    ]
