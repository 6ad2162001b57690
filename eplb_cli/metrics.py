"""Rank loads and balancedness: arrays in, numbers out.

Letters: W windows, L MoE layers, E logical experts, P physical slots, G EP ranks, S = P / G slots per rank.
A plan's row `physical_to_logical` [P] puts slot p on rank p // S. Copies of an expert share its load equally.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eplb_cli.errors import EplbError

__all__ = [
    "MOST_CELLS",
    "balancedness",
    "balancedness_per_layer",
    "initial_map",
    "loads_of_shares",
    "max_over_mean",
    "rank_loads",
    "rank_shares",
    "replica_counts",
    "require_table",
    "smallest_redundancy",
]

MOST_CELLS = 2**27
"""Largest L x E x G: tables of that size are made. 128 layers of 1,024 experts on 1,024 ranks have as many."""

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.float64]


def initial_map(num_experts: int, num_redundant_experts: int) -> npt.NDArray[np.int32]:
    """The layout every vLLM starts with, int32 [P]: experts 0..E-1, then copies of expert i mod E for i < R."""
    return np.concatenate(
        [np.arange(num_experts), np.arange(num_redundant_experts) % num_experts], dtype=np.int32, casting="unsafe"
    )


def require_table(layers: int, experts: int, ranks: int, error: type[EplbError]) -> None:
    """Refuse sizes whose tables [L, E, G] do not fit into memory.

    Raises:
        EplbError: of the given kind.
    """
    if layers * max(experts, 1) * max(ranks, 1) > MOST_CELLS:
        raise error(
            f"{layers:,} layers x {experts:,} experts x {ranks:,} ranks or copies",
            rule=f"at most {MOST_CELLS:,} fit into memory",
        )


def smallest_redundancy(num_experts: int, ep_size: int) -> int:
    """The smallest R for which E + R slots divide over G ranks: (G - E mod G) mod G."""
    return -num_experts % ep_size


def replica_counts(physical_to_logical: IntArray, num_experts: int) -> npt.NDArray[np.int64]:
    """Copies of each expert, int64 [L, E], from a map [L, P]."""
    layers = physical_to_logical.shape[0]
    flat = physical_to_logical + num_experts * np.arange(layers)[:, None]
    counts: npt.NDArray[np.int64] = np.bincount(flat.ravel(), minlength=layers * num_experts)
    return counts.reshape(layers, num_experts)


def rank_shares(physical_to_logical: IntArray, num_experts: int, ep_size: int) -> FloatArray:
    """The part of each expert's load that each rank serves, float64 [L, E, G]; sums to 1 over ranks."""
    layers, slots = physical_to_logical.shape
    shares = np.zeros((layers, num_experts, ep_size))
    rank = np.arange(slots) // (slots // ep_size)
    copies = replica_counts(physical_to_logical, num_experts)
    row = np.arange(layers)[:, None]
    np.add.at(shares, (row, physical_to_logical, rank), 1.0 / copies[row, physical_to_logical])
    return shares


def rank_loads(physical_to_logical: IntArray, counts: npt.NDArray[np.number], ep_size: int) -> FloatArray:
    """Tokens each rank serves, float64 [W, L, G], from a map [L, P] and loads [W, L, E]."""
    return loads_of_shares(rank_shares(physical_to_logical, counts.shape[-1], ep_size), counts)


def loads_of_shares(shares: FloatArray, counts: npt.NDArray[np.number]) -> FloatArray:
    """Tokens each rank serves, float64 [W, L, G], from the parts of each expert [L, E, G] and loads [W, L, E]."""
    by_layer = counts.transpose(1, 0, 2).astype(np.float64)
    loads: FloatArray = (by_layer @ shares).transpose(1, 0, 2)
    return loads


def _ratio(mean: FloatArray, peak: FloatArray) -> FloatArray:
    """mean / peak, and 1 (nothing to balance) where there is no load."""
    return np.divide(mean, peak, out=np.ones_like(mean), where=peak > 0)


def balancedness(loads: FloatArray) -> float:
    """Sum of the mean rank load over the sum of the max rank load, both over windows and layers; 1.0 is perfect.

    The definition of vLLM's log line (mean and max over ranks within a layer, then summed over layers), summed over
    windows as well, so that it weighs each window by the time it takes. `loads` is [..., G].
    """
    return float(_ratio(np.asarray(loads.mean(-1).sum()), np.asarray(loads.max(-1, initial=0.0).sum())))


def balancedness_per_layer(loads: FloatArray) -> FloatArray:
    """Balancedness of each layer, float64 [L], from rank loads [W, L, G]."""
    return _ratio(loads.mean(-1).sum(0), loads.max(-1, initial=0.0).sum(0))


def max_over_mean(loads: FloatArray) -> FloatArray:
    """Max over mean rank load for each leading index, float64 [...], from [..., G]; 1 where there is no load."""
    mean = loads.mean(-1)
    ratio: FloatArray = np.divide(loads.max(-1, initial=0.0), mean, out=np.ones_like(mean), where=mean > 0)
    return ratio
