"""The conditions of the staged procedure, P1 to P4, as plain functions of a finished round.

    P1  baseline          200 rollouts, fixed parameters   -> gates: environment, success, reward clearly up
    P2  KL and clip       300 more, from P1's checkpoint   -> one change, confirmed by a narrower spread
    P3  speed and length  500 more, from P2's checkpoint   -> one change at a time, then the held-out score
    P4  always            one parameter at a time, every comparison from three runs

A round reads the log of the round before it. Nothing here runs, waits or writes: a round's values in,
gates and conditions out. A condition that cannot be judged says why and is never taken for "not met";
one that would do harm is refused with the reason, and "refused" is a result.

Source: document B 4 with its own numbers. Where the document contradicts itself the notes beside the
functions say what decides: clip is not widened while KL is high, `kl_coef` is lowered only with KL in its
band, a cap is trimmed only where the longest answers allow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.errors import InputError
from autotune.knobs import ALIASES, divisors, expand
from autotune.preflight import REWARD_VARIANCE, largest_variance
from autotune.statistics import (
    Movement,
    detrended_variance,
    movement,
    theil_sen,
    variance_ratio_limit,
)

ROLLOUTS = {"P1": 200, "P2": 300, "P3": 500}
"""Length of each round."""

BASELINE: dict[str, float] = {
    "rollout_micro_batch_size": 16,
    "num_rollout_batches": 8,
    "kl_coef": 0.1,
    "clip_range": 0.1,
    "actor_learning_rate": 2e-6,
    "critic_learning_rate": 1e-5,
    "max_prompt_length": 1024,
    "max_response_length": 512,
}
"""The fixed parameters of P1 in the document, whose model has 7B parameters."""

RUNS = 3
"""Runs behind every comparison."""

SUCCESS = 0.95
KL_HIGH = 0.08
CLIPPED = 0.35
UTILIZATION = 0.80
MEMORY_CEILING = 0.92
LENGTH_BAND, LENGTH_ROOM, LENGTH_STEP = 20.0, 20.0, 64
TRUNCATED, TAIL = 0.005, 1.15
KL_COEF_LATE = 0.08
SLOW = 0.5
"""A reward has slowed when it surely rises less than this share of its steepest quarter."""
WINDOW = 10
"""Rollouts of one window mean."""

DERIVED = {
    "ppo_mini_batch_size": ("micro_batch_size",),
    "rollout_micro_batch_size": ("num_rollout_batches",),
}
"""Knob -> knobs that follow from it and are no change of their own."""


@dataclass(frozen=True, slots=True)
class Round:
    """What one round left behind."""

    metrics: Mapping[str, Sequence[float]]
    """Canonical metric -> its valid values, one a rollout, oldest first."""
    knobs: Mapping[str, float]
    """Real knobs at the end of the round."""
    noise: float = 0.0
    """Standard deviation of one rollout's mean reward that sampling alone explains."""
    reward_range: tuple[float, float] | None = None
    """Least and largest reward, where they are known."""
    world_size: int = 1

    def mean(self, metric: str) -> float | None:
        values = self.metrics.get(metric, ())
        return math.fsum(values) / len(values) if values else None  # exact: a constant is its own mean


@dataclass(frozen=True, slots=True)
class Gate:
    """Something that must hold before the next round."""

    id: str
    passed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Condition:
    """One "if this, then that knob" of the document, judged on a round."""

    id: str
    met: bool
    reason: str
    value: float | None = None
    limit: float = 0.0
    knob: str = ""
    after: float | None = None
    """What the knob would be set to."""
    offered: bool = False
    """Not the document's own condition, but one that can be met where its own cannot."""

    @property
    def severity(self) -> float:
        """How far beyond its limit, as a ratio."""
        return 0.0 if self.value is None or not self.limit else self.value / self.limit


# ------------------------------------------------------------------------------------------ P1


def baseline_gates(round_: Round, environment_faults: Sequence[str] = ()) -> tuple[Gate, ...]:
    """P1: the environment is right (E1), rollouts succeed (B7) and the reward is clearly up.

    Args:
        round_: the baseline's log.
        environment_faults: what the doctor found bad.
    """
    faults = ", ".join(environment_faults)
    healthy = Gate("E1", not faults, faults or "the environment fits")
    return healthy, _success(round_), _clearly_up(round_)


def _success(round_: Round) -> Gate:
    rate = round_.mean("rollout_success_rate")
    if rate is None:
        return Gate("B7", False, "rollout_success_rate was not measured")
    sign = ">" if rate > SUCCESS else "<="
    return Gate("B7", rate > SUCCESS, f"rollout_success_rate {rate:.3f} {sign} {SUCCESS:g}")


def _clearly_up(round_: Round) -> Gate:
    """Proven: the whole confidence bound of the slope above zero, the rise beyond the noise."""
    values = round_.metrics.get("reward_mean", ())
    if len(values) < 2 * WINDOW:
        return Gate("P1", False, f"{len(values)} rewards are too few to see a rise")
    trend = theil_sen(values)
    up = movement(trend, _gain(round_)) is Movement.RISING
    start = sum(values[:WINDOW]) / WINDOW
    end = sum(values[-WINDOW:]) / WINDOW
    return Gate("P1", up, f"reward {start:.3g} -> {end:.3g}: {'clearly up' if up else 'not clearly up'}")


def _gain(round_: Round) -> float:
    """Smallest rise of interest: two noise standard deviations of one rollout."""
    return 2 * round_.noise


# ------------------------------------------------------------------------------------------ P2


def kl_and_clip(round_: Round) -> tuple[Condition, ...]:
    """P2's three conditions, in the document's order, and the relative form of the third where it is dead."""
    return _mean_kl(round_), _clipped_share(round_), *_reward_variance(round_)


def most_severe(conditions: Sequence[Condition], *, relative: bool = False) -> Condition | None:
    """The one change that P4 allows: the condition furthest beyond its limit; earlier ones win a tie.

    Args:
        conditions: of one round.
        relative: whether offered conditions count.
    """
    met = [c for c in conditions if c.met and (relative or not c.offered)]
    return max(met, key=lambda c: c.severity, default=None)


def _mean_kl(round_: Round) -> Condition:
    kl, name = round_.mean("kl_ref"), "P2 kl"
    if kl is None:
        return Condition(name, False, "kl_ref was not measured", limit=KL_HIGH, knob="kl_coef")
    return _scaled(name, round_, "mean kl_ref", kl, KL_HIGH, "kl_coef", 1.2)


def _clipped_share(round_: Round) -> Condition:
    """Not while KL is high: widening takes the brake away."""
    low, high, kl = (round_.mean(m) for m in ("ratio_low", "ratio_high", "kl_ref"))
    name, knob = "P2 clip", "clip_range"
    if low is None or high is None:
        return Condition(name, False, "the policy ratio was not measured", limit=CLIPPED, knob=knob)
    found = _scaled(name, round_, "clipped share", low + high, CLIPPED, knob, 1.2)
    if found.met and kl is not None and kl > KL_HIGH:
        high_kl = f"kl_ref {kl:.3g} > {KL_HIGH:g}"
        why = f"{found.reason}, but {high_kl}: refused, clip is not widened while KL is high"
        return Condition(name, False, why, found.value, CLIPPED, knob)
    return found


def _reward_variance(round_: Round) -> tuple[Condition, ...]:
    """Variance of the per-rollout mean around its trend, in task units squared."""
    values, name, knob = round_.metrics.get("reward_mean", ()), "P2 reward variance", "actor_learning_rate"
    if len(values) < 4:
        short = f"{len(values)} rewards are too few for a variance"
        return (Condition(name, False, short, limit=REWARD_VARIANCE, knob=knob),)
    variance = detrended_variance(values, theil_sen(values))
    largest = largest_variance(round_.reward_range)
    if largest > REWARD_VARIANCE:
        return (_scaled(name, round_, "reward variance", variance, REWARD_VARIANCE, knob, 0.75),)
    dead = (
        f"a reward within {round_.reward_range} has a variance of at most {largest:g}:"
        f" it can never exceed {REWARD_VARIANCE:g}; use the relative form"
    )
    letter = Condition(name, False, dead, variance, REWARD_VARIANCE, knob)
    return letter, _relative_variance(round_, variance, len(values))


def _relative_variance(round_: Round, variance: float, n: int) -> Condition:
    """The same question in units of the noise floor that P and G leave."""
    name, knob, limit = "P2 reward variance, relative", "actor_learning_rate", variance_ratio_limit(n)
    if round_.noise == 0.0:
        return Condition(name, False, "the noise floor is not known", None, limit, knob, offered=True)
    ratio = variance / round_.noise**2
    found = _scaled(name, round_, "reward variance over its noise floor", ratio, limit, knob, 0.75)
    return Condition(found.id, found.met, found.reason, ratio, limit, knob, found.after, offered=True)


def _scaled(
    name: str, round_: Round, what: str, value: float, limit: float, knob: str, factor: float
) -> Condition:
    """`value > limit` -> the knob times `factor`."""
    met = value > limit
    reason = f"{what} {value:.3g} {'>' if met else '<='} {limit:g}"
    after = max(round_.knobs[real] for real in expand(knob)) * factor if met else None
    return Condition(name, met, reason, value, limit, knob, after)


def confirmed(before: Round, after: Round, *, relative: bool = False) -> Gate:
    """P2 is confirmed only if the spread narrowed: the round's sd is below the last round's.

    The sd is that of the per-rollout mean reward around its own trend, so that learning is no spread.

    Args:
        relative: a spread that sampling alone explains cannot narrow, and comparing two of them would
            toss a coin: such a round is confirmed too.
    """
    spreads = [_spread(r) for r in (before, after)]
    if spreads[0] is None or spreads[1] is None:
        return Gate("P2", False, "a spread needs at least 4 rewards in both rounds")
    if relative and (words := _at_the_floor(after, spreads[1])):
        return Gate("P2", True, f"spread of the reward {spreads[0]:.3g} -> {spreads[1]:.3g}, {words}")
    narrowed = spreads[1] < spreads[0]
    words = "narrowed" if narrowed else "did not narrow: stop"
    return Gate("P2", narrowed, f"spread of the reward {spreads[0]:.3g} -> {spreads[1]:.3g}, {words}")


def _at_the_floor(round_: Round, spread: float) -> str:
    """That sampling alone explains the spread, in words; empty when it does not."""
    if round_.noise == 0.0:
        return ""
    ratio, limit = (spread / round_.noise) ** 2, variance_ratio_limit(len(round_.metrics["reward_mean"]))
    words = f"no more than its noise floor explains: variance ratio {ratio:.3g} <= {limit:.3g}"
    return words if ratio <= limit else ""


def _spread(round_: Round) -> float | None:
    values = round_.metrics.get("reward_mean", ())
    return math.sqrt(detrended_variance(values, theil_sen(values))) if len(values) >= 4 else None


# ------------------------------------------------------------------------------------------ P3


def speed_and_length(round_: Round) -> tuple[Condition, ...]:
    """P3's three conditions, in the document's order."""
    return _utilization(round_), _length(round_), _late_kl(round_)


def _utilization(round_: Round) -> Condition:
    """Utilization is the reason to rise, memory the ceiling."""
    name, knob = "P3 utilization", "rollout_micro_batch_size"
    use = round_.mean("gpu_utilization")
    memory = max(round_.metrics.get("gpu_memory_fraction", ()), default=0.0)
    if use is None:
        return Condition(name, False, "gpu_utilization was not measured", None, UTILIZATION, knob)
    if use >= UTILIZATION:
        why = f"mean gpu_utilization {use:.3g} >= {UTILIZATION:g}"
        return Condition(name, False, why, use, UTILIZATION, knob)
    low = f"mean gpu_utilization {use:.3g} < {UTILIZATION:g}"
    if memory > MEMORY_CEILING:
        why = f"{low}, but peak memory {memory:.0%} > {MEMORY_CEILING:.0%}: refused"
        return Condition(name, False, why, use, UTILIZATION, knob)
    after = _larger_sampling_batch(round_)
    why = low if after else f"{low}, but no larger batch divides the rollout"
    return Condition(name, after is not None, why, use, UTILIZATION, knob, after)


def _larger_sampling_batch(round_: Round) -> float | None:
    """The legal batch nearest to 1.5 x, above the present one."""
    now, k = int(round_.knobs["rollout_micro_batch_size"]), round_.knobs
    share = int(k["train_batch_size"]) * int(k["rollout_n"]) // round_.world_size
    larger = [d for d in divisors(share) if d > now]
    return float(min(larger, key=lambda d: abs(d - 1.5 * now))) if larger else None


def cap_for(mean_length: float) -> int:
    """The next multiple of 64 tokens above mean + 20: 420 -> 448, and 428 -> 512."""
    return (math.floor((mean_length + LENGTH_ROOM) / LENGTH_STEP) + 1) * LENGTH_STEP


def steady(lengths: Sequence[float], window: int = WINDOW, within: float = LENGTH_BAND) -> bool:
    """Whether all window means lie within +-20 tokens of the round's mean; two windows at least."""
    full = [lengths[i : i + window] for i in range(0, len(lengths) - window + 1, window)]
    if len(full) < 2:
        return False
    mean = math.fsum(lengths) / len(lengths)
    return all(abs(math.fsum(part) / window - mean) <= within for part in full)


def _length(round_: Round) -> Condition:
    name, knob = "P3 length", "max_response_length"
    lengths, cap = round_.metrics.get("response_length_mean", ()), round_.knobs["max_response_length"]
    if not steady(lengths):
        why = f"not steady: too few windows, or one more than {LENGTH_BAND:g} tokens off the mean length"
        return Condition(name, False, why, knob=knob)
    mean = math.fsum(lengths) / len(lengths)
    after, words = cap_for(mean), f"response length steady at {mean:.0f}"
    if after >= cap:
        return Condition(name, False, f"{words}: {after} is no less than the cap {cap:g}", mean, cap, knob)
    refusal = _tail_refusal(round_, after)
    if refusal:
        return Condition(name, False, f"{words}, but trim to {after} refused: {refusal}", mean, cap, knob)
    return Condition(name, True, f"{words}: cap {cap:g} -> {after}", mean, cap, knob, float(after))


def _tail_refusal(round_: Round, cap: float) -> str:
    """Why the longest answers forbid this cap, or an empty string."""
    cut = round_.metrics.get("truncated_fraction", ())
    tail = round_.metrics.get("response_length_p995") or round_.metrics.get("response_length_max") or ()
    if not cut or not tail:
        return "truncation or the longest answers were not measured"
    if max(cut) >= TRUNCATED:
        return f"up to {max(cut):.1%} of the answers are cut already"
    needed = TAIL * max(tail)
    return f"the longest answers need {needed:.0f} tokens" if cap < needed else ""


def slowed(rewards: Sequence[float], gain: float = 0.0) -> bool:
    """Whether the reward surely rises less now than in its main rise.

    The main rise is the steepest of the first three quarters, and it must be a proven one; slower is
    proven when even the upper bound of the last quarter's slope is below half of it.
    """
    quarter = len(rewards) // 4
    if quarter < 4:
        return False
    parts = [theil_sen(rewards[i * quarter : (i + 1) * quarter]) for i in range(3)]
    main, last = max(parts, key=lambda t: t.slope), theil_sen(rewards[-quarter:])
    rose = movement(theil_sen(rewards), gain) is Movement.RISING
    return rose and last.high < SLOW * main.slope


def _late_kl(round_: Round) -> Condition:
    """The document lowers `kl_coef` whatever KL is; here only while KL is not above its band."""
    name, knob, now = "P3 kl", "kl_coef", round_.knobs["kl_coef"]
    kl = round_.mean("kl_ref")
    if not slowed(round_.metrics.get("reward_mean", ()), _gain(round_)):
        return Condition(name, False, "the reward has not surely slowed after a main rise", knob=knob)
    if kl is None or kl > KL_HIGH:
        seen = "not measured" if kl is None else f"{kl:.3g} > {KL_HIGH:g}"
        why = f"the reward has slowed, but kl_ref is {seen}: refused"
        return Condition(name, False, why, kl, KL_HIGH, knob)
    if now <= KL_COEF_LATE:
        return Condition(name, False, f"kl_coef {now:g} is not above {KL_COEF_LATE:g}", kl, KL_HIGH, knob)
    return Condition(name, True, "the reward has slowed after its main rise", kl, KL_HIGH, knob, KL_COEF_LATE)


# ------------------------------------------------------------------------------------------ P4


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean and sample standard deviation over runs."""

    mean: float
    sd: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3g} ± {self.sd:.2g} (n = {self.n})"


def summary(scores: Sequence[float]) -> Summary:
    """Mean ± standard deviation of one arm of a comparison.

    Raises:
        InputError: fewer than three runs, or a score that is not finite.
    """
    if len(scores) < RUNS:
        raise InputError(f"received {len(scores)} run(s); a comparison needs {RUNS}: run other seeds")
    if not all(math.isfinite(s) for s in scores):
        raise InputError(f"received {[*scores]}; every score of a comparison must be finite")
    mean = sum(scores) / len(scores)
    sd = math.sqrt(sum((s - mean) ** 2 for s in scores) / (len(scores) - 1))
    return Summary(mean, sd, len(scores))


@dataclass(frozen=True, slots=True)
class Comparison:
    before: Summary
    after: Summary

    @property
    def better(self) -> bool:
        """Whether the two bands of mean ± sd lie apart, the new one higher."""
        return self.after.mean - self.after.sd > self.before.mean + self.before.sd

    @property
    def worse(self) -> bool:
        return self.after.mean + self.after.sd < self.before.mean - self.before.sd


def compare(before: Sequence[float], after: Sequence[float]) -> Comparison:
    """Two arms of three runs or more.

    Raises:
        InputError: too few runs in one of them.
    """
    return Comparison(summary(before), summary(after))


def one_parameter(before: Mapping[str, float], after: Mapping[str, float]) -> Gate:
    """P4: at most one parameter differs; what follows from it, and both sides of `clip_range`, are one."""
    changed = {k for k in {*before, *after} if before.get(k) != after.get(k)}
    for owner, derived in DERIVED.items():
        if owner in changed:
            changed -= set(derived)
    for alias, real in ALIASES.items():
        if set(real) <= changed:
            changed = (changed - set(real)) | {alias}
    names = ", ".join(sorted(changed)) or "nothing"
    return Gate("P4", len(changed) <= 1, f"changed: {names}")
