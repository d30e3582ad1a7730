"""Optional watchers: signs that no knob of this list can mend by itself, said once with the next move.

    XM  `kl_mismatch` above its bound          the sampler and the trainer disagree; no knob will help
    XE  entropy falls while the reward is flat  -> `clip_range_high` up (clip-higher), where it may move
    XZ  share of zero-variance groups > 0.8     prompts too easy or too hard, not a learning-rate matter
    XR  KL rises with a flat reward             resetting the reference is the known remedy
    XC  reward components diverge               one rises while another falls: reward hacking
    XT  temperature outside 0.6-1.2             toward 1.0, sampler and log-probs together

Source: beyond the documents; public troubles of people who do this work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal, RunFacts
from autotune.policies.base import (
    Advice,
    Alarm,
    Answer,
    Context,
    Family,
    Policy,
    kl_movement,
    sequence_loss,
    signal_present,
)
from autotune.statistics import Movement, movement


@dataclass(frozen=True)
class SamplerMismatch(Policy):
    """XM."""

    id: ClassVar[str] = "XM"
    family: ClassVar[Family] = Family.INTEGRITY
    source: ClassVar[str] = "beyond the documents: sampler/trainer mismatch"
    summary: ClassVar[str] = "kl_mismatch above 0.05 nats/token -> alarm"
    needs: ClassVar[tuple[str, ...]] = ("kl_mismatch",)

    threshold: float = 0.05

    def propose(self, ctx: Context) -> Answer:
        level = ctx.level("kl_mismatch")
        if level is None or level <= self.threshold:
            return None
        return Alarm(self.id, f"kl_mismatch {level:.2g}: sampler and trainer disagree, no knob will help")


@dataclass(frozen=True)
class EntropyCollapse(Policy):
    """XE."""

    id: ClassVar[str] = "XE"
    family: ClassVar[Family] = Family.ENTROPY
    source: ClassVar[str] = "beyond the documents: entropy falls, reward flat"
    summary: ClassVar[str] = "entropy falling while the reward is flat -> clip_range_high up"
    needs: ClassVar[tuple[str, ...]] = ("entropy", "reward_mean", "clip_ratio")
    moves: ClassVar[tuple[str, ...]] = ("clip_range_high",)
    needs_ratio: ClassVar[bool] = True

    factor: float = 1.2
    ceiling: float = 0.28
    fall: float = 0.3
    """Relative fall of the entropy over the trend window."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        """A sequence ratio's range is a hundred times narrower: this ceiling is not its own."""
        return sequence_loss(facts)

    def propose(self, ctx: Context) -> Answer:
        values, trend = ctx.window("entropy", ctx.pace.trend), ctx.trend("entropy")
        if not values or trend is None or not ctx.reward.plateau or not signal_present(ctx):
            return None
        level = sum(values) / len(values)
        if movement(trend, self.fall * level) is not Movement.FALLING:
            return None
        now = ctx.knobs["clip_range_high"]
        after = min(now * self.factor, self.ceiling)
        reason = f"entropy falls from {values[0]:.2g} to {values[-1]:.2g} with a flat reward"
        return Proposal(self.id, "clip_range_high", after, reason) if after > now else None


@dataclass(frozen=True)
class NoSignal(Policy):
    """XZ."""

    id: ClassVar[str] = "XZ"
    family: ClassVar[Family] = Family.LEARNING_SPEED
    source: ClassVar[str] = "beyond the documents: groups without signal"
    summary: ClassVar[str] = "zero_std_fraction > 0.8 -> prompts, not the learning rate"
    needs: ClassVar[tuple[str, ...]] = ("zero_std_fraction",)

    threshold: float = 0.8

    def propose(self, ctx: Context) -> Answer:
        share = ctx.level("zero_std_fraction")
        if share is None or share <= self.threshold:
            return None
        reason = f"{share:.0%} of the groups have equal rewards: filter or re-balance the prompts"
        return Advice(self.id, "zero_std_fraction", reason)


@dataclass(frozen=True)
class ResetReference(Policy):
    """XR."""

    id: ClassVar[str] = "XR"
    family: ClassVar[Family] = Family.REFERENCE_KL
    source: ClassVar[str] = "beyond the documents: KL rises, reward flat"
    summary: ClassVar[str] = "kl_ref rising on a reward plateau -> consider resetting the reference"
    needs: ClassVar[tuple[str, ...]] = ("kl_ref", "reward_mean")

    def propose(self, ctx: Context) -> Answer:
        if not ctx.reward.plateau or kl_movement(ctx, 0.25) is not Movement.RISING:
            return None
        return Advice(self.id, "reference", "kl_ref rises with a flat reward: reset the reference model?")


@dataclass(frozen=True)
class ComponentsDiverge(Policy):
    """XC."""

    id: ClassVar[str] = "XC"
    family: ClassVar[Family] = Family.INTEGRITY
    source: ClassVar[str] = "beyond the documents: reward components diverge"
    summary: ClassVar[str] = "one reward component rises while another falls -> alarm"
    needs: ClassVar[tuple[str, ...]] = ("reward_mean",)

    gain_sd: float = 3.0
    """Move of a component over the trend window, in noise standard deviations, that counts."""

    def propose(self, ctx: Context) -> Answer:
        names = [n for n in ctx.snapshot.readings if n.startswith("reward/")]
        if len(names) < 2:
            return None
        moves = {name: self._movement(ctx, name) for name in names}
        up = [n for n, m in moves.items() if m is Movement.RISING]
        down = [n for n, m in moves.items() if m is Movement.FALLING]
        if not up or not down:
            return None
        return Alarm(self.id, f"{', '.join(up)} rises while {', '.join(down)} falls: reward hacking?")

    def _movement(self, ctx: Context, name: str) -> Movement:
        trend = ctx.trend(name)
        if trend is None:
            return Movement.UNDETERMINED
        return movement(trend, self.gain_sd * max(ctx.noise, 1e-9))


@dataclass(frozen=True)
class TemperatureOff(Policy):
    """XT."""

    id: ClassVar[str] = "XT"
    family: ClassVar[Family] = Family.ENTROPY
    source: ClassVar[str] = "beyond the documents: temperature outside 0.6-1.2"
    summary: ClassVar[str] = "temperature outside 0.6-1.2 and entropy out of its band -> toward 1.0"
    needs: ClassVar[tuple[str, ...]] = ("entropy",)
    moves: ClassVar[tuple[str, ...]] = ("temperature",)

    low: float = 0.6
    high: float = 1.2
    entropy_low: float = 0.05
    entropy_high: float = 1.5
    """Band of the entropy, as shares of the run's own start."""

    def propose(self, ctx: Context) -> Answer:
        now = ctx.knobs["temperature"]
        level, first = ctx.level("entropy"), ctx.first_level("entropy")
        if self.low <= now <= self.high or level is None or not first:
            return None
        if self.entropy_low * first <= level <= self.entropy_high * first:
            return None
        after = (now + 1.0) / 2
        reason = f"temperature {now:g} outside {self.low:g}-{self.high:g}, entropy {level:.2g}"
        return Proposal(self.id, "temperature", after, reason, evidence={"entropy": level})
