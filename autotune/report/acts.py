"""What was decided in a run, one step per row: the change, its evidence, and what became of it.

The story pairs changes with their verdicts; here the statistics that both rest on are fetched from the
raw lines beside them, so that a reader sees the numbers that the rule and the judge saw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.journal import Line
from autotune.story import Act, Event, Story, What, acts_of

SHOWN = (
    What.CHANGE,
    What.WOULD,
    What.REFUSED,
    What.VERDICT,
    What.RESTORE,
    What.ALARM,
    What.STOP,
    What.COMMAND,
)
MADE = (What.CHANGE, What.WOULD, What.REFUSED)


@dataclass(frozen=True, slots=True)
class Step:
    """One event that moved something, or that a person must see."""

    rollout: int
    what: str
    """change, would, refused, reverted, restore, alarm, stop or command."""
    rule: str
    knob: str
    before: float | None
    after: float | None
    reason: str
    kind: str = ""
    """intervention, regulator, emergency or revert."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    verdict: str = ""
    """kept, reverted or inconclusive; empty while it was not judged."""
    verdict_reason: str = ""
    verdict_rollout: int | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)
    """What the verdict rests on."""
    again: bool = False
    """A further move of a regulator that had begun before."""

    @property
    def outcome(self) -> str:
        """The one word that a mark shows."""
        if self.what == "change":
            return self.verdict or {"regulator": "regulating", "emergency": "emergency"}.get(
                self.kind, "open"
            )
        return self.what


def steps_of(story: Story, rows: Sequence[Line]) -> list[Step]:
    """All steps of a run, in order of rollout."""
    events = [event for event in story.events() if event.what in SHOWN]
    acts, raw = acts_of(events), _Raw(rows)
    return [step for event in events if (step := _step(event, acts, raw)) is not None]


class _Raw:
    """Evidence of changes and statistics of verdicts, by what identifies them."""

    def __init__(self, rows: Sequence[Line]) -> None:
        self.evidence: dict[tuple[int, str, str], Mapping[str, float]] = {}
        self.verdicts: dict[tuple[str, str, str], tuple[int, Mapping[str, float]]] = {}
        for line in rows:
            decision, rollout = line.get("decision") or {}, int(line["rollout"])
            for change in decision.get("changes", ()):
                key = (rollout, change["rule"], change["knob"])
                self.evidence[key] = change.get("evidence") or {}
            for verdict in decision.get("verdicts", ()):
                named = (verdict["rule"], verdict["knob"], verdict["reason"])
                self.verdicts[named] = (rollout, verdict.get("statistics") or {})


def _step(event: Event, acts: Sequence[Act], raw: _Raw) -> Step | None:
    if event.what in MADE:
        return _made(event, _act_of(event, acts), raw)
    if event.what is What.VERDICT:
        return _taken_back(event, raw) if event.outcome == "reverted" and event.after is not None else None
    return Step(event.rollout, str(event.what), event.rule, event.knob, None, None, event.reason)


def _act_of(event: Event, acts: Sequence[Act]) -> Act | None:
    same = (a for a in acts if (a.event.rule, a.event.knob) == (event.rule, event.knob))
    return next((a for a in same if a.first <= event.rollout <= a.last), None)


def _made(event: Event, act: Act | None, raw: _Raw) -> Step:
    verdict, why = (act.verdict, act.verdict_reason) if act else ("", "")
    judged, statistics = raw.verdicts.get((event.rule, event.knob, why), (None, {}))
    return Step(
        event.rollout, str(event.what), event.rule, event.knob, event.before, event.after, event.reason,
        kind=event.kind,
        evidence=raw.evidence.get((event.rollout, event.rule, event.knob), {}),
        verdict=verdict,
        verdict_reason=why,
        verdict_rollout=judged,
        statistics=statistics,
        again=act is not None and act.first < event.rollout,
    )  # fmt: skip


def _taken_back(event: Event, raw: _Raw) -> Step:
    _, statistics = raw.verdicts.get((event.rule, event.knob, event.reason), (None, {}))
    return Step(
        event.rollout, "reverted", event.rule, event.knob, event.before, event.after, event.reason,
        kind="revert", statistics=statistics,
    )  # fmt: skip


def tally(steps: Sequence[Step]) -> dict[str, int]:
    """Acts (a regulator's engagement is one), moves, verdicts and restores, counted."""
    first = [s for s in steps if s.what == "change" and not s.again]
    count = {"acts": len(first), "moves": sum(s.what == "change" for s in steps)}
    for outcome in ("kept", "reverted", "inconclusive"):
        count[outcome] = sum(s.verdict == outcome for s in first)
    for what in ("restore", "alarm", "stop", "refused", "would", "command"):
        count[what] = sum(s.what == what for s in steps)
    return count


def plain(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Evidence as (name, number) pairs to be read."""
    for name, value in values.items():
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        yield name.replace("_", " "), f"{value:.4g}" if number else str(value)
