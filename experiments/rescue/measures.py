"""The arithmetic of the report: regret, intervals, paired tests, harm. Rows in, numbers out.

    regret    (J_best - J) / (J_best - J_untrained): 0 equals the sweep's best, 1 learnt nothing
    rescued   J >= 0.9 J_best
    harm      P(J_on < the 2 % quantile of J_off) - 2 %, and the mean of J_on - J_off

Intervals are percentile bootstraps over seeds (10,000 draws, one fixed stream): where several starts are
pooled, whole seeds are drawn, since runs of one seed share prompts and noise.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def regret(score: float, best: float, untrained: float) -> float:
    """Normalised regret.

    Raises:
        ValueError: the best is not above the untrained model, so there is nothing to normalise by.
    """
    if best <= untrained:
        raise ValueError(f"received best {best:g} and untrained {untrained:g}; expected best above untrained")
    return (best - score) / (best - untrained)


def bootstrap(
    groups: Sequence[Sequence[float]], stat: Callable[[np.ndarray], float] | None = None
) -> Estimate:
    """Mean over everything with an interval; the groups (seeds) are drawn whole.

    Args:
        groups: values that belong together, one group a seed.
        stat: of one flat array; the mean when left out.
    """
    stat = stat or (lambda values: float(values.mean()))
    flat = np.array([v for group in groups for v in group], dtype=float)
    rng = np.random.default_rng(20261130)
    arrays = [np.array(group, dtype=float) for group in groups]
    draws = []
    for _ in range(DRAWS if len(groups) > 1 else 0):
        chosen = rng.integers(0, len(arrays), len(arrays))
        draws.append(stat(np.concatenate([arrays[i] for i in chosen])))
    low, high = np.quantile(draws, (0.025, 0.975)) if draws else (float("nan"), float("nan"))
    return Estimate(stat(flat), float(low), float(high), len(flat))


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


def excess_harm(on: Sequence[float], off: Sequence[float]) -> Estimate:
    """P(J_on < the 2 % quantile of J_off) - 2 %, both samples drawn anew for the interval."""

    def once(a: np.ndarray, b: np.ndarray) -> float:
        return float((a < np.quantile(b, QUANTILE)).mean() - QUANTILE)

    a, b = np.array(on, dtype=float), np.array(off, dtype=float)
    rng = np.random.default_rng(11)
    draws = [once(rng.choice(a, len(a)), rng.choice(b, len(b))) for _ in range(DRAWS)]
    low, high = np.quantile(draws, (0.025, 0.975))
    return Estimate(once(a, b), float(low), float(high), len(a))


def tokens_to(curve: Sequence[float], goal: float, window: int = 5) -> float | None:
    """Share of the tokens after which the running mean of the curve first reaches the goal."""
    for end in range(window, len(curve) + 1):
        if statistics.fmean(curve[end - window : end]) >= goal:
            return end / len(curve)
    return None


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
