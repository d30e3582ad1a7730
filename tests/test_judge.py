"""Judging a change: clear harm is reverted, clear help is kept, and noise convicts nobody."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decisions import Outcome
from autotune.judge import MEDIAN_ERROR, due, judge, judge_engagement, reward_difference
from autotune.ledger import Probation
from autotune.policies.base import Engagement
from tests.series import NOISE, PACE, QUICK, Series, context, run

SINCE = 10
ERROR = MEDIAN_ERROR * NOISE * math.sqrt(1 / PACE.window + 1 / PACE.evaluate)
"""Standard error of the difference of a before-window and an after-window."""


def probation(kl_step: float | None = 0.01) -> Probation:
    knob, rewards = "ppo_mini_batch_size", (0.5,) * PACE.window
    return Probation("A1", knob, {knob: 16}, {knob: 8}, SINCE, 1, rewards, kl_step)


def verdict(reward: Series) -> Outcome:
    after = PACE.settle + PACE.evaluate
    snapshots = run(after, start=SINCE + 1, epoch=1, reward_mean=reward)
    return judge(probation(), context(snapshots)).outcome


@pytest.mark.parametrize(("later", "expected"), [(4, False), (5, True), (6, True)])
def test_a_change_is_due_after_settle_and_evaluate(later: int, expected: bool) -> None:
    assert PACE.settle + PACE.evaluate == 5
    assert due(probation(), context(run(1, start=SINCE + later, epoch=1))) == expected


@pytest.mark.parametrize(
    ("sds", "expected"),
    [
        (-10.0, Outcome.REVERTED),
        (-3.01, Outcome.REVERTED),
        (-2.99, Outcome.INCONCLUSIVE),
        (0.0, Outcome.INCONCLUSIVE),
        (1.99, Outcome.INCONCLUSIVE),
        (2.01, Outcome.KEPT),
    ],
)
def test_the_reward_convicts_clear_harm_only(sds: float, expected: Outcome) -> None:
    assert verdict(reward=0.5 + sds * ERROR) is expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (0.01, 0.100, Outcome.INCONCLUSIVE),
        (0.01, 0.101, Outcome.REVERTED),
        (0.06, 0.119, Outcome.INCONCLUSIVE),  # it was high already: not doubled
        (0.06, 0.121, Outcome.REVERTED),
        (0.01, [0.2, 0.2, 0.01, 0.01, 0.2], Outcome.INCONCLUSIVE),  # settling does not count: median .01
        (0.01, [0.01, 0.01, 0.2, 0.2, 0.01], Outcome.REVERTED),
        (None, 0.2, Outcome.REVERTED),
    ],
)
def test_a_drift_that_left_its_band_convicts_too(
    before: float | None, after: Series, expected: Outcome
) -> None:
    snapshots = run(5, start=SINCE + 1, epoch=1, kl_step=after)
    assert judge(probation(kl_step=before), context(snapshots)).outcome is expected


def test_a_drift_that_a_regulator_mended_still_convicts_the_change() -> None:
    """X1 lowered the rate meanwhile: the two samples before that show what the change did."""
    alone = run(2, start=SINCE + 1, epoch=1, kl_step=0.2)
    lower = {"actor_learning_rate": 1e-4}
    mended = run(3, knobs=lower, start=SINCE + 3, epoch=1, kl_step=0.02)
    found = judge(probation(), context([*alone, *mended]))
    assert found.outcome is Outcome.REVERTED and found.statistics["kl_step_after"] == 0.2


def test_settling_rollouts_and_other_epochs_are_not_judged() -> None:
    assert verdict(reward=[0.0, 0.0, 0.5, 0.5, 0.5]) is Outcome.INCONCLUSIVE
    other = run(5, start=SINCE + 1, epoch=7, reward_mean=0.0)
    assert judge(probation(), context(other)).outcome is not Outcome.REVERTED


def test_the_verdict_carries_its_statistics() -> None:
    snapshots = run(5, start=SINCE + 1, epoch=1, reward_mean=0.3, kl_step=0.05)
    found = judge(probation(), context(snapshots))
    assert (found.rule, found.knob, found.since_rollout) == ("A1", "ppo_mini_batch_size", SINCE)
    assert found.statistics["reward_before"] == pytest.approx(0.5)
    assert found.statistics["reward_after"] == pytest.approx(0.3)
    assert found.statistics["difference_sd"] == pytest.approx(-0.2 / ERROR)
    assert (found.statistics["n_before"], found.statistics["n_after"]) == (PACE.window, PACE.evaluate)
    assert found.statistics["kl_step_after"] == 0.05 and found.statistics["kl_step_before"] == 0.01
    assert "fell by" in found.reason


@QUICK
@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=12),
    st.lists(st.floats(-1, 1), min_size=1, max_size=12),
    st.floats(0.01, 1),
    st.floats(-5, 5),
)
def test_the_difference_ignores_the_level_and_changes_sign_with_its_sides(
    before: list[float], after: list[float], noise: float, shift: float
) -> None:
    here = reward_difference(before, after, noise)["difference_sd"]
    moved = reward_difference([v + shift for v in before], [v + shift for v in after], noise)
    assert moved["difference_sd"] == pytest.approx(here, rel=1e-6, abs=1e-6)
    assert reward_difference(after, before, noise)["difference_sd"] == pytest.approx(-here)
    assert abs(here) >= 0.0 and reward_difference(before, after, 10 * noise)["difference_sd"] * here >= 0


def test_without_rewards_there_is_no_difference() -> None:
    assert reward_difference([], [0.5], 0.1) == {} == reward_difference([0.5], [], 0.1)


def test_a_verdict_without_rewards_says_that_nothing_was_measured() -> None:
    snapshots = run(5, start=SINCE + 1, epoch=1, reward_mean=None, kl_step=None)
    assert "moved by" not in judge(probation(), context(snapshots)).reason


def test_one_wild_sample_convicts_nobody() -> None:
    assert verdict(reward=[0.5, 0.5, 0.5, -50.0, 0.5]) is not Outcome.REVERTED


def test_a_regulator_is_judged_once_it_is_back_and_says_what_moved() -> None:
    snapshots = run(6, knobs={"actor_learning_rate": 1e-4}, reward_mean=0.6)
    found = judge_engagement("X1", "actor_learning_rate", Engagement(4, 3e-4, 0.5), context(snapshots))
    assert found.outcome is Outcome.KEPT and found.since_rollout == 4
    assert "0.0003 -> 0.0001" in found.reason
    assert found.statistics["reward_before"] == 0.5 and found.statistics["value"] == 1e-4
    none = judge_engagement("X1", "actor_learning_rate", Engagement(4, 3e-4, None), context(snapshots))
    assert "difference_sd" not in none.statistics
