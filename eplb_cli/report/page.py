"""A report as one HTML page: text and tables are written here, charts are drawn by `page.js` from the same numbers."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from eplb_cli import __version__
from eplb_cli.console import printable
from eplb_cli.report.data import FOLDS, Layout, Report

__all__ = ["render"]

WORST = 10
"""Layers in the table of the least balanced."""


def render(report: Report) -> str:
    """The page: styles, scripts and numbers inlined; the same text for the same report.

    A content-security policy in its head forbids every request, so that a browser enforces what is promised.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_printable
    )
    environment.filters["percent"] = lambda share: f"{100 * share:.1f} %"
    environment.filters["count"] = lambda number: f"{number:,}"
    document = _printable(report.as_dict())
    # "<" cannot occur in JSON but inside strings, where the escape means the same and cannot end the script.
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = environment.from_string(_file("page.html")).render(
        report=report,
        document=document,
        title=_title(report),
        plan=report.plan,
        summary=_summary(report),
        worst=_worst(report),
        hottest=dict(zip(document["profile"]["layer_ids"], document["hottest"], strict=True)),
        folds=min(FOLDS, report.loads.num_windows),
        version=__version__,
        style=Markup(_file("page.css")),  # noqa: S704 - our own file
        script=Markup(_file("page.js")),  # noqa: S704 - our own file
        library=Markup(_library()),  # noqa: S704 - the library's own files
        data=Markup(data),  # noqa: S704 - escaped above
    )
    return f"{page}\n"


def _printable(value: Any) -> Any:
    """`value` with control and format characters of its texts escaped: names come from files that others made."""
    if isinstance(value, dict):
        return {_printable(key): _printable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(item) for item in value]
    # Our own scripts and styles are marked as safe, and are not touched.
    return printable(value) if type(value) is str else value


def _file(name: str) -> str:
    return (resources.files("eplb_cli.report") / name).read_text(encoding="utf-8")


def _library() -> str:
    """BokehJS with its drawing interface, to inline."""
    from bokeh.resources import Resources

    resources = Resources(mode="inline", components=["bokeh", "bokeh-api"], minified=True, log_level="warn")
    return "\n".join(resources.js_raw)


def _title(report: Report) -> str:
    if report.model is None:
        return f"Expert loads of {report.loads.model or report.profile}"
    path = Path(report.model)
    name = path.parent.name if path.name == "config.json" else path.name
    return f"Expert loads of {name or report.model}"


def _summary(report: Report) -> list[tuple[str, str, str]]:
    """(figure, label, definition) of the tiles at the top."""
    loads, plan = report.loads, report.plan
    tiles = []
    if plan is not None:
        before = report.layouts[plan.initial]
        tiles.append((f"{before.balancedness:.3f}", "balancedness now", f"{before.name}, on these loads"))
        tiles.append((f"{plan.balancedness:.3f}", f"balancedness with {plan.name}", _provenance(plan)))
        if plan.recorded_held_out is not None:
            interval = ""
            if report.held_out_interval is not None and plan.in_sample is not False:
                interval = "; 90 % interval {:.3f} to {:.3f} with little search".format(*report.held_out_interval)
            tiles.append(
                (
                    f"{plan.recorded_held_out:.3f}",
                    "held out",
                    f"on windows the planner did not see, as the plan records{interval}",
                )
            )
        tiles.append((f"{plan.bound:.3f}", "upper bound", "no placement of this size does better on these loads"))
    elif report.layouts:
        before = report.layouts[0]
        tiles.append((f"{before.balancedness:.3f}", "balancedness now", f"{before.name}, on these loads"))
    total = loads.counts.sum(0)
    loaded = total[total.any(1)]
    if loaded.size:
        skew = float((loaded.max(1) / loaded.mean(1)).max())
        tiles.append((f"{skew:.1f} ×", "hottest expert", "its load over its layer's mean expert load"))
    return tiles


def _provenance(plan: Layout) -> str:
    if plan.in_sample is None:
        return "on these loads; the plan does not say which loads it was made from"
    if plan.in_sample:
        return "on the loads it was made from"
    return "on another file than it was made from: held out, unless that holds these windows too"


def _worst(report: Report) -> list[dict[str, Any]]:
    """Least balanced layers, with the first plan when there is one; ties by lowest layer."""
    judged = report.plan or (report.layouts[0] if report.layouts else None)
    if judged is None:
        return []
    rows = []
    for index in judged.per_layer.argsort(kind="stable")[:WORST]:
        loads = judged.rank_loads[index]
        rows.append(
            {
                "layer": int(report.layer_ids[index]),
                "balancedness": [float(layout.per_layer[index]) for layout in report.layouts],
                "busiest": int(loads.argmax()),
                "ratio": float(loads.max() / loads.mean()) if loads.any() else 1.0,
            }
        )
    return rows
