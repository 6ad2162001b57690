"""Counts given as (layer, expert) -> count, where absent pairs are zero: never a shift of rows or columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import TraceError
from eplb_cli.traces.protocol import MOST_EXPERTS, LayerAxis

__all__ = ["dense_counts"]


def dense_counts(
    entries: Iterable[tuple[int, int, int]], num_experts: int, file: str
) -> tuple[npt.NDArray[np.int64], LayerAxis]:
    """int64 [1, L, E] and the layers that occur, ascending, from (layer, expert, count); equal pairs add up.

    Raises:
        TraceError: an expert is E or above.
    """
    if num_experts > MOST_EXPERTS:
        raise TraceError(f"has {num_experts} experts", file=file, rule=f"no model has more than {MOST_EXPERTS}")
    rows: dict[int, npt.NDArray[np.int64]] = {}
    for layer, expert, count in entries:
        if not 0 <= expert < num_experts:
            raise TraceError(
                f"expert {expert} >= num_experts {num_experts}",
                file=file,
                layer=layer,
                rule=f"experts are 0..{num_experts - 1}",
                hint="Are these physical ids? Pass the map in force: --physical-to-logical PLAN.",
            )
        rows.setdefault(layer, np.zeros(num_experts, np.int64))[expert] += count
    layers = sorted(rows)
    counts = np.stack([rows[layer] for layer in layers]) if layers else np.zeros((0, num_experts), np.int64)
    return counts[None], LayerAxis.absolute(layers)
