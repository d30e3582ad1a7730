"""The actor's learning rate: X1 (a step-KL trust region) and B5a (saw-tooth reward).

X1 is a regulator on `kl_step`, the drift from the sampling weights after the last update of a rollout
(k3, nats/token). It moves the learning rate in proportion:

    lr *= sqrt(target / median kl_step),   within [1/slew, rise] a move

It engages when the drift leaves [low, high] x target and rests when it is back within `rest` of the
target. Once the run was seen healthy (drift in band, reward rising) only a drift below `low_healthy` x target
engages it upward: a converging run drifts less by itself and needs no larger steps.
Samples made under other learning rates or update counts are not mixed in. A single window rarely has
to be full: two samples are enough when even the mildest of them asks for the largest step.

B5a lowers the rate (x0.75) when the reward saw-tooths: a spread around its trend beyond the noise floor,
with sharp drops.

Sources: X1 is ours (`kl_step` is the best single signal of timid / healthy / aggressive that was
measured); the square root keeps below the measured exponent (kl_step ~ lr^1.6), so it cannot overshoot.
B5a: document B 3.5.

X1 does nothing upward while the reward rises well, when the signal is gone (a dead model looks timid), or
when the reward is saturated; the first rollouts after an optimizer start, which drift three to five
times more, only ever count as upper bounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Kind, Proposal
from autotune.history import Sample
from autotune.policies.base import Answer, Context, Family, Policy, signal_present
from autotune.statistics import detrended_variance, median, turning_points, variance_ratio_limit

ADAM_START = 3
"""Rollouts whose drift is inflated by Adam's start."""


@dataclass(frozen=True)
class StepKlTrustRegion(Policy):
    """X1."""

    id: ClassVar[str] = "X1"
    family: ClassVar[Family] = Family.TRUST_REGION
    source: ClassVar[str] = "beyond the documents: step-KL trust region"
    summary: ClassVar[str] = "kl_step outside its band -> actor_learning_rate x sqrt(target / kl_step)"
    needs: ClassVar[tuple[str, ...]] = ("kl_step", "reward_mean")
    moves: ClassVar[tuple[str, ...]] = ("actor_learning_rate",)

    target: float = 0.015
    """Nats/token of drift per rollout."""
    low: float = 0.5
    high: float = 3.0
    """Engages outside [low, high] x target."""
    low_healthy: float = 0.2
    """Takes the place of `low` once the run was seen healthy."""
    rest: float = 1.3
    """Rests within [1/rest, rest] x target."""
    slew: float = 4.0
    """Largest factor of one move down."""
    rise: float = 10.0
    """And up: the square root stays short of the target, and a timid run loses its variety while it waits."""
    samples: int = 3
    """Samples under the present rate that a move needs."""
    span: float = 50.0
    """The rate stays within [1/span, span] x the recipe's while rescuing."""

    def propose(self, ctx: Context) -> Answer:
        drift = self._drift(ctx)
        if not drift:
            return None
        level = median(drift)
        if not self._wanted(ctx, level) or not self._enough(ctx, drift):
            return None
        if level < self.target and not self._may_raise(ctx):
            return None
        return self._move(ctx, level)

    def _drift(self, ctx: Context) -> list[float]:
        """kl_step of the samples made under the present rate and update count, oldest first."""
        knobs = ("actor_learning_rate", "ppo_mini_batch_size", "ppo_epochs", "train_batch_size")
        made = ctx.under(*knobs, n=max(self.samples, ctx.pace.window))
        late = [s for s in made if s.rollout >= ADAM_START]
        return _values(late) or self._early(made)

    def _early(self, made: Sequence[Sample]) -> list[float]:
        """Only early samples: upper bounds, so they count only where they already say timid."""
        values = _values(made)
        return values if values and max(values) < self.low * self.target else []

    def _wanted(self, ctx: Context, level: float) -> bool:
        ratio = level / self.target
        if self.id in ctx.engagements:
            return not 1 / self.rest <= ratio <= self.rest
        low = self.low_healthy if self.id in ctx.anchors else self.low
        return not low <= ratio <= self.high

    def _enough(self, ctx: Context, drift: Sequence[float]) -> bool:
        """Enough samples for a move of this size."""
        if len(drift) >= self.samples:
            return True
        reach = self.slew**2
        mildest = max(drift) if drift[-1] < self.target else min(drift)
        saturated = mildest < self.target / reach or mildest > self.target * reach
        return len(drift) >= 2 and saturated

    def _may_raise(self, ctx: Context) -> bool:
        view = ctx.reward
        return not view.rising_well and not view.falling and signal_present(ctx, limit=0.8)

    def _move(self, ctx: Context, level: float) -> Answer:
        now, start = ctx.knobs["actor_learning_rate"], ctx.facts.knobs["actor_learning_rate"]
        factor = math.sqrt(self.target / max(level, 1e-12))
        factor = min(max(factor, 1 / self.slew), self.rise)
        after = min(max(now * factor, start / self.span), start * self.span)
        reason = f"kl_step {level:.2g} against a target of {self.target:g} -> learning rate x{factor:.2f}"
        evidence = {"kl_step": level, "factor": factor}
        return Proposal(self.id, "actor_learning_rate", after, reason, kind=Kind.REGULATOR, evidence=evidence)

    def resting(self, ctx: Context) -> bool:
        """Whether an engaged regulator is back in its band."""
        drift = self._drift(ctx)
        full = len(drift) >= max(self.samples, ctx.pace.window)
        return full and not self._wanted(ctx, median(drift))

    def healthy(self, ctx: Context) -> bool:
        drift = self._drift(ctx)
        if len(drift) < self.samples or not ctx.reward.rising_well:
            return False
        return self.low <= median(drift) / self.target <= self.high


def _values(samples: Sequence[Sample]) -> list[float]:
    return [s.values["kl_step"] for s in samples if "kl_step" in s.values]


@dataclass(frozen=True)
class SawTooth(Policy):
    """B5a."""

    id: ClassVar[str] = "B5a"
    family: ClassVar[Family] = Family.LEARNING_SPEED
    source: ClassVar[str] = "B 3.5: reward saw-tooths"
    summary: ClassVar[str] = "reward rises and drops sharply, again and again -> actor LR x0.75"
    needs: ClassVar[tuple[str, ...]] = ("reward_mean", "reward_std")
    moves: ClassVar[tuple[str, ...]] = ("actor_learning_rate",)

    factor: float = 0.75
    drops: int = 2
    """Sharp one-rollout drops, in the window, that make a saw."""
    drop_sd: float = 3.0
    """A sharp drop in noise standard deviations of a difference."""
    turning: float = 0.5
    """Least share of turning points."""

    def propose(self, ctx: Context) -> Answer:
        view = ctx.reward
        if view.trend is None or view.noise == 0:
            return None
        limit = self.drop_sd * view.noise * math.sqrt(2)
        sharp = sum(a - b > limit for a, b in itertools.pairwise(view.values))
        if sharp < self.drops or turning_points(view.values) < self.turning:
            return None
        ratio = detrended_variance(view.values, view.trend) / view.noise**2
        if ratio <= variance_ratio_limit(len(view.values)):
            return None
        after = ctx.knobs["actor_learning_rate"] * self.factor
        reason = f"reward saw-tooths: {sharp} sharp drops, variance {ratio:.1f}x its noise floor"
        evidence = {"variance_ratio": ratio, "drops": sharp}
        return Proposal(self.id, "actor_learning_rate", after, reason, evidence=evidence)
