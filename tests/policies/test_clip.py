"""The clip range: B4a and B4b at their edges."""

from __future__ import annotations

import pytest

from autotune.policies.clip import HardlyAnyClipped, TooMuchClipped
from tests.series import FALLING, FLAT, RISING, TREND, UNCLEAR, WINDOW, Series, ask, run, wants

B4A, B4B = TooMuchClipped(), HardlyAnyClipped()


def sides(low: float, high: float | None = None) -> dict[str, float]:
    return {"clip_range_low": low, "clip_range_high": low if high is None else high}


# ----------------------------------------------------------------------------------------- B4a


@pytest.mark.parametrize(
    ("low", "high", "speaks"),
    [
        (0.199, 0.200, False),
        (0.200, 0.200, False),
        (0.200, 0.201, True),
        (0.401, 0.0, True),  # one side alone
        (0.0, 0.401, True),
    ],
)
def test_b4a_widens_above_40_percent_outside(low: float, high: float, speaks: bool) -> None:
    answer = wants(ask(B4A, run(WINDOW, knobs=sides(0.1), ratio_low=low, ratio_high=high)))
    assert answer == (("clip_range", pytest.approx(0.12)) if speaks else None)


@pytest.mark.parametrize(
    ("now", "after"),
    [(0.1, 0.12), (0.16, 0.192), (0.19, 0.2), (0.1999, 0.2), (0.2, None), (0.28, None)],
)
def test_b4a_never_widens_beyond_the_documented_range(now: float, after: float | None) -> None:
    answer = wants(ask(B4A, run(WINDOW, knobs=sides(now), ratio_low=0.3, ratio_high=0.3)))
    assert answer == (None if after is None else ("clip_range", pytest.approx(after)))


@pytest.mark.parametrize(
    ("metrics", "speaks"),
    [
        ({"kl_step": 0.030}, True),
        ({"kl_step": 0.0301}, False),  # never widen while the drift is high
        ({"kl_ref": 0.150}, True),
        ({"kl_ref": 0.1501}, False),
        ({"kl_ref": None}, False),  # a reference whose KL is not known: the brake stays
        ({"entropy": [0.3] * 3 + [0.46]}, False),
        ({"kl_mismatch": 0.05}, False),
    ],
)
def test_b4a_keeps_the_brake(metrics: dict[str, Series], speaks: bool) -> None:
    outside = {"ratio_low": 0.3, "ratio_high": 0.3}
    answer = ask(B4A, run(WINDOW, knobs=sides(0.1), **outside, **metrics))
    assert (answer is not None) == speaks


def test_b4a_reads_a_window_and_both_of_its_sides() -> None:
    one = run(WINDOW, knobs=sides(0.1), ratio_low=[0.1] * 3 + [0.9], ratio_high=0.05)
    assert ask(B4A, one) is None
    assert ask(B4A, run(WINDOW - 1, knobs=sides(0.1), ratio_low=0.3, ratio_high=0.3)) is None
    hole = run(WINDOW, knobs=sides(0.1), ratio_low=[0.3, None, 0.3, 0.3], ratio_high=0.3)
    assert ask(B4A, hole) is None


def test_the_window_median_of_an_even_window_is_its_middle() -> None:
    spread = run(WINDOW, knobs=sides(0.1), ratio_low=[0.1, 0.1, 0.3, 0.3], ratio_high=0.15)
    assert ask(B4A, spread) is None, "the median of .25 .25 .45 .45 is .35"


def test_b4a_does_not_widen_while_the_drift_is_unknown() -> None:
    blind = run(WINDOW, knobs=sides(0.1), ratio_low=0.3, ratio_high=0.3, kl_step=None)
    assert ask(B4A, blind) is None


def test_b4a_is_the_last_rung_after_fewer_updates() -> None:
    knobs = sides(0.1) | {"ppo_mini_batch_size": 4, "micro_batch_size": 32}  # 16 updates
    assert ask(B4A, run(WINDOW, knobs=knobs, ratio_low=0.3, ratio_high=0.3)) is None


# ----------------------------------------------------------------------------------------- B4b

RISING_ENTROPY: list[float] = [0.30] * 4 + [0.34] * 4


def hardly_any(**metrics: Series) -> object:
    calm: dict[str, Series] = {"ratio_low": 0.01, "ratio_high": 0.02, "entropy": RISING_ENTROPY}
    return ask(B4B, run(TREND, knobs=sides(0.2), **(calm | metrics)))


@pytest.mark.parametrize(
    ("metrics", "speaks"),
    [
        ({"ratio_high": 0.0399}, True),
        ({"ratio_low": 0.01, "ratio_high": 0.04}, False),
        ({"ratio_high": 0.0401}, False),
        ({"ratio_low": 0.0, "ratio_high": 0.0}, True),
        # entropy 10 % above its start, proven plateau, signal
        ({"entropy": [0.30] * 4 + [0.3301] * 4}, True),
        ({"entropy": [0.30] * 4 + [0.3299] * 4}, False),
        ({"entropy": 0.3}, False),
        ({"reward_mean": FLAT}, True),
        ({"reward_mean": RISING}, False),
        ({"reward_mean": FALLING}, False),
        ({"reward_mean": UNCLEAR}, False),
        ({"zero_std_fraction": 0.599}, True),
        ({"zero_std_fraction": 0.6}, False),
        ({"reward_mean": 0.96}, False),
    ],
)
def test_b4b_narrows_below_5_percent_on_a_plateau_with_rising_entropy(
    metrics: dict[str, Series], speaks: bool
) -> None:
    answer = hardly_any(**metrics)
    assert wants(answer) == (("clip_range", pytest.approx(0.2 / 1.2)) if speaks else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("now", "after"), [(0.3, 0.25), (0.12, 0.1), (0.11, 0.1), (0.1, None), (0.05, None)])
def test_b4b_never_narrows_below_the_documented_range(now: float, after: float | None) -> None:
    snapshots = run(TREND, knobs=sides(now), ratio_low=0.01, ratio_high=0.02, entropy=RISING_ENTROPY)
    answer = wants(ask(B4B, snapshots))
    assert answer == (None if after is None else ("clip_range", pytest.approx(after)))


@pytest.mark.parametrize("metrics", [{"kl_mismatch": 0.2}, {"entropy": [0.3] * 4 + [3.0] * 4}])
def test_b4b_wants_entropy_and_mismatch_in_their_normal_range(metrics: dict[str, Series]) -> None:
    assert hardly_any(**metrics) is None
