"""How far to trust a held-out figure, and how much traffic it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Confidence", "bootstrap_interval", "step_noise_ceiling", "tokens_needed"]

FloatArray = npt.NDArray[np.float64]

BLOCK_WINDOWS = 8
"""Consecutive windows resampled together: neighbours resemble each other."""
BOOTSTRAP_DRAWS = 1000
WINDOWS_NEEDED = 64
"""Windows after which held-out balancedness hardly rises further (measured: docs/planner.md)."""
LOSS_ALLOWED = 0.005
"""Balancedness that sampling noise in the loads may cost before more tokens are asked for."""
DIGITS = 6
MOST_POISSON = 1e6
"""Mean load of a rank in a step up to which the distribution of the maximum is summed term by term."""


@dataclass(frozen=True)
class Confidence:
    """What the held-out figure rests on.

    Args:
        interval: 5th and 95th percentile of the held-out balancedness by block bootstrap; None where not known.
        windows_seen, windows_needed: see `WINDOWS_NEEDED`.
        tokens_seen, tokens_needed: see `tokens_needed`; tokens are None when the recorder did not tell them.
        step_tokens, step_ceiling: the ceiling for the tokens per step asked about; None when none was.
    """

    interval: tuple[float, float] | None
    windows_seen: int
    windows_needed: int
    tokens_seen: int | None
    tokens_needed: int
    step_tokens: int | None
    step_ceiling: float | None

    def as_dict(self) -> dict[str, Any]:
        """For the JSON output."""
        return {
            "held_out_interval": None if self.interval is None else list(self.interval),
            "windows_seen": self.windows_seen,
            "windows_needed": self.windows_needed,
            "tokens_seen": self.tokens_seen,
            "tokens_needed": self.tokens_needed,
            "step_tokens": self.step_tokens,
            "step_ceiling": self.step_ceiling,
        }


def step_noise_ceiling(tokens_per_step: float, top_k: int, ep_size: int) -> float:
    """Balancedness that a perfect placement reaches in a step of so many tokens, in expectation.

    Perfect means that every rank has the same expectation m = tokens x k / G. The ranks' loads then are close to
    independent Poisson variables, and the ceiling is m / E[max of G of them], with E[max] = sum over x of 1 - F(x)^G.
    """
    mean = tokens_per_step * top_k / ep_size
    if mean <= 0 or ep_size == 1:
        return 1.0
    if mean > MOST_POISSON:  # by then normal: what is lost falls with the square root
        lost = 1.0 / step_noise_ceiling(MOST_POISSON * ep_size / top_k, top_k, ep_size) - 1.0
        return 1.0 / (1.0 + lost * math.sqrt(MOST_POISSON / mean))
    top = int(mean + 12 * math.sqrt(mean) + 30)
    x = np.arange(top + 1)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, top + 1)))])
    cumulative = np.minimum(np.cumsum(np.exp(x * math.log(mean) - mean - log_factorial)), 1.0)
    return float(mean / (1.0 - cumulative**ep_size).sum())


def tokens_needed(loss: float, top_k: int, ep_size: int) -> int:
    """Tokens after which sampling noise in the loads costs a plan at most `loss` of balancedness.

    loss = 0.6 sqrt(2 ln G) sqrt(G / (n k)); the form is the expected maximum of G normal variables, the factor was
    measured on six models' loads with 1,000 to 4 million tokens (docs/planner.md).
    """
    if ep_size == 1:
        return 0
    return math.ceil(0.36 * 2 * math.log(ep_size) * ep_size / (top_k * loss**2))


def bootstrap_interval(mean: FloatArray, peak: FloatArray, seed: int = 0) -> tuple[float, float] | None:
    """90 % interval of sum(mean) / sum(peak) over windows, by resampling blocks of neighbouring windows.

    Args:
        mean, peak: float64 [W], mean and max rank load of each window, summed over layers.

    Returns:
        The 5th and 95th percentile, or None with fewer than eight windows.
    """
    windows = len(mean)
    if windows < BLOCK_WINDOWS or not peak.sum() > 0:
        return None
    block = min(BLOCK_WINDOWS, max(1, windows // BLOCK_WINDOWS))
    blocks = -(-windows // block)
    starts = np.random.default_rng(seed).integers(0, windows, (BOOTSTRAP_DRAWS, blocks))
    drawn = ((starts[:, :, None] + np.arange(block)) % windows).reshape(BOOTSTRAP_DRAWS, -1)[:, :windows]
    low, high = np.quantile(mean[drawn].sum(1) / peak[drawn].sum(1), (0.05, 0.95))
    return float(low), float(high)
