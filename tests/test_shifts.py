"""Trends and shifts: Mann-Kendall, memory and CUSUM against scipy, and their false alarms counted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.statistics import (
    Cusum,
    autocorrelation,
    change_point,
    mann_kendall,
    robust_z,
    whitened,
)
from tests.series import QUICK

scipy_stats = pytest.importorskip("scipy.stats")

SERIES = st.lists(st.integers(-50, 50), min_size=4, max_size=40)


def remembering(rho: float, runs: int, n: int, seed: int = 5) -> np.ndarray:
    """`runs` series of n standard-normal values with lag-1 memory rho, [runs, n]."""
    noise = np.random.default_rng(seed).normal(size=(runs, n))
    values = noise.copy()
    for t in range(1, n):
        values[:, t] = rho * values[:, t - 1] + math.sqrt(1 - rho * rho) * noise[:, t]
    return values


# ----------------------------------------------------------------------------- robust z


@pytest.mark.parametrize(
    ("value", "baseline", "floor", "expected"),
    [
        (5.0, [1.0, 2.0, 3.0, 4.0, 5.0], 0.0, 2 / 1.4826),
        (1.0, [1.0, 2.0, 3.0, 4.0, 5.0], 0.0, -2 / 1.4826),
        (2.0, [1.0, 1.0, 1.0], 0.5, 2.0),
        (1.0, [1.0, 1.0, 1.0], 0.0, 0.0),
        (1.1, [1.0, 1.0, 1.0], 0.0, math.inf),
        (0.9, [1.0, 1.0, 1.0], 0.0, -math.inf),
    ],
)
def test_robust_z(value: float, baseline: list[float], floor: float, expected: float) -> None:
    assert robust_z(value, baseline, floor) == pytest.approx(expected)


def test_one_wild_value_in_the_baseline_hides_nothing() -> None:
    calm = [float(k % 5) for k in range(20)]
    assert robust_z(12.0, [*calm, 1e9]) > 5


# ------------------------------------------------------------------------------ memory


@QUICK
@given(SERIES)
def test_memory_is_a_correlation_and_ignores_level_and_scale(values: list[int]) -> None:
    rho = autocorrelation(values)
    assert -0.95 <= rho <= 0.95
    assert autocorrelation([4.0 * v + 16 for v in values]) == pytest.approx(rho, abs=1e-6)


@pytest.mark.parametrize("rho", [0.0, 0.4, 0.7])
def test_memory_is_measured_without_much_bias(rho: float) -> None:
    found = [autocorrelation(row.tolist()) for row in remembering(rho, 300, 60)]
    assert np.mean(found) == pytest.approx(rho, abs=0.05)


def test_a_constant_or_tiny_series_remembers_nothing() -> None:
    assert autocorrelation([0.3] * 30) == 0.0 and autocorrelation([1.0, 2.0, 1.0]) == 0.0


def test_whitening_takes_the_memory_out_and_keeps_the_trend() -> None:
    row = remembering(0.7, 1, 4000)[0].tolist()
    assert autocorrelation(whitened(row, 0.7)) == pytest.approx(0.0, abs=0.04)
    line = whitened([0.5 * k for k in range(20)], 0.7)
    assert np.diff(line).tolist() == pytest.approx([0.5] * 18)


# ----------------------------------------------------------------------- Mann-Kendall


@QUICK
@given(SERIES)
def test_mann_kendall_is_kendalls_tau_against_time(values: list[int]) -> None:
    """scipy's variance with ties and its S; ours has the usual correction for continuity beside."""
    ours = mann_kendall(values, prewhiten=False)
    if len(set(values)) == 1:
        assert (ours.s, ours.z, ours.p) == (0, 0.0, 1.0)
        return
    oracle = scipy_stats.kendalltau(range(len(values)), values, method="asymptotic")
    n = len(values)
    pairs = n * (n - 1) / 2
    tied = sum(c * (c - 1) / 2 for c in np.unique(values, return_counts=True)[1])
    assert ours.s == round(oracle.statistic * math.sqrt(pairs * (pairs - tied)))
    if ours.s:
        spread = abs(ours.s) / scipy_stats.norm.isf(oracle.pvalue / 2)
        assert abs(ours.z) == pytest.approx((abs(ours.s) - 1) / spread, rel=1e-6)
        assert ours.p == pytest.approx(2 * scipy_stats.norm.sf(abs(ours.z)), rel=1e-9)


@QUICK
@given(SERIES)
def test_a_series_upside_down_has_the_opposite_trend(values: list[int]) -> None:
    up, down = mann_kendall(values), mann_kendall([-v for v in values])
    assert (down.s, down.z, down.p) == (-up.s, -up.z, up.p)


@pytest.mark.parametrize(("rho", "most"), [(0.0, 0.08), (0.4, 0.12), (0.7, 0.17)])
def test_memory_is_not_taken_for_a_trend(rho: float, most: float) -> None:
    rows = remembering(rho, 200, 50)
    false = np.mean([mann_kendall(row.tolist()).p < 0.05 for row in rows])
    assert false <= most
    if rho:  # the plain test is fooled, or whitening would prove nothing
        plain = np.mean([mann_kendall(row.tolist(), prewhiten=False).p < 0.05 for row in rows])
        assert plain > false + 0.05


def test_a_real_trend_is_found_through_the_memory() -> None:
    rows = remembering(0.4, 100, 50) + 0.08 * np.arange(50)
    assert np.mean([mann_kendall(row.tolist()).p < 0.05 for row in rows]) >= 0.9


def test_mann_kendall_needs_four_values() -> None:
    with pytest.raises(ValueError, match="at least 4 values, got 3"):
        mann_kendall([1.0, 2.0, 3.0])


# ------------------------------------------------------------------------------- CUSUM


def alarms(rows: np.ndarray, direction: int = -1) -> list[int | None]:
    return [change_point(row.tolist(), direction) for row in rows]


@pytest.mark.parametrize(("rho", "most"), [(0.0, 0.05), (0.3, 0.10), (0.6, 0.25)])
def test_false_alarms_of_noise_are_rare(rho: float, most: float) -> None:
    """Share of 150-value runs without any shift in which one is seen."""
    assert np.mean([found is not None for found in alarms(remembering(rho, 120, 150))]) <= most


def test_a_run_that_learns_and_then_rests_has_not_fallen() -> None:
    learns = 0.7 * np.minimum(np.arange(200) / 60, 1) + 0.02 * remembering(0.0, 60, 200)
    assert sum(found is not None for found in alarms(learns)) <= 1


@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_collapse_is_dated_to_its_onset(steps: int) -> None:
    """At whatever speed: the reward goes from 0.7 to 0 within `steps` rollouts from rollout 90 on."""
    fall = np.clip(1 - (np.arange(120) - 89) / steps, 0, 1)
    rows = 0.7 * np.minimum(np.arange(120) / 60, 1) * fall + 0.02 * remembering(0.0, 60, 120)
    found = [at for at in alarms(rows) if at is not None]
    assert len(found) == 60
    assert np.mean([88 <= at <= 90 + max(3, steps / 4) for at in found]) >= 0.95


def test_a_slow_decline_is_not_followed_down_by_the_baseline() -> None:
    rows = 0.6 - 0.002 * np.maximum(np.arange(160) - 90, 0) + 0.02 * remembering(0.0, 60, 160)
    found = alarms(rows)
    assert all(at is not None for at in found) and 85 <= np.median([at or 0 for at in found]) <= 110


def test_a_collapse_in_the_seventh_row_of_a_sparse_log_is_seen() -> None:
    rows = 0.5 + 0.03 * remembering(0.0, 100, 40)
    rows[:, 6:] *= 0.1
    assert np.mean([found == 6 for found in alarms(rows)]) >= 0.9


@pytest.mark.parametrize("wild", [1, 2])
def test_one_or_two_wild_samples_are_not_a_shift(wild: int) -> None:
    row = (0.6 + 0.02 * remembering(0.0, 1, 100)[0]).tolist()
    row[60 : 60 + wild] = [-1e6] * wild
    assert change_point(row) is None


def test_direction_tells_falls_from_rises() -> None:
    row = [0.5, 0.52, 0.48, 0.51, 0.49] * 6 + [0.9, 0.92, 0.88] * 5
    assert change_point(row) is None and change_point(row, direction=+1) == 30


def test_a_known_noise_keeps_a_constant_reward_from_looking_exact() -> None:
    row = [1.0] * 20 + [0.99] * 20
    assert change_point(row) == 20
    assert change_point(row, floor=0.02) is None


def test_too_little_is_no_shift() -> None:
    assert change_point([]) is None and change_point([1.0, 0.0, 0.0, 0.0]) is None


@QUICK
@given(st.lists(st.floats(-1e3, 1e3), max_size=60), st.integers(0, 60))
def test_sample_by_sample_equals_all_at_once(values: list[float], stop: int) -> None:
    """What is seen does not depend on what comes later, and the sum never falls below zero."""
    cusum = Cusum()
    for value in values[:stop]:
        shifted = cusum.update(value)
        assert cusum.total >= 0.0 and (cusum.since is None) == (cusum.total == 0.0)
        if shifted:
            assert change_point(values) == cusum.since
            return
    assert change_point(values[:stop]) is None
