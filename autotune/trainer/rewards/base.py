"""Rewards of responses: weighted components, each of them scored or known to be unscorable.

    total = sum over components of weight * score        scores as they are, never normalised

A response whose components cannot all be scored (a scorer raised, hung, died, or answered something
that is not a finite number) gets the total None. It is counted by `rollout_success_rate` and never
trained on as a zero: a broken scorer must not look like a bad model. Why it could not be scored is
kept once per reason and handed out by `Rewards.news`.

A scorer maps responses and their examples to one score each. Most look at one response at a time
(`each`); a reward model wants batches, and foreign code runs in another process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autotune.errors import TrainingError

if TYPE_CHECKING:
    import torch

    from autotune.trainer.tasks import Example

REASONS_TOLD = 5
"""Different reasons per component that are told in one run; a scorer may word each one anew."""


@dataclass(frozen=True, slots=True)
class Unscorable:
    """In place of a score: why there is none."""

    reason: str
    """Told once."""
    detail: str = ""
    """Told with the first response that this reason is given for; may be different every time."""


Score = float | Unscorable


class Scorer(Protocol):
    """Scores responses against the examples of the same position; must not raise for one of them."""

    def __call__(self, responses: Sequence[str], examples: Sequence[Example]) -> Sequence[Score]: ...


def each(score: Callable[[str, Example], float]) -> Scorer:
    """A scorer of one response at a time; whatever it raises, its neighbours are still scored."""

    def scorer(responses: Sequence[str], examples: Sequence[Example]) -> list[Score]:
        return [guarded(score, *pair) for pair in zip(responses, examples, strict=True)]

    return scorer


def guarded(score: Callable[[str, Example], float], response: str, example: Example) -> Score:
    try:
        return float(score(response, example))
    except Exception as error:  # a scorer is foreign code; whatever it raises, the run goes on
        return Unscorable(f"{type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a scorer may need of the run that it serves."""

    device: torch.device | str = "cpu"
    folder: Path | None = None
    """Run folder: output of foreign code goes there."""
    rank: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Something about a component that the run's record should say once."""

    component: str
    text: str


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

    def score(self, responses: Sequence[str], examples: Sequence[Example]) -> list[Score]:
        """Unweighted scores, all of them finite.

        Raises:
            TrainingError: the scorer does not keep to its contract of one score per response.
        """
        scores = [_finite(score) for score in self.scorer(responses, examples)]
        if len(scores) != len(responses):
            raise TrainingError(
                f"reward {self.name}: {len(scores)} scores for {len(responses)} responses;"
                " expected one each"
            )
        return scores


def _finite(score: Score) -> Score:
    if isinstance(score, Unscorable):
        return score
    return score if math.isfinite(score) else Unscorable(f"the score is {score}, not a finite number")


@dataclass(slots=True)
class Rewards:
    """The reward of a recipe: all of its components."""

    components: tuple[Component, ...]
    _told: dict[str, set[str]] = field(default_factory=dict)
    _news: list[News] = field(default_factory=list)

    def score(self, responses: Sequence[str], examples: Sequence[Example]) -> RewardTable:
        """Scores each response against the example of the same position."""
        if len(responses) != len(examples):
            raise ValueError(f"{len(responses)} responses and {len(examples)} examples do not pair up")
        columns = {c.name: self._column(c, responses, examples) for c in self.components}
        rows = zip(*columns.values(), strict=True)
        return RewardTable([self._total(row) for row in rows], columns)

    def news(self) -> list[News]:
        """Reasons that were not told yet, each of them once."""
        news, self._news = self._news, []
        return news

    def state_dict(self) -> dict[str, list[str]]:
        """JSON state for a checkpoint: what was told already."""
        return {name: sorted(texts) for name, texts in self._told.items()}

    def load_state_dict(self, state: Mapping[str, Sequence[str]]) -> None:
        """Inverse of `state_dict`."""
        self._told = {name: set(texts) for name, texts in state.items()}

    def close(self) -> None:
        """End the processes of foreign code."""
        for component in self.components:
            close = getattr(component.scorer, "close", None)
            if close is not None:
                close()

    def _column(
        self, component: Component, responses: Sequence[str], examples: Sequence[Example]
    ) -> list[float | None]:
        scores = component.score(responses, examples)
        for score in scores:
            if isinstance(score, Unscorable):
                self._note(component.name, score.reason, score.detail)
        for remark in getattr(component.scorer, "remarks", ()):
            self._note(component.name, remark, "")
        return [None if isinstance(score, Unscorable) else score for score in scores]

    def _note(self, component: str, reason: str, detail: str) -> None:
        told = self._told.setdefault(component, set())
        if reason not in told and len(told) < REASONS_TOLD:
            told.add(reason)
            self._news.append(News(component, reason + detail))

    def _total(self, row: Sequence[float | None]) -> float | None:
        known = [value for value in row if value is not None]
        if len(known) < len(row):
            return None
        return sum(c.weight * value for c, value in zip(self.components, known, strict=True))
