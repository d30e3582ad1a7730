"""`sweep` and `tune`: many runs of one recipe."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.recipe.schema.base import Count, Positive, Section
from autotune.recipe.schema.rewards import Reward

Scalar = bool | int | float | str | None


class AxisSection(Section):
    """The values that a sweep may give one field; what is left out follows from the table of knobs."""

    low: float | None = None
    high: float | None = None
    log: bool | None = None
    """Spread evenly over orders of magnitude."""
    step: Positive | None = None
    """Distance of neighbouring values on a linear axis."""
    choices: Annotated[tuple[Scalar, ...], Field(min_length=1)] | None = None
    """These values instead of a range."""


class SweepSection(Section):
    """A study over fields of this recipe: `autotune sweep`."""

    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """Name of the study and of its folder beside the runs; unset, `<name>-sweep`."""
    trials: Count = 24
    seeds: Count = 2
    """Runs of every trial: `seed`, `seed` + 1, … of this recipe, the same for all trials."""
    space: Annotated[dict[str, AxisSection], Field(min_length=1)]
    """Dotted field -> its values; `{}` is the knob's own range. Gains of rules are fields too, such as
    `control.policies.A4.threshold`."""
    known_good: tuple[dict[str, Scalar], ...] = ()
    """Settings tried first, after this recipe's own values: dotted field -> value."""
    score: Literal["greedy", "sampled"] = "greedy"
    """Which held-out score at the end of a run counts."""
    objective: Literal["mean", "lower_bound"] = "mean"
    """Of the seeds' scores: their mean, or the lower end of its confidence interval."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """Of the lower bound, one-sided."""
    second: Literal["tokens", "time"] | None = None
    """A cost to be lowered beside the score: tokens processed, or seconds of training."""
    sampler: Literal["tpe", "random", "gp", "qmc", "nsgaii", "cmaes"] = "tpe"
    pruner: Literal["median", "hyperband", "none"] | None = None
    """Gives up on a run that is behind, at its evaluations; unset, `median`, or `none` with a `second`."""
    pairs: Literal["auto", "prompts", "seeds", "none"] | None = None
    """Gives up on a trial between two seeds, by a paired test against the best one: over held-out prompts,
    over seeds (from 5 on), or over seeds once there are 5 (`auto`). Unset, `auto`, or `none` with a
    `second`."""
    pair_level: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """p below which a trial counts as worse than the best one."""
    confirm: Annotated[int, Field(ge=0)] = 5
    """Fresh seeds on which the best recipe, and this one, are run at the end."""
    storage: str | None = None
    """`sqlite:///FILE`, `postgresql://…`, `journal:FILE` or `grpc://HOST:PORT`; unset, SQLite."""
    heartbeat: Positive = 10.0
    """Seconds between two signs of life of a running trial."""
    grace: Positive = 60.0
    """Seconds without one after which a trial is given to another worker."""
    keep_checkpoints: bool = False
    """Keep those of finished trials; the confirming runs' always stay."""


class TuneSection(Section):
    """The staged procedure: `autotune tune`."""

    budget: Annotated[int, Field(ge=100)] = 1000
    """Rollouts of all rounds: 20 %, 30 % and 50 % of it."""
    repeats: Annotated[int, Field(ge=3)] = 3
    """Runs behind every figure: `seed`, `seed` + 1, …"""
    preset: Literal["documented_7b"] | None = None
    """Values of the trainer's fields that the recipe leaves out."""
    relative_variance: bool = False
    """Judge the reward's variance and spread by their noise floor; for rewards that cannot vary by 0.3."""
    metrics: tuple[Reward, ...] = ()
    """Further scores of the held-out responses at the end, such as helpfulness; never trained on."""
