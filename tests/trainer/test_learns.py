"""Every algorithm learns the embedded task: its last five rollouts beat its first five, clearly.

Clearly is three standard errors of the difference of the two means, from the scatter of the rollouts
themselves. The settings are the quickstart's with two epochs and fewer rollouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.recipe import Recipe
from autotune.trainer.loop import Trainer
from autotune.trainer.records import RolloutRecord

SETTINGS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "dapo": {"dynamic_sampling": 2, "kl_coef": 0.0},
    "gspo": {"clip_range": 0.03},  # the published range is for responses of thousands of tokens
    "rloo": {"kl": {"placement": "reward"}},
    "ppo": {"critic_learning_rate": 1e-3, "rollouts": 20},
}


def learn(folder: Path, trainer: dict[str, Any], model: dict[str, Any]) -> list[RolloutRecord]:
    common = {"rollouts": 18, "ppo_epochs": 2, "actor_learning_rate": 3e-4}
    recipe = Recipe.model_validate(
        {
            "seed": 1,
            "model": {"path": "builtin:digits", **model},
            "eval": {"every": 0, "prompts": 8},
            "checkpoint": {"every": 1000},
            "trainer": {**common, **trainer},
        }
    )
    run, records = Trainer(recipe, folder), []
    run.run(records.append)
    run.close()
    return records


def standard_errors(rewards: list[float]) -> float:
    """By how many standard errors the last five rollouts beat the first five."""
    first, last = np.array(rewards[:5]), np.array(rewards[-5:])
    error = np.sqrt(first.var(ddof=1) / 5 + last.var(ddof=1) / 5)
    return float((last.mean() - first.mean()) / error)


def explained(records: list[RolloutRecord]) -> float:
    """Share of the reward's variance that the critic foresees; knowing the mean alone explains nothing."""
    scalars = [record.scalars for record in records]
    losses = np.array([s["value_loss"] for s in scalars], dtype=float)
    spread = np.array([s["reward_std"] for s in scalars], dtype=float)
    return float(np.mean(1 - losses / (0.5 * spread**2)))


def rewards(records: list[RolloutRecord]) -> list[float]:
    return [float(record.scalars["reward_mean"]) for record in records]  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", SETTINGS)
def test_an_algorithm_learns(algorithm: str, tmp_path: Path) -> None:
    records = learn(tmp_path, {"algorithm": algorithm, **SETTINGS[algorithm]}, {})
    assert standard_errors(rewards(records)) > 3.0
    assert all(0.0 < record.scalars["ratio_in"] < 1.0 for record in records)  # type: ignore[operator]
    if algorithm == "ppo":
        assert explained(records[-5:]) > 0.2  # the critic learns too


@pytest.mark.slow
def test_adapters_learn(tmp_path: Path) -> None:
    trainer = {"algorithm": "grpo", "rollouts": 16, "ppo_epochs": 1, "actor_learning_rate": 3e-3}
    records = learn(tmp_path, trainer, {"lora": {"rank": 8, "alpha": 16}})
    assert standard_errors(rewards(records)) > 3.0
    assert records[0].scalars["kl_ref"] == 0.0
