"""The staged procedure's conditions at their boundary values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from autotune.errors import InputError
from autotune.procedure import (
    BASELINE,
    ROLLOUTS,
    Condition,
    Gate,
    Round,
    baseline_gates,
    cap_for,
    compare,
    confirmed,
    kl_and_clip,
    most_severe,
    one_parameter,
    slowed,
    speed_and_length,
    steady,
    summary,
)

KNOBS = {
    "train_batch_size": 64,
    "rollout_n": 8,
    "ppo_mini_batch_size": 16,
    "rollout_micro_batch_size": 16,
    "kl_coef": 0.1,
    "clip_range_low": 0.1,
    "clip_range_high": 0.1,
    "actor_learning_rate": 2e-6,
    "max_response_length": 512,
}
NOISE = 0.02
CALM = np.random.default_rng(1).normal(0.0, NOISE, size=200)


def a_round(knobs: dict[str, float] | None = None, **metrics: Any) -> Round:
    """One round of 200 rollouts; a number stands for the same value at every rollout."""
    settings = {k: metrics.pop(k) for k in ("noise", "reward_range") if k in metrics}
    values = {name: [v] * 200 if isinstance(v, (int, float)) else list(v) for name, v in metrics.items()}
    return Round(values, KNOBS | (knobs or {}), **settings)


def named(conditions: Sequence[Condition], name: str) -> Condition:
    return next(c for c in conditions if c.id == name)


# -------------------------------------------------------------------------------------------- P1


def passed(gates: Sequence[Gate]) -> dict[str, bool]:
    return {gate.id: gate.passed for gate in gates}


@pytest.mark.parametrize(("rate", "passes"), [(0.9499, False), (0.95, False), (0.9501, True), (1.0, True)])
def test_p1_success_above_95_percent(rate: float, passes: bool) -> None:
    gates = baseline_gates(a_round(rollout_success_rate=rate, reward_mean=1.0))
    assert passed(gates)["B7"] is passes


@pytest.mark.parametrize(
    ("rise", "noise", "passes"),
    [
        (0.6, NOISE, True),  # the document's example: 1.2 -> 1.8
        (0.06, NOISE, True),
        (0.03, NOISE, False),  # rises, but by less than two noise standard deviations
        (0.0, NOISE, False),
        (-0.6, NOISE, False),
        (0.03, 0.0, True),  # nothing is known of the noise: any proven rise
    ],
)
def test_p1_the_reward_is_clearly_up(rise: float, noise: float, passes: bool) -> None:
    rewards = 1.2 + np.linspace(0, rise, 200) + CALM / 4
    assert passed(baseline_gates(a_round(reward_mean=rewards, noise=noise)))["P1"] is passes


def test_p1_is_blocked_by_what_was_not_measured_or_does_not_fit() -> None:
    gates = baseline_gates(a_round(reward_mean=[1.0, 2.0]), ["torch 2.9: tested with >=2.11"])
    assert passed(gates) == {"E1": False, "B7": False, "P1": False}
    reasons = {gate.id: gate.reason for gate in gates}
    assert "torch" in reasons["E1"] and "not measured" in reasons["B7"] and "too few" in reasons["P1"]
    assert passed(baseline_gates(a_round()))["E1"]


def test_the_rounds_are_a_thousand_rollouts_with_the_documents_parameters() -> None:
    assert sum(ROLLOUTS.values()) == 1000
    assert BASELINE["kl_coef"] == BASELINE["clip_range"] == 0.1
    assert BASELINE["rollout_micro_batch_size"] * BASELINE["num_rollout_batches"] == 128


# -------------------------------------------------------------------------------------------- P2


@pytest.mark.parametrize(("kl", "after"), [(0.0799, None), (0.08, None), (0.0801, 0.12)])
def test_p2_kl(kl: float, after: float | None) -> None:
    found = named(kl_and_clip(a_round(kl_ref=kl, reward_mean=1.0)), "P2 kl")
    assert found.met is (after is not None) and found.after == (after and pytest.approx(after))


@pytest.mark.parametrize(
    ("low", "high", "kl", "after"),
    [
        (0.2, 0.1499, 0.05, None),
        (0.25, 0.10, 0.05, None),  # exactly 35 %
        (0.2, 0.1501, 0.05, 0.12),
        (0.2, 0.1501, 0.08, 0.12),
        (0.2, 0.1501, 0.0801, None),  # KL is high: clip is not widened
    ],
)
def test_p2_clip(low: float, high: float, kl: float, after: float | None) -> None:
    found = named(kl_and_clip(a_round(ratio_low=low, ratio_high=high, kl_ref=kl)), "P2 clip")
    assert found.met is (after is not None) and found.after == (after and pytest.approx(after))
    assert ("refused" in found.reason) == (kl > 0.08)


def saw(variance: float) -> list[float]:
    """200 rewards around 5 with this variance around their trend, n - 2 degrees of freedom."""
    return [5 + math.sqrt(variance * 198 / 200) * (-1) ** k for k in range(200)]


@pytest.mark.parametrize(("variance", "after"), [(0.299, None), (0.301, 1.5e-6)])
def test_p2_reward_variance_in_task_units(variance: float, after: float | None) -> None:
    found = named(kl_and_clip(a_round(reward_mean=saw(variance))), "P2 reward variance")
    assert found.value == pytest.approx(variance, rel=1e-3)
    assert found.met is (after is not None) and found.after == (after and pytest.approx(after))


def test_p2_variance_is_that_around_the_trend() -> None:
    """A reward that climbs by 4 has a plain variance of 1.3, and has not been volatile at all."""
    climbs = np.linspace(0, 4, 200) + CALM
    assert climbs.var() > 1 and not named(kl_and_clip(a_round(reward_mean=climbs)), "P2 reward variance").met


@pytest.mark.parametrize(
    ("reward_range", "dead"), [((0.0, 1.0), True), ((-1.0, 0.0), True), ((0.0, 1.1), False), (None, False)]
)
def test_p2_variance_of_a_0_1_reward_is_structurally_dead(
    reward_range: tuple[float, float] | None, dead: bool
) -> None:
    """A range of 1 allows a variance of 0.25, one of 1.1 allows 0.3025."""
    found = kl_and_clip(a_round(reward_mean=saw(0.2), reward_range=reward_range, noise=NOISE))
    letter = named(found, "P2 reward variance")
    assert ("can never exceed 0.3" in letter.reason) is dead and not letter.met
    assert any(c.offered for c in found) is dead


@pytest.mark.parametrize(("times", "met"), [(1.0, False), (2.4, False), (2.6, True), (100.0, True)])
def test_p2_offers_the_variance_above_the_noise_floor(times: float, met: bool) -> None:
    values = saw(times * NOISE**2)
    found = kl_and_clip(a_round(reward_mean=values, reward_range=(0, 1), noise=NOISE))
    relative = named(found, "P2 reward variance, relative")
    assert relative.met is met and relative.limit == 2.5
    assert most_severe(found) is None, "the user did not take the offer"
    assert (most_severe(found, relative=True) is relative) is met


def test_p2_without_a_noise_floor_there_is_nothing_to_be_relative_to() -> None:
    found = named(
        kl_and_clip(a_round(reward_mean=saw(0.2), reward_range=(0, 1))), "P2 reward variance, relative"
    )
    assert not found.met and "not known" in found.reason


def test_p2_grants_one_change_the_most_severe() -> None:
    both = a_round(kl_ref=0.09, reward_mean=saw(0.9))
    chosen = most_severe(kl_and_clip(both))
    assert chosen is not None and chosen.knob == "actor_learning_rate"
    chosen = most_severe(kl_and_clip(a_round(kl_ref=0.4, reward_mean=saw(0.9))))
    assert chosen is not None and chosen.knob == "kl_coef"
    assert most_severe(kl_and_clip(a_round(kl_ref=0.05, reward_mean=1.0))) is None


def test_p2_says_what_it_could_not_measure() -> None:
    found = kl_and_clip(a_round())
    assert not any(c.met for c in found)
    assert [("not measured" in c.reason or "too few" in c.reason) for c in found] == [True] * 3


@pytest.mark.parametrize(
    ("before", "after", "passes"), [(0.3, 0.29, True), (0.3, 0.3, False), (0.3, 0.31, False)]
)
def test_p2_is_confirmed_only_by_a_narrower_spread(before: float, after: float, passes: bool) -> None:
    gate = confirmed(a_round(reward_mean=saw(before)), a_round(reward_mean=saw(after)))
    assert gate.passed is passes and ("stop" in gate.reason) is not passes
    assert not confirmed(a_round(reward_mean=[1.0]), a_round(reward_mean=saw(0.1))).passed


@pytest.mark.parametrize(("ratio", "passes"), [(2.49, True), (2.51, False)])
def test_a_spread_that_sampling_explains_cannot_narrow(ratio: float, passes: bool) -> None:
    """In units of the noise: 200 values tolerate a variance ratio of 2.5."""
    before = a_round(reward_mean=saw(NOISE**2), noise=NOISE)
    after = a_round(reward_mean=saw(ratio * NOISE**2), noise=NOISE)
    assert confirmed(before, after, relative=True).passed is passes
    assert not confirmed(before, after).passed
    unknown = a_round(reward_mean=saw(ratio * NOISE**2))
    assert not confirmed(before, unknown, relative=True).passed


# -------------------------------------------------------------------------------------------- P3


@pytest.mark.parametrize(
    ("use", "memory", "after"),
    [
        (0.799, 0.5, 32),  # 24 is off the lattice of 512 samples
        (0.80, 0.5, None),
        (0.801, 0.5, None),
        (0.5, 0.92, 32),
        (0.5, 0.921, None),
        (0.5, 0.0, 32),
    ],
)
def test_p3_utilization_is_the_reason_and_memory_the_ceiling(
    use: float, memory: float, after: float | None
) -> None:
    found = named(
        speed_and_length(a_round(gpu_utilization=use, gpu_memory_fraction=memory)), "P3 utilization"
    )
    assert found.met is (after is not None) and found.after == after


def test_p3_stays_on_the_lattice() -> None:
    knobs = {"train_batch_size": 12, "rollout_n": 12, "rollout_micro_batch_size": 16}
    found = named(speed_and_length(a_round(knobs, gpu_utilization=0.5)), "P3 utilization")
    assert found.after == 24
    full = {"train_batch_size": 2, "rollout_n": 8}
    found = named(speed_and_length(a_round(full, gpu_utilization=0.5)), "P3 utilization")
    assert not found.met and "no larger batch" in found.reason


@pytest.mark.parametrize(
    ("mean", "cap"), [(420, 448), (427.9, 448), (428, 512), (0, 64), (43.9, 64), (44, 128)]
)
def test_p3_the_next_multiple_of_64_above_mean_plus_20(mean: float, cap: int) -> None:
    assert cap_for(mean) == cap


@pytest.mark.parametrize(
    ("lengths", "is_steady"),
    [
        ([400.0] * 20, True),
        ([380.0] * 10 + [420.0] * 10, True),  # both 20 off the mean
        ([379.9] * 10 + [420.1] * 10, False),
        ([300.0, 500.0] * 10, True),  # windows, not samples
        ([400.0] * 19, False),  # one full window proves nothing
    ],
)
def test_p3_steady_is_every_window_mean_within_20_tokens(lengths: list[float], is_steady: bool) -> None:
    assert steady(lengths) is is_steady


@pytest.mark.parametrize(
    ("mean", "tail", "cut", "after", "word"),
    [
        (420, 389, 0.0, 448, "512 -> 448"),
        (420, 448 / 1.15, 0.0049, 448, "512 -> 448"),
        (420, 390, 0.0, None, "refused: the longest answers need"),
        (420, 300, 0.005, None, "refused: up to 0.5% of the answers are cut"),
        (440, 300, 0.0, None, "no less than the cap"),
    ],
)
def test_p3_trims_only_what_the_tail_allows(
    mean: float, tail: float, cut: float, after: float | None, word: str
) -> None:
    metrics = {"response_length_mean": mean, "response_length_p995": tail, "truncated_fraction": cut}
    found = named(speed_and_length(a_round(**metrics)), "P3 length")
    assert found.after == after and found.met is (after is not None) and word in found.reason


def test_p3_takes_the_longest_answer_where_there_is_no_percentile() -> None:
    known = {"response_length_mean": 420.0, "truncated_fraction": 0.0}
    found = named(speed_and_length(a_round(**known, response_length_max=380.0)), "P3 length")
    assert found.after == 448
    assert "not measured" in named(speed_and_length(a_round(**known)), "P3 length").reason


def climb(late: float) -> np.ndarray:
    """A reward that rises 0.01 a rollout for 150 rollouts and then `late` times as fast."""
    steps = np.concatenate([np.full(150, 0.01), np.full(50, 0.01 * late)])
    return np.cumsum(steps) + CALM / 10


@pytest.mark.parametrize(
    ("late", "is_slow"), [(0.0, True), (0.4, True), (0.6, False), (1.0, False), (-0.5, True)]
)
def test_p3_slower_than_half_of_the_main_rise(late: float, is_slow: bool) -> None:
    assert slowed(climb(late).tolist(), 2 * NOISE) is is_slow


def test_p3_a_run_that_never_rose_has_not_slowed() -> None:
    assert not slowed((0.5 + CALM).tolist(), 2 * NOISE)
    assert not slowed([0.1, 0.5, 0.9, 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("kl", "coef", "after"),
    [(0.08, 0.1, 0.08), (0.0801, 0.1, None), (0.05, 0.08, None), (0.05, 0.0801, 0.08), (None, 0.1, None)],
)
def test_p3_lowers_kl_coef_only_with_kl_in_its_band(
    kl: float | None, coef: float, after: float | None
) -> None:
    metrics: dict[str, Any] = {"reward_mean": climb(0.0), "noise": NOISE}
    metrics |= {} if kl is None else {"kl_ref": kl}
    found = named(speed_and_length(a_round({"kl_coef": coef}, **metrics)), "P3 kl")
    assert found.after == after and found.met is (after is not None)


# -------------------------------------------------------------------------------------------- P4


def test_p4_three_runs_with_mean_and_sample_standard_deviation() -> None:
    found = summary([0.7, 0.8, 0.9])
    assert (found.mean, found.sd, found.n) == (pytest.approx(0.8), pytest.approx(0.1), 3)
    assert str(found) == "0.8 ± 0.1 (n = 3)"


@pytest.mark.parametrize("scores", [[], [0.5], [0.5, 0.6]])
def test_p4_fewer_than_three_runs_are_no_comparison(scores: list[float]) -> None:
    with pytest.raises(InputError, match=f"received {len(scores)} run"):
        compare(scores, [1.0, 1.0, 1.0])


def test_p4_a_run_that_failed_is_not_averaged_away() -> None:
    with pytest.raises(InputError, match="finite"):
        summary([0.5, 0.6, math.nan])


@pytest.mark.parametrize(
    ("after", "better", "worse"),
    [
        ([0.91, 1.0, 1.09], True, False),  # 1.0 - 0.09 above 0.8 + 0.1
        ([0.89, 1.0, 1.11], False, False),
        ([0.7, 0.8, 0.9], False, False),
        ([0.51, 0.6, 0.69], False, True),
    ],
)
def test_p4_better_only_where_the_bands_lie_apart(after: list[float], better: bool, worse: bool) -> None:
    found = compare([0.7, 0.8, 0.9], after)
    assert (found.better, found.worse) == (better, worse)


@pytest.mark.parametrize(
    ("changes", "passes", "word"),
    [
        ({}, True, "nothing"),
        ({"kl_coef": 0.2}, True, "kl_coef"),
        ({"kl_coef": 0.2, "actor_learning_rate": 1e-6}, False, "actor_learning_rate, kl_coef"),
        ({"clip_range_low": 0.12, "clip_range_high": 0.12}, True, "clip_range"),
        ({"clip_range_high": 0.12}, True, "clip_range_high"),
        ({"rollout_micro_batch_size": 32, "num_rollout_batches": 16}, True, "rollout_micro_batch_size"),
        ({"num_rollout_batches": 16}, True, "num_rollout_batches"),
        ({"kl_coef": 0.2, "num_rollout_batches": 16}, False, "kl_coef, num_rollout_batches"),
    ],
)
def test_p4_one_parameter_at_a_time(changes: dict[str, float], passes: bool, word: str) -> None:
    before = KNOBS | {"num_rollout_batches": 32}
    gate = one_parameter(before, before | changes)
    assert gate.passed is passes and gate.reason == f"changed: {word}"
