"""Offline expert-parallel load balancing for Mixture-of-Experts models.

The names below are the Python API; the command line uses the same ones. They are imported when first used, so that
`import eplb_cli` loads neither numpy nor torch.

    from eplb_cli import ExpertLoads, PlanRequest, plan, score

    loads = ExpertLoads.load("monday.safetensors")
    result = plan(loads, PlanRequest(ep_size=8, num_redundant_experts=16))
    print(result.balancedness.held_out)
    print(score(result.placement, ExpertLoads.load("tuesday.safetensors")).balancedness)
    result.placement.save("plan.json")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eplb_cli.advice import Advice, Situation, advise
    from eplb_cli.checkpoint import Model
    from eplb_cli.checkpoint.convert import Conversion
    from eplb_cli.checkpoint.convert import prepare as prepare_conversion
    from eplb_cli.errors import EplbError
    from eplb_cli.exports import ENGINES, export_placement, import_placement
    from eplb_cli.loads import ExpertLoads, ModelShape, concatenate
    from eplb_cli.metrics import balancedness, rank_loads
    from eplb_cli.placement import Placement, Provenance
    from eplb_cli.planner import PlanRequest, PlanResult, Score, score
    from eplb_cli.planner import make_plan as plan
    from eplb_cli.traces import ReadOptions, read_traces

__version__ = "0.1.0"

__all__ = [
    "ENGINES",
    "Advice",
    "Conversion",
    "EplbError",
    "ExpertLoads",
    "Model",
    "ModelShape",
    "Placement",
    "PlanRequest",
    "PlanResult",
    "Provenance",
    "ReadOptions",
    "Score",
    "Situation",
    "advise",
    "balancedness",
    "concatenate",
    "export_placement",
    "import_placement",
    "plan",
    "prepare_conversion",
    "rank_loads",
    "read_traces",
    "score",
]

_HOMES = {
    "advice": ("Advice", "Situation", "advise"),
    "checkpoint.convert": ("Conversion", "prepare_conversion"),
    "checkpoint.model": ("Model",),
    "errors": ("EplbError",),
    "exports": ("ENGINES", "export_placement", "import_placement"),
    "loads": ("ExpertLoads", "ModelShape", "concatenate"),
    "metrics": ("balancedness", "rank_loads"),
    "placement": ("Placement", "Provenance"),
    "planner": ("PlanRequest", "PlanResult", "Score", "plan", "score"),
    "traces": ("ReadOptions", "read_traces"),
}
"""Module below eplb_cli -> the public names that it defines."""
_NAMES_AT_HOME = {"plan": "make_plan", "prepare_conversion": "prepare"}
"""Names that say enough inside their module, but not here."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"eplb_cli.{module}"), _NAMES_AT_HOME.get(name, name))
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
