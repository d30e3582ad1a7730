"""The actor's learning rate: X1 and B5a at their edges."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decisions import Kind, Proposal
from autotune.policies.base import Engagement
from autotune.policies.batch import UpdatesInGoldenRange
from autotune.policies.learning_rate import SawTooth, StepKlTrustRegion
from tests.series import (
    FALLING,
    FLAT,
    NOISE,
    QUICK,
    RISING,
    SAW,
    TREND,
    UNCLEAR,
    WINDOW,
    Series,
    ask,
    context,
    run,
    wants,
)

RATE, START = "actor_learning_rate", 3e-4
X1 = StepKlTrustRegion(target=0.01, low=0.5, high=3.0, low_healthy=0.2, rest=1.5, slew=4.0, samples=3)
"""Parameters of the test's own, so that the tables stay true when the defaults are tuned."""
B5A = SawTooth()
ENGAGED = {"X1": Engagement(0, START, 0.5)}


# ------------------------------------------------------------------------------------------ X1


@pytest.mark.parametrize(
    ("kl_step", "factor"),
    [
        # engages outside [1/2, 3] x the target of 0.01
        (0.0049, (0.01 / 0.0049) ** 0.5),
        (0.0050, None),
        (0.0051, None),
        (0.0100, None),
        (0.0299, None),
        (0.0300, None),
        (0.0301, (0.01 / 0.0301) ** 0.5),
        # in proportion, at most / 4 and x 10
        (0.0025, 2.0),
        (0.04, 0.5),
        (0.01 / 16, 4.0),
        (0.01 / 81, 9.0),
        (0.01 / 100, 10.0),
        (1e-5, 10.0),
        (0.16, 0.25),
        (0.29, 0.25),
        (0.0, 10.0),
    ],
)
def test_x1_moves_in_proportion_outside_its_band(kl_step: float, factor: float | None) -> None:
    answer = ask(X1, run(3, kl_step=kl_step))
    assert wants(answer) == (None if factor is None else (RATE, pytest.approx(START * factor)))
    assert answer is None or (isinstance(answer, Proposal) and answer.kind is Kind.REGULATOR)


@pytest.mark.parametrize(
    ("kl_step", "moves", "rests"),
    [
        (0.01 / 1.51, True, False),
        (0.0067, False, True),
        (0.0149, False, True),
        (0.0150, False, True),
        (0.0151, True, False),
    ],
)
def test_x1_once_engaged_steers_until_it_is_close(kl_step: float, moves: bool, rests: bool) -> None:
    snapshots = run(WINDOW, kl_step=kl_step)
    assert (ask(X1, snapshots, engagements=ENGAGED) is not None) == moves
    assert X1.resting(context(snapshots, engagements=ENGAGED)) == rests
    assert ask(X1, snapshots) is None, "it would not have engaged on this"


@pytest.mark.parametrize(
    ("kl_step", "moves"), [(0.0049, False), (0.0020, False), (0.0019, True), (0.0301, True)]
)
def test_x1_lets_a_run_that_was_healthy_converge(kl_step: float, moves: bool) -> None:
    answer = ask(X1, run(WINDOW, kl_step=kl_step), anchors={"X1": START})
    assert (answer is not None) == moves


@pytest.mark.parametrize(
    ("kl_step", "reward", "healthy"),
    [
        (0.01, RISING, True),
        (0.005, RISING, True),
        (0.0049, RISING, False),
        (0.0301, RISING, False),
        (0.01, FLAT, False),
        (0.01, UNCLEAR, False),
    ],
)
def test_healthy_is_a_drift_in_band_under_a_rising_reward(
    kl_step: float, reward: list[float], healthy: bool
) -> None:
    assert X1.healthy(context(run(TREND, kl_step=kl_step, reward_mean=reward))) == healthy


def test_the_rules_that_share_a_target_share_its_value() -> None:
    assert StepKlTrustRegion().target == UpdatesInGoldenRange().target


def test_x1_does_not_rest_before_a_full_window() -> None:
    assert not X1.resting(context(run(WINDOW - 1, kl_step=0.01), engagements=ENGAGED))


@pytest.mark.parametrize(
    ("drift", "speaks"),
    [
        ([0.05], False),
        ([0.05, 0.05], False),  # not extreme: two are not enough
        ([0.05, 0.05, 0.05], True),
        ([0.161, 0.2], True),  # even the milder of two asks for the largest step
        ([0.159, 0.2], False),
        ([0.0006, 0.0005], True),
        ([0.0007, 0.0005], False),
        ([0.0005], False),
        ([0.01, 0.29, 0.01], False),  # one wild sample
    ],
)
def test_x1_needs_samples_for_a_move_of_this_size(drift: list[float], speaks: bool) -> None:
    assert (ask(X1, run(len(drift), kl_step=drift)) is not None) == speaks


def test_x1_counts_only_samples_made_under_the_present_rate_and_updates() -> None:
    old = run(6, kl_step=0.1)
    for knob, value in ((RATE, 1e-4), ("ppo_mini_batch_size", 32), ("ppo_epochs", 2)):
        new = run(2, start=9, knobs={knob: value}, kl_step=0.05)
        assert ask(X1, [*old, *new]) is None, knob
        assert ask(X1, [*old, *new, *run(1, start=11, knobs={knob: value}, kl_step=0.05)]) is not None


@pytest.mark.parametrize(
    ("drift", "speaks"),
    [
        ([0.06, 0.05, 0.04], False),  # Adam's start drifts three to five times more: no evidence
        ([0.0001, 0.0001, 0.0001], True),  # and yet timid: an upper bound is enough
        ([0.0001, 0.0051, 0.0001], False),
        ([0.0001], False),
    ],
)
def test_x1_takes_adams_start_for_an_upper_bound(drift: list[float], speaks: bool) -> None:
    assert (ask(X1, run(len(drift), start=0, kl_step=drift)) is not None) == speaks


def test_x1_forgets_adams_start_once_it_is_over() -> None:
    start, after = run(3, start=0, kl_step=0.06), run(3, start=3, kl_step=0.012)
    assert ask(X1, [*start, *after]) is None


@pytest.mark.parametrize(
    ("metrics", "speaks"),
    [
        ({"reward_mean": FLAT}, True),
        ({"reward_mean": UNCLEAR}, True),
        ({"reward_mean": RISING}, False),  # do not touch what learns
        ({"reward_mean": FALLING}, False),
        ({"reward_mean": 0.949}, True),
        ({"reward_mean": 0.950}, False),
        ({"zero_std_fraction": 0.79}, True),
        ({"zero_std_fraction": 0.80}, False),  # a dead model looks timid
    ],
)
def test_x1_raises_only_while_the_reward_does_not_rise_and_there_is_a_signal(
    metrics: dict[str, Series], speaks: bool
) -> None:
    assert (ask(X1, run(TREND, kl_step=0.001, **metrics)) is not None) == speaks


@pytest.mark.parametrize("reward", [FLAT, RISING, FALLING, [0.97] * TREND])
def test_x1_lowers_whatever_the_reward_does(reward: list[float]) -> None:
    assert ask(X1, run(TREND, kl_step=0.1, reward_mean=reward, zero_std_fraction=1.0)) is not None


@pytest.mark.parametrize(
    ("now", "kl_step", "after"),
    [(START * 20, 1e-4, START * 50), (START / 20, 0.2, START / 50), (START * 50, 1e-4, START * 50)],
)
def test_x1_stays_within_fifty_times_the_recipe(now: float, kl_step: float, after: float) -> None:
    answer = wants(ask(X1, run(3, knobs={RATE: now}, kl_step=kl_step)))
    assert answer == (RATE, pytest.approx(after))


@QUICK
@given(st.floats(1e-6, 0.3), st.floats(1.0, 2.5))
def test_x1_does_not_overshoot_a_plant_with_a_steeper_exponent(kl_step: float, exponent: float) -> None:
    """kl_step ~ lr^a, a up to the measured 1.6 and beyond: one move never crosses the band."""
    answer = wants(ask(X1, run(3, kl_step=kl_step)))
    if answer is None:
        return
    after = kl_step * (answer[1] / START) ** exponent
    low, high = X1.low * X1.target, X1.high * X1.target
    if kl_step < X1.target:
        assert after <= high
    else:
        assert after >= low
    closer = abs(math.log(after / X1.target)) <= abs(math.log(kl_step / X1.target))
    assert closer, (kl_step, after)


def test_x1_does_not_raise_while_the_signal_is_unknown() -> None:
    snapshots = run(TREND, kl_step=0.001, zero_std_fraction=[0.9] * 7 + [None])
    assert ask(X1, snapshots) is None


# ----------------------------------------------------------------------------------------- B5a


def saw(drop: float) -> list[float]:
    """Three teeth, each a rise of `drop` over two rollouts and a sharp fall."""
    return [0.5 + drop * x for x in (0.0, 0.5, 1.0, 0.0, 0.5, 1.0, 0.0, 0.5)]


SHARP = 3.0 * NOISE * math.sqrt(2)
"""A sharp drop: three standard deviations of a difference."""


@pytest.mark.parametrize(
    ("reward", "speaks"),
    [
        (SAW, True),
        (saw(1.7 * SHARP), True),
        (saw(0.9 * SHARP), False),  # no drop is sharp
        (FLAT, False),
        (RISING, False),
        (FALLING, False),
        (UNCLEAR, False),
        ([0.3, 0.4, 0.5, 0.6, 0.7, 0.4, 0.3, 0.2], False),  # one tooth is not a saw
    ],
)
def test_b5a_lowers_the_rate_when_the_reward_saw_tooths(reward: list[float], speaks: bool) -> None:
    answer = wants(ask(B5A, run(TREND, reward_mean=reward)))
    assert answer == ((RATE, pytest.approx(0.75 * START)) if speaks else None)


@pytest.mark.parametrize(("drops", "speaks"), [(1, True), (2, True), (3, False)])
def test_b5a_counts_sharp_drops(drops: int, speaks: bool) -> None:
    assert (ask(SawTooth(drops=drops), run(TREND, reward_mean=SAW)) is not None) == speaks


@pytest.mark.parametrize(("share", "speaks"), [(0.66, True), (2 / 3, True), (0.67, False)])
def test_b5a_counts_turning_points(share: float, speaks: bool) -> None:
    """`SAW` turns at four of its six inner points."""
    assert (ask(SawTooth(turning=share), run(TREND, reward_mean=SAW)) is not None) == speaks


def test_b5a_is_silent_without_a_noise_floor_or_a_full_window() -> None:
    assert ask(B5A, run(TREND, reward_mean=SAW, reward_std=0.0)) is None
    assert ask(B5A, run(TREND - 1, reward_mean=SAW[1:])) is None


def test_b5a_does_not_mix_config_epochs() -> None:
    from dataclasses import replace

    snapshots = run(TREND, reward_mean=SAW)
    mixed: list[Any] = [*snapshots[:WINDOW], *(replace(s, epoch=1) for s in snapshots[WINDOW:])]
    assert ask(B5A, mixed) is None


def test_b5a_takes_its_noise_floor_from_the_whole_window() -> None:
    """Rollouts of few prompts often have no spread at all; the newest four must not decide."""
    noisy = [0.5 + NOISE * (-1) ** k for k in range(TREND)]
    spread = [0.5] * (TREND - 4) + [0.02] * 4
    assert ask(SawTooth(), run(TREND, reward_mean=noisy, reward_std=spread)) is None
    narrow = [0.02] * TREND
    assert ask(SawTooth(), run(TREND, reward_mean=noisy, reward_std=narrow)) is not None
