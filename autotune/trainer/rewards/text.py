"""Rewards that compare texts here and now: exact match, the last match of a pattern, the task's own.

Texts are compared after stripping white space at both ends.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from autotune.errors import InputError
from autotune.trainer.rewards.base import Scorer, Surroundings, each

if TYPE_CHECKING:
    from autotune.recipe.schema import ExactMatchReward, RegexReward, TaskReward
    from autotune.trainer.tasks import Example, TaskData


def exact_match(section: ExactMatchReward, task: TaskData, around: Surroundings, name: str) -> Scorer:
    """1 when the stripped response is the answer."""
    return each(lambda response, example: float(response.strip() == example.answer.strip()))


def last_match(section: RegexReward, task: TaskData, around: Surroundings, name: str) -> Scorer:
    """1 when the pattern's last match (its first group, if it has one) is the answer."""
    try:
        pattern = re.compile(section.pattern)
    except re.error as error:
        raise InputError(
            f"rewards: {section.pattern!r} is not a regular expression ({error});"
            r" expected one such as (-?\d+)"
        ) from error
    group = min(pattern.groups, 1)

    def score(response: str, example: Example) -> float:
        matches = [match.group(group) for match in pattern.finditer(response)]
        last = matches[-1] if matches else None  # None too where an optional group is not there
        return float(last is not None and last.strip() == example.answer.strip())

    return each(score)


def task_score(section: TaskReward, task: TaskData, around: Surroundings, name: str) -> Scorer:
    """The task's own scorer."""
    if task.score is None:
        raise InputError(
            "rewards: this task has no scorer of its own, so `type: task` cannot be used;"
            " use exact_match or regex"
        )
    return each(task.score)
