"""Stalls that one band cannot see: X5 (KL pinned low) and X4 (nothing left to learn).

X5 watched: `kl_ref` low though the coefficient is high, and either the reward on a proven plateau, or a whole
distance from the reference of hardly more than one rollout's drift, after many rollouts: a walk of n steps
ends up n to n^2 steps away unless it is pulled back. Moved: `kl_coef` / 4, and to where it no longer pins.
A run that is held to its reference sits inside the documented KL band and learns nothing.

X4 watched: the training reward at 95 % of its maximum, or a held-out score that falls while the training
reward rises. It holds tuning and suggests to stop: knobs cannot help any more.

Source: beyond the documents; measured on the embedded task (kl_coef 1: reward 0.37 of 0.79, KL in band).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal, RunFacts
from autotune.policies.base import (
    Advice,
    Answer,
    Context,
    Family,
    Policy,
    kl_movement,
    no_reference,
    signal_present,
)
from autotune.statistics import Movement


@dataclass(frozen=True)
class PinnedToReference(Policy):
    """X5."""

    id: ClassVar[str] = "X5"
    family: ClassVar[Family] = Family.REFERENCE_KL
    source: ClassVar[str] = "beyond the documents: stall with KL pinned low"
    summary: ClassVar[str] = "reward plateau or a walk pulled back, kl_ref low at a high kl_coef -> lower it"
    needs: ClassVar[tuple[str, ...]] = ("kl_ref", "reward_mean")
    moves: ClassVar[tuple[str, ...]] = ("kl_coef",)

    kl_low: float = 0.08
    """Nats/token; the documented band's upper edge: in it or below is "pinned low"."""
    coef_high: float = 0.05
    """A coefficient below this does not pin anything."""
    factor: float = 0.25
    """Largest factor; from far above it goes down to `coef_high` at once."""
    walk: float = 2.5
    """A distance of less than this many rollouts' drifts ..."""
    steps: int = 8
    """... after so many rollouts is a walk that was pulled back."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        return no_reference(facts)

    def propose(self, ctx: Context) -> Answer:
        level, coef = ctx.level("kl_ref"), ctx.knobs["kl_coef"]
        if level is None or level > self.kl_low or coef < self.coef_high:
            return None
        if ctx.reward.trend is None or ctx.reward.falling or not signal_present(ctx):
            return None
        if not self._pulled_back(ctx, level) and not self._stalls(ctx):
            return None
        after = min(coef * self.factor, self.coef_high)
        reason = f"kl_ref {level:.2g} is pinned by kl_coef {coef:.2g}"
        return Proposal(self.id, "kl_coef", after, reason, evidence={"kl_ref": level})

    def _stalls(self, ctx: Context) -> bool:
        steady = ctx.reward.plateau or kl_movement(ctx, 0.5) is Movement.PLATEAU
        return steady and not ctx.reward.rising_well

    def _pulled_back(self, ctx: Context, level: float) -> bool:
        drift = ctx.level("kl_step")
        walked = len(ctx.under("kl_coef", n=self.steps)) >= self.steps
        return walked and drift is not None and level < self.walk * drift


@dataclass(frozen=True)
class Saturated(Policy):
    """X4."""

    id: ClassVar[str] = "X4"
    family: ClassVar[Family] = Family.LEARNING_SPEED
    source: ClassVar[str] = "beyond the documents: reward saturated or overfitting"
    summary: ClassVar[str] = "train reward >= 95 % of its maximum, or held-out falls -> suggest to stop"
    needs: ClassVar[tuple[str, ...]] = ("reward_mean",)

    share: float = 0.95
    gap: float = 0.05
    """Fall of the held-out score, in task units, that counts while the training reward rises."""

    def propose(self, ctx: Context) -> Answer:
        if len(ctx.reward.values) >= ctx.pace.window and ctx.reward.saturated(self.share):
            return Advice(self.id, "saturated", "training reward is saturated: tuning cannot help, stop?")
        scores = ctx.history.values("eval_score", ctx.history.samples(10**9))
        if len(scores) >= 2 and max(scores) - scores[-1] > self.gap and not ctx.reward.falling:
            why = f"held-out score fell from {max(scores):.2f} to {scores[-1]:.2f}: overfitting, stop?"
            return Advice(self.id, f"held-out {max(scores):.3f}", why)
        return None
