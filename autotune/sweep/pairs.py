"""Is this trial worse than the best one? Asked between two seeds, on pairs: the same prompts, the same seeds.

Optuna's Wilcoxon pruner does the test. It reads a trial's intermediate values, and these already hold the
scores of evaluations by rollout; so it is shown views that hold the pairs instead.

Pairs over prompts tell that these weights are worse, and a seed's luck is in them; pairs over seeds tell that
the settings are. The smallest p of n seeds is 2^-n, so seeds can speak from 5 on, and prompts speak before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.recipe.schema import SweepSection
from autotune.sweep.storages import optuna

LEAST_SEEDS, LEAST_PROMPTS = 5, 16


@dataclass(frozen=True, slots=True)
class Scores:
    """What a trial scored so far, seed by seed."""

    seeds: Sequence[float]
    prompts: Sequence[Sequence[float]] = ()
    """One row per seed, empty where scores of prompts were not kept."""


@dataclass(frozen=True, slots=True)
class _Trial:
    intermediate_values: Mapping[int, float]
    number: int = 0


@dataclass(frozen=True, slots=True)
class _Study:
    best_trial: _Trial
    direction: Any


def wants_prompts(section: SweepSection) -> bool:
    """Whether runs have to keep the score of every prompt."""
    return kind_of(section) in ("auto", "prompts") and section.seeds > 1


def kind_of(section: SweepSection) -> str:
    return section.pairs or ("none" if section.second else "auto")


def worse(section: SweepSection, mine: Scores, best: Scores) -> str:
    """Why the trial is surely worse than the best one so far; empty when it is not, or nobody can tell."""
    kind, done = kind_of(section), len(mine.seeds)
    if done >= LEAST_SEEDS and kind in ("auto", "seeds"):
        ours, theirs, what = list(mine.seeds), list(best.seeds[:done]), "seeds"
    elif kind in ("auto", "prompts") and len(best.prompts) >= done:
        ours, theirs, what = _means(mine.prompts), _means(best.prompts[:done]), "held-out prompts"
    else:
        return ""
    least = LEAST_SEEDS if what == "seeds" else LEAST_PROMPTS
    if len(ours) < least or len(ours) != len(theirs) or not _test(ours, theirs, section.pair_level):
        return ""
    return f"worse than the best trial on {len(ours)} paired {what} (Wilcoxon, p < {section.pair_level:g})"


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Mean over the seeds for every prompt."""
    return [sum(column) / len(column) for column in zip(*rows, strict=True)] if rows and all(rows) else []


def _test(ours: Sequence[float], theirs: Sequence[float], level: float) -> bool:
    package = optuna()
    pruner = package.pruners.WilcoxonPruner(p_threshold=level, n_startup_steps=2)
    study = _Study(_Trial(dict(enumerate(theirs))), package.study.StudyDirection.MAXIMIZE)
    return bool(pruner.prune(study, _Trial(dict(enumerate(ours)))))
