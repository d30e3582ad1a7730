"""The verdict over a whole log, and what it rests on.

In this order, the first that is proven:

    collapsing      the controller's emergency, and the reward (or the numbers) did not come back
    cannot tell     no metric at all, or fewer than `ENOUGH` rollouts
    no signal       groups with equal rewards almost everywhere, at the end of the log
    too aggressive  it fell and lives on, or the drift or the clipped share is far above its band
    too timid       the reward does not rise and the model does not move (kl_step, else kl_ref)
    healthy         the reward rises, or holds without harm
    cannot tell     what is left, such as a reward that falls slowly

Relative to the run's own numbers wherever that is possible: absolute thresholds are blind between tasks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from autotune.advise.shadow import Said, Shadow
from autotune.statistics import MAD_TO_SD, median, theil_sen

ENOUGH = 16
"""Rollouts below which nothing is said about a healthy-looking run."""
SLACK = 0.15
"""A reward within this share of a level is still at it."""
KL_STILL = 0.01
"""Nats/token to the reference: the documented edge of a model that hardly moves."""
DRIFT_TARGET = 0.015
"""kl_step, nats/token; the same as X1's."""


class Kind(StrEnum):
    HEALTHY = "healthy"
    TIMID = "too timid"
    AGGRESSIVE = "too aggressive"
    COLLAPSING = "collapsing"
    NO_SIGNAL = "no signal"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    headline: str
    evidence: list[str] = field(default_factory=list)
    since: float | None = None
    """Trainer step of the onset, for a collapse or an aggressive run."""

    @property
    def title(self) -> str:
        """`collapsing since step 20`."""
        return str(self.kind) if self.since is None else f"{self.kind} since step {self.since:g}"


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward over the whole log, in blocks so that long logs cost no more."""

    values: list[float]
    first: float
    last: float
    sd: float
    """Of one rollout, from successive differences: a trend does not widen it."""
    rising: bool
    falling: bool

    @classmethod
    def of(cls, column: Sequence[float]) -> Reward | None:
        values = finite(column)
        if not values:
            return None
        size = max(len(values) // 4, 1)
        first, last = median(values[: min(size, 20)]), median(values[-min(size, 20) :])
        sd = _spread(values)
        blocks = _blocks(values)
        if len(blocks) < 5:
            return cls(values, first, last, sd, False, False)
        trend = theil_sen(blocks)
        rising = trend.low > 0 and trend.rise >= sd > 0
        falling = trend.high < 0 and -trend.rise >= max(sd, SLACK * abs(first)) > 0
        return cls(values, first, last, sd, rising, falling)


def finite(column: Sequence[float]) -> list[float]:
    return [v for v in column if v == v]


def _blocks(values: Sequence[float], most: int = 100) -> list[float]:
    """At most `most` medians of equal stretches."""
    size = max(math.ceil(len(values) / most), 1)
    starts = range(0, len(values) - size + 1, size)
    return [float(np.median(values[k : k + size])) for k in starts]


def _spread(values: Sequence[float]) -> float:
    """Robust standard deviation of one value, from successive differences; numpy, for a million of them."""
    steps = np.diff(values) if len(values) > 1 else np.zeros(1)
    return MAD_TO_SD * float(np.median(np.abs(steps - np.median(steps)))) / math.sqrt(2)


def tail(column: Sequence[float]) -> list[float]:
    """Valid numbers of the last quarter, at most 50."""
    size = min(max(len(column) // 4, 4), 50)
    return finite(column[-size:])


def verdict(shadow: Shadow) -> Verdict:
    """Judge everything that was read so far."""
    reward = Reward.of(shadow.columns["reward_mean"])
    evidence = _evidence(shadow, reward)
    return (
        _collapse(shadow, reward, evidence)
        or _too_little(shadow, reward, evidence)
        or _no_signal(shadow, evidence)
        or _aggressive(shadow, reward, evidence)
        or _timid(shadow, reward, evidence)
        or _healthy(shadow, reward, evidence)
        or Verdict(Kind.CANNOT_TELL, _falling_words(reward), evidence)
    )


# ------------------------------------------------------------------------------------ questions


def _collapse(shadow: Shadow, reward: Reward | None, evidence: list[str]) -> Verdict | None:
    last = next((fall for fall in shadow.of("emergency") if not _healed(shadow, reward, fall)), None)
    if last is None:
        return None
    onset = _onset(shadow, last)
    why = [f"step {last.step:g}: {last.reason.rsplit(':', 1)[0]}", *evidence]
    before, now = _levels(shadow, last)
    if "not finite" in last.reason:
        return Verdict(Kind.COLLAPSING, "the numbers are not finite", why, onset)
    if before is not None and now is not None and _alive(shadow, last, before, now):
        words = f"the reward fell from {before:.3g} to {now:.3g} and did not come back"
        return Verdict(Kind.AGGRESSIVE, words, why, onset)
    return Verdict(Kind.COLLAPSING, _fallen(before, now), why, onset)


def _alive(shadow: Shadow, last: Said, before: float, now: float) -> bool:
    """Whether answers still differ after the fall: a dead model gets the same reward for everything."""
    spread = shadow.columns["reward_std"]
    then, after = finite(spread[max(last.index - 21, 0) : max(last.index - 1, 0)]), tail(spread)
    if then and after:
        return median(after) >= 0.5 * median(then) and median(after) > 0
    return now >= 0.25 * before > 0


def _fallen(before: float | None, now: float | None) -> str:
    return "the reward is gone" if before is None else f"the reward fell from {before:.3g} to {now:.3g}"


def _onset(shadow: Shadow, last: Said) -> float:
    """First alarm of this fall, else the emergency itself."""
    signs = [s for s in shadow.of("alarm") if s.rule == "X2" and 0 <= last.index - s.index <= 4]
    return signs[0].step if signs else last.step


def _levels(shadow: Shadow, last: Said) -> tuple[float | None, float | None]:
    """Median reward before this fall, and at the end of the log."""
    rewards = shadow.columns["reward_mean"]
    before = finite(rewards[max(last.index - 21, 0) : max(last.index - 1, 0)])
    after = tail(rewards)[-8:]
    return (median(before) if before else None, median(after) if after else None)


def _healed(shadow: Shadow, reward: Reward | None, last: Said) -> bool:
    """Back to within 15 % of where it was, for at least eight rollouts."""
    since = len(shadow.steps) - 1 - last.index
    if since < 8 or len(shadow.steps) - 1 - shadow.not_finite_at < 8:
        return False
    before, now = _levels(shadow, last)
    if before is None or now is None:
        return "not finite" in last.reason
    slack = SLACK * abs(before) + (reward.sd / math.sqrt(8) if reward else 0.0)
    return now >= before - slack


def _too_little(shadow: Shadow, reward: Reward | None, evidence: list[str]) -> Verdict | None:
    if not shadow.survey.rows:
        words = "there is no metric line in this log"
        hints = shadow.log.hints
        progress = [f"{hints.progress} progress lines were seen; its metrics go somewhere else"] * bool(
            hints.progress
        )
        return Verdict(Kind.CANNOT_TELL, words, [*progress, *hints.remarks])
    if reward is None:
        return Verdict(
            Kind.CANNOT_TELL, "no key of this log is a reward; name it with --map reward_mean=…", evidence
        )
    if len(reward.values) < ENOUGH:
        words = f"{len(reward.values)} rollouts are too few, {ENOUGH} are needed"
        return Verdict(Kind.CANNOT_TELL, words, evidence)
    return None


def _no_signal(shadow: Shadow, evidence: list[str]) -> Verdict | None:
    equal, spread = tail(shadow.columns["zero_std_fraction"]), tail(shadow.columns["reward_std"])
    dead = [v >= 0.999 for v in equal] or [v == 0 for v in spread]
    rewards = tail(shadow.columns["reward_mean"])
    constant = len(set(rewards)) == 1
    if not dead or (sum(dead) / len(dead) < 0.8 and not (constant and not equal)):
        return None
    share = sum(dead) / len(dead)
    words = f"on {share:.0%} of the last rollouts every group has equal rewards: nothing to learn from"
    return Verdict(Kind.NO_SIGNAL, words, evidence)


def _aggressive(shadow: Shadow, reward: Reward | None, evidence: list[str]) -> Verdict | None:
    if reward is None or reward.rising:
        return None
    drift, clip = tail(shadow.columns["kl_step"]), tail(shadow.columns["clip_ratio"])
    signs = []
    if drift and median(drift) > 3 * DRIFT_TARGET:
        signs.append(f"kl_step {median(drift):.2g} against a target of {DRIFT_TARGET:g}")
    if clip and median(clip) > 0.15:
        signs.append(f"{median(clip):.0%} of the tokens are clipped")
    saws = [s for s in shadow.of("action") if s.rule in ("B5a", "A4")]
    signs += [f"{saws[-1].rule}: {saws[-1].reason}"] if saws else []
    if not signs:
        return None
    since = saws[0].step if saws else None
    return Verdict(Kind.AGGRESSIVE, "; ".join(signs), evidence, since)


def _timid(shadow: Shadow, reward: Reward | None, evidence: list[str]) -> Verdict | None:
    if reward is None or reward.rising or reward.falling:
        return None
    drift, kl = tail(shadow.columns["kl_step"]), tail(shadow.columns["kl_ref"])
    if drift:
        still, words = median(drift) < DRIFT_TARGET / 3, f"kl_step is {median(drift):.2g}"
    elif kl:
        still, words = median(kl) < KL_STILL, f"kl_ref is {median(kl):.2g} nats/token at the end"
    else:
        return None
    maximum = shadow.known.facts.reward_maximum
    if not still or (maximum and reward.last >= 0.95 * maximum):
        return None
    return Verdict(Kind.TIMID, f"the reward does not rise and the model hardly moves: {words}", evidence)


def _healthy(shadow: Shadow, reward: Reward | None, evidence: list[str]) -> Verdict | None:
    if reward is None or reward.falling:
        return None
    peak = max(_blocks(reward.values, 4))
    fell_back = peak - reward.last > 2 * reward.sd / math.sqrt(len(reward.values) / 4) + SLACK * abs(peak)
    if not reward.rising and fell_back:
        return None
    words = f"the reward rises from {reward.first:.3g} to {reward.last:.3g}"
    if not reward.rising:
        where = f" in the newest {shadow.newest:,} rows" if shadow.in_passing else ""
        words = f"the reward holds at {reward.last:.3g}, no harm is seen{where}"
    falls = shadow.of("emergency")
    if falls:
        words += f"; it collapsed at step {_onset(shadow, falls[-1]):g} and healed by itself"
    cut = tail(shadow.columns["truncated_fraction"])
    if cut and median(cut) > 0.5:
        words += f", but {median(cut):.0%} of the answers are cut at the cap"
    return Verdict(Kind.HEALTHY, words, evidence)


def _falling_words(reward: Reward | None) -> str:
    if reward is None:
        return "there is no reward"
    peak = max(_blocks(reward.values, 8))
    way = f"from {reward.first:.3g} over {peak:.3g} to {reward.last:.3g}"
    return f"the reward went {way}: neither a rise nor a collapse"


# ------------------------------------------------------------------------------------- evidence


def _evidence(shadow: Shadow, reward: Reward | None) -> list[str]:
    lines = []
    if reward is not None:
        lines.append(
            f"reward_mean {reward.first:.3g} -> {reward.last:.3g}, ±{reward.sd:.2g} from rollout to rollout"
        )
    for name, unit in (("kl_ref", " nats/token"), ("kl_step", " nats/token"), ("entropy", " nats/token")):
        values = finite(shadow.columns[name])
        if values:
            lines.append(f"{name} {median(values[:8]):.2g} -> {median(values[-8:]):.2g}{unit}")
    for name in ("clip_ratio", "truncated_fraction", "zero_std_fraction"):
        values = finite(shadow.columns[name])
        if values:
            lines.append(
                f"{name} {median(values[:8]):.2%} -> {median(values[-8:]):.2%}, at most {max(values):.2%}"
            )
    lines += [f"{reason} (first at step {step:g})" for step, reason in shadow.faults.values()]
    wild = _wild(shadow)
    return lines + ([wild] if wild else [])


def _wild(shadow: Shadow) -> str:
    """A single sample far from everything, which is no trend."""
    kl = shadow.columns["kl_ref"]
    values = finite(kl)
    if len(values) < ENOUGH:
        return ""
    limit = 20 * max(median(values), KL_STILL)
    at = [k for k, v in enumerate(kl) if v > limit]
    return (
        f"kl_ref {kl[at[0]]:.3g} at step {shadow.steps[at[0]]:g}, once, normal again after it"
        if len(at) == 1
        else ""
    )
