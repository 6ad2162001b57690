"""Copies searched anew with every placement packed from scratch: for one or two slots per rank, where copies decide.

With one slot a rank the copies are the placement. With two, sorting the shares and putting the i-th largest beside the
i-th smallest is the best packing of one window, and a good one of many; it is cheap enough to try after every change of
the copies. Greedy copies (`counts`) are far from the best there: 600, 560 and six small experts on 8 ranks of two slots
end at a busiest rank of 232, where 196.7 is possible.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import replica_counts

__all__ = ["MOST_SLOTS", "recount"]

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MOST_SLOTS = 2
"""Slots per rank up to which the copies are searched with a re-pack each."""
TRIES = 8
"""Changes of the copies that a step judges, of which it takes the best."""
LEAST_STEPS, MOST_STEPS = 40, 400
"""Fewer steps than the least are not taken: they cost time and find nothing."""
HOTTEST = 1.6
"""Temperature at the start, in parts of the objective over ranks; it falls linearly to nothing."""
SEARCHED_WINDOWS = 16
"""Windows that judge the copies, sums of those at hand: copies follow slower changes than partners do."""
SORTING = 2
"""Windows whose loads take as long to add up as the shares to sort."""


def recount(windows: IntArray, start: IntArray, ep_size: int, budget: int, seed: int) -> IntArray:
    """A placement [L, P] of better copies, from loads [T, L, E] and a start of one or two slots per rank.

    Annealing on F, the sum over windows of the busiest rank's load. A step tries to give an expert one copy more at the
    cost of one with several; every other try takes an expert of the busiest rank of a window drawn. Draws are the same
    for all layers, so that a layer's result does not depend on its neighbours. The start is returned where nothing
    without twins was found.

    Args:
        budget: slots times windows that a layer's search may look at.
    """
    layers, slots = start.shape
    experts = windows.shape[2]
    judged = min(len(windows), SEARCHED_WINDOWS)
    summed = np.add.reduceat(windows, np.arange(judged) * len(windows) // judged, axis=0)
    loads = summed.transpose(1, 2, 0).astype(np.float64)
    layer, room = np.arange(layers), slots // ep_size
    counts = replica_counts(start, experts)
    steps = min(MOST_STEPS, budget // (slots * (loads.shape[2] + SORTING) * TRIES))
    if steps < LEAST_STEPS or slots == experts or ep_size < 2:
        return start
    risk = loads.mean(2) + loads.std(2)
    least, ranks_load, placed, twinned = _fold(loads, risk, counts, ep_size)
    best_value, best = np.where(twinned, np.inf, least), np.where(twinned[:, None], start, placed)
    rng = np.random.default_rng(seed)
    for step in range(steps):
        draws, luck = rng.random((TRIES, 3)), rng.random()
        window = (draws[:, 0] * loads.shape[2]).astype(np.int64)
        busiest = ranks_load[:, :, window].argmax(1)
        busiest[:, 1::2] = (draws[1::2, 0] * ep_size).astype(np.int64)
        gains = placed[layer[:, None], busiest * room + (draws[:, 1] * room).astype(np.int64)]
        several = counts > 1
        nth = (draws[None, :, 2] * several.sum(1)[:, None]).astype(np.int64) + 1
        gives = (several.cumsum(1)[:, None, :] >= nth[:, :, None]).argmax(2)
        tried = np.repeat(counts[:, None], TRIES, 1)
        tried[layer[:, None], np.arange(TRIES), gives] -= 1
        tried[layer[:, None], np.arange(TRIES), gains] += 1
        illegal = (tried.min(2) < 1) | (tried.max(2) > ep_size) | (gives == gains)
        tried[illegal] = np.repeat(counts[:, None], TRIES, 1)[illegal]
        flat = np.repeat(layer, TRIES)
        value, load, rows, twinned = _fold(loads[flat], risk[flat], tried.reshape(-1, experts), ep_size)
        value = np.where(illegal, np.inf, value.reshape(layers, TRIES))
        choice = value.argmin(1)
        value = value[layer, choice]
        heat = HOTTEST / ep_size * (1 - step / steps) * least
        taken = np.isfinite(value) & (value < least - np.log1p(-luck) * heat)
        picked = layer * TRIES + choice
        counts[taken], least[taken] = tried[layer, choice][taken], value[taken]
        ranks_load[taken], placed[taken] = load[picked][taken], rows[picked][taken]
        better = taken & (least < best_value) & ~twinned[picked]
        best_value[better], best[better] = least[better], placed[better]
    return best


def _fold(
    loads: FloatArray, risk: FloatArray, counts: IntArray, ranks: int
) -> tuple[FloatArray, FloatArray, IntArray, npt.NDArray[np.bool_]]:
    """The placement with the i-th largest share beside the i-th smallest.

    Returns:
        F [X], rank loads [X, G, T], the placement [X, P], and whether it puts two copies of an expert on one rank.
    """
    rows = len(counts)
    slots = int(counts[0].sum())
    row = np.arange(rows)[:, None]
    order = np.argsort(-risk / counts, axis=1, kind="stable")
    ends = np.take_along_axis(counts, order, 1).cumsum(1)
    marks = np.zeros((rows, slots + 1), np.int64)
    np.add.at(marks, (row, ends), 1)
    copies = order[row, marks.cumsum(1)[:, :slots]]
    shares = loads / counts[:, :, None]
    load = shares[row, copies[:, :ranks]]
    if slots == ranks:
        return load.max(1).sum(1), load, copies, np.zeros(rows, bool)
    partner = copies[:, : ranks - 1 : -1]
    load += shares[row, partner]
    twinned = (copies[:, :ranks] == partner).any(1)
    return load.max(1).sum(1), load, np.stack([copies[:, :ranks], partner], 2).reshape(rows, slots), twinned
