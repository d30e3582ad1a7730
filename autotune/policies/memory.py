"""B1: the sampling batch, between an idle GPU and an out-of-memory.

Watched: `gpu_memory_fraction` (peak in the rollout phase), `tokens_per_second`. Moved:
`rollout_micro_batch_size` in samples on its lattice, within the documented 8-64 (a recipe outside keeps
its own value as the limit); `num_rollout_batches` is re-derived, the amount of data never changes.

    above 92 %                                  one notch down, at once
    below 85 %, and the last notch up paid off  one notch up

Source: document B 3.1 (85-92 % is the golden range; lower this first on out-of-memory, not the number
of batches). Memory is the ceiling, tokens per second the goal: a notch that did not raise throughput
is not followed by another. Silent where an engine preallocates its memory, for there is no sensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotune.decisions import Proposal
from autotune.knobs import divisors
from autotune.policies.base import Answer, Context, Family, Policy
from autotune.statistics import median


def rollout_lattice(ctx: Context) -> list[int]:
    """Sampling batch sizes that divide a rank's share of the rollout."""
    samples = int(ctx.knobs["train_batch_size"]) * int(ctx.knobs["rollout_n"])
    return list(divisors(samples // ctx.facts.world_size))


@dataclass(frozen=True)
class RolloutMemory(Policy):
    """B1."""

    id: ClassVar[str] = "B1"
    family: ClassVar[Family] = Family.MEMORY
    source: ClassVar[str] = "B 3.1: GPU memory steady in 85-92 %"
    summary: ClassVar[str] = "rollout memory outside 85-92 % -> rollout_micro_batch_size a notch"
    needs: ClassVar[tuple[str, ...]] = ("gpu_memory_fraction",)
    moves: ClassVar[tuple[str, ...]] = ("rollout_micro_batch_size",)

    low: float = 0.85
    high: float = 0.92
    smallest: int = 8
    largest: int = 64
    """Samples; 128 risks an out-of-memory, says the source."""
    gain: float = 1.02
    """Throughput of the last notch up that makes the next one worth trying."""

    def propose(self, ctx: Context) -> Answer:
        peak = ctx.value("gpu_memory_fraction")
        if peak is not None and peak > self.high:
            return self._notch(ctx, -1, peak)
        level = ctx.level("gpu_memory_fraction")
        if level is None or level >= self.low or not self._last_notch_paid(ctx):
            return None
        return self._notch(ctx, +1, level)

    def _notch(self, ctx: Context, step: int, level: float) -> Answer:
        lattice, now = rollout_lattice(ctx), int(ctx.knobs["rollout_micro_batch_size"])
        start = int(ctx.facts.knobs["rollout_micro_batch_size"])
        low, high = min(self.smallest, start), max(self.largest, start)
        reachable = [m for m in lattice if low <= m <= high and (m - now) * step > 0]
        if not reachable:
            return None
        after = min(reachable, key=lambda m: abs(m - now))
        band = f"{self.low:.0%}-{self.high:.0%}"
        reason = f"peak GPU memory {level:.0%} of the rollout phase, outside {band}"
        return Proposal(
            self.id, "rollout_micro_batch_size", after, reason, evidence={"gpu_memory_fraction": level}
        )

    def _last_notch_paid(self, ctx: Context) -> bool:
        """Throughput now against throughput under the value before; true while nothing was tried."""
        before = [s for s in ctx.history.samples(10**9) if self._smaller(ctx, s.knobs)]
        now = ctx.history.values("tokens_per_second", ctx.under("rollout_micro_batch_size"))
        old = ctx.history.values("tokens_per_second", before[-ctx.pace.window :])
        return not old or not now or median(now) >= self.gain * median(old)

    @staticmethod
    def _smaller(ctx: Context, knobs: object) -> bool:
        then = knobs.get("rollout_micro_batch_size") if isinstance(knobs, dict) else None
        return then is not None and then < ctx.knobs["rollout_micro_batch_size"]
