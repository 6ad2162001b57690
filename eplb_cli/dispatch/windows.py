"""Windows of loads under a rule: the tokens that every rank serves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.balanced import choose_copies
from eplb_cli.dispatch.copies import Copies
from eplb_cli.dispatch.rules import Rule
from eplb_cli.metrics import rank_loads

__all__ = ["loads_under"]

FloatArray = npt.NDArray[np.float64]


def loads_under(
    rule: Rule, physical_to_logical: npt.NDArray[np.integer], counts: npt.NDArray[np.integer], ep_size: int
) -> FloatArray:
    """Tokens each rank serves, float64 [W, L, G], from a map [L, P] and loads [W, L, E].

    Every window is taken as one step. The hash splits a large one evenly.
    """
    if rule != "balanced":
        return rank_loads(physical_to_logical, counts, ep_size)
    windows, layers, experts = counts.shape
    copies = Copies.of(physical_to_logical, experts, ep_size)
    loads = np.zeros((windows, layers, ep_size))
    row = np.arange(layers)[:, None, None]
    # Window by window, so that memory does not grow with their number.
    for window in range(windows):
        quota = choose_copies(counts[window].astype(np.int64), copies, 0, whole_step=True)
        np.add.at(loads[window], (row, copies.ranks), quota)
    return loads
