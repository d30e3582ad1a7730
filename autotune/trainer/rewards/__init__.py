"""Rewards by the `type` of a recipe's entry; each kind is imported only when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autotune.trainer.rewards.base import (
    Component,
    News,
    Rewards,
    RewardTable,
    Score,
    Scorer,
    Surroundings,
    Unscorable,
)

if TYPE_CHECKING:
    from autotune.recipe.schema import Reward
    from autotune.trainer.tasks import TaskData

__all__ = [
    "SCORERS",
    "Component",
    "News",
    "RewardTable",
    "Rewards",
    "Score",
    "Scorer",
    "Surroundings",
    "Unscorable",
    "build_rewards",
]

SCORERS: dict[str, str] = {
    "exact_match": "autotune.trainer.rewards.text:exact_match",
    "regex": "autotune.trainer.rewards.text:last_match",
    "task": "autotune.trainer.rewards.text:task_score",
    "math_verify": "autotune.trainer.rewards.foreign:math_verify",
    "model": "autotune.trainer.rewards.classifier:classifier",
    "import": "autotune.trainer.rewards.foreign:imported",
}
"""Reward type -> `module:function`, called with the section, the task and the surroundings."""


def build_rewards(
    sections: Sequence[Reward], task: TaskData, surroundings: Surroundings | None = None
) -> Rewards:
    """Makes the scorers of a recipe's `rewards`."""
    from autotune.recipe.facts import component_names  # not for the worker, which must start quickly

    around = surroundings or Surroundings()
    named = zip(component_names(sections), sections, strict=True)
    return Rewards(tuple(Component(n, s.weight, _scorer(s, task, around, n)) for n, s in named))


def _scorer(section: Reward, task: TaskData, surroundings: Surroundings, name: str) -> Scorer:
    module, function = SCORERS[section.type].split(":")
    made: Scorer = getattr(importlib.import_module(module), function)(section, task, surroundings, name)
    return made
