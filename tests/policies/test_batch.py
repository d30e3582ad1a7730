"""Updates per rollout: A1, A3 and A4 at their edges, and where they must keep quiet."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.knobs import updates_per_rollout
from autotune.metrics import Reading, Validity
from autotune.policies.batch import ClipTooHigh, ClipTooLow, UpdatesInGoldenRange
from tests.series import (
    FALLING,
    FLAT,
    PACE,
    RISING,
    TREND,
    UNCLEAR,
    WINDOW,
    Series,
    ask,
    context,
    facts,
    run,
    wants,
)

MINI = "ppo_mini_batch_size"
RATE = "actor_learning_rate"
A1, A3, A4 = UpdatesInGoldenRange(target=0.01), ClipTooLow(target=0.01), ClipTooHigh()


def batch(mini: int, epochs: int = 1, train: int = 64) -> dict[str, float]:
    """Knobs for train / mini * epochs updates per rollout."""
    return {"train_batch_size": train, MINI: mini, "ppo_epochs": epochs, "micro_batch_size": 8 * mini}


# ------------------------------------------------------------------------------------------ A1


@pytest.mark.parametrize(
    ("knobs", "kl_step", "expected"),
    [
        # U below 4: only while the drift is timid (below half of the target of 0.01)
        (batch(64), 0.0049, (MINI, 16)),  # U = 1 -> 4
        (batch(32), 0.0049, (MINI, 16)),  # U = 2 -> 4
        (batch(32), 0.0050, None),
        (batch(32), 0.0051, None),
        (batch(64), 0.01, None),
        # U inside 4-8, whatever the drift
        (batch(16), 1e-4, None),
        (batch(16), 0.2, None),
        (batch(8), 1e-4, None),
        (batch(8), 0.2, None),
        # U above 8: only while the drift is too large (above twice the target)
        (batch(4), 0.0199, None),  # U = 16, healthy: a published recipe, not to be fixed
        (batch(4), 0.0200, None),
        (batch(4), 0.0201, (MINI, 8)),  # -> 8
        (batch(2), 0.15, (MINI, 8)),  # U = 32 -> 8
        # epochs count as updates
        (batch(32, epochs=4), 0.2, None),  # U = 8
        (batch(16, epochs=3), 0.2, (MINI, 32)),  # U = 12 -> 6
        # the lattice decides what can be reached: 7 prompts are 1 or 7 updates
        (batch(7, train=7), 0.001, (MINI, 1)),
    ],
)
def test_a1_moves_updates_into_4_to_8_when_the_drift_agrees(
    knobs: dict[str, float], kl_step: float, expected: tuple[str, float] | None
) -> None:
    assert wants(ask(A1, run(2, knobs=knobs, kl_step=kl_step))) == expected


def test_a1_ends_inside_the_golden_range_from_every_batch_that_can() -> None:
    for train in range(4, 129):
        knobs = batch(train, train=train)
        answer = wants(ask(A1, run(2, knobs=knobs, kl_step=1e-3)))
        if answer:
            assert 4 <= updates_per_rollout(knobs | {answer[0]: answer[1]}) <= 8
        else:
            assert not any(train % updates == 0 for updates in range(4, 9)), train


@pytest.mark.parametrize(
    ("what", "metrics", "expected"),
    [
        ("timid on a flat reward", {"reward_mean": FLAT}, (MINI, 16)),
        ("timid on a falling reward", {"reward_mean": FALLING}, (MINI, 16)),
        ("a timid run that learns well is left alone", {"reward_mean": RISING}, None),
        ("clip just at A4's level does not hold A1 back", {"clip_ratio": 0.15}, (MINI, 16)),
        ("A4 wins while clip is high", {"clip_ratio": 0.151}, None),
    ],
)
def test_a1_gives_way(what: str, metrics: dict[str, Series], expected: tuple[str, float] | None) -> None:
    assert wants(ask(A1, run(TREND, knobs=batch(32), kl_step=0.001, **metrics))) == expected


def test_a1_needs_two_samples_made_under_the_present_number_of_updates() -> None:
    before = run(6, knobs=batch(32), kl_step=0.001)
    after = run(2, knobs=batch(64), kl_step=0.001, start=9)
    assert wants(ask(A1, [*before, after[0]])) is None
    assert wants(ask(A1, [*before, *after])) == (MINI, 16)


def test_a1_uses_epochs_where_the_lattice_has_no_4_to_8() -> None:
    knobs = batch(1, train=3)  # U is 1 or 3 with one epoch
    answer = wants(ask(A1, run(2, knobs=knobs, kl_step=0.001)))
    assert answer == ("ppo_epochs", 2)


def test_a1_does_not_take_more_updates_while_clip_is_unknown() -> None:
    assert wants(ask(A1, run(2, knobs=batch(32), kl_step=0.001, clip_ratio=None))) is None


# ------------------------------------------------------------------------------------------ A3


def timid(**metrics: Series) -> list[Any]:
    """A full trend window of a run that A3 wants to push: everything but `metrics`."""
    calm: dict[str, Series] = {"clip_ratio": 0.005, "kl_step": 0.004, "reward_mean": FLAT}
    return run(TREND, **(calm | metrics))


@pytest.mark.parametrize(
    ("metrics", "speaks"),
    [
        ({"clip_ratio": 0.0099}, True),
        ({"clip_ratio": 0.0100}, False),
        ({"clip_ratio": 0.0101}, False),
        ({"clip_ratio": 0.0}, True),
        # a window, not a sample: the median of the last four decides
        ({"clip_ratio": [0.005] * 7 + [0.5]}, True),
        ({"clip_ratio": [0.5] * 7 + [0.005]}, False),
        # the plateau must be proven
        ({"reward_mean": RISING}, False),
        ({"reward_mean": FALLING}, False),
        ({"reward_mean": UNCLEAR}, False),
        # no more updates once the drift is at its target
        ({"kl_step": 0.0099}, True),
        ({"kl_step": 0.0100}, False),
        # the signal must be there
        ({"zero_std_fraction": 0.59}, True),
        ({"zero_std_fraction": 0.60}, False),
        ({"reward_mean": [0.949] * TREND}, True),
        ({"reward_mean": [0.950] * TREND}, False),  # saturated
        # entropy and mismatch in their normal range: [1/20, 1.5] x start, below 0.05
        ({"entropy": [0.3] * 7 + [0.449]}, True),
        ({"entropy": [0.3] * 7 + [0.451]}, False),
        ({"entropy": [0.3] * 7 + [0.0149]}, False),
        ({"kl_mismatch": 0.049}, True),
        ({"kl_mismatch": 0.050}, False),
    ],
)
def test_a3_wants_one_notch_more_updates(metrics: dict[str, Series], speaks: bool) -> None:
    assert wants(ask(A3, timid(**metrics))) == ((MINI, 8) if speaks else None)


@pytest.mark.parametrize(("kl_step", "speaks"), [(0.0029, True), (0.003, False), (0.009, False)])
def test_a3_takes_the_plateau_of_a_run_that_was_healthy_for_convergence(kl_step: float, speaks: bool) -> None:
    answer = ask(A3, timid(kl_step=kl_step), anchors={"X1": 3e-4})
    assert (wants(answer) is not None) == speaks
    assert wants(ask(A3, timid(kl_step=kl_step))) is not None  # nobody has seen it healthy


@pytest.mark.parametrize("seen", [1, WINDOW, TREND - 1])
def test_a3_waits_for_the_whole_trend_window(seen: int) -> None:
    assert wants(ask(A3, timid()[:seen])) is None


@pytest.mark.parametrize(
    ("knobs", "expected"),
    [
        (batch(32), (MINI, 16)),  # U = 2 -> 4
        (batch(16), (MINI, 8)),  # U = 4 -> 8
        (batch(8), None),  # U = 8: stays inside A1
        (batch(2, train=4), (MINI, 1)),  # the lowest notch, U = 2 -> 4
        (batch(1, epochs=1, train=4), ("ppo_epochs", 2)),  # the lattice ends: epochs, U = 4 -> 8
        (batch(1, epochs=2, train=3), None),  # U = 6 -> 9
        (batch(1, epochs=2, train=4), None),  # U = 8
        (batch(16, epochs=2), None),  # U = 8
    ],
)
def test_a3_stays_inside_a1(knobs: dict[str, float], expected: tuple[str, float] | None) -> None:
    assert wants(ask(A3, run(TREND, knobs=knobs, clip_ratio=0.005, kl_step=0.004))) == expected


def test_a3_does_not_mix_config_epochs() -> None:
    before, after = run(TREND, clip_ratio=0.005, kl_step=0.004), timid()
    mixed = [*before[:4], *(replace(s, rollout=s.rollout + 4, epoch=1) for s in after[:4])]
    assert wants(ask(A3, mixed)) is None


def test_a3_does_not_take_more_updates_while_the_drift_is_unknown() -> None:
    assert wants(ask(A3, timid(kl_step=None))) is None


def test_a3_uses_epochs_where_the_mini_batch_cannot_move() -> None:
    stuck = facts(immovable={MINI: "fixed when this trainer starts"})
    assert wants(ask(A3, timid(), of=stuck)) == ("ppo_epochs", 2)


@pytest.mark.parametrize("policy", [A3, A4])
def test_a_mini_batch_outside_the_lattice_does_not_end_the_run(policy: Any) -> None:
    clip, drift = (0.005, 0.004) if policy is A3 else (0.2, 0.01)
    snapshots = run(TREND, knobs={MINI: 24}, clip_ratio=clip, kl_step=drift)
    assert wants(ask(policy, snapshots)) is not None


# ------------------------------------------------------------------------------------------ A4


@pytest.mark.parametrize(
    ("clip_ratio", "expected"),
    [
        (0.149, None),
        (0.150, None),
        (0.151, (MINI, 32)),
        (0.9, (MINI, 32)),
        ([0.01] * 3 + [0.9], None),  # one sample is no level
        ([0.01] * 2 + [0.5] * 2, (MINI, 32)),  # the median of four is their middle
    ],
)
def test_a4_wants_fewer_updates_above_15_percent(
    clip_ratio: Series, expected: tuple[str, float] | None
) -> None:
    assert wants(ask(A4, run(WINDOW, clip_ratio=clip_ratio))) == expected


@pytest.mark.parametrize(
    ("kl_step", "expected"),
    [
        (0.0074, None),  # much clipping of a small drift: the range is narrow, and B4a widens it
        (0.0075, (MINI, 32)),
        (0.0076, (MINI, 32)),
        (None, (MINI, 32)),  # unknown: the careful way
    ],
)
def test_a4_leaves_a_narrow_range_to_b4a(kl_step: Series, expected: tuple[str, float] | None) -> None:
    assert wants(ask(A4, run(WINDOW, clip_ratio=0.3, kl_step=kl_step))) == expected


def test_a4_waits_for_a_full_window() -> None:
    assert wants(ask(A4, run(WINDOW - 1, clip_ratio=0.5))) is None


@pytest.mark.parametrize("metric", ["kl_step", "kl_ref"])
@pytest.mark.parametrize(
    ("tail", "speaks"),
    [
        ([0.099, 0.101], False),
        ([0.100, 0.100], False),  # ten times is not more than ten times
        ([0.1001, 0.1001], True),
        ([0.9, 0.05], False),  # two rollouts running
        ([0.05, 0.9], False),
        ([0.3, 0.2], True),
    ],
)
def test_a4_hears_a_sudden_explosion_of_kl(metric: str, tail: list[float], speaks: bool) -> None:
    series: dict[str, Series] = {metric: [0.01] * 6 + tail}
    assert wants(ask(A4, run(TREND, **series))) == ((MINI, 32) if speaks else None)


def test_a4_calls_a_hundredfold_of_next_to_nothing_no_explosion() -> None:
    assert ask(A4, run(TREND, kl_step=[5e-5] * 6 + [0.01, 0.01])) is None


@pytest.mark.parametrize(("seen", "speaks"), [(WINDOW + 1, False), (WINDOW + 2, True)])
def test_a4_calls_nothing_sudden_before_it_knows_the_usual(seen: int, speaks: bool) -> None:
    answer = ask(A4, run(seen, kl_step=[0.01] * (seen - 2) + [0.2, 0.2]))
    assert (answer is not None) == speaks


def test_a4_does_not_take_adams_start_for_the_usual() -> None:
    late = run(6, start=3, kl_step=[0.01] * 4 + [0.2, 0.2])
    early = run(6, start=0, kl_step=[0.01] * 4 + [0.2, 0.2])
    assert ask(A4, late) is not None
    assert ask(A4, early) is None, "rollouts 0-2 must not count: four usual ones are not there yet"


def test_a4_hears_an_explosion_with_one_update_per_rollout_and_then_lowers_the_rate() -> None:
    answer = ask(A4, run(TREND, knobs=batch(64), clip_ratio=None, kl_step=[0.01] * 6 + [0.2, 0.2]))
    assert wants(answer) == (RATE, pytest.approx(0.7 * 3e-4))


def test_a4_does_not_read_clip_with_one_update_per_rollout() -> None:
    assert wants(ask(A4, run(WINDOW, knobs=batch(64), clip_ratio=0.9))) is None


@pytest.mark.parametrize(
    ("ago", "expected"),
    [
        (1, (RATE, pytest.approx(0.7 * 3e-4))),
        (PACE.settle + PACE.evaluate + 2 * PACE.knob_cooldown, (RATE, pytest.approx(0.7 * 3e-4))),
        (PACE.settle + PACE.evaluate + 2 * PACE.knob_cooldown + 1, (MINI, 32)),
    ],
)
def test_a4_climbs_to_the_learning_rate_when_fewer_updates_did_not_help(
    ago: int, expected: tuple[str, float]
) -> None:
    snapshots = run(WINDOW, clip_ratio=0.3, start=40)
    last = snapshots[-1].rollout - ago
    assert wants(ask(A4, snapshots, last_moves={"A4": last})) == expected


def test_a4_lowers_the_rate_at_the_end_of_the_lattice() -> None:
    knobs = batch(64, epochs=2)  # U = 2 and no larger mini-batch
    assert wants(ask(A4, run(WINDOW, knobs=knobs, clip_ratio=0.3))) == (RATE, pytest.approx(2.1e-4))


def test_a4_lowers_the_rate_where_the_mini_batch_cannot_move() -> None:
    stuck = facts(immovable={MINI: "fixed when this trainer starts"})
    answer = wants(ask(A4, run(WINDOW, clip_ratio=0.3), of=stuck))
    assert answer == (RATE, pytest.approx(2.1e-4))


def test_a4_does_not_count_a_share_that_is_out_of_range() -> None:
    percent = Reading(None, Validity.OUT_OF_RANGE, "clip_ratio is 30, expected [0, 1] share")
    snapshots = run(WINDOW, clip_ratio=0.3)
    snapshots[-1] = replace(snapshots[-1], readings=dict(snapshots[-1].readings) | {"clip_ratio": percent})
    assert ask(A4, snapshots) is None


def test_thresholds_are_parameters() -> None:
    assert wants(ask(ClipTooHigh(threshold=0.03), run(WINDOW, clip_ratio=0.031))) == (MINI, 32)
    assert wants(ask(ClipTooLow(threshold=0.001), timid(clip_ratio=0.002))) is None
    assert context(run(1)).updates == 4


@pytest.mark.parametrize(("clip", "loss_kind", "speaks"), [(0.2, "token", True), (0.2, "sequence", False)])
def test_a4_knows_that_sequence_ratios_clip_more(clip: float, loss_kind: str, speaks: bool) -> None:
    answer = ask(ClipTooHigh(), run(WINDOW, clip_ratio=clip), of=facts(loss_kind=loss_kind))
    assert (answer is not None) == speaks
