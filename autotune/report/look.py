"""What all charts of the page share: the documented thresholds, and how a course becomes a curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.report.groups import Course, Group
from autotune.report.panels import Curve
from autotune.report.runs import RunData

CLIP_LOW, CLIP_HIGH = 0.01, 0.15
"""Clip ratio: below, the data is not used up; above, updates go too far."""
IDEAL = {"ratio_low": 0.20, "ratio_in": 0.70, "ratio_high": 0.10}
"""Documented shares of tokens below, inside and above the clip range."""
STEP_TARGET, STEP_LIMIT = 0.015, 0.3
"""kl_step, nats/token: X1's target, and X2's veto."""
MEMORY = (0.85, 0.92)
MOST_MARKED_RUNS = 8
"""In a group of more runs, decisions are not drawn one by one: they are in each run's own part."""


@dataclass(frozen=True, slots=True)
class Look:
    """How one part of the page is drawn."""

    span: tuple[float, float]
    points: int
    anchors: dict[tuple[str, int], str]
    """(run folder, number of the step) -> id of its row in the table of decisions."""


def span_of(runs: Sequence[RunData]) -> tuple[float, float]:
    """From half a rollout before the first to half a rollout behind the last or the planned last."""
    last = max(max(run.rollouts[-1], run.planned - 1) for run in runs)
    first = min(run.rollouts[0] for run in runs)
    return first - 0.5, last + 0.5


def curve(name: str, c: Course, color: str, *, right: bool = False, dash: int = 0) -> Curve:
    return Curve(name, c.x, c.mean, color, c.low, c.high, c.count, right=right, dash=dash)


def values(*courses: Course) -> list[float]:
    """Every number that has to fit on an axis, band edges included."""
    return [v for c in courses for column in (c.mean, c.low, c.high) for v in column if v is not None]


def held_out(name: str, score: Course, color: str, *, dash: int = 0) -> Curve:
    """Scores as points: the one of t rollouts stands at the last of them, that of none at the first."""
    x = [max(t - 1, 0) for t in score.x]
    return Curve(name, x, score.mean, color, score.low, score.high, score.count, dash=dash, dots=True)


def absent(group: Group, *names: str) -> str:
    """Why none of these metrics is there, in words; empty when one of them is."""
    if any(name in run.metrics for run in group.runs for name in names):
        return ""
    whys = {run.absent.get(name, "not logged by this trainer") for run in group.runs for name in names}
    return f"{', '.join(names)}: {'; '.join(sorted(whys))}"


def faults(group: Group, *names: str) -> str:
    """Readings that were left out because they were no usable numbers."""
    told = []
    for name in names:
        found = [run.faults[name] for run in group.runs if name in run.faults]
        if found:
            count, why = sum(n for n, _ in found), found[-1][1]
            told.append(f"{name}: {count} reading{'s' * (count > 1)} left out ({why})")
    return "; ".join(told)


def decided(group: Group) -> list[tuple[float, str]]:
    """Vertical lines where something was changed or came back."""
    if len(group.runs) > MOST_MARKED_RUNS:
        return []
    loud = {"change", "reverted", "restore", "stop", "command"}
    return sorted(
        {
            (step.rollout + 0.5, step.outcome)
            for run in group.runs
            for step in run.steps
            if step.what in loud and not step.again
        }
    )
