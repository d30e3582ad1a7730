"""Rewards by the `type` of a recipe's entry; each kind is imported only when asked for."""

from __future__ import annotations

import importlib
from collections import Counter
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
    """Makes the scorers of a recipe's `rewards`; two of a type are told apart as `regex_2`."""
    around, seen = surroundings or Surroundings(), Counter[str]()
    components = []
    for section in sections:
        seen[section.type] += 1
        count = seen[section.type]
        name = section.name or (section.type if count == 1 else f"{section.type}_{count}")
        components.append(Component(name, section.weight, _scorer(section, task, around, name)))
    return Rewards(tuple(components))


def _scorer(section: Reward, task: TaskData, surroundings: Surroundings, name: str) -> Scorer:
    module, function = SCORERS[section.type].split(":")
    made: Scorer = getattr(importlib.import_module(module), function)(section, task, surroundings, name)
    return made
