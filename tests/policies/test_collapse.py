"""X2: the veto and the collapse at their edges."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune.metrics import Reading, Validity
from autotune.policies.base import Alarm, Emergency
from autotune.policies.collapse import VetoAndCollapse
from tests.series import NOISE, Series, ask, run, snapshot

X2 = VetoAndCollapse()


def kind(answer: Any) -> str:
    """`veto`, `collapse`, `alarm` or `quiet`."""
    if isinstance(answer, Emergency):
        return {"undo": "veto", "checkpoint": "collapse"}[answer.restore]
    return "alarm" if isinstance(answer, Alarm) else "quiet"


# ---------------------------------------------------------------------------------------- veto


@pytest.mark.parametrize(("kl_step", "expected"), [(0.15, "quiet"), (0.151, "veto")])
def test_right_after_an_undone_rollout_half_the_drift_is_too_much(kl_step: float, expected: str) -> None:
    assert kind(ask(X2, [snapshot(1, kl_step=kl_step)], vetoes=1)) == expected
    assert kind(ask(VetoAndCollapse(kl_step_limit=0.1), [snapshot(1, kl_step=0.11)], vetoes=1)) == "veto"


@pytest.mark.parametrize(
    ("kl_step", "expected"), [(0.29, "quiet"), (0.30, "quiet"), (0.301, "veto"), (2.1, "veto")]
)
def test_one_rollout_may_drift_by_0_3_nats_and_no_more(kl_step: float, expected: str) -> None:
    answer = ask(X2, [snapshot(0, kl_step=kl_step)])
    assert kind(answer) == expected
    if isinstance(answer, Emergency):
        assert answer.factor == pytest.approx(1 / 3) and answer.before_rollout == 0 and not answer.stop


@pytest.mark.parametrize("metric", ["loss", "grad_norm", "kl_step"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "nan"])
def test_a_loss_gradient_or_drift_that_is_not_finite_is_a_veto(metric: str, value: Any) -> None:
    assert kind(ask(X2, [*run(6), snapshot(9, **{metric: value})])) == "veto"


@pytest.mark.parametrize("metric", ["reward_mean", "entropy", "kl_ref", "clip_ratio"])
def test_other_metrics_that_are_not_finite_are_no_veto(metric: str) -> None:
    assert kind(ask(X2, [*run(6), snapshot(9, **{metric: math.nan})])) == "quiet"


@pytest.mark.parametrize("state", [Validity.MISSING, Validity.NOT_LOGGED, Validity.FROZEN])
def test_a_drift_that_is_not_known_is_no_veto(state: Validity) -> None:
    unknown = {"kl_step": Reading(None, state, "why")}
    assert kind(ask(X2, [snapshot(0, readings=unknown)])) == "quiet"


# -------------------------------------------------------------------------------------- reward

EDGE = 0.5 - 4 * NOISE
"""Four spreads of a flat reward of 0.5 whose MAD is 0: the noise floor is the spread."""
SLOW = 0.5 - 3 * NOISE


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ([EDGE + 1e-4], "quiet"),
        ([EDGE - 1e-4], "alarm"),
        ([EDGE - 1e-4, EDGE + 1e-4], "quiet"),
        ([EDGE + 1e-4, EDGE - 1e-4], "alarm"),
        ([EDGE - 1e-4, EDGE - 1e-4], "collapse"),
        ([SLOW - 1e-4, SLOW - 1e-4], "quiet"),  # a slow fall takes three below three spreads
        ([SLOW - 1e-4, SLOW - 1e-4, SLOW - 1e-4], "collapse"),
        ([SLOW - 1e-4, SLOW + 1e-4, SLOW - 1e-4], "quiet"),
        ([0.0, 0.0], "collapse"),
        ([0.0, 0.5, 0.0], "alarm"),
    ],
)
def test_two_rewards_running_far_below_their_median_are_a_collapse(tail: list[float], expected: str) -> None:
    rewards: Series = [0.5] * 20 + tail
    assert kind(ask(X2, run(20 + len(tail), reward_mean=rewards))) == expected


def test_the_spread_is_the_mad_where_that_is_wider_than_the_noise() -> None:
    wide = [0.5, 0.2, 0.8] * 7  # MAD 0.3: four spreads below the median is out of reach
    assert kind(ask(X2, run(23, reward_mean=[*wide, 0.2, 0.2]))) == "quiet"


def test_a_crash_to_zero_in_the_middle_of_a_climb_is_a_collapse() -> None:
    climb = [0.18 + 0.014 * k for k in range(20)]
    assert kind(ask(X2, run(22, reward_mean=[*climb, 0.0, 0.0]))) == "collapse"


def test_the_crash_does_not_inflate_its_own_baseline() -> None:
    """With the crash rows inside, three rewards of 0.5 and two of 0 would have a MAD of 0.5."""
    assert kind(ask(X2, run(5, reward_mean=[0.5, 0.5, 0.5, 0.0, 0.0]))) == "collapse"


def test_collapse_is_live_from_the_third_rollout_on() -> None:
    crash = [0.5, 0.5, 0.0, 0.0]
    assert [kind(ask(X2, run(4, start=0, reward_mean=crash)[:n])) for n in (1, 2, 3, 4)] == [
        "quiet",
        "quiet",
        "alarm",
        "collapse",
    ]


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ([0.26, 0.45, 0.26, 0.45, 0.26], "alarm"),  # the first sign of a single reward, no more
        ([0.24, 0.45, 0.24, 0.45, 0.24], "collapse"),
        ([0.24, 0.45, 0.24, 0.24, 0.45], "quiet"),  # it came back
        ([0.24, 0.45, 0.45, 0.45, 0.24], "alarm"),  # two of five are no median
    ],
)
def test_five_rewards_whose_median_is_below_half_of_the_level_are_a_collapse(
    tail: list[float], expected: str
) -> None:
    rewards: Series = [0.5] * 18 + tail
    assert kind(ask(X2, run(23, reward_mean=rewards))) == expected


@pytest.mark.parametrize(("low", "expected"), [(0.045, "quiet"), (0.035, "collapse")])
def test_half_of_a_small_level_must_be_beyond_four_errors_of_a_median(low: float, expected: str) -> None:
    """Level 0.1, noise 0.024: the median of five is known to 0.015, a single reward is not."""
    rewards: Series = [0.1] * 18 + [low] * 5
    assert kind(ask(X2, run(23, reward_mean=rewards, reward_std=0.3))) == expected


def test_a_slow_fall_is_noticed_before_single_rewards_are_far_below_their_own_past() -> None:
    """A twentieth is left after 15 rollouts; each reward is near the one before, and the spread widens."""
    healthy = [0.207, 0.150, 0.203, 0.229, 0.164, 0.213, 0.271]
    falling = [0.227, 0.234, 0.152, 0.154, 0.104, 0.131, 0.102, 0.113, 0.072]
    rewards, spreads = healthy + falling, [math.sqrt(v * (1 - v)) for v in healthy + falling]
    told = run(16, start=0, reward_mean=rewards, reward_std=spreads)
    found = [kind(ask(X2, told[:n])) for n in range(8, 17)]
    assert found == ["quiet"] * 8 + ["collapse"]


def test_a_reward_that_starts_at_zero_is_no_collapse() -> None:
    assert kind(ask(X2, run(8, start=0, reward_mean=0.0, reward_std=0.0))) == "quiet"


@pytest.mark.parametrize("metric", ["reward_mean", "reward_std"])
def test_a_missing_reward_is_no_crash(metric: str) -> None:
    series: dict[str, Series] = {metric: [0.5] * 20 + [None, None]}
    assert kind(ask(X2, run(22, **series))) == "quiet"


@pytest.mark.parametrize(("usual", "dip"), [(1.0, 511 / 512), (0.0, -1 / 512)])
def test_a_constant_reward_may_dip_by_one_response(usual: float, dip: float) -> None:
    spread = math.sqrt(1 / 512 * 511 / 512)
    snapshots = run(22, reward_mean=[usual] * 20 + [dip] * 2, reward_std=[0.0] * 20 + [spread] * 2)
    assert kind(ask(X2, snapshots)) == "quiet"


# ---------------------------------------------------------------------------- gradient, length


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        ([4.49, 4.49, 4.49], "quiet"),  # three times the usual 1.5
        ([4.51, 4.51, 4.51], "collapse"),
        ([9.0, 9.0], "quiet"),
        ([9.0, 1.5, 9.0], "quiet"),
    ],
)
def test_three_wild_gradient_norms_running_are_a_collapse(tail: list[float], expected: str) -> None:
    assert kind(ask(X2, run(20 + len(tail), grad_norm=[1.5] * 20 + tail))) == expected


def test_gradients_are_wild_only_against_five_usual_ones() -> None:
    assert kind(ask(X2, run(7, grad_norm=[1.5] * 4 + [9.0] * 3))) == "quiet"
    assert kind(ask(X2, run(8, grad_norm=[1.5] * 5 + [9.0] * 3))) == "collapse"


def test_gradients_of_rollouts_without_signal_are_no_baseline() -> None:
    """Trainers that print the last update's norm print 0 whenever no group had mixed rewards."""
    norms = [0.0, 0.0, 1.5] * 4 + [1.6] * 3
    assert kind(ask(X2, run(len(norms), grad_norm=norms))) == "quiet"


def test_the_gradients_of_the_first_rewards_are_no_collapse() -> None:
    """A cap below the answers gives no reward and next to no gradient; once it is raised, both come."""
    norms = [0.001] * 12 + [0.7] * 3
    assert kind(ask(X2, run(15, grad_norm=norms, zero_std_fraction=[0.95] * 12 + [0.3] * 3))) == "quiet"
    assert kind(ask(X2, run(15, grad_norm=norms, zero_std_fraction=0.9))) == "collapse"


FEW: list[float] = [0.4, 0.9, 0.4, 0.9]
"""Level 0.65, and a spread so wide that four of it are out of reach."""


@pytest.mark.parametrize(
    ("tail", "expected"),
    [([0.33], "quiet"), ([0.32], "alarm"), ([0.32, 0.33], "quiet"), ([0.32, 0.32], "collapse")],
)
def test_half_of_the_level_is_a_sign_however_wide_the_few_rewards_were_spread(
    tail: list[float], expected: str
) -> None:
    rewards: Series = [*FEW, *tail]
    assert kind(ask(X2, run(len(rewards), reward_mean=rewards))) == expected


@pytest.mark.parametrize(
    ("rewards", "spread"),
    [
        ([*FEW, 0.3, 0.3], 4.0),  # sampling alone reaches it
        ([*FEW, 0.3, 0.3], None),  # what sampling reaches is not known
        ([0.4, 0.9, -0.1, 0.9, 0.3, 0.3], 0.5),  # a reward whose zero means nothing
        ([*FEW, 0.2, *FEW, 0.3, 0.3], 0.5),  # the baseline has been there
    ],
)
def test_half_of_the_level_is_not_always_a_sign(rewards: list[float], spread: float | None) -> None:
    snapshots = run(len(rewards), reward_mean=rewards, reward_std=spread)
    assert kind(ask(X2, snapshots)) == "quiet"


SINKING: list[float] = [0.6 - 0.02 * k for k in range(10)]


@pytest.mark.parametrize(
    ("tail", "reward", "expected"),
    [
        ([300.0, 300.0], SINKING, "collapse"),
        ([299.0, 299.0], SINKING, "quiet"),
        ([300.0, 300.0], [0.5] * 10, "alarm"),  # the length clause alone is only an alarm
        ([50.0, 50.0], SINKING, "quiet"),
        ([49.0, 49.0], SINKING, "collapse"),
        ([300.0, 100.0], SINKING, "quiet"),
        ([100.0, 300.0], SINKING, "quiet"),
    ],
)
def test_length_counts_together_with_a_falling_reward(
    tail: list[float], reward: list[float], expected: str
) -> None:
    snapshots = run(10, response_length_mean=[100.0] * 8 + tail, reward_mean=reward)
    assert kind(ask(X2, snapshots)) == expected


def test_a_length_has_a_baseline_after_three_rollouts() -> None:
    lengths = [100.0, 100.0, 100.0, 300.0, 300.0]
    assert kind(ask(X2, run(5, response_length_mean=lengths))) == "alarm"
    assert kind(ask(X2, run(4, response_length_mean=lengths[1:]))) == "quiet"


# -------------------------------------------------------------------------------------- rescue


def test_the_rescue_goes_back_to_before_the_onset() -> None:
    snapshots = run(22, start=0, reward_mean=[0.5] * 20 + [0.0, 0.0])
    answer = ask(X2, snapshots)
    assert isinstance(answer, Emergency)
    assert answer.before_rollout == 19, "rollout 20 was the first that sampled badly"


@pytest.mark.parametrize(("before", "factor", "stop"), [(0, 0.5, False), (1, 0.25, False), (2, 0.125, True)])
def test_half_the_rate_then_a_quarter_then_the_run_stops(before: int, factor: float, stop: bool) -> None:
    snapshots = run(22, reward_mean=[0.5] * 20 + [0.0, 0.0])
    answer = ask(X2, snapshots, emergencies=before)
    assert isinstance(answer, Emergency)
    assert answer.factor == pytest.approx(factor) and answer.stop == stop


def test_rewards_from_before_a_restore_are_another_models() -> None:
    snapshots = run(22, start=0, reward_mean=[0.5] * 20 + [0.0, 0.0])
    assert kind(ask(X2, snapshots, since_restore=19)) == "quiet"
