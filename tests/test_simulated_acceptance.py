"""The simulated acceptance of the controller, cut down: `experiments/controller_sim/run.py` is the whole.

The same functions with few seeds, so the bars are those of the whole and the counts are small. What a
few runs cannot prove (a rate of 2 %, one action in 500 rollouts) is asked for as a whole number.
"""

from __future__ import annotations

import pytest

from experiments.controller_sim import checks
from experiments.controller_sim.checks import Pair

SEEDS = 8
OFTEN = 0.87
"""Seven of eight; 90 % of 200 is what the experiment asks for."""

MAIN_KNOBS = {"actor_learning_rate", "ppo_mini_batch_size", "kl_coef", "clip_range", "max_response_length"}


# ------------------------------------------------------------------------------------------ power


@pytest.mark.parametrize("pair", checks.PAIRS, ids=lambda p: p.name)
def test_a_badly_set_knob_is_moved_the_right_way_first(pair: Pair) -> None:
    row = checks.power(pair, SEEDS)
    assert row["right"] >= OFTEN and row["wrong"] == 0, row


def test_both_directions_of_the_main_knobs_are_covered() -> None:
    pairs = {(p.knob, p.direction) for p in checks.PAIRS}
    assert len(pairs) >= 12
    assert {(knob, way) for knob in MAIN_KNOBS for way in (-1, 1)} <= pairs


def test_a_pair_would_notice_an_inert_controller() -> None:
    pair = checks.PAIRS[0]
    inert = Pair(pair.knob, pair.direction, pair.why, pair.start, control={"pin": [pair.knob]})
    assert checks.power(inert, 2)["right"] == 0


# ------------------------------------------------------------------------------------------- calm


@pytest.mark.slow
def test_healthy_runs_are_left_in_peace() -> None:
    rows = [checks.calm(setting, 1, 500, 1.0) for setting in checks.HEALTHY_SETTINGS]
    whole = checks.together(rows, "all")
    assert whole["emergencies"] == 0, rows
    assert whole["interval"][0] <= 1.0, rows
    assert max(row["actions"] for row in rows) <= 4, rows


def test_short_healthy_runs_meet_no_emergency() -> None:
    for setting in checks.HEALTHY_SETTINGS:
        row = checks.calm(setting, 3, 60, 0.1)
        assert row["emergencies"] == 0, row


def test_the_poisson_interval_is_the_textbook_one() -> None:
    low, high = checks.poisson_interval(0)
    assert low == 0.0 and high == pytest.approx(3.689, abs=1e-3)
    low, high = checks.poisson_interval(10)
    assert low == pytest.approx(4.795, abs=1e-3) and high == pytest.approx(18.390, abs=1e-3)


# --------------------------------------------------------------------------------------- collapse


@pytest.mark.parametrize(
    ("severity", "least"),
    [("sudden death", 1.0), ("fast decay, 5 rollouts", 1.0), ("slow decay, 15 rollouts", 0.85)],
)
def test_a_collapse_is_an_emergency_within_ten_rollouts(severity: str, least: float) -> None:
    row = checks.collapse(severity, 20)
    assert row["within_10"] >= least and row["false"] == 0, row


# ------------------------------------------------------------------------------------ oscillation


@pytest.mark.parametrize("change", [c for c in checks.HARM if c not in checks.UNSEEN])
@pytest.mark.parametrize(("rollouts", "pace"), [(90, 0.1), pytest.param(150, 1.0, marks=pytest.mark.slow)])
def test_a_harmful_change_is_taken_back_in_time(change: str, rollouts: int, pace: float) -> None:
    row = checks.harm(change, SEEDS, rollouts, pace)
    assert row["reverted"] == 1.0, row


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["well set", "2 updates", "32 updates", "timid", "kl_coef 1", "kl_coef 0.2"]
)
def test_nothing_swings_under_a_constant_plant(setting: str) -> None:
    row = checks.flips(setting, 2, 400, 0.1)
    assert row["per_200"] <= 1.0, row


def test_a_knob_at_its_bound_is_left_there_and_reported_once() -> None:
    row = checks.at_bound(2)
    assert row["last_push_latest"] < 20 and row["reports_least"] == row["reports_most"] == 1, row


# ---------------------------------------------------------------------------------------- sensors


@pytest.mark.parametrize("name", checks.SENSORS)
def test_a_sensor_that_must_not_be_believed_moves_nothing(name: str) -> None:
    row = checks.sensors(name, checks.SENSORS[name], 3)
    assert row["held"] == 3, row


# ------------------------------------------------------------------------------------------- cost


@pytest.mark.slow
def test_a_step_costs_no_more_late_in_a_run() -> None:
    """Not the milliseconds, which belong to the machine: that they and the memory do not grow."""
    early, late = checks.cost((300, 3000))
    assert late["median_ms"] <= 1.6 * early["median_ms"], (early, late)
    assert late["state_bytes"] <= 1.5 * early["state_bytes"], (early, late)
