"""The learning rate's shape over rollouts: one factor per rollout, 1 at the peak.

The learning rate used at rollout t is `actor_learning_rate` (the peak, the controller's knob) times
`factor(t)`. The schedule's clock is the rollout, so all updates of a rollout share one value and a
changed number of updates does not bend it. No factor inside the run is 0: the last rollout of a
decaying schedule still trains.
"""

from __future__ import annotations

import math

from autotune.recipe.schema import LrScheduleSection


def factor(schedule: LrScheduleSection, rollout: int, rollouts: int) -> float:
    """Share of the peak learning rate at `rollout`, in (0, 1].

    Args:
        schedule: type and warm-up of the recipe.
        rollout: index, 0 to rollouts - 1; later ones count as the last.
        rollouts: length of the run.
    """
    rollout = min(rollout, rollouts - 1)
    if rollout < schedule.warmup:
        return (rollout + 1) / (schedule.warmup + 1)
    progress = (rollout - schedule.warmup) / max(rollouts - schedule.warmup, 1)  # [0, 1)
    if schedule.type == "linear":
        return 1.0 - progress
    if schedule.type == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
