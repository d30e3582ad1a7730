"""X2: the veto after one bad rollout, and the rescue from a collapse.

*Veto.* After the updates of one rollout `kl_step` above a hard limit, or any non-finite loss, gradient or
drift: the weights and moments from before these updates come back and the learning rate falls to a
third. Live from the first rollout on; a model whose reward is already 0 after the first rollout can only
be saved by the state from before it. Right after an undone rollout the limit is half as high, ten times
the drift that X1 steers to: a rate just under the first limit, with fresh moments, ruins a model in one or
two rollouts.

*Collapse.* Two rewards running below `level - 4 x spread` of the rewards before them, three below
`level - 3 x spread` (as rare by chance, and a slow fall gets there first), or so many below half of
their level where neither sampling nor any of them reached; or five whose median is below half of the
level before them, four of its standard errors away (a slow fall takes the limits of single rewards
along); or three wild gradient norms running; or the response length at 3x or half of its baseline with
the reward falling. The last checkpoint from before the onset comes back with half the rate, a quarter the
second time; the third stops the run. The first sign alone is an alarm.
The spread is 1.4826 x MAD, never below the reward noise of P and G; the baseline is taken from before the
sign, so the crash does not inflate it.

Source: beyond the documents; measured on the embedded task and on public collapsing logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from autotune.metrics import Validity
from autotune.policies.base import Alarm, Answer, Context, Emergency, Family, Policy
from autotune.statistics import detrended_variance, mad_sd, median, residuals, reward_noise_sd, theil_sen

MEDIAN_ERROR = 1.25
"""Standard error of a median in standard errors of a mean, for normal values: sqrt(pi / 2)."""

Row = Mapping[str, float]
"""Valid scalars of one rollout."""

HARD = ("loss", "grad_norm", "kl_step")
"""Non-finite values of these mean that the weights are in danger."""


@dataclass(frozen=True, slots=True)
class Sign:
    """One sign of a collapse: how many rollouts it has stood, and how many make an emergency."""

    what: str
    running: int
    needed: int


@dataclass(frozen=True)
class VetoAndCollapse(Policy):
    """X2."""

    id: ClassVar[str] = "X2"
    family: ClassVar[Family] = Family.COLLAPSE
    source: ClassVar[str] = "beyond the documents: veto and collapse"
    summary: ClassVar[str] = "one rollout drifts too far, or the run collapses -> weights back, LR down"
    kl_step_limit: float = 0.3
    """Nats/token after the updates of one rollout."""
    again: float = 0.15
    """The limit right after an undone rollout: the smaller rate has yet to earn its trust."""
    veto_factor: float = 1 / 3
    sds: float = 4.0
    """Reward below its median by this many spreads is a sign."""
    slow_sds: float = 3.0
    """Three rewards running below this many are as rare as two below `sds`; a slow fall gets there first."""
    baseline: int = 20
    """Rollouts of the baseline."""
    newest: int = 5
    """Newest of them that say what the reward was just before."""
    least: float = 0.01
    """Smallest spread, as a share of the level."""
    half: float = 0.5
    """A reward below this share of its level is a sign however wide the rewards were spread."""
    grad_z: float = 6.0
    grad_least: float = 3.0
    """A norm below this x the usual one is not wild: norms of healthy runs double while they learn."""
    quiet: float = 0.9
    """Share of groups without signal above which a rollout's norm is no baseline."""
    long: float = 3.0
    short: float = 0.5
    most: int = 2
    """Checkpoint restores before the run is stopped."""
    vetoes: int = 8
    """Vetoes running before the run is stopped: what causes them is not the learning rate."""

    def propose(self, ctx: Context) -> Answer:
        return self._veto(ctx) or self._collapse(ctx)

    def _veto(self, ctx: Context) -> Emergency | None:
        drift = ctx.value("kl_step")
        why = self._non_finite(ctx)
        limit = min(self.again, self.kl_step_limit) if ctx.vetoes else self.kl_step_limit
        if drift is not None and drift > limit:
            why = f"kl_step {drift:.2g} > {limit:g} after one rollout's updates"
        if not why:
            return None
        evidence = {} if drift is None else {"kl_step": drift}
        stop = ctx.vetoes + 1 >= self.vetoes
        return Emergency(self.id, "undo", ctx.rollout, self.veto_factor, why, evidence, stop)

    def _non_finite(self, ctx: Context) -> str:
        bad = [n for n in HARD if ctx.snapshot.reading(n).validity is Validity.NON_FINITE]
        return f"{', '.join(bad)} not finite" if bad else ""

    def _collapse(self, ctx: Context) -> Answer:
        samples = ctx.history.samples(self.baseline + 3, since=ctx.since_restore)
        rows = [s.values for s in samples]
        signs = self._sunk(ctx, rows), self._reward(ctx, rows), self._gradient(rows), self._length(ctx, rows)
        for sign in signs:
            if sign and sign.running >= sign.needed:
                return self._rescue(ctx, sign)
            if sign:
                return Alarm(self.id, f"{sign.what}: first sign of a collapse")
        return None

    def _rescue(self, ctx: Context, sign: Sign) -> Emergency:
        onset = ctx.rollout - sign.running + 1
        return Emergency(
            self.id,
            "checkpoint",
            onset - 1,
            0.5 ** (ctx.emergencies + 1),
            f"{sign.what}, {sign.running} rollouts running",
            {"onset": onset, "emergencies": ctx.emergencies},
            stop=ctx.emergencies >= self.most,
        )

    def _reward(self, ctx: Context, rows: Sequence[Row]) -> Sign | None:
        rows = [r for r in rows if "reward_mean" in r]
        for running, needed, sds in ((2, 2, self.sds), (3, 3, self.slow_sds), (1, 2, self.sds)):
            base = rows[:-running][-self.baseline :]
            tail = [r["reward_mean"] for r in rows[-running:]]
            if len(base) < 2 or max(tail) >= self._level([r["reward_mean"] for r in base]):
                continue  # every limit is below the level
            limit = self._reward_limit(ctx, base, rows[-running:], sds)
            if all(value < limit for value in tail):
                return Sign(f"reward_mean {tail[-1]:.3g} below {limit:.3g}", running, needed)
        return None

    def _sunk(self, ctx: Context, rows: Sequence[Row]) -> Sign | None:
        """The median of the newest few below half of the level before them, and the last one too.

        A fall over many rollouts takes the limits of single rewards along; a median is known better than they
        are. Asked only where the sampling noise is known and the reward's zero means something.
        """
        rows = [r for r in rows if "reward_mean" in r]
        rewards, base = [r["reward_mean"] for r in rows], rows[: -self.newest]
        before, tail = rewards[: -self.newest], rewards[-self.newest :]
        if len(base) < self.newest or min(before) < 0:
            return None
        level, now, noise = self._level(before), median(tail), self._noise(ctx, base)
        if max(now, tail[-1]) >= self.half * level or noise == 0:
            return None
        spread = max(noise, math.sqrt(detrended_variance(before, theil_sen(before))))
        error = MEDIAN_ERROR * spread * math.sqrt(1 / len(tail) + 1 / len(base))
        if now >= level - self.sds * error:
            return None
        return Sign(f"median reward_mean {now:.3g} against {level:.3g}", self.newest, self.newest)

    def _level(self, rewards: Sequence[float]) -> float:
        return max(median(rewards[-self.newest :]), median(rewards))

    def _reward_limit(self, ctx: Context, base: Sequence[Row], tail: Sequence[Row], sds: float) -> float:
        """Level - sds x spread of the rewards before the sign.

        The level is the median of the newest few, or of the whole baseline where that is higher: a slow
        fall must not take its own yardstick along. The spread is taken around the baseline's own
        trend: a reward that climbs has a wide spread, and a dead model would hide in it. The spread is
        floored by the sampling noise of either side, and by a share of the level where both are nil
        (a constant reward that loses one answer has not collapsed).
        """
        rewards = [r["reward_mean"] for r in base]
        level, usual = self._level(rewards), self._noise(ctx, base)
        spreads = (self._noise(ctx, rows) for rows in (base[-self.newest :], tail))
        noise = max(usual, *spreads, self.least * abs(level))
        half = self._half_limit(rewards, usual)
        highest = max(level - sds * noise, half)  # the spread can only lower it
        if max(r["reward_mean"] for r in tail) >= highest:
            return highest  # no sign either way: the trend need not be asked
        slope = theil_sen(rewards).slope if len(rewards) >= 3 else 0.0
        return max(level - sds * max(mad_sd(residuals(rewards, slope)), noise), half)

    def _half_limit(self, rewards: Sequence[float], noise: float) -> float:
        """A few rewards can be spread as wide as their level, and a fall in two steps widens it too.

        Then the limit is half of the baseline's level: if sampling does not reach it, if no reward of the
        baseline was there, and if the reward's zero means something.
        """
        if len(rewards) < 3 or noise == 0 or min(rewards) < 0:
            return -math.inf
        level = median(rewards)
        return min(self.half * level, level - self.sds * noise, min(rewards))

    def _noise(self, ctx: Context, rows: Sequence[Row]) -> float:
        stds = [r["reward_std"] for r in rows if "reward_std" in r]
        prompts, group = int(ctx.knobs["train_batch_size"]), int(ctx.knobs["rollout_n"])
        return reward_noise_sd(median(stds), prompts, group) if stds else 0.0

    def _gradient(self, rows: Sequence[Row]) -> Sign | None:
        rows = [r for r in rows if "grad_norm" in r]
        base = [r["grad_norm"] for r in rows[:-3] if self._had_signal(r)]
        tail = [r["grad_norm"] for r in rows[-3:]]
        if len(base) < 5:
            return None
        usual = median(base)
        limit = max(usual + self.grad_z * max(mad_sd(base), 0.1 * usual), self.grad_least * usual)
        wild = all(value > limit for value in tail)
        return Sign(f"grad_norm {tail[-1]:.3g} above {limit:.3g}", 3, 3) if wild else None

    def _had_signal(self, row: Row) -> bool:
        """Whether its norm says what is usual: with hardly a mixed group it is next to nothing."""
        return row["grad_norm"] > 0 and row.get("zero_std_fraction", 0.0) <= self.quiet

    def _length(self, ctx: Context, rows: Sequence[Row]) -> Sign | None:
        lengths = [r["response_length_mean"] for r in rows if "response_length_mean" in r]
        if len(lengths) < 5:
            return None
        base, tail = median(lengths[:-2]), lengths[-2:]
        if not all(v >= self.long * base or v < self.short * base for v in tail):
            return None
        what = f"response length {tail[-1]:.0f} against {base:.0f}"
        return Sign(what, 2, 2 if ctx.reward.falling else 3)
