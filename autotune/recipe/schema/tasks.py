"""`task`: where prompts come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from autotune.recipe.schema.base import Count, Section


class DigitsTask(Section):
    """The embedded tasks: sort six digits as a letter demands (`ops6x2`), just sort (`sort6`), or drop
    repeated ones (`unique6`)."""

    type: Literal["digits"] = "digits"
    variant: Literal["ops6x2", "sort6", "unique6"] = "ops6x2"


class SumsTask(Section):
    """`What is a + b + c?` in words that a small instruction model understands."""

    type: Literal["sums"] = "sums"
    terms: Annotated[int, Field(ge=2, le=6)] = 3
    largest: Annotated[int, Field(ge=1)] = 9
    prompts: Count = 4096
    """Prompts in the training set; held-out ones are disjoint."""
    system_prompt: str | None = None
    """Message before the user's; needs a tokenizer with a chat template."""


class ReasoningGymTask(Section):
    """One task of the package reasoning-gym, by its name there."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    size: Count = 2048
    config: dict[str, Any] = Field(default_factory=dict)
    """The generator's own settings; they win over `difficulty`."""
    difficulty: Annotated[int, Field(ge=0)] | dict[str, Annotated[int, Field(ge=0)]] | None = None
    """Level of the task's own curriculum: one for all of its attributes, or attribute -> level."""
    system_prompt: str | None = None
    """Message before the user's; needs a tokenizer with a chat template."""


class FileTask(Section):
    """A user's own prompts in a file; the fields that JSONL and Parquet share."""

    path: str
    prompt_column: str = "prompt"
    """Text, or a list of chat messages; `a.b` is field `b` of column `a`."""
    answer_column: str | None = "answer"
    """What rewards compare with; null where they need nothing."""
    eval_path: str | None = None
    """Held-out file; without it `eval_fraction` of the prompts is held out by hash."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    chat_template: bool = False
    """Wrap the prompt as one user message of the tokenizer's chat template."""
    system_prompt: str | None = None
    """Message before the user's; needs `chat_template: true`."""


class JsonlTask(FileTask):
    """One JSON object a line."""

    type: Literal["jsonl"] = "jsonl"


class ParquetTask(FileTask):
    """One Parquet file, read with pyarrow."""

    type: Literal["parquet"] = "parquet"


Task = Annotated[
    DigitsTask | SumsTask | ReasoningGymTask | JsonlTask | ParquetTask, Field(discriminator="type")
]
