"""Runs that differ in nothing but their seed are one group: its curves are a mean with a band.

    same recipe, same control      -> one group, several seeds
    same recipe, another control   -> another arm of the same experiment, compared seed by seed

Mean and standard deviation at rollout t are over the seeds that have a reading there; how many these
were is kept beside them, since seeds that ended early make the tail thinner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.report.runs import RunData

Column = Callable[[RunData], Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Group:
    """Runs of one recipe under one control."""

    label: str
    index: int
    """Position on the page: decides colour and dashes."""
    runs: tuple[RunData, ...]

    @property
    def mode(self) -> str:
        return self.runs[0].mode

    @property
    def base(self) -> str:
        return self.runs[0].base

    @property
    def controlled(self) -> bool:
        """Whether a controller moved knobs in it."""
        return self.mode == "act"


@dataclass(frozen=True, slots=True)
class Course:
    """One quantity over the rollouts of a group."""

    x: list[int]
    mean: list[float | None]
    low: list[float | None]
    """Mean minus one standard deviation; None with fewer than two seeds."""
    high: list[float | None]
    count: list[int]
    """Seeds behind each mean."""

    @property
    def has_band(self) -> bool:
        return any(value is not None for value in self.low)


def group_runs(runs: Sequence[RunData]) -> list[Group]:
    """Runs in groups, in the order in which they were named; a controlled arm keeps its place."""
    found: dict[tuple[str, str, str], list[RunData]] = {}
    for run in runs:
        found.setdefault((run.base, run.control, run.name), []).append(run)
    members = [tuple(sorted(group, key=_seed)) for group in found.values()]
    return [
        Group(label, i, group) for i, (label, group) in enumerate(zip(_labels(members), members, strict=True))
    ]


def _seed(run: RunData) -> tuple[int, str]:
    return (int(run.seed) if run.seed.lstrip("-").isdigit() else 0, run.seed)


_PARTS: tuple[Callable[[RunData], str], ...] = (
    lambda run: run.mode, lambda run: run.profile, lambda run: run.base[:6], lambda run: run.folder,
)  # fmt: skip


def _labels(members: Sequence[tuple[RunData, ...]]) -> list[str]:
    """Names, with what tells them apart where the name alone does not."""
    labels = [group[0].name for group in members]
    for parts in _PARTS:
        if len(set(labels)) == len(labels):
            break
        twice = {label for label in labels if labels.count(label) > 1}
        labels = [
            f"{label} · {parts(group[0])}" if label in twice and parts(group[0]) else label
            for label, group in zip(labels, members, strict=True)
        ]
    return labels


def course(group: Group, column: Column) -> Course:
    """Mean and band of one column over the group's runs."""
    values: dict[int, list[float]] = {}
    seen: set[int] = set()
    for run in group.runs:
        seen.update(run.rollouts)
        for rollout, value in zip(run.rollouts, column(run), strict=False):
            if value is not None:
                values.setdefault(rollout, []).append(value)
    x = sorted(seen)
    return _course(x, [values.get(t, []) for t in x])


def _course(x: list[int], values: list[list[float]]) -> Course:
    """Mean, mean -/+ one standard deviation, and how many, per position."""
    mean = [math.fsum(v) / len(v) if v else None for v in values]
    spread = [_sd(v, m) for v, m in zip(values, mean, strict=True)]
    low = [None if m is None or s is None else m - s for m, s in zip(mean, spread, strict=True)]
    high = [None if m is None or s is None else m + s for m, s in zip(mean, spread, strict=True)]
    return Course(x, mean, low, high, [len(v) for v in values])


def _sd(values: list[float], mean: float | None) -> float | None:
    """Sample standard deviation; None below two values."""
    if mean is None or len(values) < 2:
        return None
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def metric(name: str) -> Column:
    """The column of a metric."""
    return lambda run: run.metrics.get(name, ())


def knob(name: str) -> Column:
    """The column of a knob's values."""
    return lambda run: run.knobs.get(name, ())


def seconds(phase: str) -> Column:
    """The column of a phase's seconds."""
    return lambda run: run.times.get(phase, ())


def evaluated(group: Group, kind: str) -> Course:
    """Held-out scores of a group, at the rollouts where it was evaluated; kind is greedy or sampled."""
    values: dict[int, list[float]] = {}
    for run in group.runs:
        for evaluation in run.evaluations:
            score = getattr(evaluation, kind)
            if score is not None:
                values.setdefault(evaluation.rollout, []).append(score)
    x = sorted(values)
    return _course(x, [values[t] for t in x])
