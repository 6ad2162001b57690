"""Windows of loads under a rule: the tokens that every rank serves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.balanced import choose_copies
from eplb_cli.dispatch.copies import Copies
from eplb_cli.dispatch.engines import static_shares
from eplb_cli.dispatch.rules import Rule
from eplb_cli.metrics import loads_of_shares, rank_loads

__all__ = ["loads_under"]

FloatArray = npt.NDArray[np.float64]


def loads_under(
    rule: Rule,
    physical_to_logical: npt.NDArray[np.integer],
    counts: npt.NDArray[np.integer],
    ep_size: int,
    num_nodes: int = 1,
    layer_ids: Sequence[int] | npt.NDArray[np.integer] | None = None,
) -> FloatArray:
    """Tokens each rank serves, float64 [W, L, G], from a map [L, P] and loads [W, L, E].

    Every window is taken as one step to which all ranks bring equal parts of each expert's tokens. The hash and
    TensorRT-LLM's turns split a large one evenly.

    Args:
        rule, physical_to_logical, counts, ep_size: as above; G is `ep_size`.
        num_nodes, layer_ids: as in `engines.chosen_slots`; they matter to a static rule only.
    """
    if rule == "sglang" or rule == "vllm-ascend":
        experts = counts.shape[2]
        return loads_of_shares(static_shares(rule, physical_to_logical, experts, ep_size, num_nodes, layer_ids), counts)
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
