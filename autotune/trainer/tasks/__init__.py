"""Tasks by the `type` of the recipe's `task` section; each is imported only when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from autotune.trainer.tasks.base import Example, TaskData, is_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import Task

__all__ = ["TASKS", "Example", "TaskData", "is_held_out", "load_task"]

TASKS: dict[str, str] = {
    "digits": "autotune.trainer.tasks.digits:load",
    "sums": "autotune.trainer.tasks.sums:load",
    "reasoning_gym": "autotune.trainer.tasks.reasoning_gym:load",
    "jsonl": "autotune.trainer.tasks.jsonl:load",
    "parquet": "autotune.trainer.tasks.parquet:load",
}
"""Task type -> `module:function`, called with the section and the tokenizer."""


def load_task(section: Task, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Builds the prompts of a recipe's `task` section for one tokenizer."""
    module, function = TASKS[section.type].split(":")
    data: TaskData = getattr(importlib.import_module(module), function)(section, tokenizer)
    return data
