"""B5b: the critic's learning rate, when the reward has been flat for long.

Watched: the reward trend (a proven plateau). Moved: `critic_learning_rate`, up a little, never above
3 x the actor's and never equal to it.

Source: document B 3.5 (5e-6 to 1e-5, usually 2-3 x the actor's; fix the critic, tune the actor first).
Silent without a critic. The cap binds this rule's own raises only: the documents' starting values are
themselves 5 x the actor's, which the pre-flight reports.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal, RunFacts
from autotune.policies.base import Answer, Context, Family, Policy, signal_present


@dataclass(frozen=True)
class CriticTooSlow(Policy):
    """B5b."""

    id: ClassVar[str] = "B5b"
    family: ClassVar[Family] = Family.LEARNING_SPEED
    source: ClassVar[str] = "B 3.5: reward flat for long"
    summary: ClassVar[str] = "reward flat for long, critic present -> critic_learning_rate x1.2"
    needs: ClassVar[tuple[str, ...]] = ("reward_mean",)
    moves: ClassVar[tuple[str, ...]] = ("critic_learning_rate",)

    factor: float = 1.2
    ratio: float = 3.0
    """Largest multiple of the actor's learning rate."""

    def blocked(self, facts: RunFacts, knobs: Mapping[str, float]) -> str:
        return "" if facts.has_critic else "there is no critic"

    def propose(self, ctx: Context) -> Answer:
        actor, critic = ctx.knobs["actor_learning_rate"], ctx.knobs["critic_learning_rate"]
        after = min(critic * self.factor, actor * self.ratio)
        if not ctx.reward.plateau or not signal_present(ctx) or after <= critic:
            return None
        reason = f"reward on a proven plateau; critic {critic:.2g} is {critic / actor:.1f}x the actor's"
        return Proposal(self.id, "critic_learning_rate", after, reason)
