"""What a run's journal says, told as one row per rollout and one event per decision.

The screen, the final summary and the tracker all retell the same journal. They fold its lines
through `Story` and never look at a raw line themselves, so a decision reads the same everywhere:

    journal line -> Story.add -> rows[rollout] (numbers, knobs, times) + events (who, what, why)

The last line per rollout wins, as everywhere: after a resume the repeated rollouts replace the
earlier ones together with their events. Only the standard library; nothing here raises on an
unknown line type, so an old reader can watch a newer run.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

Line = Mapping[str, Any]


class What(StrEnum):
    """What kind of thing an event is."""

    CHANGE = "change"
    """A knob was changed in the running trainer and read back."""
    WOULD = "would"
    """Shadow mode: the change that would have been made."""
    REFUSED = "refused"
    """Granted, but the trainer refused it or read back another value."""
    VETO = "veto"
    VERDICT = "verdict"
    RESTORE = "restore"
    ALARM = "alarm"
    STOP = "stop"
    COMMAND = "command"


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that the controller (or a human's hand) said or did at one rollout."""

    rollout: int
    what: What
    reason: str
    rule: str = ""
    knob: str = ""
    before: float | None = None
    after: float | None = None
    outcome: str = ""
    """Of a verdict: kept, reverted or inconclusive."""
    guard: str = ""
    """Of a veto: the guard that stopped the proposal."""
    kind: str = ""
    """Of a change: intervention, regulator (whose moves are told as one act) or emergency."""
    since: int | None = None
    """Of a verdict: the rollout of the change that it judges."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rollout: what was measured, under which knobs, and what was decided on it."""

    rollout: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Valid readings only."""
    invalid: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Metric -> (state, reason) of every reading that is not a usable number."""
    knobs: Mapping[str, float] = field(default_factory=dict)
    """The vector under which this rollout's data was made."""
    next_knobs: Mapping[str, float] = field(default_factory=dict)
    """The vector that the next rollout uses: `knobs` with what was read back."""
    events: tuple[Event, ...] = ()
    state: str = ""
    epoch: int = 0
    times: Mapping[str, float] = field(default_factory=dict)
    """Phase -> seconds."""
    silent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out scores after `rollout` rollouts."""

    rollout: int
    greedy: float | None
    sampled: float | None


def finite(value: Any) -> float | None:
    """A journalled number; None for what is not one ("nan" is journalled as text)."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


def row_of(line: Line) -> Row:
    """One `rollout` line as a row."""
    snapshot, decision = line.get("snapshot") or {}, line.get("decision") or {}
    knobs = dict(snapshot.get("knobs", {}))
    applied = [a for a in line.get("applied") or [] if not a.get("error")]
    return Row(
        rollout=int(line["rollout"]),
        metrics=snapshot.get("metrics", {}),
        invalid={n: (str(s), str(r)) for n, (s, r) in snapshot.get("invalid", {}).items()},
        knobs=knobs,
        next_knobs={**knobs, **{a["knob"]: a["read_back"] for a in applied}},
        events=tuple(events_of(line)),
        state=str(decision.get("state", "")),
        epoch=int(decision.get("epoch", snapshot.get("epoch", 0))),
        times=line.get("times") or {},
        silent=decision.get("silent", {}),
    )


def events_of(line: Line) -> Iterator[Event]:
    """Everything that one `rollout` line decided, the most telling first."""
    decision, rollout = line.get("decision") or {}, int(line["rollout"])
    if decision.get("stop"):
        yield Event(rollout, What.STOP, decision["stop"])
    yield from _restores(line, decision, rollout)
    yield from (Event(rollout, What.ALARM, text) for text in decision.get("alarms", ()))
    yield from _changes(line, decision, rollout)
    yield from _verdicts(decision, rollout)
    yield from _vetoes(decision, rollout)


def _restores(line: Line, decision: Line, rollout: int) -> Iterator[Event]:
    restore, back = decision.get("restore"), line.get("restored")
    if restore:
        came = "not carried out" if back is None else f"weights of rollout {back} are back"
        yield Event(rollout, What.RESTORE, f"{came}: {restore['reason']}", rule="X2")


def _changes(line: Line, decision: Line, rollout: int) -> Iterator[Event]:
    """Changes, but for the taking back of one: its verdict tells that."""
    failed = {a["knob"]: a for a in line.get("applied") or [] if _mismatch(a)}
    for change in decision.get("changes", ()):
        what, reason = What.CHANGE if decision.get("act", True) else What.WOULD, change["reason"]
        bad = next((failed[k] for k in change.get("values", {}) if k in failed), None)
        if bad is not None:
            what = What.REFUSED
            reason = bad.get("error") or f"read back {bad['read_back']:g}, asked {bad['requested']:g}"
        elif any(_takes_back(verdict, change) for verdict in decision.get("verdicts", ())):
            continue
        yield Event(
            rollout, what, reason, change["rule"], change["knob"], change["before"],
            change["after"], kind=change.get("kind", ""),
        )  # fmt: skip


def _takes_back(verdict: Line, change: Line) -> bool:
    same = (verdict["rule"], verdict["knob"]) == (change["rule"], change["knob"])
    return same and verdict["outcome"] == "reverted"


def _mismatch(applied: Line) -> bool:
    tolerance = 1e-6 * max(abs(applied["requested"]), 1e-12)
    return bool(applied.get("error")) or abs(applied["read_back"] - applied["requested"]) > tolerance


def _verdicts(decision: Line, rollout: int) -> Iterator[Event]:
    for verdict in decision.get("verdicts", ()):
        back: Line = next((c for c in decision.get("changes", ()) if _takes_back(verdict, c)), {})
        yield Event(
            rollout, What.VERDICT, verdict["reason"], verdict["rule"], verdict["knob"],
            back.get("before"), back.get("after"), outcome=verdict["outcome"],
            since=verdict.get("since_rollout"),
        )  # fmt: skip


def _vetoes(decision: Line, rollout: int) -> Iterator[Event]:
    for veto in decision.get("vetoes", ()):
        proposal = veto["proposal"]
        yield Event(
            rollout, What.VETO, veto["reason"], proposal["rule"], proposal["knob"],
            after=proposal["value"], guard=veto["guard"],
        )  # fmt: skip


class Story:
    """All that is known of a run, folded line by line from its journal."""

    def __init__(self) -> None:
        self.header: Line = {}
        self.rows: dict[int, Row] = {}
        self.evaluations: list[Evaluation] = []
        self.checkpoints: list[Line] = []
        self.commands: list[Event] = []
        self.resumed: list[int] = []
        self.end: Line | None = None

    def add(self, line: Line) -> None:
        """Fold one line in; types that this reader does not know are passed over."""
        kind = line.get("type")
        if kind == "rollout":
            self.rows.pop(int(line["rollout"]), None)  # the winning line also moves to the end
            self.rows[int(line["rollout"])] = row_of(line)
        elif kind == "header":
            self.header = line
        elif kind == "eval":
            self._add_evaluation(line)
        elif kind == "checkpoint":
            self.checkpoints.append(line)
        elif kind == "command":
            self._add_command(line)
        elif kind == "resumed":
            start = int(line.get("from", line.get("rollout", 0)))
            self.resumed.append(start)
            self.commands = [c for c in self.commands if c.rollout <= start]  # later ones are told again
            self.end = None
        elif kind == "end":
            self.end = line

    def _add_command(self, line: Line) -> None:
        """What was said, and what a `set` did to the vector that the next rollout uses."""
        self.commands.append(_command(line))
        applied = line.get("applied") or []
        if self.last is not None and line.get("outcome") == "done" and applied:
            knobs = {**self.last.next_knobs, **{a["knob"]: a["read_back"] for a in applied}}
            self.rows[self.last.rollout] = replace(self.last, next_knobs=knobs)

    def _add_evaluation(self, line: Line) -> None:
        rollout = int(line.get("rollout", 0))
        self.evaluations = [e for e in self.evaluations if e.rollout != rollout]
        greedy, sampled = (finite(line.get(kind)) for kind in ("greedy", "sampled"))
        self.evaluations.append(Evaluation(rollout, greedy, sampled))

    @property
    def recipe(self) -> Line:
        """The resolved recipe of the header, empty before one was seen."""
        return self.header.get("recipe") or {}

    def state(self, folder: Path, held: bool) -> tuple[str, str]:
        """How the run stands, and why.

        Args:
            folder: of the run, for the command that goes on with it.
            held: whether a process held its journal (`journal.is_written`) before the journal was read; a run
                that ended in between has its end.
        """
        if self.end is not None:
            return str(self.end.get("status", "done")), str(self.end.get("reason") or "")
        return ("running", "the run is still writing its journal") if held else self._broken_off(folder)

    def _broken_off(self, folder: Path) -> tuple[str, str]:
        next_move = f"go on with: autotune run --resume {shlex.quote(str(folder))}"
        if kind := (self.recipe.get("trainer") or {}).get("kind"):  # only its own script can start it
            next_move = f"start {kind} again to go on"
        why = "no end was recorded and nobody writes the journal: it was killed, or copied"
        return "broken off", f"{why}; {next_move}"

    @property
    def last(self) -> Row | None:
        return next(reversed(self.rows.values())) if self.rows else None

    @property
    def start_knobs(self) -> Mapping[str, float]:
        """The vector of the very first rollout: what the run was started with."""
        return self.rows[min(self.rows)].knobs if self.rows else {}

    @property
    def knobs(self) -> Mapping[str, float]:
        """The vector in use now."""
        return self.last.next_knobs if self.last else {}

    def series(self, metric: str) -> list[float | None]:
        """Valid readings by rollout, None where there was no usable number."""
        return [self.rows[t].metrics.get(metric) for t in sorted(self.rows)]

    def events(self) -> list[Event]:
        """Everything that was said and done, in order of rollout."""
        told = [event for t in sorted(self.rows) for event in self.rows[t].events]
        return sorted([*told, *self.commands], key=lambda e: e.rollout)

    def counts(self) -> Counter[str]:
        """How often each kind of event, and each outcome of a verdict, happened."""
        tally: Counter[str] = Counter()
        for event in self.events():
            tally[str(event.what)] += 1
            if event.outcome:
                tally[event.outcome] += 1
        return tally

    def silent(self) -> dict[str, str]:
        """Rule -> why it could not speak; an empty reason ends a silence, and so does speaking."""
        reasons: dict[str, str] = {}
        for t in sorted(self.rows):
            reasons.update(self.rows[t].silent)
            for event in self.rows[t].events:
                reasons.pop(event.rule, None)
        return {rule: why for rule, why in reasons.items() if why}


def _command(line: Line) -> Event:
    """`set kl_coef=0.01: set: kl_coef = 0.01`, or what was refused and why."""
    values = [f"{knob}={value:g}" for knob, value in (line.get("values") or {}).items()]
    words = " ".join([str(line.get("command", "")), *(line.get("knobs") or ()), *values]).strip()
    outcome = "refused: " if line.get("outcome") == "refused" else ""
    reason = line.get("reason") or ""
    told = (words or "a command") + (f": {outcome}{reason}" if reason else "")
    return Event(int(line.get("rollout", 0)), What.COMMAND, told)


@dataclass(frozen=True, slots=True)
class Act:
    """One change with its judgement; the moves of one regulator in a row are one act."""

    first: int
    last: int
    moves: int
    event: Event
    """The first move; its reason is why the act began."""
    after: float | None
    """The value after the last move."""
    verdict: str = ""
    verdict_reason: str = ""


def acts_of(events: list[Event]) -> list[Act]:
    """Changes with their verdicts, in order; the raw material of every table of decisions."""
    acts: list[Act] = []
    for event in events:
        if event.what in (What.CHANGE, What.WOULD, What.REFUSED):
            _add_act(acts, event)
        elif event.what is What.VERDICT:
            _judge(acts, event)
    return acts


def _add_act(acts: list[Act], event: Event) -> None:
    for at in range(len(acts) - 1, -1, -1):
        old = acts[at]
        if old.event.knob == event.knob:
            same = old.event.rule == event.rule and old.event.what is event.what
            if same and event.kind == "regulator" and not old.verdict:
                acts[at] = Act(old.first, event.rollout, old.moves + 1, old.event, event.after)
                return
            break
    acts.append(Act(event.rollout, event.rollout, 1, event, event.after))


def _judge(acts: list[Act], verdict: Event) -> None:
    for at in range(len(acts) - 1, -1, -1):
        act = acts[at]
        if (act.event.rule, act.event.knob) == (verdict.rule, verdict.knob) and not act.verdict:
            acts[at] = Act(
                act.first, act.last, act.moves, act.event, act.after, verdict.outcome, verdict.reason
            )
            return
