"""What no placement can do better than: proven bounds on the busiest rank's load and on balancedness.

Letters as in `metrics`: W windows, L MoE layers, E logical experts, P slots, G EP ranks, S = P / G slots per rank.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.metrics import initial_map, replica_counts

__all__ = ["balancedness_bound", "least_shares", "pair_peaks", "stock_bound"]

FloatArray = npt.NDArray[np.float64]

PAIR_STEPS = 100
"""Steps of the search for the multipliers of `pair_peaks`. At 288 slots (docs/planner.md) they close 90 % of the gap
between the simple bound and the linear program; three times as many close 3 % more."""
THRESHOLDS = 200
"""Sizes, evenly spaced in the upper half of a rank, at which `pair_peaks` compares large copies with small ones."""
EXACT_COPIES = 8
"""Copies up to which `pair_peaks` looks at every count by itself; beyond, at ranges of counts by their best ends."""
WEIGHT_RATE, PRICE_RATE, LEAST_WEIGHT = 2.0, 0.2, 1e-6
"""First lengths of the steps of thresholds' weights (in logarithms) and of the price; and the least a weight may be."""
FIRST_STRIDE, LEAST_STRIDE = 0.02, 2e-4
PATIENCE = 8
"""How far above the bound proven so far the next one is tried, and after how many failures it is tried nearer."""


def balancedness_bound(
    counts: npt.NDArray[np.number], num_slots: int, ep_size: int, *, even_split: bool = True
) -> float:
    """A proven upper bound on the balancedness of any placement of P slots on G ranks, from loads [W, L, E].

    In window t no placement has a max rank load below max(mean_t, lambda_t), where lambda_t is the least possible
    largest share max_e w_e / c_e over all counts c with c_e >= 1, c_e <= G and sum c = P. Letting the counts differ
    between windows only lowers the sum, so the bound holds for a static plan. With two slots per rank `pair_peaks` of
    the summed load is often more; it bounds the same sum, as the sum of maxima is no less than the maximum of sums.

    Of c shares that sum to w_e the largest is w_e / c or more, so the first holds for every rule that chooses copies;
    `pair_peaks` is for equal shares only, which `even_split` tells.
    """
    loads = counts.astype(np.float64)
    peaks = np.maximum(loads.sum(-1) / ep_size, least_shares(loads, num_slots, ep_size)).sum(0)
    if even_split and num_slots == 2 * ep_size:
        peaks = np.maximum(peaks, pair_peaks(loads.sum(0), ep_size))
    return _over_peaks(loads, ep_size, peaks)


def stock_bound(counts: npt.NDArray[np.number], num_slots: int, ep_size: int, *, even_split: bool = True) -> float:
    """As `balancedness_bound`, for relabellings of vLLM's initial layout, whose copies go to positions 0..R-1.

    The multiset of copies is fixed there, so the least possible largest share is that of the hottest experts on the
    positions with most copies (another order only raises it).
    """
    loads = counts.astype(np.float64)
    experts = loads.shape[-1]
    copies = -np.sort(-replica_counts(initial_map(experts, num_slots - experts)[None], experts)[0])
    # More copies than ranks are no more use than as many; but by then a share is no more than the mean.
    share = (-np.sort(-loads, axis=-1) / copies).max(-1, initial=0.0)
    peaks = np.maximum(loads.sum(-1) / ep_size, share).sum(0)
    return min(
        _over_peaks(loads, ep_size, peaks), balancedness_bound(counts, num_slots, ep_size, even_split=even_split)
    )


def _over_peaks(loads: FloatArray, ep_size: int, peaks: FloatArray) -> float:
    peak = float(peaks.sum())
    return float(loads.sum()) / ep_size / peak if peak else 1.0


def least_shares(loads: FloatArray, num_slots: int, ep_size: int) -> FloatArray:
    """min over counts of max_e w_e / c_e, for each leading index of [..., E].

    Giving the next copy to the largest share is optimal (an exchange argument); an expert at G copies takes no more.
    """
    shares = loads.reshape(-1, loads.shape[-1]).copy()
    full = shares.copy()
    copies = np.ones_like(shares)
    row = np.arange(shares.shape[0])
    for _ in range(num_slots - loads.shape[-1]):
        hottest = np.where(copies < ep_size, shares, -1.0).argmax(1)
        copies[row, hottest] += 1
        shares[row, hottest] = full[row, hottest] / copies[row, hottest]
    least: FloatArray = shares.max(1, initial=0.0).reshape(loads.shape[:-1])
    return least


def pair_peaks(totals: FloatArray, ep_size: int) -> FloatArray:
    """A lower bound on the busiest rank's load with two slots per rank, [L], from loads [L, E].

    A placement pairs its P = 2 G copies. None above T means that, for every threshold s > T / 2, there are as many
    copies of at most T - s as there are of s or more, each of which needs a partner of its own. So for any weights
    m_k >= 0 of thresholds s_k, which sum to 1, and any price p >= 1 of a slot,

        sum_e min over c of c (phi(w_e / c) + p) <= p P,
        phi(x) = sum of m_k over s_k <= x for x > T / 2, less the sum of m_k over s_k <= T - x for x <= T / 2,

    or T is refuted. This is Lagrange's dual of the linear program over all pairs of copies (P. Gilmore and R. Gomory,
    1961, who solve it by generating columns), with the pairs eliminated by Hall's theorem; phi is a dual feasible
    function of bin packing. Any multipliers prove a bound; multiplicative subgradient steps look for good ones, and
    T rises whenever they refute it.
    """
    bounds = np.zeros(len(totals))
    loaded = totals.any(1)
    if loaded.any():
        means = totals[loaded].sum(1) / ep_size
        bounds[loaded] = means * _pair_peaks(totals[loaded] / means[:, None], ep_size)
    return bounds


def _pair_peaks(loads: FloatArray, ranks: int) -> FloatArray:
    """`pair_peaks` of loads in units of the mean rank load."""
    layers, experts = loads.shape
    slots = 2 * ranks
    first, last = _count_ranges(slots - experts + 1)
    sizes = loads[:, :, None] / last
    layer = np.arange(layers)[:, None]
    proven = np.maximum(1.0, least_shares(loads, slots, ranks))
    stride, failures = np.full(layers, FIRST_STRIDE), np.zeros(layers, np.int64)
    weights, price = np.full((layers, THRESHOLDS), 1.0 / THRESHOLDS), np.full(layers, 1.5)
    width = THRESHOLDS + 1
    for step in range(PAIR_STEPS):
        tried = proven * (1.0 + stride)
        # Entry k of the table is phi of a large copy that reaches k thresholds, entry width + k that of a small one
        # whose partner may reach k.
        reached = np.concatenate([np.zeros((layers, 1)), weights.cumsum(1)], 1)
        table = np.concatenate([reached, -reached], 1)
        relative = sizes / tried[:, None, None]
        small = relative <= 0.5
        partner = np.where(small, 1.0 - relative, relative)
        entry = np.minimum((partner - 0.5) * (2 * THRESHOLDS), THRESHOLDS).astype(np.int64) + width * small
        phi = table.ravel()[entry + (layer * 2 * width)[:, :, None]]
        cost = np.where(relative <= 1.0, first * (phi + price[:, None, None]), np.inf)
        choice = cost.argmin(2)[:, :, None]
        value = np.take_along_axis(cost, choice, 2).sum((1, 2)) - price * slots
        refuted = value > 1e-9 * slots
        proven = np.where(refuted, tried, proven)
        failures = np.where(refuted, 0, failures + 1)
        nearer = failures == PATIENCE
        failures[nearer] = 0
        stride = np.where(refuted, np.minimum(1.3 * stride, FIRST_STRIDE), np.where(nearer, 0.6 * stride, stride))
        stride = np.maximum(stride, LEAST_STRIDE)
        copies = first[choice[:, :, 0]]
        counted = np.bincount(
            (np.take_along_axis(entry, choice, 2)[:, :, 0] + layer * 2 * width).ravel(),
            copies.ravel(),
            layers * 2 * width,
        ).reshape(layers, 2, width)
        # More copies at or above a threshold than partners for them: its weight must rise.
        excess = (counted[:, 0] - counted[:, 1])[:, ::-1].cumsum(1)[:, -2::-1]
        surplus = copies.sum(1) - slots
        length = 1.0 / np.sqrt(1.0 + step / 50.0) / np.maximum(np.abs(excess).max(1), 1.0)
        # An exponential's polynomial cousin, which every machine rounds alike.
        growth = 1.0 + WEIGHT_RATE / 8.0 * length[:, None] * excess
        growth *= growth
        growth *= growth
        weights = np.maximum(weights * growth * growth, LEAST_WEIGHT)
        weights /= weights.sum(1, keepdims=True)
        price = np.maximum(price + PRICE_RATE * length * surplus, 1.0)
    # Rounding may misjudge by an ulp whether a copy reaches a threshold.
    bound: FloatArray = proven * (1.0 - 1e-9)
    return bound


def _count_ranges(most: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Counts 1..`most`, the first EXACT_COPIES by themselves and then in ranges that grow by half: first and last.

    `first` times what a copy costs at the last count of a range is no more than any count of the range costs.
    """
    first, count = [], 1
    while count <= most:
        first.append(count)
        count = count + 1 if count <= EXACT_COPIES else count * 3 // 2
    last = [*(following - 1 for following in first[1:]), most]
    return np.array(first), np.array(last)
