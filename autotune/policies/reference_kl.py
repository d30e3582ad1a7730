"""KL to the reference: B3a (stuck near it), B3b (far and volatile), B3c (a law that holds a band).

Watched: `kl_ref` in nats/token, its own slope, the reward trend and its noise floor. Moved: `kl_coef`.

B3a and B3b are interventions (x0.8, x1.2). B3c is a regulator, an integral law in log space:

    log kl_coef += gain * (log kl_ref - log edge),  |move| <= log slew,  floor <= kl_coef <= ceiling

with the edge of the documented band 0.03-0.08 that was crossed. It integrates on the value that the
trainer read back, so a pinned, bounded or hand-set coefficient cannot wind it up.

Source: document B 3.3 and the brief (KL in 0.03-0.08 while the reward rises monotonically).

Guards that make the band safe: every run starts at KL 0, so nothing is lowered while KL still rises by
itself or before the reward is on a proven plateau; healthy runs climb far above 0.15 with rising reward,
so nothing is raised without harm: reward falling, volatile beyond its noise, or flat while KL is still
rising. A flat reward at a steady KL is a run that has converged, and a reward that falls only after the law
has pushed is held back by the law itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Kind, Proposal, RunFacts
from autotune.history import DEPTH
from autotune.policies.base import (
    PLATEAU_SAMPLES,
    Answer,
    Context,
    Family,
    Policy,
    kl_movement,
    kl_steady,
    no_reference,
    signal_present,
    volatile,
)
from autotune.statistics import Movement, median, movement, theil_sen


@dataclass(frozen=True)
class StuckNearReference(Policy):
    """B3a."""

    id: ClassVar[str] = "B3a"
    family: ClassVar[Family] = Family.REFERENCE_KL
    source: ClassVar[str] = "B 3.3: KL < 0.01 persistently and reward stagnates"
    summary: ClassVar[str] = "kl_ref < 0.01 on a reward plateau -> kl_coef x0.8"
    needs: ClassVar[tuple[str, ...]] = ("kl_ref", "reward_mean")
    moves: ClassVar[tuple[str, ...]] = ("kl_coef",)

    threshold: float = 0.01
    factor: float = 0.8
    floor: float = 0.001
    """0.001 is adrift, says the source."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        return no_reference(facts)

    def propose(self, ctx: Context) -> Answer:
        level = ctx.level("kl_ref")
        if level is None or level >= self.threshold or ctx.knobs["kl_coef"] <= self.floor:
            return None
        if not self._stagnates(ctx):
            return None
        after = max(ctx.knobs["kl_coef"] * self.factor, self.floor)
        reason = f"kl_ref {level:.2g} < {self.threshold:g} and reward on a proven plateau"
        return Proposal(self.id, "kl_coef", after, reason, evidence={"kl_ref": level})

    def _stagnates(self, ctx: Context) -> bool:
        if ctx.literal:
            return not ctx.reward.rising_well
        return ctx.reward.plateau and signal_present(ctx) and kl_steady(ctx)


@dataclass(frozen=True)
class FarAndVolatile(Policy):
    """B3b."""

    id: ClassVar[str] = "B3b"
    family: ClassVar[Family] = Family.REFERENCE_KL
    source: ClassVar[str] = "B 3.3: KL > 0.15 and reward volatile"
    summary: ClassVar[str] = "kl_ref > 0.15 and reward volatile -> kl_coef x1.2"
    needs: ClassVar[tuple[str, ...]] = ("kl_ref", "reward_mean", "reward_std")
    moves: ClassVar[tuple[str, ...]] = ("kl_coef",)

    threshold: float = 0.15
    factor: float = 1.2

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        return no_reference(facts)

    def propose(self, ctx: Context) -> Answer:
        level = ctx.level("kl_ref")
        rising = ctx.reward.rising_well and not ctx.literal
        if level is None or level <= self.threshold or rising or not volatile(ctx):
            return None
        after = ctx.knobs["kl_coef"] * self.factor
        reason = f"kl_ref {level:.2g} > {self.threshold:g} and reward volatile beyond its noise"
        return Proposal(self.id, "kl_coef", after, reason, evidence={"kl_ref": level})


@dataclass(frozen=True)
class KlBand(Policy):
    """B3c."""

    id: ClassVar[str] = "B3c"
    family: ClassVar[Family] = Family.REFERENCE_KL
    source: ClassVar[str] = "brief, B 3.3: hold KL in 0.03-0.08"
    summary: ClassVar[str] = "kl_ref outside 0.03-0.08, and it harms -> kl_coef steers it back"
    needs: ClassVar[tuple[str, ...]] = ("kl_ref", "reward_mean")
    moves: ClassVar[tuple[str, ...]] = ("kl_coef",)

    low: float = 0.03
    high: float = 0.08
    gain: float = 0.5
    slew: float = 1.5
    """Largest factor of one move."""
    span: float = 10.0
    """kl_coef stays within [1/span, span] x the recipe's value."""
    margin: float = 1.15
    """Once engaged it rests only this factor inside the edge (hysteresis)."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        if facts.has_reference and knobs.get("kl_coef", 1.0) <= 0:
            return "kl_coef is 0: a law that multiplies cannot move it"
        return no_reference(facts)

    def propose(self, ctx: Context) -> Answer:
        level = self._level(ctx)
        if level is None or level <= 0 or ctx.knobs["kl_coef"] <= 0 or self._inside(ctx, level):
            return None
        above = level > math.sqrt(self.low * self.high)
        if not ctx.literal and not (self._harm(ctx) if above else self._may_loosen(ctx)):
            return None
        return self._move(ctx, level)

    def _inside(self, ctx: Context, level: float) -> bool:
        low, high = self._edges(ctx)
        return low <= level <= high

    def _edges(self, ctx: Context) -> tuple[float, float]:
        """The documented edges to engage; a margin inside them to rest."""
        margin = self.margin if self.id in ctx.engagements else 1.0
        return self.low * margin, self.high / margin

    def _level(self, ctx: Context) -> float | None:
        """Median KL of a full window made under the present coefficient."""
        values = ctx.history.values("kl_ref", ctx.under("kl_coef"))
        return median(values) if len(values) >= ctx.pace.window else None

    def resting(self, ctx: Context) -> bool:
        level = self._level(ctx)
        return level is not None and self._inside(ctx, level)

    def _move(self, ctx: Context, level: float) -> Answer:
        now, start = ctx.knobs["kl_coef"], ctx.facts.knobs["kl_coef"]
        above = level > math.sqrt(self.low * self.high)
        edge = self._edges(ctx)[int(above)]
        step = self.gain * math.log(level / edge)
        step = max(-math.log(self.slew), min(step, math.log(self.slew)))
        after = min(max(now * math.exp(step), start / self.span), start * self.span)
        if abs(math.log(after / now)) < 0.02:
            return None
        why = "harms" if above else "holds the model back"
        reason = f"kl_ref {level:.2g} outside {self.low:g}-{self.high:g} and {why}"
        return Proposal(self.id, "kl_coef", after, reason, kind=Kind.REGULATOR, evidence={"kl_ref": level})

    def _harm(self, ctx: Context) -> bool:
        view = ctx.reward
        if view.trend is None or view.rising_well or view.saturated():
            return False
        rising = kl_movement(ctx, 0.1) is Movement.RISING and _lasting(ctx, "kl_ref", +1)
        falls = view.falling and _lasting(ctx, "reward_mean", -1)
        falling = falls and (rising or not self._own_doing(ctx))
        return falling or (view.plateau and rising) or volatile(ctx)

    def _own_doing(self, ctx: Context) -> bool:
        """Whether the reward began to fall after the first push, not before it.

        A stronger pull holds the model back. A law that took that for the harm of a high KL would push
        harder and harder; where it cannot be told any more which came first, it does not push.
        """
        engagement, trend = ctx.engagements.get(self.id), ctx.pace.trend
        if engagement is None:
            return False
        past = [s for s in ctx.history.samples(DEPTH) if s.rollout <= engagement.since]
        before = ctx.history.values("reward_mean", past[-trend:])
        if len(before) < trend:
            return True
        return movement(theil_sen(before), ctx.gain_sd * ctx.noise) is not Movement.FALLING

    def _may_loosen(self, ctx: Context) -> bool:
        return ctx.reward.plateau and kl_steady(ctx) and signal_present(ctx)


def _lasting(ctx: Context, metric: str, direction: int) -> bool:
    """Whether 20 samples, where a trend window has fewer and they were seen, move the same way.

    The question is asked at every rollout, and noise alone makes one short window in twenty move.
    """
    samples = ctx.history.samples(
        max(ctx.pace.trend, PLATEAU_SAMPLES), epoch=ctx.epoch, since=ctx.since_restore
    )
    values = ctx.history.values(metric, samples)
    if len(values) < 3:
        return True
    trend = theil_sen(values)
    return trend.low > 0 if direction > 0 else trend.high < 0
