"""The decision statistics against scipy, and the properties that a rule relies on."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.statistics import (
    Movement,
    Trend,
    detrended_variance,
    mad_sd,
    median,
    movement,
    reward_noise_sd,
    theil_sen,
    turning_points,
    variance_ratio_limit,
)
from tests.series import QUICK

scipy_stats = pytest.importorskip("scipy.stats")

FEW = st.integers(-1000, 1000)
"""Whole numbers: exact in binary, so that equivariance holds to the last bit."""
SERIES = st.lists(FEW, min_size=3, max_size=50)
SCALE = st.sampled_from([0.25, 0.5, 2.0, 8.0])


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-9)


# ---------------------------------------------------------------------------------- scipy says


@QUICK
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_median_and_mad_are_scipys(values: list[float]) -> None:
    assert close(median(values), float(np.median(values)))
    assert close(mad_sd(values), float(scipy_stats.median_abs_deviation(values)) * 1.4826)


def test_the_mad_factor_is_the_normal_distributions() -> None:
    assert scipy_stats.median_abs_deviation([1, 2, 3, 9], scale="normal") == pytest.approx(
        mad_sd([1, 2, 3, 9]), rel=1e-4
    )


@QUICK
@given(SERIES)
def test_theil_sen_slope_is_scipys(values: list[int]) -> None:
    ours = theil_sen(values)
    assert close(ours.slope, scipy_stats.theilslopes(values).slope)
    assert ours.low <= ours.slope <= ours.high and ours.n == len(values)


@pytest.mark.parametrize("n", [8, 10, 50])
def test_theil_sen_bounds_are_no_narrower_than_scipys(n: int) -> None:
    """scipy rounds the rank to the nearest, ours outwards: ours may be wider, never narrower."""
    values = np.random.default_rng(n).permutation(n * 100)[:n].astype(float)  # no ties
    ours, oracle = theil_sen(values.tolist()), scipy_stats.theilslopes(values, alpha=0.90)
    assert ours.high >= oracle.high_slope
    assert ours.low <= oracle.low_slope


@pytest.mark.parametrize("n", [8, 20, 50])
def test_theil_sen_bounds_are_within_one_rank_of_scipys(n: int) -> None:
    values = np.random.default_rng(n).normal(size=n)
    ours, oracle = theil_sen(values.tolist()), scipy_stats.theilslopes(values, alpha=0.90)
    i, j = np.triu_indices(n, k=1)
    slopes = np.sort((values[j] - values[i]) / (j - i))

    def rank(slope: float) -> int:
        return int(np.argmin(np.abs(slopes - slope)))

    assert abs(rank(ours.low) - rank(oracle.low_slope)) <= 1
    assert abs(rank(ours.high) - rank(oracle.high_slope)) <= 1


@pytest.mark.parametrize("n", [8, 20])
def test_each_bound_holds_about_95_percent_of_the_time(n: int) -> None:
    generator = np.random.default_rng(7)
    trends = [theil_sen(row.tolist()) for row in generator.normal(size=(600, n))]
    assert np.mean([t.low > 0 for t in trends]) <= 0.075
    assert np.mean([t.high < 0 for t in trends]) <= 0.075


def test_a_trend_needs_three_values() -> None:
    with pytest.raises(ValueError, match="at least 3 values, got 2"):
        theil_sen([1.0, 2.0])


# ---------------------------------------------------------------------------------- properties


@QUICK
@given(SERIES, FEW, SCALE)
def test_trends_move_and_scale_with_their_series(values: list[int], shift: int, scale: float) -> None:
    base = theil_sen(values)
    moved, scaled = theil_sen([v + shift for v in values]), theil_sen([v * scale for v in values])
    assert moved == base
    assert (scaled.slope, scaled.low, scaled.high) == (
        base.slope * scale,
        base.low * scale,
        base.high * scale,
    )


@QUICK
@given(SERIES)
def test_a_series_upside_down_has_its_bounds_upside_down(values: list[int]) -> None:
    up, down = theil_sen(values), theil_sen([-v for v in values])
    assert (down.slope, down.low, down.high) == (-up.slope, -up.high, -up.low)


@QUICK
@given(SERIES, FEW, SCALE)
def test_spreads_ignore_the_level_and_scale_with_the_series(
    values: list[int], shift: int, scale: float
) -> None:
    shifted, scaled = [float(v + shift) for v in values], [v * scale for v in values]
    assert close(mad_sd(shifted), mad_sd(values)) and close(mad_sd(scaled), scale * mad_sd(values))
    assert turning_points(shifted) == turning_points(values) == turning_points(scaled)
    base = detrended_variance(values, theil_sen(values))
    assert close(detrended_variance(shifted, theil_sen(shifted)), base)
    assert close(detrended_variance(scaled, theil_sen(scaled)), scale**2 * base)


@QUICK
@given(st.integers(3, 60), st.floats(-5, 5), st.floats(-5, 5))
def test_a_straight_line_has_no_variance_around_itself(n: int, level: float, slope: float) -> None:
    values = [level + slope * k for k in range(n)]
    trend = theil_sen(values)
    assert trend.slope == pytest.approx(slope, abs=1e-9) and trend.high - trend.low < 1e-9
    assert detrended_variance(values, trend) == pytest.approx(0.0, abs=1e-12)
    assert trend.rise == pytest.approx(slope * n, abs=1e-6)


def test_one_wild_sample_does_not_make_a_trend() -> None:
    values = [0.5] * 20
    values[10] = 1e5
    assert theil_sen(values).slope == 0.0 and mad_sd(values) == 0.0


@pytest.mark.parametrize(
    ("values", "share"),
    [
        ([1, 2, 3, 4], 0.0),
        ([1, 2, 1, 2], 1.0),
        ([1, 2, 2, 1], 0.0),
        ([1, 3, 2, 4, 5], 2 / 3),
        ([1, 2], 0.0),
        ([], 0.0),
    ],
)
def test_turning_points(values: list[float], share: float) -> None:
    assert turning_points(values) == pytest.approx(share)


# ------------------------------------------------------------------------------------ movement

GAIN = 0.1


def trend(low: float, slope: float, high: float, n: int = 10) -> Trend:
    """A trend by its change over the window."""
    return Trend(slope / n, low / n, high / n, n)


@pytest.mark.parametrize(
    ("low", "slope", "high", "expected"),
    [
        (0.01, 0.15, 0.3, Movement.RISING),
        (0.01, 0.09, 0.3, Movement.UNDETERMINED),  # it rises, but perhaps too little to matter
        (-0.01, 0.15, 0.3, Movement.UNDETERMINED),
        (-0.3, -0.15, -0.01, Movement.FALLING),
        (-0.3, -0.09, -0.01, Movement.UNDETERMINED),
        (-0.099, 0.0, 0.099, Movement.PLATEAU),
        (-0.101, 0.0, 0.05, Movement.UNDETERMINED),
        (-0.05, 0.0, 0.101, Movement.UNDETERMINED),
        (-0.5, 0.0, 0.5, Movement.UNDETERMINED),
        (0.02, 0.05, 0.08, Movement.PLATEAU),  # rises for sure, and for sure less than what matters
        (0.0, 0.0, 0.0, Movement.PLATEAU),
    ],
)
def test_movement_has_an_honest_third_answer(
    low: float, slope: float, high: float, expected: Movement
) -> None:
    assert movement(trend(low, slope, high), GAIN) is expected


@QUICK
@given(SERIES, st.floats(0.01, 100))
def test_a_plateau_is_proven_and_never_a_rise_or_a_fall(values: list[int], gain: float) -> None:
    seen = theil_sen(values)
    inside = -gain < seen.low * seen.n and seen.high * seen.n < gain
    proven = movement(seen, gain)
    assert (proven is Movement.PLATEAU) == (inside and abs(seen.rise) < gain)
    if proven in (Movement.RISING, Movement.FALLING):
        assert abs(seen.rise) >= gain


@QUICK
@given(SERIES, st.floats(0.01, 100), st.floats(1.0, 10.0))
def test_a_larger_gain_never_takes_a_plateau_away(values: list[int], gain: float, more: float) -> None:
    seen = theil_sen(values)
    if movement(seen, gain) is Movement.PLATEAU:
        assert movement(seen, gain * more) is Movement.PLATEAU


def test_without_a_noise_floor_nothing_is_a_plateau() -> None:
    assert movement(theil_sen([0.0] * 8), 0.0) is Movement.UNDETERMINED


def test_noise_alone_is_rarely_called_a_movement_and_short_windows_prove_no_plateau() -> None:
    generator = np.random.default_rng(11)
    answers = [movement(theil_sen(row.tolist()), 2.0) for row in generator.normal(size=(400, 8))]
    moved = sum(a in (Movement.RISING, Movement.FALLING) for a in answers)
    assert moved / 400 <= 0.12
    assert sum(a is Movement.UNDETERMINED for a in answers) / 400 >= 0.3


# --------------------------------------------------------------------------------- noise floor


def test_the_reward_noise_is_that_of_prompts_and_of_responses_within_them() -> None:
    """0/1 rewards, difficulty Beta(1, 1): the floor against a simulation."""
    prompts, group, generator = 64, 8, np.random.default_rng(3)
    difficulty = generator.uniform(size=(4000, prompts))
    means = generator.binomial(group, difficulty).mean(axis=1) / group
    assert reward_noise_sd(0.5, prompts, group) == pytest.approx(float(means.std()), rel=0.05)


@pytest.mark.parametrize(
    ("prompts", "group", "expected"),
    [(256, 1, 0.5 / 16), (64, 8, 0.0403), (128, 8, 0.0285), (512, 16, 0.0135)],
)
def test_the_reward_noise_at_published_sizes(prompts: int, group: int, expected: float) -> None:
    assert reward_noise_sd(0.5, prompts, group) == pytest.approx(expected, rel=0.02)


@QUICK
@given(st.floats(0, 10), st.integers(1, 512), st.integers(1, 64))
def test_more_prompts_or_responses_are_never_noisier(std: float, prompts: int, group: int) -> None:
    here = reward_noise_sd(std, prompts, group)
    assert reward_noise_sd(std, prompts + 1, group) <= here
    assert reward_noise_sd(std, prompts, group + 1) <= here
    assert 0.0 <= here <= std + 1e-12


@pytest.mark.parametrize("n", [8, 20, 50, 200])
def test_chance_does_not_reach_the_variance_ratio_limit(n: int) -> None:
    generator, limit = np.random.default_rng(n), variance_ratio_limit(n)
    ratios = [float(row.var(ddof=1)) for row in generator.normal(size=(2000, n))]
    assert np.mean(np.asarray(ratios) > limit) <= 0.005
    assert limit >= 2.5
