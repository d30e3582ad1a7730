"""The controller: a pure state machine from snapshots to decisions.

    WARMUP -> OBSERVE -> (propose, apply) -> SETTLE -> EVALUATE -> keep | revert -> COOLDOWN -> OBSERVE
    any -> HOLD (a metric is not to be trusted), any -> EMERGENCY (weights come back), and FROZEN

One `step` a rollout: remember the snapshot, judge what is on probation, ask every rule, let the guards
object, let priority choose, grant at most one change. `confirm` tells it what the trainer read back. It
never touches the trainer, the clock or the disk: the same snapshots and read-backs always give the same
decisions, so a journal can be replayed. All of its state is JSON (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune import hand
from autotune.decisions import (
    RANKS_DISAGREE,
    Applied,
    Change,
    Command,
    Decision,
    Kind,
    Outcome,
    Proposal,
    Restore,
    RunFacts,
    State,
    Verdict,
    Veto,
)
from autotune.errors import InputError
from autotune.guards import (
    ALWAYS,
    GUARDS,
    Question,
    bounded,
    first_objection,
    freeze_reason,
    real_values,
    sign,
)
from autotune.history import History, Sample
from autotune.judge import due, judge, judge_engagement
from autotune.knobs import KNOBS, expand
from autotune.ledger import Ledger, Move, Probation
from autotune.metrics import Snapshot, Validity
from autotune.policies import PROFILES, UNGUARDED, build_policies
from autotune.policies.base import (
    Advice,
    Alarm,
    Answer,
    Context,
    Emergency,
    Engagement,
    Hold,
    Policy,
    pace_for,
)
from autotune.standing import RuleStatus, blocked, standings
from autotune.statistics import median

AT_BOUND_WINDOWS = 5
"""Windows at a bound after which pushing is reported."""


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """The `control` section of a recipe, as plain data."""

    mode: str = "act"
    profile: str = "recommended"
    pace: str | float = "auto"
    pin: Sequence[str] = ()
    policies: Mapping[str, Any] = field(default_factory=dict)
    schedule: str | None = None
    """A schedule that takes the controller's place; the controller itself does not read it."""

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise InputError(f"profile is {self.profile!r}, expected one of {', '.join(PROFILES)}")

    def scale(self, rollouts: int) -> float:
        """`pace` as a number: rollouts / 1000 within [0.1, 1] when it is auto."""
        if isinstance(self.pace, str):
            return min(max(rollouts / 1000, 0.1), 1.0)
        return float(self.pace)


@dataclass(frozen=True, slots=True)
class Unconfirmed:
    """What a decision has already changed in the ledger and the trainer may not be able to do."""

    restore: Restore | None
    since_restore: int
    """`Ledger.since_restore` from before the decision."""


class Controller:
    """Decides, for one run, from one snapshot a rollout.

    Args:
        settings: profile, pace, pins and parameters of the rules.
        facts: the structure of the run.

    Raises:
        InputError: unknown rule or parameter.
    """

    def __init__(self, settings: ControlSettings, facts: RunFacts) -> None:
        self.settings = settings
        self.facts = facts
        self.policies = build_policies(settings.profile, settings.policies)
        scale = settings.scale(facts.rollouts)
        self.pace = pace_for(scale, lr_warmup=facts.lr_warmup, staleness=facts.staleness)
        self.history = History()
        self.ledger = Ledger(pinned=self._recipe_pins())
        self._unconfirmed: Unconfirmed | None = None
        self._blocked: tuple[Sequence[Policy], Mapping[str, float], list[str]] = ((), {}, [])
        """Structural reasons of these policies under these knobs."""

    @property
    def epoch(self) -> int:
        """Config epoch of the next rollout's data."""
        return self.ledger.epoch

    @property
    def acting(self) -> bool:
        return self.settings.mode == "act"

    # ---- one rollout -------------------------------------------------------------------------

    def step(self, snapshot: Snapshot) -> Decision:
        """Decide from one finished rollout; the only entry on the training path."""
        if snapshot.rollout <= self.ledger.last_rollout:
            return self._out_of_order(snapshot)
        alarms, since = self._notice_other_writers(snapshot), self.ledger.since_restore
        self.ledger.last_rollout = snapshot.rollout
        self.history.add(Sample.of(snapshot))
        ctx = self.context(snapshot)
        answers, silent = self._ask(ctx)
        emergency = next((a for _, a in answers if isinstance(a, Emergency)), None)
        if emergency is not None and self.ledger.paused:
            alarms.append(f"{emergency.rule}: {emergency.reason}; paused, so nothing is done about it")
            emergency = None
        if emergency is not None:
            decision = self._emergency(ctx, emergency, silent, alarms)
        else:
            self.ledger.vetoes = 0
            decision = self._tune(ctx, answers, silent, alarms)
        if self.ledger.closed:
            decision = replace(decision, verdicts=(*self.ledger.closed, *decision.verdicts))
            self.ledger.closed = []
        self._unconfirmed = Unconfirmed(decision.restore, since)
        if not self.acting:
            self._remember_shadow(decision)
        self.ledger.trim(snapshot.rollout)
        return decision

    def _tune(
        self, ctx: Context, answers: list[tuple[Policy, Answer]], silent: dict[str, str], alarms: list[str]
    ) -> Decision:
        hold = self._hold_reason(ctx, answers)
        alarms += [f"{a.rule}: {a.reason}" for _, a in answers if isinstance(a, Alarm)]
        alarms += self._new_advice(answers)
        verdicts, revert = self._judge(ctx)
        proposals = tuple(a for _, a in answers if isinstance(a, Proposal))
        change, vetoes = (revert, ()) if revert else self._grant(ctx, proposals, hold, alarms)
        if change is not None:
            self._book(ctx, change, reverting=revert is not None)
        self.ledger.frozen = self.ledger.frozen or freeze_reason(self.ledger, ctx.rollout)
        return Decision(
            rollout=ctx.rollout,
            state=self._state(ctx, hold),
            epoch=self.ledger.epoch,
            proposals=proposals,
            vetoes=tuple(vetoes),
            changes=(change,) if change else (),
            verdicts=tuple(verdicts),
            alarms=tuple(([f"hold: {hold}"] if hold else []) + alarms),
            silent=silent,
            act=self.acting,
        )

    def context(self, snapshot: Snapshot) -> Context:
        """What the rules see at this snapshot."""
        return Context(
            facts=self.facts,
            snapshot=snapshot,
            history=self.history,
            knobs=snapshot.knobs,
            pace=self.pace,
            epoch=snapshot.epoch,
            since_restore=self.ledger.since_restore,
            engagements=self.ledger.engagements,
            anchors=self.ledger.anchors,
            last_moves=self.ledger.last_moves,
            memory=self.ledger.memory,
            emergencies=self.ledger.emergencies,
            vetoes=self.ledger.vetoes,
            pinned=self.pinned | frozenset(self.ledger.contested),
            literal=self.settings.profile == "literal",
        )

    @property
    def pinned(self) -> frozenset[str]:
        """Real knobs that nobody but a person may move."""
        return frozenset(self.ledger.pinned)

    def _recipe_pins(self) -> list[str]:
        return sorted({real for name in self.settings.pin for real in expand(name)})

    # ---- sensing -----------------------------------------------------------------------------

    def _out_of_order(self, snapshot: Snapshot) -> Decision:
        alarm = f"rollout {snapshot.rollout} came after {self.ledger.last_rollout}: ignored"
        hold = State.HOLD
        return Decision(snapshot.rollout, hold, self.ledger.epoch, alarms=(alarm,), act=self.acting)

    def _notice_other_writers(self, snapshot: Snapshot) -> list[str]:
        """A knob that is not what was read back has a second writer; it is then left alone."""
        if snapshot.knobs == self.ledger.expected:
            return []  # nearly every rollout
        alarms = []
        for knob, expected in self.ledger.expected.items():
            found = snapshot.knobs.get(knob, expected)
            if snapshot.rollout < self.ledger.effective.get(knob, 0):
                continue  # sampled before our own change reached it
            if abs(found - expected) > 1e-6 * max(abs(expected), 1e-12):
                reason = f"{knob} is {found:.4g} though {expected:.4g} was read back: another writer"
                self.ledger.contested.setdefault(knob, reason)
                alarms.append(reason)
        seen = {k: v for k, v in snapshot.knobs.items() if k in KNOBS}
        late = {k for k, first in self.ledger.effective.items() if snapshot.rollout < first}
        self.ledger.expected.update({k: v for k, v in seen.items() if k not in late})
        return alarms

    def _ask(self, ctx: Context) -> tuple[list[tuple[Policy, Answer]], dict[str, str]]:
        answers: list[tuple[Policy, Answer]] = []
        silent: dict[str, str] = {}
        for policy, structural in zip(self.policies, self._blocks(ctx.knobs), strict=True):
            reason = structural or self._unread(policy, ctx)
            if reason:
                silent[policy.id] = reason
            else:
                answers.append((policy, policy.propose(ctx)))
                kept = policy.remember(ctx)
                if kept is not None:
                    self.ledger.memory[policy.id] = kept
        news = {rule: why for rule, why in silent.items() if self.ledger.silent.get(rule) != why}
        news |= {rule: "" for rule in self.ledger.silent if rule not in silent}  # it can speak again
        self.ledger.silent = silent
        return answers, news

    def _blocks(self, knobs: Mapping[str, float]) -> list[str]:
        """Why each policy cannot act, or an empty string; asked again only when a knob has moved."""
        policies, under, reasons = self._blocked
        if policies is not self.policies or under != knobs:
            reasons = [blocked(policy, self.facts, knobs) for policy in self.policies]
            self._blocked = self.policies, dict(knobs), reasons
        return reasons

    def _unread(self, policy: Policy, ctx: Context) -> str:
        """Why a metric that the policy needs has no valid reading at this rollout."""
        readings = ctx.snapshot.readings
        for metric in policy.needs:
            reading = readings.get(metric) or ctx.snapshot.reading(metric)
            if reading.validity is not Validity.VALID:
                return reading.reason or f"{metric} is {reading.validity}"
        return ""

    def _hold_reason(self, ctx: Context, answers: Sequence[tuple[Policy, Answer]]) -> str:
        """Why no tuning happens at this rollout: a faulty metric, or a rule that says so."""
        holds = [f"{a.rule}: {a.reason}" for _, a in answers if isinstance(a, Hold)]
        invalid = list(ctx.snapshot.invalid())
        if not invalid:
            return "; ".join(holds)
        sensed = {metric for policy in self.policies for metric in policy.needs} | {"grad_norm", "loss"}
        faults = [reading.reason for name, reading in invalid if name in sensed]
        return "; ".join(holds + faults)

    def _new_advice(self, answers: Sequence[tuple[Policy, Answer]]) -> list[str]:
        """Advice is said once: it asks a person, and a person has read it."""
        said = []
        for _, advice in answers:
            if isinstance(advice, Advice) and self.ledger.advised.get(advice.rule) != advice.key:
                self.ledger.advised[advice.rule] = advice.key
                said.append(f"advice {advice.rule}: {advice.reason}")
        return said

    # ---- judging -----------------------------------------------------------------------------

    def _judge(self, ctx: Context) -> tuple[list[Verdict], Change | None]:
        verdicts = self._rest_engagements(ctx)
        probation = self.ledger.probation
        if probation is None or not due(probation, ctx):
            return verdicts, None
        verdict = judge(probation, ctx)
        self.ledger.probation = None
        self.ledger.cooldown_until = ctx.rollout + self.pace.cooldown
        harmed = verdict.outcome is Outcome.REVERTED and not self._is_contested(probation.knob)
        return [*verdicts, verdict], self._revert(ctx, probation, verdict) if harmed else None

    def _is_contested(self, knob: str) -> bool:
        return bool(set(expand(knob)) & set(self.ledger.contested))

    def _rest_engagements(self, ctx: Context) -> list[Verdict]:
        verdicts = []
        for policy in self.policies:
            if policy.healthy(ctx):
                self.ledger.anchors[policy.id] = ctx.knob(policy.moves[0])
            engagement = self.ledger.engagements.get(policy.id)
            if engagement is not None and policy.moves[0] in self.ledger.contested:
                del self.ledger.engagements[policy.id]  # it moves nothing, so there is no merit to judge
            elif engagement is not None and policy.resting(ctx):
                knob = policy.moves[0]
                verdicts.append(judge_engagement(policy.id, knob, engagement, ctx))
                del self.ledger.engagements[policy.id]
        return verdicts

    def _revert(self, ctx: Context, probation: Probation, verdict: Verdict) -> Change:
        count = self.ledger.revert_counts.get(probation.knob, 0)
        self.ledger.revert_counts[probation.knob] = count + 1
        self.ledger.locks[probation.knob] = ctx.rollout + self.pace.revert_cooldown * 2**count
        self.ledger.reverts.append(ctx.rollout)
        real = expand(probation.knob)
        after = max(probation.before[r] for r in real)
        return Change(
            rule=probation.rule,
            knob=probation.knob,
            before=ctx.knob(probation.knob),
            after=after,
            reason=f"reverted: {verdict.reason}",
            kind=Kind.REVERT,
            values=probation.before,
            evidence=verdict.statistics,
        )

    # ---- granting ----------------------------------------------------------------------------

    def _grant(
        self, ctx: Context, proposals: Sequence[Proposal], hold: str, alarms: list[str]
    ) -> tuple[Change | None, list[Veto]]:
        """At most one change: the first by priority that no guard objects to."""
        granted: Change | None = None
        vetoes: list[Veto] = []
        for proposal in self._conservative_first(proposals, ctx):
            veto = self._objection(ctx, proposal, hold, granted) or self._overruled(proposal, vetoes, ctx)
            change = None if veto else self._change(ctx, proposal)
            if veto is None and change is None:
                veto = self._at_bound(ctx, proposal, alarms)
            if veto is not None:
                vetoes.append(veto)
            granted = granted or change
        self._forget_bounds(proposals)
        return granted, vetoes

    @staticmethod
    def _overruled(proposal: Proposal, vetoes: Sequence[Veto], ctx: Context) -> Veto | None:
        """A bold move does not slip through because the careful one on its knob has to wait."""
        now = ctx.knob(proposal.knob)
        for veto in vetoes:
            other = veto.proposal
            opposite = sign(other.value - now) == -sign(proposal.value - now)
            if set(expand(other.knob)) & set(expand(proposal.knob)) and opposite:
                return Veto(proposal, "conflict", f"{other.rule} wants {other.knob} the other way")
        return None

    def _forget_bounds(self, proposals: Sequence[Proposal]) -> None:
        """Only pushes of rollouts running count."""
        pushed = {p.knob for p in proposals}
        self.ledger.at_bound = {k: n for k, n in self.ledger.at_bound.items() if k in pushed}

    @staticmethod
    def _conservative_first(proposals: Sequence[Proposal], ctx: Context) -> list[Proposal]:
        """Order by priority; on one knob the most careful value takes the first one's place."""
        ordered: list[Proposal] = []
        for knob in dict.fromkeys(p.knob for p in proposals):
            same = [p for p in proposals if p.knob == knob]
            side = KNOBS[expand(knob)[0]].conservative
            ordered += sorted(same, key=lambda p: -side * p.value) if side else same
        return ordered

    def _objection(self, ctx: Context, proposal: Proposal, hold: str, granted: Change | None) -> Veto | None:
        if granted is not None:
            return Veto(proposal, "priority", f"{granted.rule} on {granted.knob} goes first")
        guards = ALWAYS if self.settings.profile in UNGUARDED else GUARDS
        question = Question(proposal, ctx, self.ledger, tuple(self.ledger.pinned), hold)
        objection = first_objection(question, guards)
        return Veto(proposal, *objection) if objection else None

    def _change(self, ctx: Context, proposal: Proposal) -> Change | None:
        """The granted change, or None when the bounds leave nothing of it."""
        now = ctx.knob(proposal.knob)
        value = bounded(proposal, ctx, self.ledger.anchors.get(proposal.rule))
        moves_on = sign(value - now) == sign(proposal.value - now)
        if not moves_on or abs(value - now) <= 1e-3 * abs(now):
            return None
        return Change(
            rule=proposal.rule,
            knob=proposal.knob,
            before=now,
            after=value,
            reason=proposal.reason,
            kind=proposal.kind,
            values=real_values(proposal.knob, value, ctx),
            evidence=proposal.evidence,
        )

    def _at_bound(self, ctx: Context, proposal: Proposal, alarms: list[str]) -> Veto:
        count = self.ledger.at_bound.get(proposal.knob, 0) + 1
        self.ledger.at_bound[proposal.knob] = count
        reason = f"{proposal.knob} {ctx.knob(proposal.knob):.4g} is at its bound"
        key, value = f"bound {proposal.knob}", f"{ctx.knob(proposal.knob):.6g}"
        if count == AT_BOUND_WINDOWS * self.pace.window and self.ledger.advised.get(key) != value:
            self.ledger.advised[key] = value
            alarms.append(f"{reason} for {AT_BOUND_WINDOWS} windows: not pushed any more")
        return Veto(proposal, "bounds", reason)

    def _book(self, ctx: Context, change: Change, *, reverting: bool) -> None:
        """Write a granted change into the ledger."""
        if not self.acting:
            return
        ledger, rollout = self.ledger, ctx.rollout
        direction = sign(change.after - change.before)
        ledger.moves.append(Move(rollout, change.knob, direction, str(change.kind)))
        ledger.last_moves[change.rule] = rollout
        if change.kind is Kind.REGULATOR:
            self._engage(ctx, change)
            return
        ledger.epoch += 1
        if not reverting:
            ledger.probation = self._probation(ctx, change)
            ledger.at_bound.pop(change.knob, None)

    def _engage(self, ctx: Context, change: Change) -> None:
        rewards = self.history.values("reward_mean", self.history.samples(self.pace.window))
        before = sum(rewards) / len(rewards) if rewards else None
        start = Engagement(ctx.rollout, change.before, before)
        self.ledger.engagements.setdefault(change.rule, start)

    def _probation(self, ctx: Context, change: Change) -> Probation:
        samples = self.history.samples(self.pace.window, since=self.ledger.since_restore)
        drift = self.history.values("kl_step", samples)
        return Probation(
            rule=change.rule,
            knob=change.knob,
            before={k: ctx.knobs[k] for k in change.values},
            after=dict(change.values),
            since=ctx.rollout,
            epoch=self.ledger.epoch,
            rewards=tuple(self.history.values("reward_mean", samples)),
            kl_step=median(drift) if drift else None,
        )

    # ---- emergencies -------------------------------------------------------------------------

    def _emergency(
        self, ctx: Context, call: Emergency, silent: dict[str, str], alarms: list[str]
    ) -> Decision:
        """Weights back, learning rate down; a bold change on probation goes back with them."""
        stop = self._stop_reason(ctx, call)
        changes, verdicts = self._convict(ctx, call)
        cut = self._rate_cut(ctx, call)
        if cut is not None and not any(cut.knob in c.values for c in changes):
            changes.append(cut)
        if self.acting:
            self._book_emergency(ctx, call, changes)
        return Decision(
            rollout=ctx.rollout,
            state=State.EMERGENCY,
            epoch=self.ledger.epoch,
            changes=tuple(changes),
            verdicts=tuple(verdicts),
            restore=Restore(call.restore, call.before_rollout, call.reason),
            alarms=(f"{call.rule}: {call.reason}", *alarms),
            stop=stop,
            silent=silent,
            act=self.acting,
        )

    def _convict(self, ctx: Context, call: Emergency) -> tuple[list[Change], list[Verdict]]:
        """The change under probation: taken back if it was bold, left if it was the careful way."""
        flying = self.ledger.probation
        if flying is None:
            return [], []
        real = expand(flying.knob)[0]
        bold = sign(flying.after[real] - flying.before[real]) != KNOBS[real].conservative
        outcome = Outcome.REVERTED if bold else Outcome.INCONCLUSIVE
        verdict = Verdict(flying.rule, flying.knob, outcome, f"emergency: {call.reason}", flying.since)
        if not bold or self._is_contested(flying.knob):
            return [], [verdict]
        return [self._revert(ctx, flying, verdict)], [verdict]

    def _rate_cut(self, ctx: Context, call: Emergency) -> Change | None:
        knob = "actor_learning_rate"
        proposal = Proposal(
            call.rule, knob, ctx.knob(knob) * call.factor, call.reason, Kind.EMERGENCY, call.evidence
        )
        question = Question(proposal, ctx, self.ledger, tuple(self.ledger.pinned), "")
        return None if first_objection(question, ALWAYS) else self._change(ctx, proposal)

    def _stop_reason(self, ctx: Context, call: Emergency) -> str:
        if call.stop:
            return f"{call.reason}: too often; going back cannot mend this run"
        floor = self.facts.knobs["actor_learning_rate"] / 50
        if ctx.knobs["actor_learning_rate"] <= floor * 1.001:
            return f"{call.reason} even at the lowest learning rate {floor:.2g}"
        return ""

    def _book_emergency(self, ctx: Context, call: Emergency, changes: Sequence[Change]) -> None:
        ledger = self.ledger
        ledger.probation, ledger.engagements = None, {}
        ledger.vetoes = ledger.vetoes + 1 if call.restore == "undo" else 0
        ledger.anchors.pop("X1", None)
        ledger.epoch += 1
        if call.restore == "checkpoint":
            ledger.emergencies += 1
            ledger.since_restore = ctx.rollout + 1
        for change in changes:
            direction = sign(change.after - change.before)
            ledger.moves.append(Move(ctx.rollout, change.knob, direction, str(change.kind)))
        ledger.last_moves[call.rule] = ctx.rollout

    # ---- after the fact ----------------------------------------------------------------------

    def confirm(self, applied: Sequence[Applied], restored: int | None) -> None:
        """What the trainer will really use next.

        A knob that did not obey is left alone from now on. When a checkpoint that was asked for did
        not come back (`restored` is None) the old rewards stay the baseline: the model is the same.
        """
        asked, self._unconfirmed = self._unconfirmed, None
        if asked and asked.restore and asked.restore.kind == "checkpoint" and restored is None:
            self.ledger.since_restore = asked.since_restore
        for item in applied:
            self.ledger.expected[item.knob] = item.read_back
            self.ledger.effective[item.knob] = item.effective_from
            if not item.ok:
                why = item.error or f"asked for {item.requested:.4g}, reads {item.read_back:.4g}"
                self.ledger.contested[item.knob] = f"{item.knob} does not obey: {why}"
            if item.error.startswith(RANKS_DISAGREE):
                # Whatever the cause, no change can be trusted to reach every rank any more.
                self.ledger.frozen = f"hold: {RANKS_DISAGREE} for {item.knob}"
        failed = {item.knob for item in applied if not item.ok}
        probation = self.ledger.probation
        if probation is not None and failed & set(probation.after):
            self.ledger.probation = None

    def obey(self, command: Command, applied: Sequence[Applied] = ()) -> str:
        """A human's command between two rollouts, and what came of it in words; see `autotune.hand`.

        Raises:
            InputError: it cannot be obeyed; nothing was changed.
        """
        regulated = {policy.id: policy.moves for policy in self.policies if policy.moves}
        return hand.obey(self.ledger, command, applied, self.pace, regulated)

    def hand_state(self) -> dict[str, Any]:
        """What a human's hand holds: paused or not, and the real knobs that are pinned."""
        return {"paused": self.ledger.paused, "pinned": list(self.ledger.pinned)}

    def _remember_shadow(self, decision: Decision) -> None:
        """In shadow nothing is applied: only the cooldown runs, so that the log stays readable."""
        for change in decision.changes:
            self.ledger.cooldown_until = decision.rollout + self.pace.settle + self.pace.evaluate
            self.ledger.moves.append(Move(decision.rollout, change.knob, 0, "shadow"))

    def _state(self, ctx: Context, hold: str) -> State:
        ledger = self.ledger
        if ledger.paused:
            return State.PAUSED
        if hold:
            return State.HOLD
        if ledger.frozen:
            return State.FROZEN
        if ledger.probation is not None:
            settled = ctx.rollout >= ledger.probation.since + self.pace.settle
            return State.EVALUATE if settled else State.SETTLE
        if ctx.rollout + 1 < self.pace.warmup:
            return State.WARMUP
        return State.COOLDOWN if ctx.rollout < ledger.cooldown_until else State.OBSERVE

    # ---- state and introspection ---------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All mutable state as plain JSON."""
        return {"ledger": self.ledger.to_json(), "history": self.history.to_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`.

        Raises:
            RunError: if the state was written by another version.
        """
        self.ledger = Ledger.from_json({"pinned": self._recipe_pins(), **state["ledger"]})
        self.history = History.from_json(state["history"])
        self._unconfirmed = None

    def rules(self) -> list[RuleStatus]:
        """For every known rule: is it on, can it act on this run, and why not."""
        return standings(self.policies, self.facts, self.pinned, self.settings.profile)
