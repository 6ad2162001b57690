"""Which slot serves each token of a batch, under the `balanced` rule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.balanced import choose_copies
from eplb_cli.dispatch.copies import Copies

__all__ = ["serving_slots"]

IntArray = npt.NDArray[np.int64]


def serving_slots(
    ids: npt.NDArray[np.integer],
    real: int,
    physical_to_logical: npt.NDArray[np.integer],
    num_experts: int,
    ep_size: int,
    price: int,
    *,
    whole_step: bool,
) -> IntArray:
    """The slot that serves each expert of each token, int64 [n, k]; -1 where `ids` names no expert.

    The i-th real token of an expert, counted along the rows of `ids`, goes to the copy in whose part of the expert's
    tokens i lies, parts being in the order of the copies: so a batch's split is exactly that of `choose_copies`.
    Padding goes to primaries and is not counted.

    Args:
        ids: [n, k], the experts that the router chose.
        real: the first so many rows are tokens, the rest padding.
        physical_to_logical: the layer's map [P].
        num_experts, ep_size: E and G.
        price, whole_step: as in `choose_copies`.
    """
    flat = np.asarray(ids, np.int64).ravel()
    known = (flat >= 0) & (flat < num_experts)
    counted = known & (np.arange(len(flat)) < real * ids.shape[1])
    counts = np.bincount(flat[counted], minlength=num_experts)
    copies = Copies.of(np.asarray(physical_to_logical)[None], num_experts, ep_size)
    ends = choose_copies(counts[None], copies, price, whole_step=whole_step)[0].cumsum(1)
    by_expert = np.flatnonzero(counted)[np.argsort(flat[counted], kind="stable")]
    place = np.arange(len(by_expert)) - np.repeat(np.cumsum(counts) - counts, counts)
    copy = np.zeros_like(flat)
    copy[by_expert] = (place[:, None] >= ends[flat[by_expert]]).sum(1)
    slots = np.where(known, copies.slots[0, np.where(known, flat, 0), copy], -1)
    return slots.reshape(ids.shape)
