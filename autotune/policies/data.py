"""Amount and freshness of data: A2 (as large a batch as there is room for), B2 (not stale, not too few).

A2 watched: the reward's noise floor against the gain that a trend window must show. Source: document A
(256 prompts jitter, 10240 are steady; shrinking the batch to see logs more often is the documented
mistake). When even a window of `trend` rollouts cannot decide a plateau, it doubles `train_batch_size`
where the trainer can, and says so where it cannot; a sweep settles the rest.

B2 watched: `data_age` in rollouts and `kl_mismatch` in nats/token. Source: document B 3.2 (4-32 sampling
batches, 8 or 16 usual; 2 overfits, 64 is stale). Halves `num_rollout_batches` where it may move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal
from autotune.policies.base import Advice, Answer, Context, Family, Policy, signal_present
from autotune.statistics import Z_95, Movement


def slope_error(noise: float, n: int) -> float:
    """Standard error of a window's rise: noise / sqrt(sum (t - mean t)^2) * n, for n samples."""
    return noise * n / math.sqrt(n * (n * n - 1) / 12)


@dataclass(frozen=True)
class BatchTooSmall(Policy):
    """A2."""

    id: ClassVar[str] = "A2"
    family: ClassVar[Family] = Family.THROUGHPUT
    source: ClassVar[str] = "A: train_batch_size as large as memory and time allow"
    summary: ClassVar[str] = "reward too noisy to decide anything -> train_batch_size x2"
    needs: ClassVar[tuple[str, ...]] = ("reward_mean", "reward_std")

    gain: float = 0.25
    """Rise over a trend window, in reward standard deviations, that must be decidable."""
    factor: int = 2
    most: int = 10240
    """Prompts; the source calls this steady."""

    def propose(self, ctx: Context) -> Answer:
        spread = ctx.value("reward_std") or 0.0
        error = Z_95 * slope_error(ctx.noise, ctx.pace.trend)
        undecided = ctx.reward.trend is not None and ctx.reward.movement is Movement.UNDETERMINED
        prompts = int(ctx.knobs["train_batch_size"])
        known = spread > 0 and signal_present(ctx)
        if not (undecided and known) or error <= self.gain * spread or prompts * self.factor > self.most:
            return None
        reason = (
            f"{ctx.pace.trend} rollouts of {prompts} prompts see no rise below {error:.2g}"
            f" (spread of the reward {spread:.2g}): a larger train_batch_size is steadier"
        )
        if ctx.facts.can_move("train_batch_size"):
            return Proposal(self.id, "train_batch_size", prompts * self.factor, reason)
        return Advice(self.id, "train_batch_size", reason)


@dataclass(frozen=True)
class DataFreshness(Policy):
    """B2."""

    id: ClassVar[str] = "B2"
    family: ClassVar[Family] = Family.THROUGHPUT
    source: ClassVar[str] = "B 3.2: num_rollout_batches 4-32"
    summary: ClassVar[str] = "data older or further from the trainer than its bound -> fewer batches"
    needs: ClassVar[tuple[str, ...]] = ("data_age", "kl_mismatch")

    oldest: float = 1.0
    """Rollouts of age that are still fresh."""
    mismatch: float = 0.05
    """Nats/token between sampler and trainer."""
    least: int = 4

    def propose(self, ctx: Context) -> Answer:
        age, mismatch = ctx.level("data_age"), ctx.level("kl_mismatch")
        if (age or 0.0) <= self.oldest and (mismatch or 0.0) <= self.mismatch:
            return None
        batches = int(ctx.knobs.get("num_rollout_batches", 0))
        reason = f"data_age {age or 0:.1f} rollouts, kl_mismatch {mismatch or 0:.2g}: data is stale"
        if ctx.facts.can_move("num_rollout_batches") and batches // 2 >= self.least:
            return Proposal(self.id, "num_rollout_batches", batches // 2, reason)
        return Advice(self.id, "num_rollout_batches", f"{reason}; fewer num_rollout_batches help")
