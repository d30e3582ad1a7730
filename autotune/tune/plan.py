"""What the staged procedure runs: lengths, starting values, and the recipe of each round.

    budget 1000     P1 to rollout 200, P2 to 500, P3 to 1000; another budget scales all three

The controller is off in all rounds: here the procedure is the one that changes things.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.procedure import BASELINE, ROLLOUTS
from autotune.recipe import Recipe
from autotune.recipe.axes import with_values
from autotune.recipe.schema import TuneSection
from autotune.recipe.source import read_document

RESPONSES_7B = {"train_batch_size": 16, "rollout_n": 8}
"""16 responses at once x 8 batches, as prompts and responses a prompt; the document does not split them."""


def with_preset(file: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides, preceded by the preset's values for fields of `trainer` that nobody has set.

    Args:
        file: a recipe.
        overrides: `key=value` texts of the command line.
    """
    data = read_document(file).data
    section, trainer = data.get("tune") or {}, data.get("trainer") or {}
    asked = section.get("preset") if isinstance(section, dict) else None
    given = dict(text.split("=", 1) for text in overrides if "=" in text)
    if given.get("tune.preset", asked) != "documented_7b" or not isinstance(trainer, dict):
        return list(overrides)
    set_already = {*trainer, *(name.removeprefix("trainer.") for name in given)}
    values = {name: v for name, v in preset(trainer).items() if name not in set_already}
    return [*(f"trainer.{name}={value:g}" for name, value in values.items()), *overrides]


def preset(trainer: Mapping[str, Any]) -> dict[str, float]:
    """The document's starting values for a model of 7B parameters, as fields of a recipe."""
    fields = {name: value for name, value in BASELINE.items() if name != "num_rollout_batches"}
    if trainer.get("algorithm") != "ppo":
        del fields["critic_learning_rate"]  # there is no critic
    return {**fields, **RESPONSES_7B, "ppo_mini_batch_size": 4, "micro_batch_size": 16}


@dataclass(frozen=True, slots=True)
class Plan:
    """The procedure for one recipe."""

    recipe: Recipe
    section: TuneSection
    budget: int
    folder: Path

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(range(self.recipe.seed, self.recipe.seed + self.section.repeats))

    def end(self, round_: str) -> int:
        """Rollout at which P1, P2 or P3 ends."""
        total, upto = sum(ROLLOUTS.values()), list(ROLLOUTS)[: list(ROLLOUTS).index(round_) + 1]
        return round(self.budget * sum(ROLLOUTS[name] for name in upto) / total)

    def data(self, stage: str, rollouts: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The resolved recipe of a stage, without seed and start."""
        plain = self.recipe.model_dump(mode="json", exclude={"sweep", "tune", "fingerprint"})
        plain["trainer"]["rollouts"] = rollouts
        plain["control"] = {"mode": "off"}
        mlflow = plain["tracking"]["mlflow"]
        mlflow["group"] = [*mlflow["group"], self.folder.name, stage][:4]
        mlflow["uri"] = mlflow["uri"] or f"sqlite:///{self.folder.parent / 'mlflow.db'}"
        return with_values(plain, values)

    def judged(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """A stage's recipe with the user's further scores: weight 0, so nothing is trained on them."""
        changed = copy.deepcopy(dict(data))
        further = [metric.model_dump(mode="json") | {"weight": 0.0} for metric in self.section.metrics]
        changed["rewards"] = [*changed["rewards"], *further]
        return changed


def plan_for(recipe: Recipe, budget: int | None) -> Plan:
    """The plan of a recipe.

    Raises:
        InputError: the budget is too short to judge a round, or the learning rate has a schedule of its own.
    """
    section = recipe.tune or TuneSection()
    budget = section.budget if budget is None else budget
    if budget < 100:
        raise InputError(f"received --budget {budget}; expected at least 100 rollouts, P1 takes a fifth")
    if recipe.trainer.lr_schedule.type != "constant":
        raise InputError(
            f"received trainer.lr_schedule.type {recipe.trainer.lr_schedule.type}; expected constant: a round"
            " must not be compared with one that had another learning rate"
        )
    folder = Path(recipe.folder()).resolve().parent / f"{recipe.name}-tune"
    return Plan(recipe, section, budget, folder)
