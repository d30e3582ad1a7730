"""Rules that never tune: A6 (the anchor of the ratio) and B7 (the rollouts must succeed).

A6, an invariant: `old_log_prob` is computed once per rollout with the sampling weights in eval mode, so
the first update of a rollout must see a ratio of 1 and a drift of 0. A first-update drift above the
tolerance means dropout, another temperature or stale log-probs: no rule may trust the ratio then.

B7, a gate: with 5 % or more of the rollouts failing (not generated, not scorable) there is no tuning.

Sources: document A (the anchor), document B 4.1 (rollout_success_rate > 0.95).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotune.policies.base import Answer, Context, Family, Hold, Policy


@dataclass(frozen=True)
class AnchorHolds(Policy):
    """A6."""

    id: ClassVar[str] = "A6"
    family: ClassVar[Family] = Family.INTEGRITY
    source: ClassVar[str] = "A: old_log_prob is the fixed anchor of a rollout"
    summary: ClassVar[str] = "first update of a rollout drifts -> hold, the ratio cannot be trusted"

    tolerance: float = 0.005
    """Nats/token; bf16 kernels differ a little between batch shapes."""

    def propose(self, ctx: Context) -> Answer:
        drift = ctx.snapshot.per_update.get("kl_step")
        if not drift or drift[0] <= self.tolerance:
            return None  # a NaN is not <=, so it holds too
        reason = f"kl_step of the first update is {drift[0]:.2g}, expected 0 (<= {self.tolerance:g})"
        return Hold(self.id, f"{reason}: check dropout, temperature and old log-probs")


@dataclass(frozen=True)
class RolloutsSucceed(Policy):
    """B7."""

    id: ClassVar[str] = "B7"
    family: ClassVar[Family] = Family.INTEGRITY
    source: ClassVar[str] = "B 4.1: rollout_success_rate > 0.95"
    summary: ClassVar[str] = "rollout_success_rate <= 0.95 -> no tuning until it is repaired"
    needs: ClassVar[tuple[str, ...]] = ("rollout_success_rate",)

    threshold: float = 0.95

    def propose(self, ctx: Context) -> Answer:
        rate = ctx.value("rollout_success_rate")
        if rate is None or rate > self.threshold:
            return None
        reason = f"rollout_success_rate {rate:.1%} <= {self.threshold:.0%}"
        return Hold(self.id, f"{reason}: look at the reward function and the sampler, not at knobs")
