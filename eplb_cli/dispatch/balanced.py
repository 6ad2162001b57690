"""The `balanced` rule: a step's own expert ids decide which copy serves.

It spreads each expert's tokens so that the busiest rank has least to do, and opens a copy only where that is worth
reading one more expert's weights. Loads and prices are whole numbers of tokens: a rank's time in a step is its tokens
plus `price` for each slot that serves any. The rule is a function of integers alone, so every rank that sees the same
batch makes the same choice.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.dispatch.copies import Copies

__all__ = ["choose_copies"]

IntArray = npt.NDArray[np.int64]

PASSES = 8
"""Rounds over the experts with copies: within 0.2 % of the optimum where copies are chained over many ranks."""
LADDER = (4.0, 2.0, 1.0, 0.5, 0.0)
"""Tokens per open copy, in prices, that are tried in turn after "primaries only"; 0 opens every copy."""
SHARE_WORTH = 3
"""Prices that each copy must be worth where the step's other batches are not seen."""


def choose_copies(counts: IntArray, copies: Copies, price: int, *, whole_step: bool) -> IntArray:
    """Tokens that each copy serves under the `balanced` rule, int64 [X, E, C].

    1. How many copies of an expert may serve: its first n // t (at least its primary), where it has n tokens and each
       copy must be worth t of them. Where the batch is the whole step, several t are tried and the one with the least
       time of the slowest rank counts; ties go to the one that opens fewest. Where other ranks have batches of their
       own, t is three times the price, and n is what can be relied on, two standard deviations below the count, so that
       ranks agree without talking: a few tokens open nothing.
    2. The tokens are spread over them by `_fill`.

    With primaries that are a plan without copies, a step that is seen whole is never slower than that plan: "primaries
    only" is among what is tried.

    Args:
        counts: int64 [X, E], the batch's tokens of each expert, without padding.
        copies: the map.
        price: what a slot that serves any token costs, in tokens of this batch; 0 for balance alone.
        whole_step: all tokens of the step are in the batch; else `counts` and `price` are one source's share.
    """
    if not whole_step:
        opened = _relied_on(counts, copies.count, SHARE_WORTH * price)
        return _fill(counts, copies, opened, price)
    best = _fill(counts, copies, np.ones_like(counts), price)
    least = _slowest(best, copies, price)
    # Without a price, opening everything is never worse.
    for prices in LADDER if price else LADDER[-1:]:
        worth = int(prices * price)
        opened = copies.count if worth == 0 else np.clip(counts // worth, 1, copies.count)
        tried = _fill(counts, copies, opened, price)
        time = _slowest(tried, copies, price)
        better = time < least
        best[better], least[better] = tried[better], time[better]
    return best


def _relied_on(counts: IntArray, most: IntArray, worth: int) -> IntArray:
    """Copies that may serve: the largest j with n - 2 sqrt(n) >= j x worth, within 1 and `most`.

    Compared by squares, since a rounded root could differ between processors.
    """
    if worth == 0:
        return most
    # n - 2 sqrt(n) >= m is (n - m)^2 >= 4 n for n >= m; the largest such whole m is n - ceil(2 sqrt(n)).
    root = np.floor(np.sqrt(4.0 * counts)).astype(np.int64)
    root += (root * root < 4 * counts).astype(np.int64)
    reliable: IntArray = np.clip((counts - root) // worth, 1, most)
    return reliable


def _fill(counts: IntArray, copies: Copies, opened: IntArray, price: int) -> IntArray:
    """Spread each expert's tokens over its opened copies, least busy rank first, int64 [X, E, C].

    Rounds of one expert after the other, by id: its tokens are taken off the ranks and poured back like water. That is
    exact descent on a convex function, whose least value no other split has lower ranks than; PASSES rounds come within
    a fraction of a per cent of it.
    """
    rows, _, most = copies.slots.shape
    row = np.arange(rows)
    ranks = copies.ranks
    quota = np.zeros(copies.slots.shape, np.int64)
    quota[:, :, 0] = counts
    open_mask = np.arange(most) < np.where(counts > 0, opened, 0)[:, :, None]
    loads = np.zeros((rows, copies.ep_size), np.int64)
    np.add.at(loads, (row[:, None, None], ranks), quota + price * open_mask)
    shared = (opened > 1) & (counts > 0)
    # The j-th expert that several copies serve, in every row at once.
    experts = np.argsort(~shared, axis=1, kind="stable")[:, : int(shared.sum(1).max(initial=0))]
    for _ in range(PASSES):
        for expert in experts.T:
            at, among = ranks[row, expert], open_mask[row, expert]
            live = shared[row, expert]
            before = quota[row, expert]
            np.subtract.at(loads, (row[:, None], at), before)
            after = np.where(live[:, None], _pour(counts[row, expert], loads[row[:, None], at], among), before)
            np.add.at(loads, (row[:, None], at), after)
            quota[row, expert] = after
    return quota


def _pour(tokens: IntArray, loads: IntArray, among: npt.NDArray[np.bool_]) -> IntArray:
    """Pour tokens [X] over copies on ranks of the given loads [X, C], lowest first, those not `among` left out.

    Returns what each gets, int64 [X, C]: all that get any end level; what does not divide goes to the lowest.
    """
    never = np.int64(1) << 60
    heights = np.where(among, loads, never)
    order = np.argsort(heights, axis=1, kind="stable")
    sorted_heights = np.take_along_axis(heights, order, 1)
    below = np.cumsum(np.where(sorted_heights < never, sorted_heights, 0), 1)
    number = np.arange(1, heights.shape[1] + 1)
    # The first k columns are filled when raising them to the height of the last of them takes fewer than the tokens.
    filled = (sorted_heights < never) & (sorted_heights * number - below < tokens[:, None])
    width = np.maximum(filled.sum(1), 1)
    total = tokens + np.take_along_axis(below, width[:, None] - 1, 1)[:, 0]
    level, rest = total // width, total % width
    given = np.where(
        number <= width[:, None], level[:, None] - sorted_heights + (number <= rest[:, None]).astype(np.int64), 0
    )
    poured = np.empty_like(given)
    np.put_along_axis(poured, order, given, 1)
    return poured


def _slowest(quota: IntArray, copies: Copies, price: int) -> IntArray:
    """Time of the slowest rank, int64 [X]."""
    times = np.zeros((len(quota), copies.ep_size), np.int64)
    np.add.at(times, (np.arange(len(quota))[:, None, None], copies.ranks), quota + price * (quota > 0))
    slowest: IntArray = times.max(1)
    return slowest
