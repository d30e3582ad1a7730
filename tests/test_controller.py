"""The state machine: open loop on snapshots made by hand, closed loop on the fake trainer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.controller import AT_BOUND_WINDOWS, Controller, ControlSettings
from autotune.decisions import (
    RANKS_DISAGREE,
    Applied,
    Decision,
    Kind,
    Outcome,
    Proposal,
    RunFacts,
    State,
    to_json,
)
from autotune.errors import AutotuneError, ControlStop, InputError
from autotune.hooks.loop import ControlLoop
from autotune.metrics import Reading, Snapshot, Validity
from autotune.policies import POLICIES, PROFILES
from autotune.policies.base import Answer, Context, Emergency, Family, Hold, Policy
from autotune.testing import FakeTrainer
from autotune.testing.faults import (
    Collapse,
    DeadKnob,
    Duplicate,
    Fault,
    Frozen,
    Missing,
    NonFinite,
    OutOfOrder,
    Overwrite,
    RefusedKnob,
    negative_kl,
    outlier,
    percent,
)
from tests.series import PACE, QUICK, RISING, facts, snapshot

RATE, MINI, COEF = "actor_learning_rate", "ppo_mini_batch_size", "kl_coef"
CYCLE = PACE.settle + PACE.evaluate
"""Rollouts from a change to its verdict."""


def scripted(
    rule: str,
    say: Callable[[Context], Answer],
    *,
    family: Family = Family.TRUST_REGION,
    needs: tuple[str, ...] = (),
    moves: tuple[str, ...] = (),
    resting: Callable[[Context], bool] | None = None,
    healthy: Callable[[Context], bool] | None = None,
) -> Policy:
    """A rule that says what a test wants."""
    body: dict[str, Any] = {
        "id": rule,
        "family": family,
        "source": "test",
        "summary": "test",
        "needs": needs,
        "moves": moves,
        "propose": lambda self, ctx: say(ctx),
    }
    if resting is not None:
        body["resting"] = lambda self, ctx: resting(ctx)
    if healthy is not None:
        body["healthy"] = lambda self, ctx: healthy(ctx)
    return type(rule, (Policy,), body)()  # type: ignore[no-any-return]


def always(rule: str, knob: str, factor: float, kind: Kind = Kind.INTERVENTION, **more: Any) -> Policy:
    """A rule that wants `factor` x the present value at every rollout."""
    return scripted(
        rule,
        lambda ctx: Proposal(rule, knob, ctx.knob(knob) * factor, "always", kind),
        moves=(knob,),
        **more,
    )


def once(rule: str, knob: str, factor: float, at: int, **more: Any) -> Policy:
    """A rule that wants it at one rollout."""

    def say(ctx: Context) -> Answer:
        if ctx.rollout != at:
            return None
        return Proposal(rule, knob, ctx.knob(knob) * factor, "once")

    return scripted(rule, say, moves=(knob,), **more)


class Rig:
    """A controller and an obedient trainer that consists of its knobs."""

    def __init__(
        self,
        *policies: Policy,
        of: RunFacts | None = None,
        disobeys: tuple[str, ...] = (),
        **control: Any,
    ) -> None:
        self.facts = of or facts()
        self.controller = Controller(ControlSettings(**control), self.facts)
        if policies:
            self.controller.policies = policies
        self.knobs = dict(self.facts.knobs)
        self.disobeys, self.epoch, self.rollout = disobeys, 0, 0

    def step(self, **metrics: Any) -> Decision:
        """One rollout under the present knobs; what the controller wants is applied and confirmed."""
        snap = snapshot(self.rollout, self.knobs, epoch=self.epoch, **metrics)
        decision = self.controller.step(snap)
        self.rollout += 1
        if decision.act:
            obeyed = {k: v for k, v in decision.values.items() if k not in self.disobeys}
            self.knobs.update(obeyed)
            applied = [Applied(k, v, self.knobs[k], self.rollout) for k, v in decision.values.items()]
            self.epoch = decision.epoch
            back = None if decision.restore is None else decision.restore.before_rollout
            self.controller.confirm(applied, back)
        return decision

    def steps(self, n: int, **metrics: Any) -> list[Decision]:
        return [self.step(**metrics) for _ in range(n)]


def changed(decisions: list[Decision]) -> list[tuple[int, str]]:
    return [(d.rollout, c.knob) for d in decisions for c in d.changes]


# --------------------------------------------------------------------------- the machine's clock


def test_warm_up_settle_evaluate_cooldown_have_their_lengths() -> None:
    rig = Rig(always("T", COEF, 1.2))
    states = [d.state for d in rig.steps(12)]
    assert states == [
        State.WARMUP,
        State.WARMUP,
        State.SETTLE,  # rollout 2: granted
        State.SETTLE,
        State.EVALUATE,
        State.EVALUATE,
        State.EVALUATE,
        State.COOLDOWN,  # rollout 7: the verdict
        State.COOLDOWN,
        State.COOLDOWN,
        State.SETTLE,  # rollout 10: granted again
        State.SETTLE,
    ]
    assert PACE.warmup == 3 and CYCLE == 5 and PACE.cooldown == 3


def test_a_quiet_run_is_observed_once_it_is_warm() -> None:
    silent = scripted("T", lambda ctx: None)
    assert [d.state for d in Rig(silent).steps(4)] == [State.WARMUP] * 2 + [State.OBSERVE] * 2


def test_one_change_in_flight_then_a_verdict_then_a_cooldown() -> None:
    rig = Rig(always("T1", COEF, 1.2), always("T2", "clip_range", 0.9))
    decisions = rig.steps(9)
    assert changed(decisions) == [(2, COEF)]
    vetoed = {d.rollout: [(v.proposal.rule, v.guard) for v in d.vetoes] for d in decisions}
    assert vetoed[1] == [("T1", "warmed_up"), ("T2", "warmed_up")]
    assert vetoed[2] == [("T2", "priority")]
    assert vetoed[6] == [("T1", "one_in_flight"), ("T2", "one_in_flight")]
    assert [v.rule for v in decisions[7].verdicts] == ["T1"]
    assert vetoed[8] == [("T1", "cooled_down"), ("T2", "cooled_down")]


def test_every_verdict_follows_its_change_by_settle_and_evaluate() -> None:
    decisions = Rig(always("T", COEF, 1.1)).steps(60)
    verdicts = [(v.since_rollout, d.rollout) for d in decisions for v in d.verdicts]
    assert len(verdicts) >= 5 and all(at - since == CYCLE for since, at in verdicts)
    gaps = [b - a for (a, _), (b, _) in itertools.pairwise(changed(decisions))]
    assert min(gaps) == CYCLE + PACE.cooldown


def test_an_intervention_opens_an_epoch_and_a_regulator_does_not() -> None:
    assert [d.epoch for d in Rig(always("T", COEF, 1.2)).steps(4)] == [0, 0, 1, 1]
    assert {d.epoch for d in Rig(always("T", COEF, 1.2, Kind.REGULATOR)).steps(9)} == {0}


def test_priority_is_the_order_of_families_and_safety_that_of_one_knob() -> None:
    late = always("T1", COEF, 1.2, family=Family.LEARNING_SPEED)
    up, down = always("T2", RATE, 1.5), always("T3", RATE, 0.5)
    rig = Rig(*sorted((late, up, down), key=lambda p: p.family))
    decision = rig.steps(3)[-1]
    assert [c.rule for c in decision.changes] == ["T3"], "lower is the careful side of a learning rate"
    assert {v.proposal.rule: v.guard for v in decision.vetoes} == {"T1": "priority", "T2": "priority"}
    assert all(v.reason.startswith("T3 on") for v in decision.vetoes)


def test_a_careful_wish_on_cooldown_still_beats_a_bold_one() -> None:
    first = once("T1", COEF, 1.2, at=2)
    down, up = always("T2", RATE, 0.75), always("T3", RATE, 2.0, Kind.REGULATOR)
    rig = Rig(first, down, up)
    for decision in rig.steps(6):
        assert [c.rule for c in decision.changes] != ["T3"], "T2 wants the same knob lower"


# ----------------------------------------------------------------------------- judging a change


def test_a_harmful_change_is_reverted_locked_and_counted() -> None:
    rig = Rig(always("T", COEF, 4.0))
    decisions = [rig.step(reward_mean=0.5 if rig.knobs[COEF] == 0.005 else 0.1) for _ in range(15)]
    assert changed(decisions) == [(2, COEF), (7, COEF)]
    verdict, revert = decisions[7].verdicts[0], decisions[7].changes[0]
    assert verdict.outcome is Outcome.REVERTED and revert.values == {COEF: 0.005}
    assert revert.reason.startswith("reverted: reward fell") and rig.knobs[COEF] == 0.005
    assert decisions[8].vetoes[0].guard == "not_locked"
    locked = [d.rollout for d in decisions if d.vetoes and d.vetoes[0].guard == "not_locked"]
    assert locked == list(range(8, 7 + PACE.revert_cooldown))


def test_the_lock_doubles_with_every_revert() -> None:
    rig = Rig(always("T", COEF, 4.0))
    ledger = rig.controller.ledger
    ledger.revert_counts[COEF] = 2
    for _ in range(8):
        rig.step(reward_mean=0.5 if rig.knobs[COEF] == 0.005 else 0.1)
    assert ledger.locks[COEF] == 7 + 4 * PACE.revert_cooldown


def test_a_helpful_change_is_kept_and_a_neutral_one_stays() -> None:
    for gain, outcome in ((0.3, Outcome.KEPT), (0.0, Outcome.INCONCLUSIVE)):
        rig = Rig(always("T", COEF, 1.2))
        decisions = [rig.step(reward_mean=0.3 if rig.knobs[COEF] == 0.005 else 0.3 + gain) for _ in range(8)]
        assert [v.outcome for v in decisions[-1].verdicts] == [outcome]
        assert rig.knobs[COEF] == pytest.approx(0.006)


def test_three_reverts_freeze_all_tuning_but_not_the_emergencies() -> None:
    rules = [
        once(f"T{i}", knob, 0.5, at=2 + i * (CYCLE + PACE.cooldown))
        for i, knob in enumerate((COEF, "clip_range", RATE))
    ]
    rules.append(always("T3", "temperature", 0.9))
    dying = scripted(
        "T9",
        lambda ctx: Emergency("T9", "undo", ctx.rollout, 0.5, "dying") if ctx.rollout == 50 else None,
        family=Family.COLLAPSE,
    )
    rig, home = Rig(dying, *rules), dict(facts().knobs)
    rig.controller.ledger.locks["temperature"] = 24
    decisions = [rig.step(reward_mean=0.5 if rig.knobs == home else 0.1) for _ in range(51)]
    reverts = [d.rollout for d in decisions for v in d.verdicts if v.outcome is Outcome.REVERTED]
    assert len(reverts) == 3 and decisions[reverts[-1]].state is State.FROZEN
    after = decisions[reverts[-1] + 1 : 50]
    assert not changed(after) and {d.state for d in after} == {State.FROZEN}
    assert all("3 reverts" in v.reason for d in after for v in d.vetoes)
    assert decisions[50].state is State.EMERGENCY and decisions[50].changes


def test_one_revert_and_a_second_try_do_not_freeze_the_run() -> None:
    rig = Rig(always("T", COEF, 1.2))
    decisions = [rig.step(reward_mean=0.5 if rig.knobs[COEF] == 0.005 else 0.1) for _ in range(19)]
    reverts = [d.rollout for d in decisions for v in d.verdicts if v.outcome is Outcome.REVERTED]
    assert len(reverts) == 1 and len(changed(decisions)) == 3
    assert State.FROZEN not in {d.state for d in decisions}


def test_a_regulator_holds_no_slot_and_is_judged_once_it_rests() -> None:
    regulator = scripted(
        "R",
        lambda ctx: (
            Proposal("R", RATE, ctx.knob(RATE) * 0.8, "down", Kind.REGULATOR) if ctx.rollout < 6 else None
        ),
        moves=(RATE,),
        resting=lambda ctx: ctx.rollout == 8,
        healthy=lambda ctx: ctx.rollout == 4,
    )
    rig = Rig(regulator, always("T", COEF, 1.1, family=Family.REFERENCE_KL))
    decisions = rig.steps(10)
    assert changed(decisions) == [(2, RATE), (3, RATE), (4, RATE), (5, RATE), (6, COEF)]
    verdicts = [(d.rollout, v.rule, v.since_rollout) for d in decisions for v in d.verdicts]
    assert verdicts == [(8, "R", 2)], "one engagement, one verdict"
    anchor = rig.controller.ledger.anchors["R"]
    assert anchor == pytest.approx(3e-4 * 0.8**2), "the value under which it was seen healthy"


def test_a_regulator_does_not_move_the_very_knob_on_probation() -> None:
    rig = Rig(once("T", RATE, 0.3, at=2), always("R", RATE, 1.5, Kind.REGULATOR))
    decisions = rig.steps(8)
    assert changed(decisions)[:2] == [(2, RATE), (7, RATE)]
    assert [d.vetoes[0].guard for d in decisions[3:7]] == ["probation_knob"] * 4


# ----------------------------------------------------------------------------- bounds and literal


def test_a_knob_at_its_bound_is_reported_once_and_not_pushed() -> None:
    rig = Rig(always("T", COEF, 2.0), of=facts(knobs={COEF: 2.0}))
    pushes = AT_BOUND_WINDOWS * PACE.window
    decisions = rig.steps(PACE.warmup - 1 + 2 * pushes)
    assert not changed(decisions) and rig.knobs[COEF] == 2.0
    assert {v.guard for d in decisions[2:] for v in d.vetoes} == {"bounds"}
    told = [d.rollout for d in decisions if d.alarms]
    assert told == [PACE.warmup - 1 + pushes - 1]
    assert "kl_coef 2 is at its bound for 5 windows" in decisions[told[0]].alarms[0]


def test_the_literal_profile_drops_the_calm_but_not_the_safety() -> None:
    rig = Rig(always("T", COEF, 1.2), profile="literal", pin=())
    assert changed(rig.steps(3)) == [(0, COEF), (1, COEF), (2, COEF)]
    pinned = Rig(always("T", COEF, 1.2), profile="literal", pin=(COEF,))
    assert not changed(pinned.steps(3))


# ------------------------------------------------------------------------- hold: nothing measured


@pytest.mark.parametrize(
    "bad",
    [
        {"reward_mean": math.nan},
        {"reward_mean": math.inf},
        {"reward_mean": "nan"},
        {"reward_mean": True},
        {"kl_ref": -0.01},
        {"kl_ref": -math.inf},
        {"clip_ratio": 30.0},
        {"clip_ratio": -0.0001},
        {"entropy": math.nan},
        {"loss": math.nan},
        {"grad_norm": math.inf},
        {"kl_step": math.nan},
    ],
    ids=str,
)
def test_a_metric_that_is_not_to_be_trusted_holds_all_tuning(bad: dict[str, Any]) -> None:
    documented = [POLICIES[rule]() for rule in PROFILES["documented"]]
    wishes = [always("T1", COEF, 1.2), always("T2", RATE, 0.5, Kind.REGULATOR)]
    rig = Rig(*documented, *wishes)
    rig.steps(2)
    decision = rig.step(**bad)
    assert decision.state is State.HOLD and not decision.changes and not decision.values
    assert {v.guard for v in decision.vetoes if v.proposal.rule in ("T1", "T2")} == {"integrity"}
    assert decision.alarms[0].startswith("hold: ") and next(iter(bad)) in decision.alarms[0]
    assert rig.step().changes, "it goes on as soon as the metric is sound again"


def test_a_rule_may_hold_all_tuning_too() -> None:
    gate = scripted("G", lambda ctx: Hold("G", "repair first"), family=Family.INTEGRITY)
    decision = Rig(gate, always("T", COEF, 1.2)).steps(3)[-1]
    assert decision.state is State.HOLD and decision.alarms == ("hold: G: repair first",)
    assert not decision.changes


def test_no_reading_reaches_a_rule_as_zero() -> None:
    """The same run with a metric at 0 and with that metric broken must not look alike."""
    seen: list[float | None] = []
    spy = scripted("S", lambda ctx: seen.append(ctx.value("kl_ref")))  # type: ignore[func-returns-value]
    rig = Rig(spy)
    for value in (0.0, math.nan, None, -1.0, "0"):
        rig.step(kl_ref=value)
    assert seen == [0.0, None, None, None, None]


def test_a_rule_without_its_metric_is_silent_and_says_why_once() -> None:
    rule = always("T", COEF, 1.2, needs=("kl_ref",))
    rig = Rig(rule)
    first, second = rig.step(kl_ref=None), rig.step(kl_ref=None)
    assert dict(first.silent) == {"T": "kl_ref was not in this rollout's metrics"}
    assert not second.silent and not second.proposals, "said once"
    frozen = {"kl_ref": Reading(None, Validity.FROZEN, "kl_ref has been exactly 0.05 for 5 rollouts")}
    assert "exactly 0.05" in rig.step(readings=frozen).silent["T"]
    assert rig.step().proposals and not rig.controller.ledger.silent


# ------------------------------------------------------------------------ order, other writers


def test_rollouts_out_of_order_or_twice_are_ignored() -> None:
    rig = Rig(always("T", COEF, 1.2))
    rig.steps(4)
    before = rig.controller.state_dict()
    for late in (3, 2, 0):
        decision = rig.controller.step(snapshot(late, rig.knobs, reward_mean=-9.0))
        assert decision.state is State.HOLD and not decision.changes and decision.restore is None
        assert decision.alarms == (f"rollout {late} came after 3: ignored",)
    assert rig.controller.state_dict() == before
    assert rig.step().rollout == 4


def test_another_writer_is_noticed_and_its_knob_left_alone() -> None:
    rig = Rig(always("T", RATE, 0.9, Kind.REGULATOR))
    rig.steps(3)
    rig.knobs[RATE] = 1e-3  # a scheduler that also owns it
    decision = rig.step()
    assert not decision.changes and "another writer" in decision.alarms[0]
    assert decision.vetoes[0].guard == "knob_movable"
    assert all(not d.changes and not d.alarms for d in rig.steps(5)), "said once, then left alone"


def test_a_dead_knob_is_tried_once_and_left_alone() -> None:
    rig = Rig(always("T", COEF, 1.2), disobeys=(COEF,))
    decisions = rig.steps(12)
    assert changed(decisions) == [(2, COEF)]
    assert "does not obey: asked for 0.006, reads 0.005" in decisions[3].vetoes[0].reason
    assert not [v for d in decisions for v in d.verdicts], "what never happened is not judged"
    assert not [a for d in decisions for a in d.alarms if "another writer" in a]


def test_a_change_that_takes_effect_later_is_not_another_writer() -> None:
    rig = Rig(always("T", COEF, 1.2), of=facts(staleness=1))
    rig.steps(2)
    before = dict(rig.knobs)
    decision = rig.controller.step(snapshot(2, before))
    applied = [Applied(k, v, v, effective_from=4) for k, v in decision.values.items()]
    rig.controller.confirm(applied, None)
    late = rig.controller.step(snapshot(3, before))  # sampled before the change
    assert not [a for a in late.alarms if "another writer" in a]


# ----------------------------------------------------------------------------------- emergencies


def emergency_at(*rollouts: int, restore: str = "checkpoint") -> Policy:
    return scripted(
        "E",
        lambda ctx: (
            Emergency("E", restore, ctx.rollout - 1, 0.5, "dying") if ctx.rollout in rollouts else None
        ),
        family=Family.COLLAPSE,
        moves=(RATE,),
    )


def test_an_emergency_passes_every_guard_but_a_pin() -> None:
    decision = Rig(emergency_at(0)).step(reward_mean=math.nan)
    assert decision.state is State.EMERGENCY and decision.values == {RATE: pytest.approx(1.5e-4)}
    assert decision.changes[0].kind is Kind.EMERGENCY and decision.restore is not None
    pinned = Rig(emergency_at(0), pin=(RATE,)).step()
    assert pinned.restore is not None and not pinned.changes


def test_an_emergency_opens_an_epoch_and_ends_what_was_in_flight() -> None:
    rig = Rig(emergency_at(4), always("T", COEF, 1.2))
    decisions = rig.steps(6)
    assert [d.epoch for d in decisions] == [0, 0, 1, 1, 2, 2]
    assert rig.controller.ledger.since_restore == 5 and rig.controller.ledger.emergencies == 1


def test_a_checkpoint_that_does_not_come_back_leaves_the_old_rewards_as_the_baseline() -> None:
    controller = Rig(emergency_at(4)).controller
    for t in range(5):
        decision = controller.step(snapshot(t))
        controller.confirm([], None)
    assert decision.restore is not None and controller.ledger.since_restore == 0


def test_a_change_in_flight_is_taken_back_by_an_emergency() -> None:
    rig = Rig(emergency_at(4), always("T", COEF, 0.25))
    decision = rig.steps(5)[-1]
    assert [(v.rule, v.outcome) for v in decision.verdicts] == [("T", Outcome.REVERTED)]
    assert rig.knobs[COEF] == 0.005


def test_a_careful_change_in_flight_outlives_an_emergency() -> None:
    rig = Rig(emergency_at(4), always("T", COEF, 4.0))
    decision = rig.steps(5)[-1]
    assert [(v.rule, v.outcome) for v in decision.verdicts] == [("T", Outcome.INCONCLUSIVE)]
    assert rig.knobs[COEF] == 0.02


def test_an_emergency_does_not_swallow_why_a_rule_is_silent() -> None:
    rig = Rig(emergency_at(2), always("T", COEF, 1.2, needs=("kl_ref",)))
    rig.steps(2)
    decisions = [rig.step(kl_ref=None), rig.step(kl_ref=None)]
    assert any("T" in d.silent for d in decisions)


def test_x2_brings_weights_back_even_where_the_rate_cannot_move() -> None:
    rig = Rig(of=facts(immovable={RATE: "the trainer's scheduler owns it"}))
    assert rig.step(kl_step=2.0).restore is not None


def test_vetoes_that_cannot_lower_the_rate_end_in_a_stop() -> None:
    rig = Rig(pin=(RATE,))
    assert any(d.stop for d in rig.steps(40, kl_step=2.0))


def test_at_the_lowest_rate_a_veto_stops_the_run() -> None:
    rig = Rig()
    decisions = rig.steps(6, kl_step=2.0)
    assert [bool(d.stop) for d in decisions] == [False] * 4 + [True] * 2
    assert rig.knobs[RATE] == pytest.approx(3e-4 / 50)
    assert "even at the lowest learning rate" in decisions[4].stop


# ---------------------------------------------------------------------- who can act, and why not


def statuses(of: RunFacts, **control: Any) -> dict[str, Any]:
    return {s.id: s for s in Controller(ControlSettings(**control), of).rules()}


def test_one_update_per_rollout_silences_the_clip_rules_and_says_why() -> None:
    one = facts(knobs={MINI: 64})
    for rule in ("A3", "B4a", "B4b"):
        status = statuses(one)[rule]
        assert status.on and not status.can_act and "one update per rollout" in status.reason
        assert statuses(facts())[rule].can_act
    assert "one update per rollout" in Rig(of=one).step().silent["B4a"]


def test_without_a_reference_the_kl_rules_are_silent_and_say_why() -> None:
    none = facts(has_reference=False, knobs={COEF: 0.0}, immovable={COEF: "no reference was built"})
    for rule in ("B3a", "B3b", "B3c"):
        assert "no reference model" in statuses(none)[rule].reason
        assert "no reference model" in Rig(of=none).step(kl_ref=None).silent[rule]


def test_a_pin_an_unlogged_metric_and_a_dead_actuator_are_named() -> None:
    assert statuses(facts(), pin=(RATE,))["X1"].reason == f"{RATE} pinned"
    assert statuses(facts(), pin=("clip_range_low",))["B4a"].reason == "clip_range pinned"
    assert statuses(facts(), pin=(MINI,))["A3"].can_act, "A3 has a second knob"
    unlogged = facts(unlogged={"kl_step": "this trainer rounds it"})
    assert statuses(unlogged)["X1"].reason == "this trainer rounds it"
    stuck = facts(immovable={MINI: "fixed at start", "ppo_epochs": "fixed at start"})
    assert "cannot be changed" in statuses(stuck)["A1"].reason


def test_a_loss_without_a_ratio_has_no_clip_rules() -> None:
    assert "no policy ratio" in statuses(facts(loss_kind="none"))["A3"].reason


@pytest.mark.parametrize("rule", ["B4a", "B4b"])
def test_sequence_ratios_need_thresholds_of_their_own(rule: str) -> None:
    assert not statuses(facts(loss_kind="sequence"))[rule].can_act


def test_profiles_switches_and_parameters() -> None:
    for profile, expected in PROFILES.items():
        assert {s.id for s in statuses(facts(), profile=profile).values() if s.on} == set(expected)
    off = statuses(facts(), policies={"A3": "off", "B5a": False})
    assert not off["A3"].on and not off["B5a"].on and "off in profile" in off["A3"].reason
    on = statuses(facts(), profile="documented", policies={"X1": "on", "X2": {"kl_step_limit": 0.5}})
    assert on["X1"].on and on["X2"].on
    made = Controller(ControlSettings(policies={"A4": {"threshold": 0.03}}), facts())
    assert next(p for p in made.policies if p.id == "A4").threshold == 0.03  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("control", "says"),
    [
        ({"profile": "bold"}, "profile is 'bold', expected one of documented"),
        ({"policies": {"A44": "off"}}, "unknown rule 'A44'; did you mean 'A4'?"),
        ({"policies": {"A4": {"treshold": 0.1}}}, "did you mean 'threshold'?"),
        ({"policies": {"A4": {"threshold": "15%"}}}, "threshold is '15%', expected a number"),
        ({"policies": {"A4": {"threshold": True}}}, "expected a number"),
    ],
)
def test_bad_settings_are_refused_with_the_nearest_name(control: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as refusal:
        Controller(ControlSettings(**control), facts())
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("pace", "rollouts", "scale"),
    [("auto", 60, 0.1), ("auto", 500, 0.5), ("auto", 9999, 1.0), (0.3, 60, 0.3)],
)
def test_pace_follows_the_length_of_the_run(pace: str | float, rollouts: int, scale: float) -> None:
    assert ControlSettings(pace=pace).scale(rollouts) == pytest.approx(scale)


# --------------------------------------------------------------------------------- closed loop


class Pages:
    """A journal in memory; every line has been JSON, unless only the score is wanted."""

    def __init__(self, plain: bool) -> None:
        self.plain = plain
        self.lines: list[dict[str, Any]] = []

    def append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        line = {"type": type, "rollout": rollout, **payload}
        self.lines.append(json.loads(json.dumps(line, allow_nan=False)) if self.plain else line)
        return line


TIMID = {RATE: 3e-5, MINI: 64}
AGGRESSIVE = {RATE: 1e-3, MINI: 2, "micro_batch_size": 16}
DEADLY = {RATE: 3e-3}
WELL_SET: dict[str, float] = {}


class Run:
    """One closed loop on the plant."""

    def __init__(
        self,
        knobs: Mapping[str, float],
        seed: int = 1,
        rollouts: int = 60,
        faults: tuple[Fault, ...] = (),
        policies: tuple[Policy, ...] = (),
        plain: bool = True,
        **control: Any,
    ) -> None:
        self.trainer = FakeTrainer(knobs, seed=seed, rollouts=rollouts, faults=faults)
        self.controller: Controller | None = None
        if control.get("mode") != "off":
            self.controller = Controller(ControlSettings(**control), self.trainer.facts())
            if policies:
                self.controller.policies = policies
        self.pages, self.stopped, self.decisions = Pages(plain), "", []
        self.records: list[Any] = []
        loop = ControlLoop(self.trainer, self.controller, self.pages)
        try:
            self.trainer.run(lambda raw: self._one(loop, raw))
        except ControlStop as stop:
            self.stopped = str(stop)

    def _one(self, loop: ControlLoop, raw: Any) -> None:
        self.records.append(raw)
        self.decisions.append(loop.on_rollout(raw))

    @property
    def score(self) -> float:
        """Mean training reward of the last ten rollouts."""
        rewards = [line["snapshot"]["metrics"].get("reward_mean", 0.0) for line in self.pages.lines]
        return sum(rewards[-10:]) / 10

    def line(self, rollout: int) -> dict[str, Any]:
        return next(line for line in self.pages.lines if line["rollout"] == rollout)


def test_a_veto_saves_a_model_in_its_first_rollout() -> None:
    run = Run(DEADLY)
    first = run.line(0)
    assert first["snapshot"]["metrics"]["kl_step"] > 0.3
    assert first["decision"]["restore"]["kind"] == "undo" and first["restored"] == 0
    assert first["applied"][0]["read_back"] == pytest.approx(1e-3)
    assert run.line(1)["snapshot"]["metrics"]["reward_mean"] > 0.05, "the weights from before came back"
    assert Run(DEADLY, mode="off").score < 0.01


def test_the_third_collapse_stops_the_run_with_everything_journalled() -> None:
    run = Run(WELL_SET, rollouts=130, faults=(Collapse(70), Collapse(90), Collapse(110)))
    restores = [line for line in run.pages.lines if (line["decision"] or {}).get("restore")]
    collapses = [line for line in restores if line["decision"]["restore"]["kind"] == "checkpoint"]
    assert len(collapses) == 3 and "too often" in run.stopped
    assert all(line["restored"] <= line["rollout"] - 2 for line in collapses), "before the onset"
    cut = [line["decision"]["changes"][0] for line in collapses]
    assert [round(c["after"] / c["before"], 3) for c in cut] == [0.5, 0.25, 0.125]
    assert run.pages.lines[-1]["decision"]["stop"] == run.stopped
    assert 110 < run.pages.lines[-1]["rollout"] < 116


def test_a_collapse_in_the_middle_of_the_climb_is_rescued() -> None:
    run = Run(WELL_SET, faults=(Collapse(20),))
    assert run.trainer.state.alive and run.score > 0.5


def test_shadow_changes_nothing_and_says_what_it_would_have_done() -> None:
    off, shadow = Run(TIMID, mode="off"), Run(TIMID, mode="shadow")
    assert [r.scalars for r in off.records] == [r.scalars for r in shadow.records]
    assert [r.knobs for r in off.records] == [r.knobs for r in shadow.records]
    wanted = [d for d in shadow.decisions if d and d.changes]
    assert wanted and not any(d.act for d in wanted)
    assert not any(line["applied"] for line in shadow.pages.lines)
    assert all(d.epoch == 0 for d in shadow.decisions if d)


def test_a_harmful_change_on_the_plant_is_taken_back() -> None:
    """Four times the rate would drift by 0.13 nats a rollout: above the band, below the veto."""
    run = Run(WELL_SET, policies=(once("H", RATE, 4.0, at=20),))
    assert run.line(20)["decision"]["changes"][0]["after"] == pytest.approx(1.2e-3)
    verdict = run.line(20 + CYCLE)["decision"]["verdicts"][0]
    assert verdict["outcome"] == "reverted" and verdict["statistics"]["kl_step_after"] > 0.1
    assert run.records[20 + CYCLE + 1].knobs[RATE] == pytest.approx(3e-4)
    assert run.trainer.state.alive


@pytest.mark.parametrize("fault", [DeadKnob(RATE), RefusedKnob(RATE)], ids=["dead", "refused"])
def test_a_knob_that_does_not_obey_is_tried_once(fault: Fault) -> None:
    run = Run({RATE: 3e-5}, faults=(fault,))
    tried = [a for line in run.pages.lines for a in line["applied"] if a["knob"] == RATE]
    assert len(tried) == 1 and tried[0]["read_back"] == 3e-5
    vetoes = [v for d in run.decisions if d for v in d.vetoes if v.proposal.knob == RATE]
    assert any("does not obey" in v.reason for v in vetoes)


def test_a_scheduler_that_overwrites_is_noticed() -> None:
    run = Run({RATE: 3e-5}, faults=(Overwrite(RATE, lambda rollout: 3e-5),))
    alarms = [a for d in run.decisions if d for a in d.alarms if "another writer" in a]
    assert len(alarms) == 1 and alarms[0].startswith(RATE)
    assert len([a for line in run.pages.lines for a in line["applied"] if a["knob"] == RATE]) == 1


@pytest.mark.parametrize("fault", [Duplicate(20), OutOfOrder(20)], ids=["twice", "swapped"])
def test_disorder_on_the_plant_is_ignored_and_survived(fault: Fault) -> None:
    run = Run(WELL_SET, faults=(fault,))
    assert len([a for d in run.decisions if d for a in d.alarms if "ignored" in a]) == 1
    assert not run.stopped and run.score > 0.6


@pytest.mark.parametrize(
    "fault",
    [
        NonFinite("reward_mean", at=20),
        NonFinite("kl_ref", at=20),
        negative_kl(at=20),
        percent("clip_ratio", at=20),
        Frozen("kl_step", at=20),
        Missing("kl_step", at=20),
        Missing("reward_mean", at=20),
    ],
    ids=lambda f: f"{type(f).__name__}-{f.metric}",
)
def test_a_broken_sensor_on_the_plant_moves_nothing_up_and_harms_nothing(fault: Fault) -> None:
    run = Run(WELL_SET, faults=(fault,))
    late = [c for d in run.decisions if d and d.rollout >= 26 for c in d.changes]
    assert not [c for c in late if c.knob == RATE and c.after > c.before]
    assert not [c for c in late if c.knob == MINI and c.after < c.before]
    assert not run.stopped and run.trainer.state.skill > 0.6


@pytest.mark.parametrize("metric", ["reward_mean", "kl_ref", "grad_norm", "response_length_mean"])
def test_one_wild_sample_is_no_trend(metric: str) -> None:
    factor = -50.0 if metric == "reward_mean" else 50.0
    calm = Run(WELL_SET, rollouts=40)
    wild = Run(WELL_SET, rollouts=40, faults=(outlier(metric, at=30, factor=factor),))
    assert changed([d for d in wild.decisions if d]) == changed([d for d in calm.decisions if d])


# --------------------------------------------------------------------- determinism and memory


def heard(run: Run) -> list[tuple[Snapshot, list[Applied], int | None]]:
    """What a controller was told, rollout by rollout, read back from the journal."""
    return [
        (Snapshot.from_json(line["snapshot"]), [Applied(**a) for a in line["applied"]], line["restored"])
        for line in run.pages.lines
    ]


HEARD = {
    name: Run(knobs, seed=3, rollouts=40, faults=faults)
    for name, knobs, faults in (
        ("timid", TIMID, ()),
        ("aggressive", AGGRESSIVE, ()),
        ("collapsing", WELL_SET, (Collapse(20),)),
    )
}


def replay(
    controller: Controller, told: list[tuple[Snapshot, list[Applied], int | None]]
) -> list[dict[str, Any]]:
    decisions = []
    for snap, applied, restored in told:
        decisions.append(to_json(controller.step(snap)))
        controller.confirm(applied, restored)
    return decisions


def made(of: Run) -> Controller:
    return Controller(ControlSettings(), of.trainer.facts())


@pytest.mark.parametrize("name", HEARD)
def test_the_same_journal_gives_the_same_decisions(name: str) -> None:
    run = HEARD[name]
    told = [line["decision"] for line in run.pages.lines]
    assert json.loads(json.dumps(replay(made(run), heard(run)))) == told
    assert sum(bool(d["changes"]) for d in told) >= 1


@settings(QUICK, max_examples=25)
@given(st.sampled_from(sorted(HEARD)), st.integers(0, 40), st.integers(0, 40))
def test_a_kill_at_any_rollout_changes_no_later_decision(name: str, first: int, second: int) -> None:
    run = HEARD[name]
    told = heard(run)
    expected = [line["decision"] for line in run.pages.lines]
    controller, decisions = made(run), []
    for k, item in enumerate(told):
        if k in (first, second):
            saved = json.dumps(controller.state_dict(), allow_nan=False)
            controller = made(run)
            controller.load_state_dict(json.loads(saved))
        decisions += replay(controller, [item])
    assert json.loads(json.dumps(decisions)) == expected


def test_the_kill_points_cover_a_change_under_probation() -> None:
    run = HEARD["timid"]
    states = {line["decision"]["state"] for line in run.pages.lines}
    assert {"settle", "evaluate", "cooldown"} <= states


def test_a_forgotten_memory_would_be_noticed() -> None:
    """The opposite: without its state the controller decides differently, so the test above can fail."""
    run = HEARD["timid"]
    expected = [line["decision"] for line in run.pages.lines]
    assert json.loads(json.dumps(replay(made(run), heard(run)[5:]))) != expected[5:]


def test_state_of_another_version_is_refused() -> None:
    controller = made(HEARD["timid"])
    state = controller.state_dict()
    state["ledger"]["version"] = 99
    with pytest.raises(AutotuneError, match="version 99"):
        controller.load_state_dict(state)


def test_the_same_seed_gives_the_same_run() -> None:
    def lines(run: Run) -> list[dict[str, Any]]:
        return [{k: v for k, v in line.items() if k != "times"} for line in run.pages.lines]

    assert lines(Run(TIMID, seed=5, rollouts=30)) == lines(Run(TIMID, seed=5, rollouts=30))
    assert lines(Run(TIMID, seed=5, rollouts=30)) != lines(Run(TIMID, seed=6, rollouts=30))


# ------------------------------------------------------------------------------ does it help?

SEEDS = range(20)


def scores(start: Mapping[str, float], seeds: range = SEEDS, **control: Any) -> list[float]:
    return [Run(start, seed, plain=False, **control).score for seed in seeds]


@pytest.fixture(scope="module")
def well_set() -> dict[str, list[float]]:
    """Scores of the well-set recipe, seed by seed: without and with the controller."""
    return {mode: scores(WELL_SET, mode=mode) for mode in ("off", "act")}


@pytest.mark.parametrize(
    ("start", "bad"), [(TIMID, 0.5), (AGGRESSIVE, 0.5), (DEADLY, 0.1)], ids=["timid", "aggressive", "deadly"]
)
def test_a_badly_set_run_ends_within_90_percent_of_the_well_set_score(
    start: dict[str, float], bad: float, well_set: dict[str, list[float]]
) -> None:
    found = scores(start)
    reached = sum(a >= 0.9 * b for a, b in zip(found, well_set["off"], strict=True))
    assert reached >= 18, sorted(round(s, 2) for s in found)
    assert max(scores(start, range(3), mode="off")) < bad, "without the controller it is really badly set"


def test_a_well_set_run_loses_nothing_worth_mentioning(well_set: dict[str, list[float]]) -> None:
    lost = [a - b for a, b in zip(well_set["off"], well_set["act"], strict=True)]
    assert sum(lost) / len(lost) <= 0.02
    assert not any(math.isnan(score) for score in well_set["act"])


def test_a_well_set_run_is_left_in_peace() -> None:
    """500 rollouts of nothing but noise around a good recipe: hardly an action, no oscillation."""
    run = Run(WELL_SET, seed=2, rollouts=500, plain=False)
    moves = run.controller.ledger.moves if run.controller else []
    directions = [m.direction for m in moves if m.knob == RATE]
    flips = sum(a != b for a, b in itertools.pairwise(directions))
    assert len(moves) <= 4 and flips <= 2, [(m.rollout, m.knob, m.direction) for m in moves]


def test_a_rising_reward_is_never_interrupted_by_a_bolder_step() -> None:
    rig = Rig()
    for reward in [0.1, 0.2, *RISING, 0.55, 0.58, 0.61]:
        drift = 0.012 if rig.rollout < 12 else 0.005
        decision = rig.step(reward_mean=reward, kl_step=drift, clip_ratio=0.001, kl_ref=0.02)
        assert not decision.changes, decision.changes


def test_ranks_that_disagree_put_all_tuning_on_hold() -> None:
    rig = Rig(always("T", COEF, 0.5))
    decision = next(d for d in (rig.step() for _ in range(10)) if d.changes)
    error = f"{RANKS_DISAGREE}; the previous one was put back on all of them"
    rig.controller.confirm([Applied(COEF, decision.changes[0].after, 0.005, 9, error)], None)
    later = rig.steps(20)
    assert not changed(later) and {d.state for d in later} == {State.FROZEN}
