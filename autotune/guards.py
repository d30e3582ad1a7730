"""Generic limits, written once for all rules: who may speak, when, and how far.

A guard looks at one proposal and answers why it must not become a change, or an empty string. The
order of `GUARDS` is the order in which they are asked; the first reason is journalled with the
guard's name. Limits on size (`bounded`) and the divisor lattice are here too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from autotune.decisions import Kind, Proposal
from autotune.knobs import KNOBS, divisors, expand, fit_micro_batch, mini_batch_lattice
from autotune.ledger import Ledger
from autotune.policies.base import Context

FLIPS_TO_FREEZE, FLIP_SPAN = 2, 100
"""Direction changes of one knob, within this many rollouts, that freeze all tuning."""
REVERTS_TO_FREEZE, REVERT_SPAN = 3, 200
RATE_SPAN = 50.0
"""Learning rates stay within [1/50, 50] x the recipe's value."""


@dataclass(frozen=True, slots=True)
class Question:
    """What a guard looks at."""

    proposal: Proposal
    ctx: Context
    ledger: Ledger
    pinned: tuple[str, ...]
    hold: str
    """Why tuning is on hold at this rollout, or empty."""


def not_paused(q: Question) -> str:
    return "paused by hand" if q.ledger.paused else ""


def knob_pinned(q: Question) -> str:
    pinned = {real for name in q.pinned for real in expand(name)}
    if pinned & set(expand(q.proposal.knob)):
        return f"{q.proposal.knob} is pinned"
    derived = real_values(q.proposal.knob, bounded(q.proposal, q.ctx), q.ctx)
    held = [k for k in pinned & set(derived) if derived[k] != q.ctx.knobs[k]]
    return f"{q.proposal.knob} would move {', '.join(held)}, which is pinned" if held else ""


def knob_movable(q: Question) -> str:
    for real in expand(q.proposal.knob):
        capability = q.ctx.facts.knob_capability.get(real)
        if capability is None or not capability.acts:
            why = capability.reason or capability.state if capability else "this trainer has no such knob"
            return f"{real} cannot be changed in this run: {why}"
        if real in q.ledger.contested:
            return q.ledger.contested[real]
    return ""


def integrity(q: Question) -> str:
    return q.hold


def warmed_up(q: Question) -> str:
    seen = q.ctx.rollout + 1
    return "" if seen >= q.ctx.pace.warmup else f"warm-up: {seen} of {q.ctx.pace.warmup} rollouts seen"


def not_frozen(q: Question) -> str:
    return q.ledger.frozen


def one_in_flight(q: Question) -> str:
    flying = q.ledger.probation
    if flying is None or q.proposal.kind is Kind.REGULATOR:
        return ""
    return f"{flying.rule} on {flying.knob} is still being judged"


def probation_knob(q: Question) -> str:
    """A regulator must not move the very knob that is being judged."""
    flying = q.ledger.probation
    same = flying is not None and set(expand(q.proposal.knob)) & set(flying.after)
    return f"{q.proposal.knob} is being judged" if same else ""


def cooled_down(q: Question) -> str:
    if q.proposal.kind is Kind.REGULATOR:
        return ""
    left = q.ledger.cooldown_until - q.ctx.rollout
    if left > 0:
        return f"cooldown: {left} more rollout(s)"
    moves = [m for m in q.ledger.moves if m.knob == q.proposal.knob]
    left = moves[-1].rollout + q.ctx.pace.knob_cooldown - q.ctx.rollout if moves else 0
    return f"cooldown of {q.proposal.knob}: {left} more rollout(s)" if left > 0 else ""


def left_to_the_hand(q: Question) -> str:
    """What a human set is given a window's time before a rule, regulators too, goes on from it."""
    names = {"*", q.proposal.knob, *expand(q.proposal.knob)}
    left = max(q.ledger.hands_off.get(name, 0) for name in names) - q.ctx.rollout
    return f"a human's hand was here: left alone for {left} more rollout(s)" if left > 0 else ""


def not_locked(q: Question) -> str:
    left = q.ledger.locks.get(q.proposal.knob, 0) - q.ctx.rollout
    return f"{q.proposal.knob} was reverted: locked for {left} more rollout(s)" if left > 0 else ""


def direction_kept(q: Question) -> str:
    """No intervention turns a knob round soon after it was moved the other way."""
    if q.proposal.kind is Kind.REGULATOR:
        return ""
    direction = sign(q.proposal.value - q.ctx.knob(q.proposal.knob))
    recent = [m for m in q.ledger.moves if m.knob == q.proposal.knob and m.kind == Kind.INTERVENTION]
    if not recent or recent[-1].direction == direction:
        return ""
    left = recent[-1].rollout + 2 * q.ctx.pace.knob_cooldown - q.ctx.rollout
    return f"{q.proposal.knob} was moved the other way: {left} more rollout(s)" if left > 0 else ""


Guard = Callable[[Question], str]

ALWAYS: tuple[Guard, ...] = (not_paused, knob_pinned, knob_movable, integrity)
"""Asked in every profile, `literal` too: they protect the run, not the calm."""
CALM: tuple[Guard, ...] = (
    warmed_up,
    not_frozen,
    one_in_flight,
    probation_knob,
    left_to_the_hand,
    not_locked,
    cooled_down,
    direction_kept,
)
GUARDS: tuple[Guard, ...] = (*ALWAYS, *CALM)


def first_objection(question: Question, guards: tuple[Guard, ...]) -> tuple[str, str] | None:
    """(guard name, reason) of the first guard that objects, or None."""
    for guard in guards:
        reason = guard(question)
        if reason:
            return guard.__name__, reason
    return None


def sign(value: float) -> int:
    return (value > 0) - (value < 0)


def bounded(proposal: Proposal, ctx: Context, anchor: float | None = None) -> float:
    """The proposed value within the knob's bounds and, for batches, on the lattice.

    `anchor` is where the run was last seen healthy: from then on its learning rate stays within
    [0.1, 2] x that value instead of the wide rescue range.
    """
    real, now = expand(proposal.knob)[0], ctx.knob(proposal.knob)
    value = _within(real, proposal.value, now)
    if proposal.knob == "clip_range":
        value = _within(real, now * _clip_factor(value / now, ctx), now)
    if proposal.knob.endswith("learning_rate"):
        start = ctx.facts.knobs[proposal.knob]
        value = min(max(value, start / RATE_SPAN), start * RATE_SPAN)
        if anchor is not None:
            value = min(max(value, 0.1 * anchor), 2.0 * anchor)
    return _on_lattice(proposal.knob, value, ctx)


def _within(real: str, value: float, now: float) -> float:
    """The value within a real knob's range; who starts outside it is never pushed further out.

    Asked again after every product: a rounding of 1 ulp is outside too.
    """
    return min(max(value, min(KNOBS[real].low, now)), max(KNOBS[real].high, now))


def _clip_factor(factor: float, ctx: Context) -> float:
    """The factor on both sides of the clip range that keeps each of them within its bounds."""
    for real in expand("clip_range"):
        side, spec = ctx.knobs[real], KNOBS[real]
        factor = min(max(factor, min(spec.low / side, 1.0)), max(spec.high / side, 1.0))
    return factor


def _on_lattice(knob: str, value: float, ctx: Context) -> float:
    train, n = int(ctx.knobs["train_batch_size"]), int(ctx.knobs["rollout_n"])
    if knob == "ppo_mini_batch_size":
        return min(mini_batch_lattice(train, n, ctx.facts.cut), key=lambda m: abs(m - value))
    if knob == "rollout_micro_batch_size":
        return min(divisors(train * n // ctx.facts.world_size), key=lambda m: abs(m - value))
    return float(round(value)) if KNOBS[expand(knob)[0]].integer else value


def real_values(knob: str, value: float, ctx: Context) -> dict[str, float]:
    """The real knobs to set for one canonical change, re-derived ones included.

    `clip_range` scales both sides alike; a new `ppo_mini_batch_size` brings the largest micro batch
    that fits and is not above the recipe's; a new `rollout_micro_batch_size` re-derives the number of
    sampling batches, so the amount of data stays.
    """
    if knob == "clip_range":
        factor = value / ctx.knob(knob)
        return {real: _within(real, ctx.knobs[real] * factor, ctx.knobs[real]) for real in expand(knob)}
    if knob == "rollout_micro_batch_size":
        share = int(ctx.knobs["train_batch_size"]) * int(ctx.knobs["rollout_n"]) // ctx.facts.world_size
        return {knob: value, "num_rollout_batches": share // int(value)}
    n, ranks = int(ctx.knobs["rollout_n"]), ctx.facts.world_size
    if knob in ("train_batch_size", "num_rollout_batches"):
        return _amount_of_data(knob, int(value), ctx)
    if knob != "ppo_mini_batch_size":
        return {knob: value}
    wanted = int(ctx.facts.knobs["micro_batch_size"])
    return {knob: value, "micro_batch_size": fit_micro_batch(int(value), n, ranks, wanted)}


def _amount_of_data(knob: str, value: int, ctx: Context) -> dict[str, float]:
    """A2 and B2 change how much data a rollout has; the number of updates stays as it is."""
    n, ranks = int(ctx.knobs["rollout_n"]), ctx.facts.world_size
    sampled = int(ctx.knobs["rollout_micro_batch_size"]) * ranks
    train = value if knob == "train_batch_size" else value * sampled // n
    now, mini = int(ctx.knobs["train_batch_size"]), int(ctx.knobs["ppo_mini_batch_size"])
    per_epoch = max(now // mini, 1)
    lattice = mini_batch_lattice(train, n, ctx.facts.cut)
    fitted = min(lattice, key=lambda m: abs(m - train / per_epoch))
    wanted = int(ctx.facts.knobs["micro_batch_size"])
    return {
        "train_batch_size": train,
        "num_rollout_batches": train * n // sampled,
        "ppo_mini_batch_size": fitted,
        "micro_batch_size": fit_micro_batch(fitted, n, ranks, wanted),
    }


def freeze_reason(ledger: Ledger, rollout: int) -> str:
    """Why all tuning must freeze, or an empty string."""
    reverts = sum(rollout - r <= REVERT_SPAN for r in ledger.reverts)
    if reverts >= REVERTS_TO_FREEZE:
        return f"frozen: {reverts} reverts within {REVERT_SPAN} rollouts"
    for knob in {m.knob for m in ledger.moves}:
        flips = _flips(ledger, knob, rollout)
        if flips >= FLIPS_TO_FREEZE:
            return f"frozen: {knob} changed direction {flips} times within {FLIP_SPAN} rollouts"
    return ""


def _flips(ledger: Ledger, knob: str, rollout: int) -> int:
    """Direction changes between interventions; a regulator corrects itself by design."""
    recent = [
        m.direction
        for m in ledger.moves
        if m.knob == knob and m.kind == Kind.INTERVENTION and rollout - m.rollout <= FLIP_SPAN
    ]  # a revert has a kind of its own: it is counted as a revert
    return sum(a != b for a, b in itertools.pairwise(recent))
