"""Any placement scored on any loads of the same model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import Rule, loads_under
from eplb_cli.dispatch.rules import RULES
from eplb_cli.errors import PlacementError
from eplb_cli.loads import ExpertLoads, refuse_constant_routing
from eplb_cli.metrics import balancedness, balancedness_per_layer, max_over_mean
from eplb_cli.placement import Placement

__all__ = ["Score", "loads_of_layers", "planned_rule", "score"]

DIGITS = 9
"""Decimals of recorded figures: more than anybody acts on, fewer than summation order could change."""


@dataclass(frozen=True)
class Score:
    """How evenly a placement spreads loads over ranks.

    Args:
        dispatch: the rule that chooses among copies.
        balancedness: sum of mean rank loads / sum of max rank loads, over windows and layers.
        balancedness_of_mean: the same on the loads summed over windows; optimistic, since a rank's busy and idle
            windows cancel in it.
        max_over_mean, max_over_mean_p95, max_over_mean_worst: mean, 95th percentile and largest of max / mean rank load
            over all (window, layer) with load.
        per_layer: (layer id, balancedness over windows) of each layer.
        windows, tokens: what was scored.
        warnings: layers left out.
    """

    dispatch: Rule
    balancedness: float
    balancedness_of_mean: float
    max_over_mean: float
    max_over_mean_p95: float
    max_over_mean_worst: float
    per_layer: tuple[tuple[int, float], ...]
    windows: int
    tokens: int
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The object that `eplb score --format json` prints."""
        return {
            "dispatch": self.dispatch,
            "balancedness": self.balancedness,
            "balancedness_of_mean": self.balancedness_of_mean,
            "max_over_mean": {
                "mean": self.max_over_mean,
                "p95": self.max_over_mean_p95,
                "worst": self.max_over_mean_worst,
            },
            "per_layer": [{"layer_id": layer, "balancedness": value} for layer, value in self.per_layer],
            "windows": self.windows,
            "tokens": self.tokens,
            "warnings": list(self.warnings),
        }


def score(placement: Placement, loads: ExpertLoads, dispatch: Rule | None = None) -> Score:
    """Score a placement on loads; layers that only one of the two has are left out with a warning.

    Args:
        placement: any.
        loads: of the same model.
        dispatch: the rule that chooses among copies; None for the one that the placement was planned for, else `even`.

    Raises:
        PlacementError: the two are of different expert counts, or share no layer.
        LoadsError: every layer sends everything to one expert (`refuse_constant_routing`).
    """
    if placement.num_experts != loads.num_experts:
        raise PlacementError(
            f"the plan places {placement.num_experts} experts, the loads are of {loads.num_experts}",
            rule="a plan and loads must be of one model",
        )
    shared = np.intersect1d(placement.layer_ids, loads.layer_ids)
    if not shared.size:
        raise PlacementError("the plan and the loads have no layer in common", rule="layers match by absolute layer id")
    warnings = []
    for name, ids in (("loads lack", placement.layer_ids), ("plan lacks", loads.layer_ids)):
        absent = np.setdiff1d(ids, shared)
        if absent.size:
            layers = f"layer{'s' * (absent.size > 1)} {', '.join(map(str, absent.tolist()))}"
            warnings.append(f"the {name} {layers}, which the score leaves out")
    loads = loads.for_layers(shared)
    warnings.extend(refuse_constant_routing(loads))
    rule = dispatch or planned_rule(placement)
    ranks = loads_of_layers(placement, loads, rule)
    summed = ranks.sum(0)
    ratios = max_over_mean(ranks)[ranks.mean(-1) > 0]
    if not ratios.size:
        ratios = np.ones(1)
        warnings.append("the loads are all zero: there is nothing to balance")
    return Score(
        dispatch=rule,
        balancedness=round(balancedness(ranks), DIGITS),
        balancedness_of_mean=round(balancedness(summed), DIGITS),
        max_over_mean=round(float(ratios.mean()), DIGITS),
        max_over_mean_p95=round(float(np.quantile(ratios, 0.95)), DIGITS),
        max_over_mean_worst=round(float(ratios.max()), DIGITS),
        per_layer=tuple(
            (int(layer), round(float(value), DIGITS))
            for layer, value in zip(shared, balancedness_per_layer(ranks), strict=True)
        ),
        windows=loads.num_windows,
        tokens=int(loads.tokens.sum()),
        warnings=tuple(warnings),
    )


def planned_rule(placement: Placement) -> Rule:
    """The rule that a placement was planned for; `even` where it does not say."""
    return next((rule for rule in RULES if rule == placement.provenance.dispatch), "even")


def loads_of_layers(placement: Placement, loads: ExpertLoads, rule: Rule) -> npt.NDArray[np.float64]:
    """Rank loads [W, L, G] of the loads' layers, all of which the placement has.

    The rule sees the whole placement: SGLang's choice in a layer depends on the layers before.
    """
    at = np.searchsorted(placement.layer_ids, loads.layer_ids)
    counts = loads.counts
    if len(at) < placement.num_layers:
        counts = np.zeros((loads.num_windows, placement.num_layers, loads.num_experts), np.int64)
        counts[:, at] = loads.counts
    ranks = loads_under(
        rule, placement.physical_to_logical, counts, placement.ep_size, placement.num_nodes, placement.layer_ids
    )
    return ranks[:, at]
