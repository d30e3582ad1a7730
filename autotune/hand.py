"""What a human's hand does to the controller's memory: pause, resume, pin, unpin, set.

Each is bumpless. A pause lets go of everything in flight; the controller then observes, journals
and raises alarms, and moves nothing. A resumed one starts with a cooldown and with empty windows (a
new config epoch), never from what it was about to do before; a frozen one thaws with it.
A value set by hand is the controller's own new starting point: it is what the next read-back must be, so
there is no alarm about another writer; no rule moves it for a window's time; and whatever was being
judged can no longer be told apart from it: inconclusive. Emergencies alone do not wait, save for a pause.

These functions know the ledger alone, so a journal with `command` lines replays like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autotune.decisions import Applied, Command, Kind, Outcome, Verdict
from autotune.errors import InputError
from autotune.knobs import ALIASES, KNOBS, expand
from autotune.ledger import Ledger, Move
from autotune.policies.base import Pace

Regulated = Mapping[str, Sequence[str]]
"""Rule -> knobs that it moves."""


def obey(
    ledger: Ledger, command: Command, applied: Sequence[Applied], pace: Pace, regulated: Regulated
) -> str:
    """Carry one command out on the ledger; what came of it, in words.

    Args:
        ledger: changed in place.
        command: of a human.
        applied: for `set`, what the trainer read back; every item obeyed.
        pace: for the cooldown that follows a hand.
        regulated: which rules must let go of a knob that was set.

    Raises:
        InputError: the command is unknown, or names no knob; nothing was changed.
    """
    if command.command == "pause":
        return _pause(ledger, pace, regulated)
    if command.command == "resume":
        return _resume(ledger, pace)
    if command.command == "pin":
        return _pin(ledger, _real(command.knobs), pace)
    if command.command == "unpin":
        return _unpin(ledger, _real(command.knobs))
    if command.command == "set":
        return _set(ledger, applied, pace, regulated)
    raise InputError(f"the command is {command.command!r}; expected pause, resume, pin, unpin or set")


def _real(names: Sequence[str]) -> list[str]:
    unknown = [name for name in names if name not in KNOBS and name not in ALIASES]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise InputError(f"{what} is no knob; expected any of {', '.join((*KNOBS, *ALIASES))}")
    return [real for name in names for real in expand(name)]


def _pause(ledger: Ledger, pace: Pace, regulated: Regulated) -> str:
    if ledger.paused:
        return "was paused already"
    _end_probation(ledger, "paused while it was being judged: stays", pace)
    _let_go(ledger, list(ledger.engagements), regulated, "paused before it was back in its band")
    ledger.paused = True
    return "paused: observes, journals and raises alarms, but moves nothing"


def _resume(ledger: Ledger, pace: Pace) -> str:
    if not ledger.paused and not ledger.frozen:
        return "was not paused"
    thawed = _thaw(ledger)
    ledger.paused = False
    ledger.epoch += 1
    ledger.hands_off = {"*": ledger.last_rollout + 1 + pace.window}
    _cool_down(ledger, pace)
    return f"resumed: windows start anew from the knobs as they are{thawed}"


def _thaw(ledger: Ledger) -> str:
    """Leave FROZEN: what froze the run is forgotten, or the very next rollout would freeze it again."""
    was, ledger.frozen = ledger.frozen, ""
    if was:
        ledger.reverts = []
        ledger.moves = [move for move in ledger.moves if move.kind != Kind.INTERVENTION]
    return f"; no longer {was}" if was else ""


def _pin(ledger: Ledger, knobs: Sequence[str], pace: Pace) -> str:
    flying = ledger.probation
    if flying is not None and set(knobs) & set(flying.after):
        _end_probation(ledger, f"{flying.knob} was pinned while it was being judged: stays", pace)
    ledger.pinned = sorted({*ledger.pinned, *knobs})
    return f"pinned: {', '.join(ledger.pinned)}"


def _unpin(ledger: Ledger, knobs: Sequence[str]) -> str:
    free = [knob for knob in knobs if knob not in ledger.pinned]
    ledger.pinned = [knob for knob in ledger.pinned if knob not in knobs]
    left = f"pinned: {', '.join(ledger.pinned) or 'nothing'}"
    return f"{', '.join(free)} was not pinned; {left}" if free else left


def _set(ledger: Ledger, applied: Sequence[Applied], pace: Pace, regulated: Regulated) -> str:
    names = [item.knob for item in applied]
    moved = ", ".join(names)
    _end_probation(ledger, f"{moved} was set by hand while it was being judged: stays", pace)
    for item in applied:
        _accept(ledger, item)
        ledger.hands_off[item.knob] = ledger.last_rollout + 1 + pace.window
    rules = [rule for rule, moves in regulated.items() if {r for k in moves for r in expand(k)} & set(names)]
    _let_go(ledger, [r for r in rules if r in ledger.engagements], regulated, f"{moved} was set by hand")
    for rule in rules:
        ledger.anchors.pop(rule, None)
    ledger.epoch += 1
    _cool_down(ledger, pace)
    return f"set: {', '.join(f'{item.knob} = {item.read_back:g}' for item in applied)}"


def _accept(ledger: Ledger, item: Applied) -> None:
    """The value read back is the new starting point, and the hand clears an old quarrel about it."""
    before = ledger.expected.get(item.knob, item.read_back)
    ledger.expected[item.knob] = item.read_back
    ledger.effective[item.knob] = item.effective_from
    ledger.contested.pop(item.knob, None)
    direction = (item.read_back > before) - (item.read_back < before)
    for name in (item.knob, *(a for a, real in ALIASES.items() if item.knob in real)):
        ledger.at_bound.pop(name, None)
        ledger.moves.append(Move(ledger.last_rollout, name, direction, "hand"))


def _end_probation(ledger: Ledger, reason: str, pace: Pace) -> None:
    flying, ledger.probation = ledger.probation, None
    if flying is not None:
        verdict = Verdict(flying.rule, flying.knob, Outcome.INCONCLUSIVE, reason, flying.since)
        ledger.closed.append(verdict)
        _cool_down(ledger, pace)


def _let_go(ledger: Ledger, rules: Iterable[str], regulated: Regulated, reason: str) -> None:
    """Engaged regulators end their engagement; they start again from the value that is in force."""
    for rule in rules:
        engagement = ledger.engagements.pop(rule)
        knob = regulated[rule][0]
        ledger.closed.append(Verdict(rule, knob, Outcome.INCONCLUSIVE, reason, engagement.since))


def _cool_down(ledger: Ledger, pace: Pace) -> None:
    ledger.cooldown_until = max(ledger.cooldown_until, ledger.last_rollout + pace.cooldown)
