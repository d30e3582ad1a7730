"""The arithmetic of the report: regret, intervals, paired tests, harm. Rows in, numbers out.

    regret    (J_best - J) / (J_best - J_untrained): 0 equals the sweep's best, 1 learnt nothing
    rescued   J >= 0.9 J_best
    harm      P(J_on < the 2 % quantile of J_off) - 2 %, and the mean of J_on - J_off

Intervals are percentile bootstraps over seeds (10,000 draws, one fixed stream): where several starts are
pooled, whole seeds are drawn, since runs of one seed share prompts and noise.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

DRAWS = 10_000
BAD = 0.2
"""A start is bad when its fixed arm loses at least this share of (best - untrained)."""
RESCUED = 0.9
MARGIN = 0.02
QUANTILE = 0.02


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if math.isnan(self.low):  # of one group there is no interval
            return f"{self.value:.3f}"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def regret(score: float, best: float, untrained: float) -> float:
    """Normalised regret.

    Raises:
        ValueError: the best is not above the untrained model, so there is nothing to normalise by.
    """
    if best <= untrained:
        raise ValueError(f"received best {best:g} and untrained {untrained:g}; expected best above untrained")
    return (best - score) / (best - untrained)


def bootstrap(groups: Sequence[Sequence[float]]) -> Estimate:
    """Mean over all values with an interval; the groups (values of one seed) are drawn whole."""
    sums = np.array([math.fsum(group) for group in groups])
    counts = np.array([len(group) for group in groups])
    low = high = float("nan")
    if len(groups) > 1:
        rng = np.random.default_rng(20261130)
        drawn = rng.integers(0, len(groups), (DRAWS, len(groups)))
        low, high = np.quantile(sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1), (0.025, 0.975))
    return Estimate(float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()))


def by_seed(values: Iterable[tuple[int | str, float]]) -> list[list[float]]:
    """Values of one seed together; of several tasks, a seed is named by its task too."""
    groups: dict[int | str, list[float]] = defaultdict(list)
    for seed, value in values:
        groups[seed].append(value)
    return [groups[seed] for seed in sorted(groups, key=str)]


def paired(on: Mapping[int, float], off: Mapping[int, float]) -> list[float]:
    """Differences on - off of the seeds that both have."""
    return [on[seed] - off[seed] for seed in sorted(on) if seed in off]


def sign_flip_p(differences: Sequence[float], draws: int = 20_000) -> float:
    """One-sided p of the mean difference being above 0, by flipping signs at random (exact to 1 / draws)."""
    values = np.array(differences, dtype=float)
    rng = np.random.default_rng(7)
    flips = rng.choice((-1.0, 1.0), size=(draws, len(values)))
    beyond = (flips * values).mean(axis=1) >= values.mean() - 1e-12
    return float((1 + beyond.sum()) / (1 + draws))


def excess_harm(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Estimate:
    """P(J_on < the 2 % quantile of J_off) - 2 %, all samples drawn anew for the interval.

    Args:
        pairs: (J_on, J_off) of each task; every task has a quantile of its own, the runs count together.
    """
    arrays = [(np.array(on, dtype=float)[None], np.array(off, dtype=float)[None]) for on, off in pairs]
    rng = np.random.default_rng(11)
    drawn = [(_drawn(rng, on), _drawn(rng, off)) for on, off in arrays]
    low, high = np.quantile(_excess(drawn), (0.025, 0.975))
    return Estimate(float(_excess(arrays)[0]), float(low), float(high), sum(on.size for on, _ in arrays))


def below_quantile(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> int:
    """How many J_on are below their task's 2 % quantile of J_off; pairs as for `excess_harm`."""
    return sum(int((np.array(on) < np.quantile(off, QUANTILE)).sum()) for on, off in pairs)


def _drawn(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Samples with replacement, one a row."""
    return values[0, rng.integers(0, values.size, (DRAWS, values.size))]


def _excess(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Of each row: the share of all J_on below their task's quantile of J_off, less that quantile."""
    below = [on < np.quantile(off, QUANTILE, axis=1, keepdims=True) for on, off in pairs]
    return np.concatenate(below, axis=1).mean(axis=1) - QUANTILE


def non_inferior(difference: Estimate, margin: float = MARGIN) -> bool:
    """Whether the whole interval of J_on - J_off lies above -margin."""
    return difference.low > -margin


def tokens_to(curve: Sequence[float], goal: float, window: int = 5) -> float | None:
    """Share of the tokens after which the running mean of the curve first reaches the goal."""
    for end in range(window, len(curve) + 1):
        if statistics.fmean(curve[end - window : end]) >= goal:
            return end / len(curve)
    return None


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
