"""The clip range: B4a widens it when too much is clipped, B4b narrows it when nothing is.

Watched: the histogram shares `ratio_low + ratio_high`, the tokens whose policy ratio lies outside
[1 - clip_range_low, 1 + clip_range_high] whatever their advantage's sign (not `clip_ratio`). Moved:
`clip_range`, both sides, by x1.2. Documented range 0.1-0.2.

Source: document B 3.4 (more than 40 % clipped: the range is too small; hardly any, below 5 %: too
large; the ideal shape is 70 % in, 20 % low, 10 % high).

B4a is the last rung of the clip ladder: it never widens while the drift or the reference KL is high or
before the number of updates is small, because widening removes the brake. B4b fires on every healthy
public run if taken by the letter, so it wants a proven reward plateau and an entropy that rises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal, RunFacts
from autotune.policies.base import (
    Answer,
    Context,
    Family,
    Policy,
    entropy_normal,
    mismatch_normal,
    sequence_loss,
    signal_present,
)
from autotune.statistics import median


def outside_share(ctx: Context) -> float | None:
    """Window median of ratio_low + ratio_high."""
    low, high = ctx.window("ratio_low"), ctx.window("ratio_high")
    if low is None or high is None:
        return None
    return median([a + b for a, b in zip(low, high, strict=True)])


@dataclass(frozen=True)
class TooMuchClipped(Policy):
    """B4a."""

    id: ClassVar[str] = "B4a"
    family: ClassVar[Family] = Family.TRUST_REGION
    source: ClassVar[str] = "B 3.4: more than 40 % clipped"
    summary: ClassVar[str] = "ratio outside the clip range > 40 % -> clip_range x1.2"
    needs: ClassVar[tuple[str, ...]] = ("ratio_low", "ratio_high")
    moves: ClassVar[tuple[str, ...]] = ("clip_range",)
    needs_ratio: ClassVar[bool] = True

    threshold: float = 0.40
    factor: float = 1.2
    ceiling: float = 0.2
    """Documented range 0.1-0.2; a recipe that starts above it is left alone."""
    updates: int = 4
    """Fewer updates are the first rung: the range is not widened above this many."""
    kl_step_high: float = 0.03
    kl_ref_high: float = 0.15

    def propose(self, ctx: Context) -> Answer:
        share = outside_share(ctx)
        now = ctx.knob("clip_range")
        if share is None or share <= self.threshold or now >= self.ceiling:
            return None
        if not ctx.literal and self._brake_needed(ctx):
            return None
        reason = f"{share:.0%} of tokens outside the clip range > {self.threshold:.0%}, drift in band"
        after = min(now * self.factor, self.ceiling)
        return Proposal(self.id, "clip_range", after, reason, evidence={"outside": share})

    def _brake_needed(self, ctx: Context) -> bool:
        """The last rung of the ladder: few updates, and drift and KL known to be in band."""
        drift, kl = ctx.level("kl_step"), ctx.level("kl_ref")
        if ctx.updates > self.updates or drift is None or drift > self.kl_step_high:
            return True
        if ctx.facts.has_reference and (kl is None or kl > self.kl_ref_high):
            return True
        return not (entropy_normal(ctx) and mismatch_normal(ctx))

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        return sequence_loss(facts)


@dataclass(frozen=True)
class HardlyAnyClipped(Policy):
    """B4b."""

    id: ClassVar[str] = "B4b"
    family: ClassVar[Family] = Family.TRUST_REGION
    source: ClassVar[str] = "B 3.4: hardly any clipping, below 5 %"
    summary: ClassVar[str] = "ratio outside the clip range < 5 % on a plateau -> clip_range down"
    needs: ClassVar[tuple[str, ...]] = ("ratio_low", "ratio_high", "entropy", "reward_mean")
    moves: ClassVar[tuple[str, ...]] = ("clip_range",)
    needs_ratio: ClassVar[bool] = True

    threshold: float = 0.05
    factor: float = 1 / 1.2
    floor: float = 0.1
    entropy_rise: float = 1.1
    """Entropy over its own start above which a narrower range is wanted."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        return sequence_loss(facts)

    def propose(self, ctx: Context) -> Answer:
        share = outside_share(ctx)
        now = ctx.knob("clip_range")
        if share is None or share >= self.threshold or now <= self.floor:
            return None
        if not ctx.literal and not self._wanted(ctx):
            return None
        reason = f"{share:.1%} of tokens outside the clip range < {self.threshold:.0%}, entropy rising"
        after = max(now * self.factor, self.floor)
        return Proposal(self.id, "clip_range", after, reason, evidence={"outside": share})

    def _wanted(self, ctx: Context) -> bool:
        """A proven plateau, entropy rising but not exploding, sampler and trainer agreeing."""
        entropy, first = ctx.level("entropy"), ctx.first_level("entropy")
        rising = bool(entropy and first and entropy > self.entropy_rise * first)
        calm = entropy_normal(ctx) and mismatch_normal(ctx)
        return ctx.reward.plateau and rising and calm and signal_present(ctx)
