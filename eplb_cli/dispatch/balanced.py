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

__all__ = ["MOST_OPEN", "PRIMARIES", "ROUNDS", "choose_copies", "tried_worths"]

IntArray = npt.NDArray[np.int64]

ROUNDS = 3
"""Rounds over the experts with copies: within half a per cent of the optimum on recorded traffic."""
LADDER = (4.0, 2.0, 1.0, 0.5, 0.0)
"""Tokens per open copy, in prices, that are tried in turn after "primaries only"; 0 opens every copy."""
SHARE_WORTH = 3
"""Prices that each copy must be worth where the step's other batches are not seen."""
MOST_OPEN = 8
"""Copies of an expert that may serve a step: comparing each with each is then two comparisons for a GPU's thread."""
PRIMARIES = -1
"""In place of a worth: no copy but the primary opens."""


def tried_worths(price: int, *, whole_step: bool) -> list[int]:
    """Tokens that an open copy must be worth, each tried in turn; 0 opens every copy, PRIMARIES none."""
    if not whole_step:
        return [SHARE_WORTH * price]
    # Without a price, opening everything is never worse.
    return [PRIMARIES, *(int(prices * price) for prices in (LADDER if price else LADDER[-1:]))]


def choose_copies(counts: IntArray, copies: Copies, price: int, *, whole_step: bool) -> IntArray:
    """Tokens that each copy serves under the `balanced` rule, int64 [X, E, C].

    1. How many copies of an expert may serve: its first n // t (at least its primary, at most MOST_OPEN), where it has
       n tokens and each copy must be worth t of them. Where the batch is the whole step, several t are tried and the
       one with the least time of the slowest rank counts; ties go to the one that opens fewest. Where other ranks have
       batches of their own, t is three times the price, and n is what can be relied on, two standard deviations
       below the count, so that ranks agree without talking: a few tokens open nothing.
    2. The tokens are spread over them by `_fill`.

    With primaries that are a plan without copies, a step that is seen whole is never slower than that plan: "primaries
    only" is among what is tried.

    Args:
        counts: int64 [X, E], the batch's tokens of each expert, without padding.
        copies: the map.
        price: what a slot that serves any token costs, in tokens of this batch; 0 for balance alone.
        whole_step: all tokens of the step are in the batch; else `counts` and `price` are one source's share.
    """
    best, least = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for worth in tried_worths(price, whole_step=whole_step):
        tried, time = _fill(counts, copies, _opened(counts, copies, worth, sure=not whole_step), price)
        if not len(least):
            best, least = tried, time
        better = time < least
        best[better], least[better] = tried[better], time[better]
    return best


def _opened(counts: IntArray, copies: Copies, worth: int, *, sure: bool) -> IntArray:
    """Copies that may serve, int64 [X, E]: the most of which each is worth its tokens, at least one.

    `sure`: also when the expert has two standard deviations fewer tokens. That is n - 2 sqrt(n) >= m; compared by
    squares, as (n - m)^2 >= 4 n for n >= m, since a rounded root could differ between processors.
    """
    most = np.minimum(copies.count, MOST_OPEN)
    if worth <= 0:
        return np.ones_like(counts) if worth == PRIMARIES else most
    needed = worth * np.arange(1, MOST_OPEN + 1)
    spare = counts[:, :, None] - needed
    worthy = (spare >= 0) & ((spare * spare >= 4 * counts[:, :, None]) | (not sure))
    opened: IntArray = np.clip(worthy.sum(2), 1, most)
    return opened


def _fill(counts: IntArray, copies: Copies, opened: IntArray, price: int) -> tuple[IntArray, IntArray]:
    """Spread each expert's tokens over its opened copies, least busy rank first.

    From an even split, rounds of one expert after the other, by id: its tokens are taken off the ranks and poured back
    like water. Each pouring is exact descent on a convex function, whose least value no other split has lower ranks
    than.

    Returns:
        int64 [X, E, C], the tokens of each copy, and int64 [X], the time of the slowest rank.
    """
    rows, _, most = copies.slots.shape
    row, copy = np.arange(rows), np.arange(most)
    ranks = copies.ranks
    open_mask = copy < np.where(counts > 0, opened, 0)[:, :, None]
    parts, rest = np.divmod(counts, opened)
    quota = np.where(open_mask, parts[:, :, None] + (copy < rest[:, :, None]), 0)
    loads = np.zeros((rows, copies.ep_size), np.int64)
    np.add.at(loads, (row[:, None, None], ranks), quota + price * open_mask)
    shared = (opened > 1) & (counts > 0)
    # The j-th expert that several copies serve, in every row at once.
    experts = np.argsort(~shared, axis=1, kind="stable")[:, : int(shared.sum(1).max(initial=0))]
    for _ in range(ROUNDS):
        for expert in experts.T:
            at, among = ranks[row, expert], open_mask[row, expert]
            live = shared[row, expert]
            before = quota[row, expert]
            np.subtract.at(loads, (row[:, None], at), before)
            after = np.where(live[:, None], _pour(counts[row, expert], loads[row[:, None], at], among), before)
            np.add.at(loads, (row[:, None], at), after)
            quota[row, expert] = after
    # A copy for which no tokens were left is not read.
    np.subtract.at(loads, (row[:, None, None], ranks), price * (open_mask & (quota == 0)))
    slowest: IntArray = loads.max(1)
    return quota, slowest


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
