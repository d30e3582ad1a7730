"""`rewards`: what a response is worth."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.recipe.schema.base import Count, Positive, Section


class RewardSection(Section):
    """One term of the reward: total = sum of weight x score, as the scores are, not normalised."""

    weight: float = 1.0
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """The component is logged as `reward/<name>`; without it, its type."""


class ExactMatchReward(RewardSection):
    """1 when the response, stripped, equals the answer."""

    type: Literal["exact_match"] = "exact_match"


class RegexReward(RewardSection):
    """1 when `pattern`'s last match in the response (first group, if any) equals the answer."""

    type: Literal["regex"] = "regex"
    pattern: str


class TaskReward(RewardSection):
    """The task's own scorer (reasoning-gym's `score_answer`)."""

    type: Literal["task"] = "task"


class MathVerifyReward(RewardSection):
    """1 when the response's last expression is mathematically equal to the answer's (math-verify)."""

    type: Literal["math_verify"] = "math_verify"
    time_limit: Positive = 5.0
    """Seconds for one response; beyond it the response is not scorable."""


class ModelReward(RewardSection):
    """The score of a sequence classifier (a reward model) for prompt and response."""

    type: Literal["model"] = "model"
    path: str
    """A folder as `save_pretrained` writes it, or a hub id."""
    label: str | Annotated[int, Field(ge=0)] | None = None
    """With several labels: the one whose probability is the reward. With one label it is its logit."""
    template: Literal["auto", "chat", "pair", "response"] = "auto"
    """What the model reads: its own chat template, a text pair, or the response alone."""
    max_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens of prompt and response; longer ones lose their beginning. Default: what the model can."""
    batch_size: Count = 32
    """Responses per forward pass."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class ImportReward(RewardSection):
    """A Python function of the user's, run in a process of its own."""

    type: Literal["import"] = "import"
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    allow_code: bool = False
    """Permission to run that code; without it nothing starts."""
    time_limit: Positive = 10.0
    """Seconds for one call; beyond it the process is killed and the responses are not scorable."""
    batch_size: Count = 1
    """Responses per call. A call that fails is repeated response by response."""
    maximum: float | None = None
    """Largest score that it can give, where known: tells a saturated reward from a stalled one."""


Reward = Annotated[
    ExactMatchReward | RegexReward | TaskReward | MathVerifyReward | ModelReward | ImportReward,
    Field(discriminator="type"),
]
