"""Small-sample statistics on the decision path: numpy float64 only, no BLAS, replayable anywhere.

Trend: Theil-Sen slope with Sen's confidence bounds. Plateau: an equivalence test on that slope,
with the honest third answer `undetermined`. Noise floor of a rollout's mean reward: from the
number of prompts P and the group size G. Spread: the median absolute deviation, scaled to a
standard deviation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import numpy as np

MAD_TO_SD = 1.4826
"""MAD of a normal distribution times this is its standard deviation."""
Z_95 = 1.6449
"""One-sided 95 % point of the normal distribution."""


def median(values: Sequence[float]) -> float:
    """Median of a non-empty sequence (numpy's own costs ten times as much on a dozen numbers)."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return 0.5 * (float(ordered[middle - 1]) + float(ordered[middle]))


def mad_sd(values: Sequence[float]) -> float:
    """Robust standard deviation: 1.4826 x median absolute deviation; 0 for one value."""
    centre = median(values)
    return MAD_TO_SD * median([abs(v - centre) for v in values])


def reward_noise_sd(reward_std: float, prompts: int, group: int, between: float = 1 / 3) -> float:
    """Standard deviation of a rollout's mean reward that sampling alone explains.

    var = v_between / P + v_within / (P * G), with P prompts and G responses a prompt. A rollout
    reports the total variance only; `between` is the share of it that lies between prompts (1/3
    is a 0/1 reward with evenly spread difficulty).
    """
    total = reward_std * reward_std
    return math.sqrt(total * between / prompts + total * (1 - between) / (prompts * group))


@dataclass(frozen=True, slots=True)
class Trend:
    """Theil-Sen slope per sample with one-sided 95 % bounds on each side."""

    slope: float
    low: float
    high: float
    n: int

    @property
    def rise(self) -> float:
        """Estimated change over the window."""
        return self.slope * self.n


@lru_cache(maxsize=64)
def _pairs(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    i, j = np.triu_indices(n, k=1)
    return i, j, (j - i).astype(np.float64)


def theil_sen(values: Sequence[float], z: float = Z_95) -> Trend:
    """Median of all pairwise slopes, bounds from Kendall's variance (Sen 1968).

    Args:
        values: equally spaced samples, oldest first, at least 3.
        z: normal quantile of each one-sided bound.

    Raises:
        ValueError: with fewer than 3 values.
    """
    n = len(values)
    if n < 3:
        raise ValueError(f"a trend needs at least 3 values, got {n}")
    y = np.asarray(values, dtype=np.float64)
    i, j, gap = _pairs(n)
    slopes = np.sort((y[j] - y[i]) / gap)  # [n(n-1)/2]
    half = z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    first = max(math.floor((len(slopes) - half) / 2), 0)
    last = min(math.ceil((len(slopes) + half) / 2), len(slopes) - 1)
    return Trend(median(slopes.tolist()), float(slopes[first]), float(slopes[last]), n)


class Movement(StrEnum):
    """What a trend proves about a metric over its window."""

    RISING = "rising"
    FALLING = "falling"
    PLATEAU = "plateau"
    UNDETERMINED = "undetermined"


def movement(trend: Trend, gain: float) -> Movement:
    """Equivalence test: is the change over the window proven smaller than `gain`?

    Rising or falling wants the whole confidence interval on one side of zero and an estimate of at
    least `gain`; a plateau wants the whole interval inside (-gain, gain). Else undetermined.
    """
    low, high = trend.low * trend.n, trend.high * trend.n
    if low > 0 and trend.rise >= gain:
        return Movement.RISING
    if high < 0 and trend.rise <= -gain:
        return Movement.FALLING
    return Movement.PLATEAU if -gain < low and high < gain else Movement.UNDETERMINED


def detrended_variance(values: Sequence[float], trend: Trend) -> float:
    """Variance around the Theil-Sen line, with n - 2 degrees of freedom."""
    centre = (len(values) - 1) / 2
    residuals = [v - trend.slope * (k - centre) for k, v in enumerate(values)]
    middle = median(residuals)
    return sum((r - middle) ** 2 for r in residuals) / max(len(values) - 2, 1)


def variance_ratio_limit(n: int, floor: float = 2.5, z: float = 4.0) -> float:
    """Ratio of a window's variance to the noise floor that chance does not reach.

    A variance of n samples has relative standard deviation sqrt(2 / (n - 1)); short windows need
    more than the usual 2.5.
    """
    return max(floor, 1 + z * math.sqrt(2 / max(n - 1, 1)))


def turning_points(values: Sequence[float]) -> float:
    """Share of inner points that are local extremes; about 2/3 for noise, less for a trend."""
    inner = range(1, len(values) - 1)
    turns = [(values[k] - values[k - 1]) * (values[k + 1] - values[k]) < 0 for k in inner]
    return sum(turns) / len(turns) if turns else 0.0
