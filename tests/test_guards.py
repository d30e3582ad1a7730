"""The limits written once for all rules, each in isolation and at its edge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest

from autotune.decisions import Kind, Proposal
from autotune.guards import (
    ALWAYS,
    CALM,
    GUARDS,
    Question,
    cooled_down,
    direction_kept,
    first_objection,
    freeze_reason,
    integrity,
    knob_movable,
    knob_pinned,
    not_frozen,
    not_locked,
    one_in_flight,
    probation_knob,
    real_values,
    warmed_up,
)
from autotune.ledger import VERSION, Ledger, Move, Probation
from autotune.policies.base import Engagement, pace_for
from tests.series import PACE, context, facts, snapshot

RATE, MINI = "actor_learning_rate", "ppo_mini_batch_size"
NOW = 50
INTERVENTION, REGULATOR = Kind.INTERVENTION, Kind.REGULATOR


def question(
    knob: str = RATE,
    value: float = 1e-4,
    kind: Kind = INTERVENTION,
    *,
    rollout: int = NOW,
    pin: tuple[str, ...] = (),
    hold: str = "",
    immovable: Mapping[str, str] | None = None,
    **ledger: Any,
) -> Question:
    ctx = context([snapshot(rollout)], of=facts(immovable=immovable))
    return Question(Proposal("T", knob, value, "test", kind), ctx, Ledger(**ledger), pin, hold)


def probation(*knobs: str) -> Probation:
    after = dict.fromkeys(knobs, 1.0)
    return Probation("A1", knobs[0], after, after, since=NOW - 1, epoch=1, rewards=(), kl_step=None)


def moved(ago: int, direction: int, knob: str = RATE, kind: Kind = INTERVENTION) -> Move:
    return Move(NOW - ago, knob, direction, str(kind))


# -------------------------------------------------------------------------------- who may speak


@pytest.mark.parametrize(
    ("knob", "pin", "objects"),
    [
        (RATE, (RATE,), True),
        (RATE, (MINI, "kl_coef"), False),
        ("clip_range", ("clip_range",), True),
        ("clip_range", ("clip_range_low",), True),  # one pinned side pins the pair
        ("clip_range", ("clip_range_high",), True),
        ("clip_range_high", ("clip_range_low",), False),
    ],
)
def test_a_pinned_knob_is_left_alone(knob: str, pin: tuple[str, ...], objects: bool) -> None:
    reason = knob_pinned(question(knob, pin=pin))
    assert (reason == f"{knob} is pinned") if objects else not reason


def test_pinning_clip_range_pins_both_of_its_sides() -> None:
    assert knob_pinned(question("clip_range_high", pin=("clip_range",)))


def test_a_pin_also_holds_against_values_that_are_derived() -> None:
    knobs = {MINI: 8, "micro_batch_size": 64}
    asked = question(MINI, 4, pin=("micro_batch_size",))
    ctx = context([snapshot(NOW, knobs)], of=facts(knobs=knobs))
    asked = Question(asked.proposal, ctx, asked.ledger, asked.pinned, "")
    changed = {k for k, v in real_values(MINI, 4, ctx).items() if v != ctx.knobs[k]}
    assert "micro_batch_size" not in changed or first_objection(asked, GUARDS)


def test_a_knob_that_cannot_move_says_why() -> None:
    reason = knob_movable(question("kl_coef", immovable={"kl_coef": "there is no reference model"}))
    assert reason == "kl_coef cannot be changed in this run: there is no reference model"
    assert "no such knob" in knob_movable(question("critic_learning_rate"))
    assert knob_movable(question("kl_coef")) == ""


def test_a_contested_knob_is_left_alone() -> None:
    assert knob_movable(question(contested={RATE: "another writer"})) == "another writer"
    assert knob_movable(question("clip_range", contested={"clip_range_high": "dead"})) == "dead"


def test_nothing_is_tuned_on_hold() -> None:
    assert integrity(question(hold="reward_mean is nan")) == "reward_mean is nan"


# -------------------------------------------------------------------------------------- when


@pytest.mark.parametrize(("rollout", "waits"), [(0, True), (1, True), (2, False), (3, False)])
def test_warm_up_counts_rollouts_that_were_seen(rollout: int, waits: bool) -> None:
    assert PACE.warmup == 3
    assert bool(warmed_up(question(rollout=rollout))) == waits
    assert bool(warmed_up(question(rollout=rollout, kind=REGULATOR))) == waits


def test_frozen_means_everything() -> None:
    assert not_frozen(question(frozen="frozen: 3 reverts", kind=REGULATOR)) == "frozen: 3 reverts"


def test_one_intervention_in_flight_and_regulators_beside_it_on_other_knobs() -> None:
    flying = probation(MINI, "micro_batch_size")
    assert one_in_flight(question(RATE, probation=flying)) == f"A1 on {MINI} is still being judged"
    assert one_in_flight(question(RATE, kind=REGULATOR, probation=flying)) == ""
    assert probation_knob(question(RATE, kind=REGULATOR, probation=flying)) == ""
    assert probation_knob(question(MINI, kind=REGULATOR, probation=flying)) == f"{MINI} is being judged"
    sides = probation("clip_range_low", "clip_range_high")
    assert probation_knob(question("clip_range", kind=REGULATOR, probation=sides))


@pytest.mark.parametrize(("until", "waits"), [(NOW - 1, False), (NOW, False), (NOW + 1, True)])
def test_cooldown_after_a_verdict(until: int, waits: bool) -> None:
    assert bool(cooled_down(question(cooldown_until=until))) == waits
    assert cooled_down(question(cooldown_until=until, kind=REGULATOR)) == ""


@pytest.mark.parametrize(
    ("ago", "waits"), [(1, True), (PACE.knob_cooldown - 1, True), (PACE.knob_cooldown, False)]
)
def test_the_same_knob_rests_longer(ago: int, waits: bool) -> None:
    assert bool(cooled_down(question(moves=[moved(ago, -1)]))) == waits
    assert cooled_down(question("kl_coef", moves=[moved(ago, -1)])) == ""


@pytest.mark.parametrize(("until", "waits"), [(NOW, False), (NOW + 1, True)])
def test_a_reverted_knob_is_locked_for_regulators_too(until: int, waits: bool) -> None:
    for kind in (INTERVENTION, REGULATOR):
        assert bool(not_locked(question(kind=kind, locks={RATE: until}))) == waits
    assert not_locked(question("kl_coef", locks={RATE: NOW + 9})) == ""


@pytest.mark.parametrize(
    ("ago", "direction", "waits"),
    [
        (2 * PACE.knob_cooldown - 1, +1, True),  # 1e-4 is down from 3e-4
        (2 * PACE.knob_cooldown, +1, False),
        (2 * PACE.knob_cooldown - 1, -1, False),
    ],
)
def test_no_intervention_turns_a_knob_round_soon(ago: int, direction: int, waits: bool) -> None:
    moves = [moved(ago, direction)]
    assert bool(direction_kept(question(moves=moves))) == waits
    assert direction_kept(question(kind=REGULATOR, moves=moves)) == ""
    assert direction_kept(question(moves=[moved(ago, direction, kind=REGULATOR)])) == ""


def test_the_first_objection_names_its_guard() -> None:
    both = question(rollout=0, pin=(RATE,), frozen="frozen")
    assert first_objection(both, GUARDS) == ("knob_pinned", f"{RATE} is pinned")
    assert first_objection(both, CALM) == ("warmed_up", "warm-up: 1 of 3 rollouts seen")
    assert first_objection(question(), GUARDS) is None
    assert set(GUARDS) == set(ALWAYS) | set(CALM)


# ------------------------------------------------------------------------------------ freezing


@pytest.mark.parametrize(
    ("reverts", "frozen"),
    [
        ([300, 400], False),
        ([300, 400, 500], True),
        ([299, 400, 500], False),  # 201 rollouts apart
        ([1, 2, 3], False),
    ],
)
def test_three_reverts_within_200_rollouts_freeze_all_tuning(reverts: list[int], frozen: bool) -> None:
    assert bool(freeze_reason(Ledger(reverts=reverts), 500)) == frozen


@pytest.mark.parametrize(
    ("moves", "frozen"),
    [
        ([(400, +1), (450, -1)], False),
        ([(400, +1), (450, -1), (500, +1)], True),
        ([(399, +1), (450, -1), (500, +1)], False),  # the first is 101 rollouts ago
        ([(400, +1), (450, +1), (500, -1)], False),
    ],
)
def test_two_direction_flips_within_100_rollouts_freeze_all_tuning(
    moves: list[tuple[int, int]], frozen: bool
) -> None:
    def ledger(kind: Kind, knobs: tuple[str, ...] = (RATE,)) -> Ledger:
        made = [Move(t, knobs[i % len(knobs)], d, str(kind)) for i, (t, d) in enumerate(moves)]
        return Ledger(moves=made)

    assert bool(freeze_reason(ledger(INTERVENTION), 500)) == frozen
    assert freeze_reason(ledger(REGULATOR), 500) == "", "a regulator corrects itself by design"
    assert freeze_reason(ledger(INTERVENTION, (RATE, MINI)), 500) == "", "flips are counted per knob"


# -------------------------------------------------------------------------------- pace, ledger


def test_the_documented_lengths_at_a_thousand_rollouts() -> None:
    pace = pace_for(1.0)
    assert (pace.warmup, pace.window, pace.trend, pace.settle) == (20, 10, 50, 2)
    assert (pace.evaluate, pace.cooldown, pace.knob_cooldown, pace.revert_cooldown) == (10, 20, 40, 80)


@pytest.mark.parametrize("scale", [0.0, 0.1, 0.25, 0.5])
def test_scaled_lengths_keep_their_minima(scale: float) -> None:
    pace = pace_for(scale)
    assert pace.warmup >= 3 and pace.window >= 4 and pace.trend >= 8
    assert pace.evaluate >= 3 and pace.cooldown >= 3 and pace.settle == 2


@pytest.mark.parametrize(
    ("scale", "lr_warmup", "expected"),
    [(1.0, 0, 20), (1.0, 5, 20), (1.0, 30, 40), (0.1, 30, 31), (0.1, 1, 3)],
)
def test_a_learning_rate_warm_up_is_waited_for(scale: float, lr_warmup: int, expected: int) -> None:
    assert pace_for(scale, lr_warmup=lr_warmup).warmup == expected


def test_stale_data_takes_longer_to_settle() -> None:
    assert pace_for(1.0, staleness=3).settle == 5


def test_a_full_ledger_survives_json() -> None:
    import json

    ledger = Ledger(
        epoch=3,
        probation=probation(MINI, "micro_batch_size"),
        engagements={"X1": Engagement(4, 3e-4, 0.5)},
        moves=[moved(3, -1)],
        locks={RATE: 70},
        reverts=[12],
        contested={"kl_coef": "dead"},
        expected={RATE: 1e-4},
    )
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json(), allow_nan=False))) == ledger
    assert {f.name for f in fields(Ledger)} == set(ledger.to_json()) - {"version"}


@pytest.mark.parametrize("version", [None, 0, VERSION + 1])
def test_a_ledger_of_another_version_is_refused(version: object) -> None:
    state = Ledger().to_json() | {"version": version}
    with pytest.raises(RuntimeError, match=f"version {version!r}, this program reads {VERSION}"):
        Ledger.from_json(state)


def test_the_ledger_forgets_what_no_guard_can_ask_for() -> None:
    ledger = Ledger(moves=[Move(t, RATE, 1, "intervention") for t in range(1000)], reverts=list(range(1000)))
    ledger.trim(1000)
    assert len(ledger.moves) == len(ledger.reverts) == 400
