"""Judging a change: every intervention is a hypothesis with a before-window and an after-window.

Small effects drown in reward noise (ten rollouts against ten see 3 percentage points at best), so
the reward only convicts clear harm, and guard metrics convict the rest: a drift that left its band.
Three answers: reverted (harm), kept (help, or the sensor it was meant to move did move and nothing
was harmed), inconclusive (no harm seen: it stays, and the journal says that nothing was proven).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autotune.decisions import Outcome, Verdict
from autotune.history import Sample
from autotune.ledger import Probation
from autotune.policies.base import Context, Engagement
from autotune.statistics import mad_sd, median

HARM_SD = 3.0
"""Reward lower by this many standard errors is harm."""
HELP_SD = 2.0
MEDIAN_ERROR = 1.2533
"""A median's standard error against the mean's; the price of not being led by one wild sample."""
DRIFT_LIMIT = 0.1
"""Median kl_step, nats/token, above which a change that raised it is harmful."""


def due(probation: Probation, ctx: Context) -> bool:
    """Whether settle and evaluate are over."""
    return ctx.rollout >= probation.since + ctx.pace.settle + ctx.pace.evaluate


def judge(probation: Probation, ctx: Context) -> Verdict:
    """The verdict once `due`; statistics are in it, so that a reader can judge the judge."""
    samples = ctx.history.samples(ctx.pace.evaluate, epoch=probation.epoch)
    rewards = ctx.history.values("reward_mean", samples)
    drift = ctx.history.values("kl_step", _untouched(probation, ctx))
    statistics = reward_difference(probation.rewards, rewards, ctx.noise)
    if drift:
        statistics["kl_step_after"] = median(drift)
    if probation.kl_step is not None:
        statistics["kl_step_before"] = probation.kl_step
    outcome, reason = _outcome(statistics)
    return Verdict(probation.rule, probation.knob, outcome, reason, probation.since, statistics)


def _untouched(probation: Probation, ctx: Context) -> list[Sample]:
    """The newest samples that show the change alone.

    A regulator may have mended the drift meanwhile, on another knob. That speaks for the regulator and not
    for the change, so what it made afterwards does not count.
    """
    since = ctx.history.samples(ctx.pace.settle + ctx.pace.evaluate, epoch=probation.epoch)
    alone = list(itertools.takewhile(lambda s: s.knobs == since[0].knobs, since))
    return alone[-ctx.pace.evaluate :]


def _outcome(statistics: dict[str, float]) -> tuple[Outcome, str]:
    sds = statistics.get("difference_sd")
    after, before = statistics.get("kl_step_after", 0.0), statistics.get("kl_step_before", 0.0)
    if sds is not None and sds < -HARM_SD:
        return Outcome.REVERTED, f"reward fell by {-sds:.1f} standard errors"
    if after > DRIFT_LIMIT and after > 2 * before:
        return Outcome.REVERTED, f"kl_step rose from {before:.2g} to {after:.2g}"
    if sds is None:
        return Outcome.INCONCLUSIVE, "no valid reward to judge by: stays"
    if sds > HELP_SD:
        return Outcome.KEPT, f"reward rose by {sds:.1f} standard errors"
    return Outcome.INCONCLUSIVE, f"reward moved by {sds:+.1f} standard errors: no harm seen, stays"


def reward_difference(before: Sequence[float], after: Sequence[float], noise: float) -> dict[str, float]:
    """Difference of two windows' medians in standard errors of the noise floor."""
    if not before or not after:
        return {}
    spread = max(noise, min(mad_sd(before), mad_sd(after)), 1e-9)
    error = MEDIAN_ERROR * spread * math.sqrt(1 / len(before) + 1 / len(after))
    difference = median(after) - median(before)
    return {
        "reward_before": median(before),
        "reward_after": median(after),
        "difference_sd": difference / error,
        "n_before": len(before),
        "n_after": len(after),
    }


def judge_engagement(rule: str, knob: str, engagement: Engagement, ctx: Context) -> Verdict:
    """A regulator's one judgement: it is back in its band; what did the reward do meanwhile?"""
    samples = ctx.history.samples(ctx.pace.evaluate)
    after = ctx.history.values("reward_mean", samples)
    before = [] if engagement.reward_before is None else [engagement.reward_before]
    statistics = reward_difference(before, after, ctx.noise)
    statistics |= {"start_value": engagement.start_value, "value": ctx.knob(knob)}
    reason = f"back in its band: {knob} {engagement.start_value:.3g} -> {ctx.knob(knob):.3g}"
    return Verdict(rule, knob, Outcome.KEPT, reason, engagement.since, statistics)
