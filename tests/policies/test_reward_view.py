"""What the reward proves: a standstill may use more samples than a short trend window has."""

from __future__ import annotations

import pytest

from autotune.policies.base import PLATEAU_SAMPLES, pace_for
from autotune.statistics import Movement
from tests.series import NOISE, context, run

JITTER = [0.5 + NOISE * (-1) ** k for k in range(60)]
"""A standstill with the noise of sampling."""


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (8, Movement.UNDETERMINED),
        (PLATEAU_SAMPLES - 1, Movement.UNDETERMINED),
        (PLATEAU_SAMPLES, Movement.PLATEAU),
        (PLATEAU_SAMPLES + 1, Movement.PLATEAU),
    ],
)
def test_twenty_samples_prove_a_standstill_that_eight_cannot(seen: int, expected: Movement) -> None:
    assert context(run(seen, reward_mean=JITTER)).reward.movement is expected


@pytest.mark.parametrize(
    ("rise", "expected"),
    [(1.0, Movement.PLATEAU), (2.0, Movement.UNDETERMINED), (3.0, Movement.UNDETERMINED)],
)
def test_a_slow_climb_over_twenty_samples_is_no_standstill(rise: float, expected: Movement) -> None:
    """`rise` in noise standard deviations over the window; the gain of interest is 2."""
    climb = [r + rise * NOISE * k / PLATEAU_SAMPLES for k, r in enumerate(JITTER)]
    assert context(run(PLATEAU_SAMPLES, reward_mean=climb)).reward.movement is expected


def test_a_trend_that_is_proven_is_not_overruled() -> None:
    series = [0.5] * (PLATEAU_SAMPLES - 8) + [0.5 + 0.4 * NOISE * k for k in range(8)]
    assert context(run(PLATEAU_SAMPLES, reward_mean=series)).reward.movement is Movement.RISING


def test_samples_of_another_epoch_prove_nothing() -> None:
    old = run(12, reward_mean=JITTER, epoch=0)
    new = run(8, reward_mean=JITTER, epoch=1, start=15)
    assert context([*old, *new]).reward.movement is Movement.UNDETERMINED


def test_a_long_trend_window_needs_no_help() -> None:
    pace = pace_for(1.0)
    assert (
        context(run(PLATEAU_SAMPLES, reward_mean=JITTER), pace=pace).reward.movement is Movement.UNDETERMINED
    )
    assert context(run(50, reward_mean=JITTER), pace=pace).reward.movement is Movement.PLATEAU
