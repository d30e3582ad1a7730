"""What every control policy is made of: the context it reads and the three things it may answer.

A policy is a frozen dataclass of its own parameters. It sees a `Context` (bounded history, the
knobs now, the run's facts, the pace) and answers a `Proposal`, a `Hold`, an `Emergency`, or None.
It cannot touch the trainer, the clock or the disk. Warm-up, patience, cooldown, bounds and direction
locks are written once, in `autotune.guards`; a policy states only its own condition and step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import ClassVar

from autotune.decisions import Proposal, RunFacts
from autotune.history import History, Sample
from autotune.knobs import expand, updates_per_rollout
from autotune.metrics import Snapshot
from autotune.statistics import (
    Movement,
    Trend,
    detrended_variance,
    median,
    movement,
    reward_noise_sd,
    theil_sen,
    variance_ratio_limit,
)


class Family(IntEnum):
    """Priority: lower speaks first."""

    INTEGRITY = 0
    COLLAPSE = 1
    MEMORY = 2
    TRUST_REGION = 3
    ENTROPY = 4
    REFERENCE_KL = 5
    LEARNING_SPEED = 6
    THROUGHPUT = 7


@dataclass(frozen=True, slots=True)
class Pace:
    """Lengths in rollouts, scaled to the run; see `pace_for`."""

    warmup: int
    window: int
    trend: int
    settle: int
    evaluate: int
    cooldown: int
    knob_cooldown: int
    revert_cooldown: int


def pace_for(scale: float, *, lr_warmup: int = 0, staleness: int = 0) -> Pace:
    """Starting constants of a thousand-rollout run times `scale`, none below its minimum.

    A learning-rate warm-up is counted in the run's own rollouts and is never scaled away.
    """

    def at(rollouts: int, least: int) -> int:
        return max(round(rollouts * scale), least)

    return Pace(
        warmup=max(at(20, 3), lr_warmup + at(10, 0) if lr_warmup else 0),
        window=at(10, 4),
        trend=at(50, 8),
        settle=2 + staleness,
        evaluate=at(10, 3),
        cooldown=at(20, 3),
        knob_cooldown=at(40, 4),
        revert_cooldown=at(80, 8),
    )


PLATEAU_SAMPLES = 20
"""Samples that a proof of "no movement" may use when the trend window is shorter.

A window's rise is known to +-z * noise * sqrt(12 / n): at n = 8 that is 2 noise, as wide as the smallest
gain of interest, so a run that stands still is hardly ever proven to; at 20 it is 1.3 noise. The gain stays
the same over the longer window, so what is called a plateau is flatter, not steeper.
"""


@dataclass(frozen=True, slots=True)
class Engagement:
    """A regulator between its first move and the day it is back in its band."""

    since: int
    start_value: float
    reward_before: float | None


@dataclass(frozen=True, slots=True)
class RewardView:
    """The reward over the trend window of the current epoch."""

    values: tuple[float, ...]
    noise: float
    """Standard deviation of one rollout's mean that sampling alone explains."""
    trend: Trend | None
    movement: Movement
    maximum: float | None

    @property
    def rising_well(self) -> bool:
        return self.movement is Movement.RISING

    @property
    def plateau(self) -> bool:
        return self.movement is Movement.PLATEAU

    @property
    def falling(self) -> bool:
        return self.movement is Movement.FALLING

    def saturated(self, share: float = 0.95) -> bool:
        """Whether the training reward has nowhere left to go."""
        if self.maximum is None or not self.values:
            return False
        return median(self.values[-4:]) >= share * self.maximum


@dataclass(frozen=True)
class Context:
    """Everything a policy may read at one rollout."""

    facts: RunFacts
    snapshot: Snapshot
    history: History
    knobs: Mapping[str, float]
    """The knobs that the next rollout would use, real names."""
    pace: Pace
    epoch: int
    since_restore: int = 0
    """First rollout after the last checkpoint restore; older rewards are another model's."""
    engagements: Mapping[str, Engagement] = field(default_factory=dict)
    anchors: Mapping[str, float] = field(default_factory=dict)
    """Regulator -> value of its knob at which the run was last seen healthy."""
    last_moves: Mapping[str, int] = field(default_factory=dict)
    """Rule -> rollout of its last granted change."""
    emergencies: int = 0
    """Checkpoint restores so far."""
    vetoes: int = 0
    """Rollouts running, up to the last one, that were undone."""
    pinned: frozenset[str] = frozenset()
    """Real knobs that must not be touched."""
    literal: bool = False
    """Study mode: the documents by their letter, without the harm and plateau guards."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Rule -> the number that it carried over from the last rollout."""
    gain_sd: float = 2.0
    """Smallest gain of interest over a trend window, in noise standard deviations."""

    # What several rules ask for at the same rollout is computed once.
    _recent: dict[int, list[Sample]] = field(default_factory=dict, init=False, compare=False, repr=False)
    _windows: dict[tuple[str, int], list[float] | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
    _levels: dict[str, float | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    _trends: dict[str, Trend | None] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def rollout(self) -> int:
        return self.snapshot.rollout

    @cached_property
    def updates(self) -> int:
        return updates_per_rollout(self.knobs)

    def value(self, metric: str) -> float | None:
        return self.snapshot.value(metric)

    def movable(self, knob: str) -> bool:
        """Whether this knob can be moved in this run and nobody pinned it."""
        return all(self.facts.can_move(r) and r not in self.pinned for r in expand(knob))

    def knob(self, name: str) -> float:
        """Current value; for `clip_range` the wider of its two sides."""
        return max(self.knobs[real] for real in expand(name))

    def recent(self, n: int) -> list[Sample]:
        """At most n newest samples of this config epoch."""
        if n not in self._recent:
            self._recent[n] = self.history.samples(n, epoch=self.epoch)
        return self._recent[n]

    def window(self, metric: str, n: int | None = None) -> list[float] | None:
        """The metric over the window of this epoch; None until it was valid on all of it."""
        size = n or self.pace.window
        if (metric, size) not in self._windows:
            values = self.history.values(metric, self.recent(size))
            self._windows[metric, size] = values if len(values) == size else None
        return self._windows[metric, size]

    def level(self, metric: str) -> float | None:
        """Median of the metric over the window, None until the window is full."""
        if metric not in self._levels:
            values = self.window(metric)
            self._levels[metric] = median(values) if values else None
        return self._levels[metric]

    def trend(self, metric: str) -> Trend | None:
        """Theil-Sen line of the metric over the trend window; None until that is full."""
        if metric not in self._trends:
            values = self.window(metric, self.pace.trend)
            self._trends[metric] = theil_sen(values) if values else None
        return self._trends[metric]

    def under(self, *knobs: str, n: int | None = None) -> list[Sample]:
        """Newest samples made under the present values of these knobs."""
        now = {k: self.knobs[k] for k in knobs if k in self.knobs}
        return self.history.samples(n or self.pace.window, under=now, since=self.since_restore)

    @cached_property
    def noise(self) -> float:
        """Noise floor of `reward_mean` from reward_std over the trend window, P and G.

        The root of the mean square, because rollouts of few prompts often have no spread at all.
        """
        samples = self.history.samples(self.pace.trend, since=self.since_restore)
        spread = self.history.values("reward_std", samples)
        p, g = int(self.knobs["train_batch_size"]), int(self.knobs["rollout_n"])
        return reward_noise_sd(math.sqrt(sum(v * v for v in spread) / len(spread)), p, g) if spread else 0.0

    @cached_property
    def reward(self) -> RewardView:
        values = self._rewards(self.pace.trend)
        full = len(values) == self.pace.trend
        trend = theil_sen(values) if full else None
        moves = movement(trend, self.gain_sd * self.noise) if trend else Movement.UNDETERMINED
        if trend and moves is Movement.UNDETERMINED and self._long_plateau():
            moves = Movement.PLATEAU
        return RewardView(values, self.noise, trend, moves, self.facts.reward_maximum)

    def _rewards(self, n: int) -> tuple[float, ...]:
        samples = self.history.samples(n, epoch=self.epoch, since=self.since_restore)
        return tuple(self.history.values("reward_mean", samples))

    def _long_plateau(self) -> bool:
        """Whether more samples than a short trend window has prove that the reward stands still."""
        if self.pace.trend >= PLATEAU_SAMPLES:
            return False
        values = self._rewards(PLATEAU_SAMPLES)
        if len(values) < PLATEAU_SAMPLES:
            return False
        return movement(theil_sen(values), self.gain_sd * self.noise) is Movement.PLATEAU

    @cached_property
    def volatile(self) -> bool:
        view = self.reward
        if view.trend is None or view.noise == 0:
            return False
        ratio = detrended_variance(view.values, view.trend, drop=1) / view.noise**2
        return ratio > variance_ratio_limit(len(view.values))

    def first_level(self, metric: str) -> float | None:
        """Median over the run's first window: its own baseline."""
        values = self.history.values(metric, self.history.head[: self.pace.window])
        return median(values) if values else None


@dataclass(frozen=True, slots=True)
class Hold:
    """No tuning at this rollout, and why."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Alarm:
    """A first sign: said, journalled, not acted on."""

    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Something only a person can change, or a sweep should decide; said once per key."""

    rule: str
    key: str
    """What it is about: the same key is not said again in this run."""
    reason: str


@dataclass(frozen=True, slots=True)
class Emergency:
    """Weights must come back and the learning rate must fall; outranks every guard."""

    rule: str
    restore: str
    """`undo` or `checkpoint`."""
    before_rollout: int
    factor: float
    """Learning rate is multiplied by this."""
    reason: str
    evidence: Mapping[str, float] = field(default_factory=dict)
    stop: bool = False
    """Give up: too many emergencies."""


Answer = Proposal | Hold | Alarm | Advice | Emergency | None


@dataclass(frozen=True)
class Policy:
    """Base of all rules."""

    id: ClassVar[str]
    family: ClassVar[Family]
    source: ClassVar[str]
    """Where the rule is documented."""
    summary: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()
    """Metrics without which the rule is silent."""
    moves: ClassVar[tuple[str, ...]] = ()
    """Knobs it may move; one movable knob is enough to speak."""
    needs_ratio: ClassVar[bool] = False
    """Reads the policy ratio, which is constant with one update per rollout."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        """Why this rule cannot act under these facts and knobs, or an empty string."""
        del facts, knobs
        return ""

    def propose(self, ctx: Context) -> Answer:
        """The rule itself; called only when every metric in `needs` is valid at this rollout."""
        raise NotImplementedError

    def remember(self, ctx: Context) -> float | None:
        """A number that the rule carries to the next rollout, part of the controller's saved state."""
        del ctx
        return None

    def resting(self, ctx: Context) -> bool:
        """For a regulator that has moved: whether what it watches is back in its band."""
        del ctx
        return False

    def healthy(self, ctx: Context) -> bool:
        """For a regulator: whether the run is proven healthy at the present value of its knob."""
        del ctx
        return False


def entropy_normal(ctx: Context, high: float = 1.5) -> bool:
    """Entropy within [1/20, high] of the run's own start; an unknown one is not objected to."""
    entropy, first = ctx.value("entropy"), ctx.first_level("entropy")
    return entropy is None or not first or first / 20 <= entropy <= high * first


def mismatch_normal(ctx: Context) -> bool:
    """Sampler and trainer within 0.05 nats/token of each other, where that is measured."""
    mismatch = ctx.value("kl_mismatch")
    return mismatch is None or mismatch < 0.05


def signal_present(ctx: Context, limit: float = 0.6) -> bool:
    """Enough groups with mixed rewards, and a reward that is not saturated.

    Asked before bold moves only, so a share that was not measured is no signal.
    """
    share = ctx.value("zero_std_fraction")
    return share is not None and share < limit and not ctx.reward.saturated()


def volatile(ctx: Context) -> bool:
    """Reward spread around its trend beyond what sampling explains."""
    return ctx.volatile


def kl_movement(ctx: Context, share: float) -> Movement:
    """What KL does by itself over the trend window; a change of share x its level counts."""
    values, trend = ctx.window("kl_ref", ctx.pace.trend), ctx.trend("kl_ref")
    if values is None or trend is None:
        return Movement.UNDETERMINED
    level = max(sum(values) / len(values), 1e-6)
    return movement(trend, share * level)


def kl_steady(ctx: Context) -> bool:
    """Whether KL is proven not to move by itself: nothing is wound down while it still rises.

    A plateau of half its level leaves room for a slow climb, so a proven rise by a tenth in a trend window,
    over twice as much as that where it was seen under the present coefficient, objects as well.
    """
    if kl_movement(ctx, 0.5) is not Movement.PLATEAU:
        return False
    seen = ctx.history.values("kl_ref", ctx.under("kl_coef", n=2 * ctx.pace.trend))
    if len(seen) < 3:
        return True
    climb = theil_sen(seen)
    return climb.low <= 0 or climb.slope * ctx.pace.trend < 0.1 * median(seen)


def no_reference(facts: RunFacts) -> str:
    """Why no rule can steer the KL to a reference, or an empty string."""
    if facts.loss_kind == "none":
        return "this loss (DPO and its kin) has no KL penalty: its reference is part of the loss itself"
    return "" if facts.has_reference else "kl_coef is 0: there is no reference model to measure against"


def sequence_loss(facts: RunFacts) -> str:
    """The documented shares are of token ratios; sequence ratios have another scale."""
    return "the ratio is per sequence, these shares are per token" if facts.loss_kind == "sequence" else ""
