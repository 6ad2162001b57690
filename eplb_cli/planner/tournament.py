"""Every pair of ranks once, in rounds of disjoint pairs; and layers spread over threads.

Both objectives of the search are sums over ranks, so swaps between disjoint pairs of ranks do not disturb each other: a
round judges and makes up to G / 2 swaps in each layer at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["over_layers", "rounds"]

IntArray = npt.NDArray[np.int64]

LEAST_LAYERS = 8
"""Fewer layers than this per thread cost more in calls than they gain."""


@lru_cache(maxsize=16)
def rounds(ranks: int) -> tuple[tuple[IntArray, IntArray], ...]:
    """The pairings of a round-robin tournament: one rank stays, the others move on by one seat each round."""
    seats = list(range(ranks + ranks % 2))
    pairings = []
    for _ in range(len(seats) - 1):
        pairs = [(a, b) for a, b in zip(seats, reversed(seats), strict=True)][: len(seats) // 2]
        both = np.array([pair for pair in pairs if max(pair) < ranks], np.int64).reshape(-1, 2)
        pairings.append((both[:, 0], both[:, 1]))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(pairings)


def over_layers(work: Callable[[slice], IntArray], layers: int) -> IntArray:
    """Rows computed by `work` for slices of the layers, on as many threads as there are processors, joined in order.

    Layers do not depend on each other, so neither the number of threads nor where the slices lie changes a row.
    """
    threads = max(1, min(len(os.sched_getaffinity(0)), layers // LEAST_LAYERS))
    if threads == 1:
        return work(slice(0, layers))
    edges = np.arange(threads + 1) * layers // threads
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(lambda i: work(slice(int(edges[i]), int(edges[i + 1]))), range(threads)))
    return np.concatenate(parts)
