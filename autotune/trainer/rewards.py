"""Rewards of responses: weighted components, each of them scored or known to be unscorable.

    total = sum over components of weight * score

A response whose components cannot all be scored (a scorer raised, or answered something that is
not a finite number) gets the total None. It is counted by `rollout_success_rate` and never trained
on as a zero: a broken scorer must not look like a bad model.

Scorers are small functions from (response, example) to a number. Texts are compared after
stripping white space at both ends.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.errors import InputError

if TYPE_CHECKING:
    from autotune.recipe.schema import ExactMatchReward, RegexReward, Reward, TaskReward
    from autotune.trainer.tasks import Example, TaskData

Scorer = Callable[[str, "Example"], float]


@dataclass(frozen=True, slots=True)
class RewardTable:
    """Scores of some responses, in their order; None where a response could not be scored."""

    total: list[float | None]
    components: dict[str, list[float | None]]
    """Component name -> unweighted scores."""


@dataclass(frozen=True, slots=True)
class Component:
    """One term of the reward."""

    name: str
    weight: float
    scorer: Scorer

    def score(self, response: str, example: Example) -> float | None:
        """The unweighted score, or None when the scorer cannot give a finite number."""
        try:
            value = float(self.scorer(response, example))
        except Exception:  # a scorer is foreign code; whatever it raises, the run goes on
            return None
        return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Rewards:
    """The reward of a recipe: all of its components."""

    components: tuple[Component, ...]

    def score(self, responses: Sequence[str], examples: Sequence[Example]) -> RewardTable:
        """Scores each response against the example of the same position."""
        pairs = list(zip(responses, examples, strict=True))
        columns = {c.name: [c.score(*pair) for pair in pairs] for c in self.components}
        rows = zip(*columns.values(), strict=True)
        return RewardTable([self._total(row) for row in rows], columns)

    def _total(self, row: Sequence[float | None]) -> float | None:
        known = [value for value in row if value is not None]
        if len(known) < len(row):
            return None
        return sum(c.weight * value for c, value in zip(self.components, known, strict=True))


def build_rewards(sections: Sequence[Reward], task: TaskData) -> Rewards:
    """Makes the scorers of a recipe's `rewards`; two of a type are told apart as `regex_2`."""
    seen: Counter[str] = Counter()
    components = []
    for section in sections:
        seen[section.type] += 1
        count = seen[section.type]
        name = section.type if count == 1 else f"{section.type}_{count}"
        components.append(Component(name, section.weight, SCORERS[section.type](section, task)))
    return Rewards(tuple(components))


def exact_match(section: ExactMatchReward, task: TaskData) -> Scorer:
    """1 when the stripped response is the answer."""
    return lambda response, example: float(response.strip() == example.answer.strip())


def last_match(section: RegexReward, task: TaskData) -> Scorer:
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

    return score


def task_score(section: TaskReward, task: TaskData) -> Scorer:
    """The task's own scorer."""
    if task.score is None:
        raise InputError(
            "rewards: this task has no scorer of its own, so `type: task` cannot be used;"
            " use exact_match or regex"
        )
    return task.score


SCORERS: dict[str, Callable[..., Scorer]] = {
    "exact_match": exact_match,
    "regex": last_match,
    "task": task_score,
}
"""Reward type -> maker of its scorer from the recipe's section and the task."""
