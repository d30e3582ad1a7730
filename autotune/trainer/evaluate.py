"""Held-out score on fixed prompts, greedy and sampled, under the recipe's own length and temperature.

The prompts, and the noise of the sampled half, are the same at every evaluation of a run: two
evaluations differ by the weights alone. Live knobs are not read here, so that a controller that
moves the temperature does not move the ruler as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autotune.recipe.schema import Recipe
from autotune.trainer.collect import Room, sample_all, texts
from autotune.trainer.ranks import Ranks
from autotune.trainer.rewards import Rewards
from autotune.trainer.rollout.base import Draw, Prompts, Sampler
from autotune.trainer.tasks import Example

EVALUATION_ROLLOUT = -1
"""Keys the noise of all evaluations; training uses 0 and up."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The fixed prompts of a run's evaluations."""

    examples: Sequence[Example]
    prompts: Prompts


def draws(recipe: Recipe) -> dict[str, Draw]:
    """How responses are drawn, by the name of the score that they give."""
    trainer = recipe.trainer
    both = {
        name: Draw(
            seed=recipe.seed,
            rollout=EVALUATION_ROLLOUT,
            temperature=trainer.temperature,
            max_response_length=trainer.max_response_length,
            greedy=name == "greedy",
        )
        for name in ("greedy", "sampled")
    }
    return both if recipe.eval.greedy else {"sampled": both["sampled"]}


def evaluate(
    recipe: Recipe,
    held_out: HeldOut,
    sampler: Sampler,
    rewards: Rewards,
    tokenizer: object,
    ranks: Ranks,
    room: Room | None = None,
) -> dict[str, Any]:
    """Mean reward over the held-out prompts, one response each; unscorable ones count as 0.

    Beside `greedy` and `sampled`: `components`, where the reward has several, each one's mean by kind of
    draw; and `scores`, where the recipe asks for them, one total per prompt.
    """
    scores: dict[str, Any] = {}
    for name, draw in draws(recipe).items():
        chunk = recipe.trainer.rollout_micro_batch_size
        samples = sample_all(sampler, held_out.prompts, draw, 1, chunk, ranks, room)
        rows = np.arange(len(held_out.examples))
        table = rewards.score(texts(samples, tokenizer, rows), list(held_out.examples))  # type: ignore[arg-type]
        scores[name] = _mean(table.total)
        if len(table.components) > 1:
            means = {component: _mean(values) for component, values in table.components.items()}
            scores.setdefault("components", {})[name] = means
        if recipe.eval.per_prompt:
            scores.setdefault("scores", {})[name] = [v or 0.0 for v in table.total]
    return scores


def _mean(values: Sequence[float | None]) -> float:
    return sum(v or 0.0 for v in values) / len(values)
