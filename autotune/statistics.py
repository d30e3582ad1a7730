"""Small-sample statistics on the decision path: numpy float64 only, no BLAS, replayable anywhere.

Trend: Theil-Sen slope with Sen's confidence bounds. Plateau: an equivalence test on that slope,
with the honest third answer `undetermined`. Noise floor of a rollout's mean reward: from the
number of prompts P and the group size G. Spread: the median absolute deviation, scaled to a
standard deviation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    slopes = (y[j] - y[i]) / gap  # [n(n-1)/2]
    slopes.sort()
    half = z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    first = max(math.floor((len(slopes) - half) / 2) - 1, 0)
    last = len(slopes) - 1 - first  # mirror images: a rise is as hard to prove as a fall
    middle = 0.5 * (float(slopes[(len(slopes) - 1) // 2]) + float(slopes[len(slopes) // 2]))
    return Trend(middle, float(slopes[first]), float(slopes[last]), n)


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


def residuals(values: Sequence[float], slope: float) -> list[float]:
    """Distances from the line of this slope through the values' middle."""
    centre = (len(values) - 1) / 2
    flat = [v - slope * (k - centre) for k, v in enumerate(values)]
    middle = median(flat)
    return [r - middle for r in flat]


def detrended_variance(values: Sequence[float], trend: Trend, drop: int = 0) -> float:
    """Variance around the Theil-Sen line, with n - 2 degrees of freedom.

    `drop` leaves out that many of the largest residuals: one wild sample is not a spread.
    """
    squares = sorted(r * r for r in residuals(values, trend.slope))[: len(values) - drop]
    return sum(squares) / max(len(values) - 2, 1)


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


def robust_z(value: float, baseline: Sequence[float], floor: float = 0.0) -> float:
    """Distance from the baseline's median in robust standard deviations, none below `floor`.

    A baseline without any spread puts every other value infinitely far away.
    """
    distance = value - median(baseline)
    spread = max(mad_sd(baseline), floor)
    if spread == 0.0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / spread


def autocorrelation(values: Sequence[float]) -> float:
    """Lag-1 autocorrelation around the mean, corrected for its bias of -(1 + 3 rho) / n; in [-0.95, 0.95].

    Too short a series (fewer than 4) or a constant one has none.
    """
    n = len(values)
    if n < 4:
        return 0.0
    mean = sum(values) / n
    around = [v - mean for v in values]
    power = sum(a * a for a in around)
    if power <= 1e-24 * max(mean * mean, 1e-300) * n:
        return 0.0
    raw = sum(a * b for a, b in itertools.pairwise(around)) / power
    return min(max((n * raw + 1) / (n - 3), -0.95), 0.95)


def whitened(values: Sequence[float], rho: float) -> list[float]:
    """The series without its lag-1 memory, on its own scale: (y[t] - rho y[t-1]) / (1 - rho)."""
    return [(b - rho * a) / (1 - rho) for a, b in itertools.pairwise(values)]


@dataclass(frozen=True, slots=True)
class MannKendall:
    """Mann-Kendall's test of a monotone trend."""

    s: int
    """Pairs that rise minus pairs that fall."""
    z: float
    p: float
    """Two-sided."""
    rho: float
    """The lag-1 memory that was taken out; 0 when there was none to speak of."""


def mann_kendall(values: Sequence[float], *, prewhiten: bool = True) -> MannKendall:
    """Is there a monotone trend, whatever its shape?

    Samples that remember each other look like a trend. With `prewhiten`, lag-1 memory of the detrended
    series (positive and beyond chance) is taken out of the series first, as Wang and Swail do.

    Raises:
        ValueError: with fewer than 4 values.
    """
    if len(values) < 4:
        raise ValueError(f"a Mann-Kendall test needs at least 4 values, got {len(values)}")
    rho = autocorrelation(residuals(values, theil_sen(values).slope)) if prewhiten else 0.0
    rho = rho if rho > Z_95 / math.sqrt(len(values)) else 0.0
    y = np.asarray(whitened(values, rho) if rho else values, dtype=np.float64)
    i, j, _ = _pairs(len(y))
    s = int(np.sign(y[j] - y[i]).sum())
    spread = math.sqrt(_kendall_variance(y))
    z = (s - (s > 0) + (s < 0)) / spread if spread else 0.0
    return MannKendall(s, z, math.erfc(abs(z) / math.sqrt(2)), rho)


def _kendall_variance(y: np.ndarray) -> float:
    """Variance of S without a trend; ties take their share away."""
    n = len(y)
    ties = [int(count) for count in np.unique(y, return_counts=True)[1] if count > 1]
    tied = sum(t * (t - 1) * (2 * t + 5) for t in ties)
    return (n * (n - 1) * (2 * n + 5) - tied) / 18


LEVEL_ERRORS = 2.5
"""A median of n values is uncertain by 1.25 / sqrt(n) standard deviations; this much is allowed for."""


SMALL_SAMPLE = 6.0
"""The spread of n values may be luckily small: it is taken as 1 + this / n times as wide."""


@dataclass
class Cusum:
    """A one-sided cumulative sum that notices a lasting shift, sample by sample.

        e = whitened residual of the newest value from its baseline, in standard deviations
        S = max(0, S + direction * e - k - LEVEL_ERRORS / sqrt(n)),   a shift when S > h

    The last term allows for the level's own error: a baseline has n values only.

    The baseline is the last `reach` values from before the present excursion (S > 0), so it follows a
    run that learns, and a slow fall cannot drag it along. One residual counts at most `most`: a single
    wild sample is not a shift. Cost per sample does not grow with the run.
    """

    direction: int = -1
    """-1 notices falls, +1 rises."""
    k: float = 0.5
    h: float = 8.0
    least: int = 4
    """Values that a baseline needs."""
    reach: int = 120
    most: float = 4.0
    floor: float = 0.0
    """Smallest standard deviation of one sample, where it is known."""
    total: float = 0.0
    """S."""
    since: int | None = None
    """Index of the first value of the present excursion."""
    seen: int = 0
    _recent: list[float] = field(default_factory=list)
    _baseline: tuple[float, float, float] | None = None
    _allowance: float = 0.0

    def update(self, value: float) -> bool:
        """Take the next value; whether a shift is proven now."""
        if self.total == 0.0 and len(self._recent) >= self.least:
            self._baseline = self._measure()
            self._allowance = self.k + LEVEL_ERRORS / math.sqrt(len(self._recent))
        if self._baseline is not None:
            residual = self._residual(value, *self._baseline)
            self.total = max(0.0, self.total + self.direction * residual - self._allowance)
        self.since = None if self.total == 0.0 else self.seen if self.since is None else self.since
        self.seen += 1
        self._recent = [*self._recent[1 - self.reach :], value]
        return self.total > self.h

    def _measure(self) -> tuple[float, float, float]:
        """Level, standard deviation and lag-1 memory of the recent values, around their own trend.

        The level is their median and not the end of the trend: a rise is no promise that a plateau breaks.
        """
        values, half = self._recent, len(self._recent) // 2
        slope = (median(values[-half:]) - median(values[:half])) / (len(values) - half)
        flat = residuals(values, slope)
        spread = mad_sd(flat) * (1 + SMALL_SAMPLE / len(values))
        return median(values), max(spread, self.floor), max(autocorrelation(flat), 0.0)

    def _residual(self, value: float, level: float, spread: float, rho: float) -> float:
        innovation = (value - level) - rho * (self._recent[-1] - level)
        scale = spread * math.sqrt(1 - rho * rho)
        if scale == 0.0:
            return math.copysign(self.most, innovation) if innovation else 0.0
        return min(max(innovation / scale, -self.most), self.most)


def change_point(values: Sequence[float], direction: int = -1, floor: float = 0.0) -> int | None:
    """Index of the first value of the first lasting shift (a fall, by default); None without one.

    `floor` is the sampling noise of one value where it is known.
    """
    cusum = Cusum(direction=direction, floor=floor)
    return next((cusum.since for value in values if cusum.update(value)), None)
