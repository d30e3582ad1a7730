"""One round: the same recipe under each seed, and what the runs' journals say as the procedure's rounds.

Gates look at the mean of the runs, rollout by rollout: three runs tell a rise from noise better than one.
A condition is met when it is met in most of the runs, each judged by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autotune import children
from autotune.children import Reading
from autotune.errors import RunError
from autotune.procedure import RUNS, WINDOW, Condition, Round, summary
from autotune.recipe import Recipe
from autotune.recipe.facts import reward_range
from autotune.statistics import reward_noise_sd
from autotune.story import Row

METRICS = (
    "reward_mean", "reward_std", "rollout_success_rate", "kl_ref", "ratio_low", "ratio_high",
    "gpu_utilization", "gpu_memory_fraction", "response_length_mean", "response_length_p995",
    "response_length_max", "truncated_fraction",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stage:
    """A finished round, or a part of P3, in all its runs."""

    name: str
    first: int
    """Rollout at which it began."""
    last: int
    """Rollout at which it ended; not trained any more."""
    change: str
    """What was changed for it, in words; empty for nothing."""
    data: Mapping[str, Any]
    """Its recipe, but for the seed."""
    folders: Mapping[int, Path]
    readings: Mapping[int, Reading] = field(default_factory=dict)
    runs: Sequence[Round] = ()
    pooled: Round = field(default_factory=lambda: Round({}, {}))

    def series(self, metric: str) -> list[list[float]]:
        """One list per run."""
        return [[*run.metrics.get(metric, ())] for run in self.runs]

    def rewards(self) -> list[float]:
        """Mean reward of the last rollouts, one per run."""
        return [_mean(values[-WINDOW:]) for values in self.series("reward_mean")]

    def scores(self) -> list[float]:
        """Held-out score at the end, one per run: greedy where it is measured."""
        found = []
        for reading in self.readings.values():
            last = reading.evaluations[-1] if reading.evaluations else None
            score = (last.score("greedy"), last.score("sampled")) if last else (None, None)
            found.append(next((s for s in score if s is not None), math.nan))
        return found


def carry_out(stage: Stage, jobs: int, starts: Mapping[int, Path], done: Callable[[Path], None]) -> Stage:
    """Train all runs of a stage and read them.

    Args:
        starts: seed -> checkpoint to go on from; none in the first round.

    Raises:
        RunError: a run failed; with its reason.
    """
    runs = []
    for seed, folder in stage.folders.items():
        start = {"start": str(starts[seed])} if seed in starts else {}
        checkpoint = {**stage.data["checkpoint"], **start}
        runs.append(({**stage.data, "seed": seed, "checkpoint": checkpoint}, folder))
    ended = children.together(runs, jobs, done)
    for (_, folder), end in zip(runs, ended, strict=True):
        if end is not None and end.code == children.INTERRUPTED:
            raise KeyboardInterrupt
        if end is not None and end.code != children.DONE:
            raise RunError(f"{stage.name}: the run in {folder} failed: {end.reason()}; see {end.log}")
    return reading_of(stage)


def reading_of(stage: Stage) -> Stage:
    """The stage with what its journals say."""
    readings = {seed: children.read(folder) for seed, folder in stage.folders.items()}
    recipe = Recipe.model_validate(stage.data)
    runs = [round_of(reading, recipe, stage.first) for reading in readings.values()]
    return replace(stage, readings=readings, runs=runs, pooled=pooled(runs))


def round_of(reading: Reading, recipe: Recipe, first: int) -> Round:
    """One run's rollouts from `first` on, in the procedure's terms."""
    rows = [row for at, row in sorted(reading.story.rows.items()) if at >= first]
    metrics = {name: values for name in METRICS if (values := _valid(rows, name))}
    spread = _mean(metrics.get("reward_std", [0.0]))
    trainer = recipe.trainer
    noise = reward_noise_sd(spread, trainer.train_batch_size, trainer.rollout_n)
    return Round(metrics, rows[-1].knobs if rows else {}, noise, reward_range(recipe))


def _valid(rows: Sequence[Row], name: str) -> list[float]:
    found = (row.metrics.get(name) for row in rows)
    return [float(v) for v in found if v is not None and math.isfinite(v)]


def pooled(runs: Sequence[Round]) -> Round:
    """The mean over runs, rollout by rollout; its noise is smaller by the root of their number."""
    names = set.intersection(*(set(run.metrics) for run in runs)) if runs else set()
    metrics = {name: _columns([run.metrics[name] for run in runs]) for name in sorted(names)}
    noise = math.sqrt(sum(run.noise**2 for run in runs)) / max(len(runs), 1)
    return Round(metrics, runs[0].knobs, noise, runs[0].reward_range, runs[0].world_size)


def _columns(rows: Sequence[Sequence[float]]) -> list[float]:
    shortest = min(len(row) for row in rows)
    return [_mean([row[at] for row in rows]) for at in range(shortest)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def in_most(runs: Sequence[Sequence[Condition]]) -> tuple[Condition, ...]:
    """Each condition as most of the runs have it."""
    return tuple(_in_most(group) for group in zip(*runs, strict=False))


def _in_most(group: Sequence[Condition]) -> Condition:
    met = [c for c in group if c.met]
    enough = 2 * len(met) > len(group)
    like = next(c for c in group if c.met is enough)
    values = [c.value for c in group if c.value is not None]
    value = _mean(values) if len(values) == len(group) else None
    after = max((c.after for c in met if c.after is not None), default=None) if enough else None
    spread = f"{summary(values)}; " if len(values) == len(group) >= RUNS else ""
    reason = f"{like.reason} ({spread}met in {len(met)} of {len(group)} runs)"
    return Condition(like.id, enough, reason, value, like.limit, like.knob, after, like.offered)
