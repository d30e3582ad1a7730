"""The random arm's rate: it shall change something as often as the controller does.

    rate <- rate x (actions a run of `recommended`) / (actions a run of `random` at that rate)

both on the same tuning rows (task, start, seed). Cooldowns let through less than is wanted, so the law is not
exact; it is repeated until the two counts agree within a fifth. Reporting rows are never read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.rescue import measures
from experiments.rescue.runs import Row, recipe_hash
from experiments.rescue.suite import COMPARED_ON, RANDOM_RATE, Job


@dataclass(frozen=True, slots=True)
class Calibration:
    """Mean actions a run of either arm, over the same runs, and the rate that follows."""

    ours: float
    random: float
    pairs: int
    rate: float

    @property
    def settled(self) -> bool:
        return abs(self.random - self.ours) <= 0.2 * self.ours


def calibrate(rows: Sequence[Row]) -> Calibration | None:
    """From tuning rows of the compared starts; None while there are no pairs at the present rate."""
    ours, random = _actions(rows, "recommended"), _actions(rows, "random")
    both = sorted(ours.keys() & random.keys())
    if not both:
        return None
    mine, its = measures.mean(ours[k] for k in both), measures.mean(random[k] for k in both)
    return Calibration(mine, its, len(both), min(RANDOM_RATE * mine / its, 1.0) if its else 1.0)


def _actions(rows: Sequence[Row], arm: str) -> dict[tuple[str, str, int], int]:
    """Actions by task, start and seed; the random arm's at its present rate alone."""
    found = {}
    for row in rows:
        if (row.purpose, row.arm) != ("tuning", arm) or row.start not in COMPARED_ON or row.score is None:
            continue
        if arm != "random" or row.recipe == recipe_hash(Job(row.task, row.start, arm, row.seed)):
            found[row.task, row.start, row.seed] = row.actions
    return found


def told(found: Calibration | None) -> str:
    if found is None:
        return "no tuning rows of `recommended` and `random` at the present rate; run --suite tuning first"
    settled = "within a fifth: settled" if found.settled else f"set suite.RANDOM_RATE to {found.rate:.3g}"
    return (
        f"rate {RANDOM_RATE:g}: {found.random:.1f} actions a run against {found.ours:.1f} of `recommended`"
        f" ({found.pairs} pairs); {settled}"
    )
