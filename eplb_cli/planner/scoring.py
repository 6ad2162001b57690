"""Any placement scored on any loads of the same model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch import EVEN_RULES, Rule, loads_under
from eplb_cli.dispatch.rules import RULES
from eplb_cli.errors import PlacementError
from eplb_cli.loads import ExpertLoads, refuse_constant_routing
from eplb_cli.metrics import balancedness, balancedness_per_layer, max_over_mean
from eplb_cli.placement import Placement

__all__ = ["Reach", "Score", "loads_of_layers", "planned_rule", "reach", "score"]

DIGITS = 9
"""Decimals of recorded figures: more than anybody acts on, fewer than summation order could change."""


WORTH_SAYING = 0.02
"""Balancedness that an engine may lose to the plan's figure without a warning."""


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


def score(placement: Placement, loads: ExpertLoads, dispatch: Rule = "even") -> Score:
    """Score a placement on loads; layers that only one of the two has are left out with a warning.

    Args:
        placement: any.
        loads: of the same model.
        dispatch: the rule that chooses among copies, whatever the placement was planned for.

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
    ranks = loads_of_layers(placement, loads, dispatch)
    summed = ranks.sum(0)
    ratios = max_over_mean(ranks)[ranks.mean(-1) > 0]
    if not ratios.size:
        ratios = np.ones(1)
        warnings.append("the loads are all zero: there is nothing to balance")
    return Score(
        dispatch=dispatch,
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


@dataclass(frozen=True)
class Reach:
    """What an engine makes of a placement by its own choice of copies.

    Args:
        dispatch, planned: the engine's rule, and the one that the placement was planned for.
        balancedness: under the engine's rule; None where neither loads nor the placement's record tell.
        promised: under the rule planned for, of the same windows; None where not known.
    """

    dispatch: Rule
    planned: Rule
    balancedness: float | None
    promised: float | None

    @property
    def falls_short(self) -> bool:
        """Whether the engine stays WORTH_SAYING or more below what the plan says."""
        if self.balancedness is None or self.promised is None:
            return False
        return self.promised - self.balancedness >= WORTH_SAYING

    def as_dict(self) -> dict[str, Any]:
        """The object in `eplb export --format json`."""
        return {
            "dispatch": self.dispatch,
            "planned_for": self.planned,
            "balancedness": self.balancedness,
            "promised": self.promised,
        }


def reach(placement: Placement, dispatch: Rule, loads: ExpertLoads | None = None) -> Reach:
    """What a placement reaches under a rule, on loads; without them from its own record, as far as that goes.

    Raises:
        PlacementError, LoadsError: as `score`.
    """
    planned = planned_rule(placement)
    if loads is not None:
        theirs, own = (score(placement, loads, rule).balancedness for rule in (dispatch, planned))
        return Reach(dispatch, planned, theirs, own)
    recorded = placement.provenance.balancedness
    alike = dispatch == planned or {dispatch, planned} <= set(EVEN_RULES)
    if not alike and dispatch in EVEN_RULES:
        return Reach(dispatch, planned, recorded.get("even"), recorded.get("after"))
    return Reach(dispatch, planned, recorded.get("after") if alike else None, recorded.get("after"))


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
