"""Updates per rollout: A1 (4 to 8 of them), A3 (more when timid), A4 (fewer when too aggressive).

Watched: `clip_ratio` (the share of tokens whose clipped branch is active), `kl_step` (the drift from
the sampling weights after the last update), the reward trend. Moved: `ppo_mini_batch_size` on its
divisor lattice, then `ppo_epochs`, then `actor_learning_rate`.

    U = train_batch_size / ppo_mini_batch_size * ppo_epochs

Source: document A (the "golden ratio" of 4-8 updates; clip ratio below 1 % with slow progress: more
updates; above 15 %, or KL suddenly exploding: fewer). Step sizes are ours: one notch of the lattice.

They do nothing when the drift disagrees: A1 leaves a published 16-update recipe alone while its drift
is in band, A3 needs a proven plateau, and no clip rule speaks at U = 1, where the ratio is always 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal, RunFacts
from autotune.knobs import mini_batch_lattice, updates_per_rollout
from autotune.policies.base import (
    Answer,
    Context,
    Family,
    Policy,
    entropy_normal,
    mismatch_normal,
    signal_present,
)
from autotune.statistics import median


def mini_batch_for(ctx: Context, low: int, high: int) -> int | None:
    """Lattice value whose U lies in [low, high] and is nearest to the present U; None if none."""
    lattice = mini_batch_lattice(
        int(ctx.knobs["train_batch_size"]), int(ctx.knobs["rollout_n"]), ctx.facts.cut
    )
    fitting = [m for m in lattice if low <= _updates_at(ctx, m) <= high]
    return min(fitting, key=lambda m: abs(_updates_at(ctx, m) - ctx.updates)) if fitting else None


def notch(ctx: Context, step: int) -> int | None:
    """The next lattice value of `ppo_mini_batch_size`, `step` +1 up or -1 down."""
    lattice = mini_batch_lattice(
        int(ctx.knobs["train_batch_size"]), int(ctx.knobs["rollout_n"]), ctx.facts.cut
    )
    now = ctx.knobs["ppo_mini_batch_size"]
    onward = [m for m in lattice if (m - now) * step > 0]
    return min(onward, key=lambda m: abs(m - now)) if onward else None


def _updates_at(ctx: Context, mini: int) -> int:
    return updates_per_rollout({**ctx.knobs, "ppo_mini_batch_size": mini})


def _updates_with(ctx: Context, epochs: int) -> int:
    return updates_per_rollout({**ctx.knobs, "ppo_epochs": epochs})


@dataclass(frozen=True)
class UpdatesInGoldenRange(Policy):
    """A1."""

    id: ClassVar[str] = "A1"
    family: ClassVar[Family] = Family.LEARNING_SPEED
    source: ClassVar[str] = "A: 4-8 updates per rollout"
    summary: ClassVar[str] = "updates per rollout outside 4-8 and the drift agrees -> mini-batch"
    needs: ClassVar[tuple[str, ...]] = ("kl_step", "reward_mean")
    moves: ClassVar[tuple[str, ...]] = ("ppo_mini_batch_size", "ppo_epochs")

    low: int = 4
    high: int = 8
    target: float = 0.015
    """Drift in nats/token that a healthy rollout shows; the same as X1's."""
    timid: float = 0.5
    """Below this x target the drift agrees that there are too few updates. The factors on either side
    are the hysteresis: a drift near its target argues neither way."""
    aggressive: float = 2.0
    clip_high: float = 0.15

    def propose(self, ctx: Context) -> Answer:
        drift = [s.values.get("kl_step") for s in ctx.under("ppo_mini_batch_size", "ppo_epochs", n=2)]
        known = [d for d in drift if d is not None]
        if len(known) < 2:
            return None
        level = median(known)
        too_few = ctx.updates < self.low and (level < self.timid * self.target or ctx.literal)
        too_many = ctx.updates > self.high and (level > self.aggressive * self.target or ctx.literal)
        if too_few and not ctx.literal and not self._may_add(ctx):
            return None
        return self._move(ctx, level) if too_few or too_many else None

    def _may_add(self, ctx: Context) -> bool:
        """More updates only while the reward does not rise well and clipping is known to be low."""
        clip = 0.0 if ctx.updates == 1 else ctx.value("clip_ratio")
        return not ctx.reward.rising_well and clip is not None and clip <= self.clip_high

    def _move(self, ctx: Context, level: float) -> Answer:
        mini = mini_batch_for(ctx, self.low, self.high) if ctx.movable("ppo_mini_batch_size") else None
        if mini is not None:
            knob, value, updates = "ppo_mini_batch_size", mini, _updates_at(ctx, mini)
        elif (epochs := self._epochs(ctx)) is not None:
            knob, value, updates = "ppo_epochs", epochs, _updates_with(ctx, epochs)
        else:
            return None
        reason = (
            f"{ctx.updates} update(s) per rollout with kl_step {level:.2g}"
            f" (target {self.target:g}) -> {updates} updates"
        )
        evidence = {"updates": ctx.updates, "kl_step": level}
        return Proposal(self.id, knob, value, reason, evidence=evidence)

    def _epochs(self, ctx: Context) -> int | None:
        """Passes over the data that bring U into the range where no mini-batch can."""
        fitting = [e for e in range(1, 9) if self.low <= _updates_with(ctx, e) <= self.high]
        if not fitting or not ctx.movable("ppo_epochs"):
            return None
        return min(fitting, key=lambda e: abs(_updates_with(ctx, e) - ctx.updates))


@dataclass(frozen=True)
class ClipTooLow(Policy):
    """A3."""

    id: ClassVar[str] = "A3"
    family: ClassVar[Family] = Family.TRUST_REGION
    source: ClassVar[str] = "A: clip ratio < 1 % and slow progress"
    summary: ClassVar[str] = "clip_ratio < 1 % on a reward plateau -> more updates per rollout"
    needs: ClassVar[tuple[str, ...]] = ("clip_ratio", "reward_mean")
    moves: ClassVar[tuple[str, ...]] = ("ppo_mini_batch_size", "ppo_epochs")
    needs_ratio: ClassVar[bool] = True

    threshold: float = 0.01
    sequence_threshold: float = 0.05
    """For sequence-level ratios (GSPO), where 5-25 % clipped is healthy."""
    highest: int = 8
    """Stays inside A1."""
    target: float = 0.01
    """No more updates when the drift is already at its target, nats/token."""
    converged: float = 0.003
    """In its place once X1 has seen the run healthy: then a plateau is convergence, and more updates only
    make it noisier."""

    def propose(self, ctx: Context) -> Answer:
        level = ctx.level("clip_ratio")
        if level is None or level >= self._threshold(ctx) or not self._slow(ctx):
            return None
        reason = f"clip_ratio {level:.2%} < {self._threshold(ctx):.0%} and reward on a proven plateau"
        evidence = {"clip_ratio": level, "kl_step": ctx.level("kl_step") or 0.0}
        mini = notch(ctx, -1) if ctx.movable("ppo_mini_batch_size") else None
        if mini is not None and _updates_at(ctx, mini) <= self.highest:
            return Proposal(self.id, "ppo_mini_batch_size", mini, reason, evidence=evidence)
        epochs = int(ctx.knobs["ppo_epochs"]) + 1
        if ctx.movable("ppo_epochs") and _updates_with(ctx, epochs) <= self.highest:
            return Proposal(self.id, "ppo_epochs", epochs, reason, evidence=evidence)
        return None

    def _threshold(self, ctx: Context) -> float:
        return self.sequence_threshold if ctx.facts.loss_kind == "sequence" else self.threshold

    def _slow(self, ctx: Context) -> bool:
        """A proven plateau, room in the drift (which must be known), and nothing else amiss."""
        if ctx.literal:
            return not ctx.reward.rising_well
        drift = ctx.level("kl_step")
        room = drift is not None and drift < (self.converged if "X1" in ctx.anchors else self.target)
        calm = entropy_normal(ctx) and mismatch_normal(ctx)
        return ctx.reward.plateau and room and calm and signal_present(ctx)


@dataclass(frozen=True)
class ClipTooHigh(Policy):
    """A4, the first two rungs of the clip ladder: fewer updates, then a lower learning rate."""

    id: ClassVar[str] = "A4"
    family: ClassVar[Family] = Family.TRUST_REGION
    source: ClassVar[str] = "A: clip ratio > 15 %, or KL suddenly explodes"
    summary: ClassVar[str] = "clip_ratio > 15 % or KL explodes -> fewer updates, then a lower LR"
    needs: ClassVar[tuple[str, ...]] = ("reward_mean",)
    moves: ClassVar[tuple[str, ...]] = ("ppo_mini_batch_size", "actor_learning_rate")

    threshold: float = 0.15
    sequence_threshold: float = 0.35
    """For sequence-level ratios (GSPO), where 5-25 % clipped is healthy."""
    drift_low: float = 0.0075
    """Nats/token of `kl_step` below which much clipping is a narrow range and not too large a step."""
    explosion: float = 10.0
    """KL this many times its own median, two rollouts running, is "suddenly"."""
    lr_factor: float = 0.7

    def propose(self, ctx: Context) -> Answer:
        reason, evidence = self._too_high(ctx)
        if not reason:
            return None
        mini = notch(ctx, +1) if ctx.movable("ppo_mini_batch_size") else None
        if ctx.updates > 1 and mini is not None and not self._mini_batch_did_not_help(ctx):
            return Proposal(self.id, "ppo_mini_batch_size", mini, reason, evidence=evidence)
        lower = ctx.knobs["actor_learning_rate"] * self.lr_factor
        return Proposal(self.id, "actor_learning_rate", lower, reason, evidence=evidence)

    def _too_high(self, ctx: Context) -> tuple[str, dict[str, float]]:
        level = ctx.level("clip_ratio") if ctx.updates > 1 else None
        limit = self.sequence_threshold if ctx.facts.loss_kind == "sequence" else self.threshold
        if level is not None and level > limit and not self._range_is_narrow(ctx):
            return f"clip_ratio {level:.1%} > {limit:.0%}", {"clip_ratio": level}
        for metric in ("kl_step", "kl_ref"):
            jump = self._jump(ctx, metric)
            if jump > self.explosion:
                return f"{metric} jumped to {jump:.0f}x its own median", {f"{metric}_jump": jump}
        return "", {}

    def _range_is_narrow(self, ctx: Context) -> bool:
        """The clip ladder's first rung wants the drift high too; where it is known to be low, B4a acts."""
        drift = ctx.level("kl_step")
        return not ctx.literal and drift is not None and drift < self.drift_low

    @staticmethod
    def _jump(ctx: Context, metric: str) -> float:
        """The smaller of the last two values over the median before them; 0 when not known."""
        samples = ctx.history.samples(ctx.pace.trend, epoch=ctx.epoch, since=max(ctx.since_restore, 3))
        values = ctx.history.values(metric, samples)
        if len(values) < ctx.pace.window + 2:
            return 0.0
        base = median(values[:-2])
        return min(values[-2:]) / base if base > 1e-4 else 0.0

    def _mini_batch_did_not_help(self, ctx: Context) -> bool:
        """Rung two: this rule moved not long ago and the sign is still there."""
        last = ctx.last_moves.get(self.id)
        reach = ctx.pace.settle + ctx.pace.evaluate + 2 * ctx.pace.knob_cooldown
        return last is not None and ctx.rollout - last <= reach


def clip_blocked(facts: RunFacts, knobs: Mapping[str, float]) -> str:
    """Why no rule can read the policy ratio here, or an empty string."""
    if facts.loss_kind == "none":
        return "this loss (DPO and its kin) has no policy ratio: nothing is clipped"
    if updates_per_rollout(knobs) == 1:
        return "one update per rollout: the policy ratio is always 1, there is nothing to sense"
    return ""
