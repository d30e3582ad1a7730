"""A whole recipe."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from autotune.recipe.schema.base import Section
from autotune.recipe.schema.control import ControlSection
from autotune.recipe.schema.keeping import (
    CheckpointSection,
    DeepSpeedSection,
    EvalSection,
    FingerprintSection,
    TrackingSection,
)
from autotune.recipe.schema.model import ModelSection
from autotune.recipe.schema.rewards import ExactMatchReward, Reward
from autotune.recipe.schema.rollout import RolloutSection
from autotune.recipe.schema.search import SweepSection, TuneSection
from autotune.recipe.schema.tasks import DigitsTask, Task
from autotune.recipe.schema.trainer import TrainerSection


class Recipe(Section):
    """A whole run in one file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "quickstart"
    """Without it, the stem of the recipe's file name."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    run_dir: str = "runs/${name}-${seed}"
    """Folder of the run; `${name}` and `${seed}` are the only interpolations."""
    model: ModelSection = ModelSection()
    task: Task = DigitsTask()
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (ExactMatchReward(),)
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    control: ControlSection = ControlSection()
    tracking: TrackingSection = TrackingSection()
    fingerprint: FingerprintSection | None = None
    sweep: SweepSection | None = None
    tune: TuneSection | None = None

    def folder(self) -> str:
        """`run_dir` with its interpolations done."""
        return self.run_dir.replace("${name}", self.name).replace("${seed}", str(self.seed))
