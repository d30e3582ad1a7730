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

from autotune.recipe.schema.base import Count, NonNegative, Positive, Section
from autotune.recipe.schema.control import ControlSection
from autotune.recipe.schema.keeping import (
    CheckpointSection,
    DeepSpeedSection,
    EvalSection,
    FingerprintSection,
    GroupName,
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
    RewardSection,
    TaskReward,
)
from autotune.recipe.schema.rollout import Address, RolloutSection, ServerSection
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
    KlSection,
    LrScheduleSection,
    PackingSection,
    TrainerSection,
)
from autotune.recipe.schema.whole import Recipe

__all__ = [
    "CLIP_RANGES",
    "LOSS_AVERAGES",
    "Address",
    "AxisSection",
    "CheckpointSection",
    "ControlSection",
    "Count",
    "CriticSection",
    "DeepSpeedSection",
    "DigitsTask",
    "EvalSection",
    "ExactMatchReward",
    "FileTask",
    "FingerprintSection",
    "GroupName",
    "ImportReward",
    "JsonlTask",
    "KlSection",
    "LoraSection",
    "LrScheduleSection",
    "MathVerifyReward",
    "MlflowSection",
    "ModelReward",
    "ModelSection",
    "NonNegative",
    "PackingSection",
    "ParquetTask",
    "Positive",
    "ReasoningGymTask",
    "Recipe",
    "RegexReward",
    "Reward",
    "RewardSection",
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
