"""KL to the reference: B3a, B3b and the law B3c at their edges, in open and in closed loop."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.decisions import Kind, Proposal
from autotune.metrics import Snapshot
from autotune.policies.base import Engagement
from autotune.policies.reference_kl import FarAndVolatile, KlBand, StuckNearReference
from tests.series import (
    FALLING,
    FLAT,
    QUICK,
    RISING,
    SAW,
    TREND,
    UNCLEAR,
    WINDOW,
    Series,
    ask,
    context,
    facts,
    run,
    snapshot,
    wants,
)

COEF = {"kl_coef": 0.1}
OF = facts(knobs=COEF)
B3A, B3B, B3C = StuckNearReference(), FarAndVolatile(), KlBand()
CLIMBING: list[float] = [0.10 + 0.01 * k for k in range(TREND)]
"""KL that rises by itself, well above the band."""


def trend(kl_ref: Series, reward_mean: Series = FLAT, **metrics: Series) -> list[Any]:
    return run(TREND, knobs=COEF, kl_ref=kl_ref, reward_mean=reward_mean, **metrics)


# ----------------------------------------------------------------------------------------- B3a


@pytest.mark.parametrize(
    ("kl_ref", "metrics", "speaks"),
    [
        (0.0099, {}, True),
        (0.0100, {}, False),
        (0.0101, {}, False),
        (0.0099, {"reward_mean": RISING}, False),
        (0.0099, {"reward_mean": FALLING}, False),
        (0.0099, {"reward_mean": UNCLEAR}, False),  # stagnation must be proven
        (0.0099, {"zero_std_fraction": 0.6}, False),
        (0.0099, {"reward_mean": 0.96}, False),
        ([0.001 + 0.001 * k for k in range(TREND)], {}, False),  # KL still rises by itself
        ([0.005] * 6 + [0.05, 0.005], {}, True),  # persistently: a window, not a sample
        ([0.05] * 7 + [0.005], {}, False),
    ],
)
def test_b3a_loosens_a_model_that_is_stuck_near_its_reference(
    kl_ref: Series, metrics: dict[str, Series], speaks: bool
) -> None:
    answer = ask(B3A, trend(kl_ref, **metrics), of=OF)
    assert wants(answer) == (("kl_coef", pytest.approx(0.08)) if speaks else None)


@pytest.mark.parametrize(
    ("now", "after"), [(0.01, 0.008), (0.00125, 0.001), (0.0011, 0.001), (0.001, None), (0.0005, None)]
)
def test_b3a_stops_where_the_source_says_adrift(now: float, after: float | None) -> None:
    answer = wants(ask(B3A, run(TREND, knobs={"kl_coef": now}, kl_ref=0.005)))
    assert answer == (None if after is None else ("kl_coef", pytest.approx(after)))


# ----------------------------------------------------------------------------------------- B3b


@pytest.mark.parametrize(
    ("kl_ref", "reward", "speaks"),
    [
        (0.149, SAW, False),
        (0.150, SAW, False),
        (0.151, SAW, True),
        (0.151, FLAT, False),
        (0.151, UNCLEAR, False),  # no wilder than its noise
        (0.151, RISING, False),
        ([0.05] * 7 + [0.9], SAW, False),
    ],
)
def test_b3b_tightens_when_far_and_volatile(kl_ref: Series, reward: Series, speaks: bool) -> None:
    answer = ask(B3B, trend(kl_ref, reward), of=OF)
    assert wants(answer) == (("kl_coef", pytest.approx(0.12)) if speaks else None)


@pytest.mark.parametrize("policy", [B3B, B3C], ids=["B3b", "B3c"])
def test_one_bad_rollout_is_not_volatile(policy: Any) -> None:
    assert ask(policy, trend(0.2, [0.5] * 5 + [0.2, 0.5, 0.5]), of=OF) is None


def test_b3b_calls_nothing_volatile_without_a_noise_floor() -> None:
    assert ask(B3B, trend(0.2, SAW, reward_std=0.0), of=OF) is None


# ----------------------------------------------------------------------------------------- B3c


@pytest.mark.parametrize(
    ("kl_ref", "reward", "direction"),
    [
        # below the band: only on a proven plateau with a steady KL
        (0.0299, FLAT, 0),  # the law asks for less than 2 %: not worth a move
        (0.0280, FLAT, -1),
        (0.0300, FLAT, 0),
        (0.0100, RISING, 0),
        (0.0100, UNCLEAR, 0),
        (0.0100, FALLING, 0),
        ([0.002 * (k + 1) for k in range(TREND)], FLAT, 0),  # KL rises by itself
        # inside
        (0.05, FALLING, 0),
        (0.0800, FALLING, 0),
        # above the band: only when it harms
        (0.0860, FALLING, +1),
        (0.2, FALLING, +1),
        (0.2, SAW, +1),
        (0.2, RISING, 0),
        (0.2, UNCLEAR, 0),
        (0.2, FLAT, 0),  # flat at a steady KL: converged
        (CLIMBING, FLAT, +1),  # KL is spent and buys nothing
        (CLIMBING, RISING, 0),
    ],
)
def test_b3c_steers_back_into_the_band(kl_ref: Series, reward: Series, direction: int) -> None:
    answer = ask(B3C, trend(kl_ref, reward), of=OF)
    if direction == 0:
        assert answer is None
        return
    assert isinstance(answer, Proposal) and answer.kind is Kind.REGULATOR
    assert (answer.value > 0.1) == (direction > 0)


@pytest.mark.parametrize(
    ("kl_ref", "factor"),
    [
        (0.16, 2**0.5),  # gain 1/2 of the log error, from the edge that was crossed
        (0.10, (0.10 / 0.08) ** 0.5),
        (0.0225, 0.75**0.5),
        (8.0, 1.5),  # slew limit
        (1e-5, 1 / 1.5),
    ],
)
def test_b3c_is_an_integral_law_in_log_space(kl_ref: float, factor: float) -> None:
    reward = FALLING if kl_ref > 0.08 else FLAT
    assert wants(ask(B3C, trend(kl_ref, reward), of=OF)) == ("kl_coef", pytest.approx(0.1 * factor))


@pytest.mark.parametrize(("now", "kl_ref", "after"), [(0.9, 1.0, 1.0), (0.012, 0.001, 0.01)])
def test_b3c_stays_within_ten_times_the_recipe(now: float, kl_ref: float, after: float) -> None:
    reward = FALLING if kl_ref > 0.08 else FLAT
    snapshots = run(TREND, knobs={"kl_coef": now}, kl_ref=kl_ref, reward_mean=reward)
    assert wants(ask(B3C, snapshots, of=OF)) == ("kl_coef", pytest.approx(after))


def test_b3c_rests_at_its_limit_instead_of_winding_up() -> None:
    top = run(TREND, knobs={"kl_coef": 1.0}, kl_ref=1.0, reward_mean=FALLING)
    assert ask(B3C, top, of=OF) is None


def test_b3c_waits_for_a_full_window_under_the_present_coefficient() -> None:
    falling = [0.9 - 0.03 * k for k in range(TREND + WINDOW)]
    old = run(TREND, knobs={"kl_coef": 0.09}, kl_ref=0.2, reward_mean=falling[:TREND])
    new = run(WINDOW, knobs=COEF, start=3 + TREND, kl_ref=0.2, reward_mean=falling[TREND:])
    assert ask(B3C, [*old, *new[:-1]], of=OF) is None
    assert ask(B3C, [*old, *new], of=OF) is not None


def test_b3c_does_not_call_a_saturated_reward_harmed() -> None:
    assert ask(B3C, trend(CLIMBING, 0.97), of=OF) is None
    assert ask(B3C, trend(CLIMBING, 0.94), of=OF) is not None


def test_b3c_does_not_wind_the_coefficient_down_while_a_young_run_climbs_from_zero() -> None:
    young = [0.0005 * 1.5**k for k in range(TREND)]
    for seen in range(1, TREND + 1):
        assert ask(B3C, trend(young)[:seen], of=OF) is None


@pytest.mark.parametrize(
    ("before", "kl_ref", "pushes"),
    [
        ([0.84 - 0.03 * k for k in range(TREND)], 0.2, True),  # it fell before the first push: KL's doing?
        (0.6, 0.2, False),  # it fell after: the law holds the model back
        (0.6, CLIMBING, True),  # KL goes on rising: it does not obey
    ],
)
def test_b3c_does_not_take_its_own_doing_for_harm(before: Series, kl_ref: Series, pushes: bool) -> None:
    old = run(TREND, knobs={"kl_coef": 0.09}, kl_ref=0.09, reward_mean=before)
    engaged = {"B3c": Engagement(old[-1].rollout, 0.09, 0.5)}
    now = run(TREND, knobs=COEF, start=old[-1].rollout + 1, kl_ref=kl_ref, reward_mean=FALLING)
    assert (ask(B3C, [*old, *now], of=OF, engagements=engaged) is not None) == pushes


@pytest.mark.parametrize(("before", "pushes"), [(0.6, True), (RISING, False), (0.5, False)])
def test_b3c_wants_a_fall_that_lasts_where_more_was_seen(before: Series, pushes: bool) -> None:
    """Eight rollouts that fall after eight that climbed, or stood lower, are noise more often than harm."""
    old = run(TREND, knobs=COEF, kl_ref=0.2, reward_mean=before)
    now = run(TREND, knobs=COEF, start=old[-1].rollout + 1, kl_ref=0.2, reward_mean=FALLING)
    assert (ask(B3C, [*old, *now], of=OF) is not None) == pushes


def test_b3c_does_not_push_where_it_cannot_tell_which_came_first() -> None:
    engaged = {"B3c": Engagement(2, 0.09, 0.5)}
    assert ask(B3C, trend(0.2, FALLING), of=OF, engagements=engaged) is None
    assert ask(B3C, trend(0.2, FALLING), of=OF) is not None


@pytest.mark.parametrize(("kl_ref", "rests"), [(0.0299, False), (0.03, True), (0.08, True), (0.0801, False)])
def test_b3c_knows_when_it_is_back(kl_ref: float, rests: bool) -> None:
    assert B3C.resting(context(trend(kl_ref), of=OF)) == rests
    assert not B3C.resting(context(trend(kl_ref)[: WINDOW - 1], of=OF))


def test_b3c_once_engaged_steers_inside_by_a_margin() -> None:
    engaged = {"B3c": Engagement(0, 0.08, 0.5)}
    just_inside = context(trend(0.0799, FALLING), of=OF, engagements=engaged)
    assert not B3C.resting(just_inside)


def test_b3c_leaves_a_coefficient_of_zero_alone() -> None:
    zero = {"kl_coef": 0.0}
    snapshots = run(TREND, knobs=zero, kl_ref=0.2, reward_mean=FALLING)
    assert ask(B3C, snapshots, of=facts(knobs=zero)) is None


@settings(QUICK, max_examples=15)
@given(st.floats(0.0005, 0.05))
def test_b3c_holds_its_band_in_closed_loop_and_never_turns_negative(strength: float) -> None:
    """On the textbook plant, KL = strength / kl_coef with a lag, from 0.005 to 0.5 nats."""
    start = coef = 0.1
    kl, harmful = strength / coef, strength / coef > 0.08
    seen: list[Snapshot] = []
    for t in range(120):
        kl += 0.6 * (strength / coef - kl)
        reward = -0.03 * t if harmful else 0.5
        seen = [*seen[-TREND:], snapshot(3 + t, {"kl_coef": coef}, kl_ref=kl, reward_mean=reward)]
        answer = wants(ask(B3C, seen, of=OF))
        if answer is not None:
            assert start / 10 * (1 - 1e-9) <= answer[1] <= start * 10 * (1 + 1e-9)
            assert abs(math.log(answer[1] / coef)) <= math.log(1.5) + 1e-9
            coef = answer[1]
    at_limit = math.isclose(coef, start / 10) or math.isclose(coef, start * 10)
    assert 0.0285 <= strength / coef <= 0.0835 or at_limit


# ---------------------------------------------------------------------------------------- none


@pytest.mark.parametrize("policy", [B3A, B3B, B3C])
def test_without_a_reference_model_the_kl_rules_say_why_they_are_silent(policy: Any) -> None:
    assert "no reference model" in policy.blocked(facts(has_reference=False), {})
    assert policy.blocked(facts(), {}) == ""


def test_the_literal_profile_keeps_the_letter_of_b3c() -> None:
    from autotune.policies import build_policies

    literal = {policy.id: policy for policy in build_policies("literal", {})}
    assert ask(literal["B3c"], trend(0.2, RISING), of=OF, literal=True) is not None
    assert ask(literal["B3c"], trend(0.2, RISING), of=OF) is None
