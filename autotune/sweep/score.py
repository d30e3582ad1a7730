"""What a trial is worth: its seeds' held-out scores as one number, and intervals around means."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.recipe.schema import SweepSection


def objective(scores: Sequence[float], section: SweepSection) -> float:
    """The mean, or the lower end of its one-sided confidence interval.

        mean - t(confidence, S - 1) * sd / sqrt(S)        S seeds

    Args:
        scores: one per seed; two or more for the lower bound.
    """
    mean = statistics.fmean(scores)
    if section.objective == "mean":
        return mean
    return mean - _t(section.confidence, len(scores)) * _error(scores)


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def _t(probability: float, n: int) -> float:
    """Student's quantile with n - 1 degrees of freedom."""
    from scipy.stats import t

    return float(t.ppf(probability, n - 1))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds with its two-sided 95 % t interval; unbounded below two values."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if self.n < 2:
            return f"{self.mean:.3f} (one seed)"
        return f"{self.mean:.3f} (95 % interval {self.low:.3f} to {self.high:.3f}, {self.n} seeds)"


def interval(values: Sequence[float]) -> Interval:
    mean = statistics.fmean(values)
    reach = _t(0.975, len(values)) * _error(values) if len(values) > 1 else math.inf
    return Interval(mean, mean - reach, mean + reach, len(values))
