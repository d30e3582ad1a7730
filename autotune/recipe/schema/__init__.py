"""The recipe: every field typed, documented, defaulted and bounded.

One pydantic model per section, `extra="forbid"`, discriminated unions on `type`. This folder
holds the shape and single-field bounds only; reading files, overrides, cross-field rules and error
messages with lines are in `autotune.recipe.load`. Nothing heavy is imported here.

base.py      what every section is made of
model.py  tasks.py  rewards.py  trainer.py  rollout.py  control.py   a section each
keeping.py   where a run lives and what is kept of it: deepspeed, eval, checkpoint, tracking, fingerprint
search.py    sweep, tune
whole.py     a whole recipe
"""

from __future__ import annotations

from autotune.recipe.schema.base import Section
from autotune.recipe.schema.control import ControlSection
from autotune.recipe.schema.keeping import (
    DeepSpeedSection,
    FingerprintSection,
    MlflowSection,
    TrackingSection,
)
from autotune.recipe.schema.model import LoraSection, ModelSection
from autotune.recipe.schema.rewards import (
    ExactMatchReward,
    ImportReward,
    MathVerifyReward,
    ModelReward,
    RegexReward,
    Reward,
    TaskReward,
)
from autotune.recipe.schema.rollout import RolloutSection, ServerSection
from autotune.recipe.schema.search import AxisSection, Scalar, SweepSection, TuneSection
from autotune.recipe.schema.tasks import (
    DigitsTask,
    FileTask,
    JsonlTask,
    ParquetTask,
    ReasoningGymTask,
    SumsTask,
    Task,
)
from autotune.recipe.schema.trainer import (
    CLIP_RANGES,
    LOSS_AVERAGES,
    CriticSection,
    LrScheduleSection,
    PackingSection,
    TrainerSection,
)
from autotune.recipe.schema.whole import Recipe

__all__ = [
    "CLIP_RANGES",
    "LOSS_AVERAGES",
    "AxisSection",
    "ControlSection",
    "CriticSection",
    "DeepSpeedSection",
    "DigitsTask",
    "ExactMatchReward",
    "FileTask",
    "FingerprintSection",
    "ImportReward",
    "JsonlTask",
    "LoraSection",
    "LrScheduleSection",
    "MathVerifyReward",
    "MlflowSection",
    "ModelReward",
    "ModelSection",
    "PackingSection",
    "ParquetTask",
    "ReasoningGymTask",
    "Recipe",
    "RegexReward",
    "Reward",
    "RolloutSection",
    "Scalar",
    "Section",
    "ServerSection",
    "SumsTask",
    "SweepSection",
    "Task",
    "TaskReward",
    "TrackingSection",
    "TrainerSection",
    "TuneSection",
]
