"""`deepspeed`, `eval`, `checkpoint`, `tracking`, `fingerprint`: where a run lives and what is kept of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.recipe.schema.base import Count, NonNegative, Section


class DeepSpeedSection(Section):
    """What is split over the ranks and what waits in host memory; `docs/deepspeed.md` has the table."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Kept in host memory: nothing, the optimizer's state and masters, or weights too (stage 3)."""
    config: str | None = None
    """A DeepSpeed JSON file of your own: it sets stage and offloading. What the recipe owns (batch
    sizes, optimizer, schedule, clipping, dtype) is overridden, with a word in `autotune check`."""


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 20
    """Rollouts between evaluations; 0 evaluates at the start and the end only."""
    prompts: Count = 512
    greedy: bool = True
    """Greedy held-out score; the sampled one is always reported beside it."""
    per_prompt: bool = False
    """Journal the score of every held-out prompt too; a sweep's paired test reads them."""


class CheckpointSection(Section):
    every: Count = 10
    keep: Annotated[int, Field(ge=2)] = 4
    start: str | None = None
    """A checkpoint folder to go on from: its weights, optimizer, data position and rollout index, under
    this recipe's knobs. The KL reference stays `model.path`."""


GroupName = Annotated[str, Field(min_length=1, max_length=200)]


class MlflowSection(Section):
    enabled: bool = True
    uri: str | None = None
    """Tracking server; without it a SQLite store beside the run folders."""
    experiment: str = "autotune"
    group: Annotated[tuple[GroupName, ...], Field(max_length=4)] = ()
    """Names of the runs that this one is nested under, outermost first, such as `[my sweep, trial 3]`.

    They are found by these names in the experiment, or made; so the first should be unique there.
    """
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run beside the ones that every run gets."""
    system_metrics: NonNegative = 10.0
    """Seconds between two samples of CPU, memory, disk, network and GPU; 0 for none."""


class TrackingSection(Section):
    mlflow: MlflowSection = MlflowSection()


class FingerprintSection(Section):
    """What these settings were tuned on; a run writes it. `check` warns where a part differs here."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    hardware: str | None = None
