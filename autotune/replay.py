"""Decisions computed again from a journal: the same rules must say the same, bit for bit.

A new controller is built from the header (settings and facts) and fed with what the old one saw:
each winning rollout's snapshot, then what the trainer read back. Its own decisions are never fed
back, so a replay is no echo: alter one journalled metric and a decision differs.

With other rules it tells what they would have said to the same metrics. These were made under
the recorded knobs, so this is a study of the rules, not of what the run would have become.

A human's commands are fed in their places; a run that followed a schedule is followed again; and any
run's knobs, as they were read back, can be taken out as a schedule (`export`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.controller import Controller, ControlSettings
from autotune.decisions import Decision, applied_from_json, command_from_json, to_json
from autotune.errors import InputError, JournalError
from autotune.hooks.schedule import ScheduleFollower
from autotune.journal import Line, inspect_journal, plain, winning_lines
from autotune.metrics import Snapshot
from autotune.provenance import policies_hash
from autotune.recipe import ControlSection, KnobSchedule, facts_from_json, schedule_of

NOT_FINITE = ("nan", "inf", "-inf")
SHOWN = 40
"""Rows of the side-by-side table."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where a decision differs from the journalled one."""

    rollout: int
    path: str
    journalled: Any
    recomputed: Any

    def __str__(self) -> str:
        return (
            f"rollout {self.rollout}: {self.path or 'decision'} is {self.recomputed!r},"
            f" the journal has {self.journalled!r}"
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """One rollout: what was decided then, and what is decided now."""

    rollout: int
    journalled: Mapping[str, Any] | None
    recomputed: Mapping[str, Any]

    @property
    def difference(self) -> Difference | None:
        found = next(differences(self.journalled, self.recomputed), None)
        return Difference(self.rollout, *found) if found else None


@dataclass(frozen=True, slots=True)
class Replay:
    """All rollouts of a journal decided again."""

    pairs: list[Pair]
    settings: ControlSettings
    recorded: ControlSettings
    """The run's own settings."""
    other_rules: bool
    """Whether the settings are not those of the run."""
    warnings: list[str] = field(default_factory=list)
    altered: str = ""

    @property
    def first_difference(self) -> Difference | None:
        return next((p.difference for p in self.pairs if p.difference), None)

    @property
    def equal(self) -> bool:
        return self.first_difference is None and not self.altered


def replay(path: str | Path, control: ControlSection | None = None) -> Replay:
    """Decide every winning rollout of a journal again.

    Args:
        path: a run's `journal.jsonl`, or its folder.
        control: other rules; they run in shadow, since nothing they say can be applied any more.

    Raises:
        JournalError: the journal cannot be read or has no header.
        InputError: the run had no controller and no other rules are given.
    """
    path = Path(path) / "journal.jsonl" if Path(path).is_dir() else Path(path)
    reading = inspect_journal(path)
    lines = winning_lines(reading.lines)
    header = _header(lines, path)
    settings = _settings(header, control)
    pairs = list(_pairs(_decider(header, settings, control), lines))
    recorded = ControlSettings(**header["recipe"]["control"])
    warnings = _warnings(header, reading.torn)
    return Replay(pairs, settings, recorded, control is not None, warnings, reading.altered)


def _decider(
    header: Line, settings: ControlSettings, control: ControlSection | None
) -> Controller | ScheduleFollower:
    """The recorded controller, the schedule in its place, or the other rules."""
    if control is None and "schedule" in header:
        return ScheduleFollower(KnobSchedule.model_validate(header["schedule"]))
    return Controller(settings, facts_from_json(header["facts"]))


def export(path: str | Path) -> KnobSchedule:
    """The knob vectors that every rollout of a run really used.

    Raises:
        JournalError: the journal cannot be read or has no header.
        InputError: it has no rollout, or not all of them.
    """
    path = Path(path) / "journal.jsonl" if Path(path).is_dir() else Path(path)
    lines = winning_lines(inspect_journal(path).lines)
    recipe = _header(lines, path)["recipe"]
    told = [line for line in lines if line["type"] == "rollout"]
    source = {"name": recipe["name"], "seed": recipe["seed"], "rollouts": len(told)}
    restores = [line["rollout"] for line in told if line.get("restored") is not None]
    vectors = ((int(line["rollout"]), line["snapshot"]["knobs"]) for line in told)
    return schedule_of(vectors, source=source, restores=restores)


def _header(lines: Sequence[Line], path: Path) -> Line:
    header = next((line for line in lines if line["type"] == "header"), None)
    if header is None or "facts" not in header or "recipe" not in header:
        raise JournalError(f"{path} has no header with recipe and facts; it cannot be replayed")
    return header


def _settings(header: Line, control: ControlSection | None) -> ControlSettings:
    recorded = header["recipe"]["control"]
    if control is not None and control.schedule is not None:
        raise InputError("--control names other rules; a schedule has none. Run a recipe with it instead")
    if control is not None:
        return ControlSettings(**{**control.model_dump(), "mode": "shadow"})
    if recorded["mode"] == "off":
        message = "this run had no controller (control.mode: off), so there is nothing to compare"
        raise InputError(f"{message}; see what rules would have said with --control control.yaml")
    return ControlSettings(**recorded)


def _warnings(header: Line, torn: str) -> list[str]:
    warnings = [f"left out: {torn}"] if torn else []
    recorded = (header.get("environment") or {}).get("policies_sha256")
    if recorded and recorded != policies_hash():
        warnings.append("the code of the rules has changed since this run")
    return warnings


def _pairs(controller: Controller | ScheduleFollower, lines: Sequence[Line]) -> Iterator[Pair]:
    for line in lines:
        if line["type"] == "command" and line.get("outcome") == "done" and isinstance(controller, Controller):
            applied = [applied_from_json(numbers(item)) for item in line["applied"]]
            controller.obey(command_from_json(line), applied)
        if line["type"] != "rollout":
            continue
        decision = controller.step(Snapshot.from_json(numbers(line["snapshot"])))
        yield Pair(int(line["rollout"]), line.get("decision"), as_journalled(decision))
        if controller.acting:
            applied = [applied_from_json(numbers(item)) for item in line["applied"]]
            controller.confirm(applied, line["restored"])


def as_journalled(decision: Decision) -> dict[str, Any]:
    """A decision as a journal gives it back: JSON types only."""
    written: dict[str, Any] = json.loads(json.dumps(plain(to_json(decision)), allow_nan=False))
    return written


def numbers(value: Any, name: str = "") -> Any:
    """Numbers that are not finite as such again; a journal has them as text."""
    if isinstance(value, dict):
        return {key: numbers(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [numbers(item, name) for item in value]
    return float(value) if value in NOT_FINITE and name not in ("reason", "error") else value


def differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(path, old, new) of every leaf that differs, in the order of the decision's fields."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(k for k in old if k not in new)]:
            here = f"{path}.{key}" if path else str(key)
            yield from differences(old.get(key), new.get(key), here)
    elif isinstance(old, list) and isinstance(new, list):
        for index in range(max(len(old), len(new))):
            before, after = (x[index] if index < len(x) else None for x in (old, new))
            yield from differences(before, after, f"{path}.{index}")
    elif old != new:
        yield path, old, new


def report(result: Replay) -> dict[str, Any]:
    """The outcome as JSON types."""
    first = result.first_difference
    return {
        "rollouts": len(result.pairs),
        "other_rules": result.other_rules,
        "equal": result.equal,
        "altered": result.altered,
        "warnings": result.warnings,
        "differing_rollouts": [p.rollout for p in result.pairs if p.difference],
        "first_difference": None if first is None else to_json(first),
        "changes": [
            {"rollout": p.rollout, "journalled": old, "recomputed": new}
            for p in result.pairs
            if (old := changes_of(p.journalled)) != (new := changes_of(p.recomputed))
        ],
        "by_rule": {rule: asdict(count) for rule, count in by_rule(result.pairs).items()},
    }


@dataclass
class Count:
    """How often one rule acted."""

    then: int = 0
    now: int = 0
    both: int = 0
    """At the same rollout, on the same knob, in the same direction."""


def by_rule(pairs: Sequence[Pair]) -> dict[str, Count]:
    """Rule (and `restore`) -> its actions in the run and in the replay, the busiest first."""
    counts: dict[str, Count] = {}
    for pair in pairs:
        old, new = _actions(pair.journalled), _actions(pair.recomputed)
        for rule, _ in [*old, *new]:
            counts.setdefault(rule, Count())
        for action in old:
            counts[action[0]].then += 1
            counts[action[0]].both += action in new
        for rule, _ in new:
            counts[rule].now += 1
    return dict(sorted(counts.items(), key=lambda item: -(item[1].then + item[1].now)))


def _actions(decision: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """(rule, what it did) of one decision, without amounts."""
    found = [
        (c["rule"], f"{c['knob']} {'up' if c['after'] > c['before'] else 'down'}")
        for c in (decision or {}).get("changes", ())
    ]
    restore = (decision or {}).get("restore")
    return [*found, ("restore", restore["kind"])] if restore else found


def changes_of(decision: Mapping[str, Any] | None) -> list[str]:
    """What a decision did, in short words."""
    words = [
        f"{c['rule']} {c['knob']} {c['before']:.4g} → {c['after']:.4g}"
        for c in (decision or {}).get("changes", ())
    ]
    restore = (decision or {}).get("restore")
    return [*words, f"restore {restore['kind']}"] if restore else words


def print_replay(console: Console, result: Replay) -> None:
    """Equal or not, and where; with other rules, both columns of actions side by side."""
    for warning in result.warnings:
        console.print(Text(f"• {warning}", "yellow"))
    if result.altered:
        console.print(Text(f"✗ the journal's chain is broken: {result.altered}", "bold red"))
    if result.other_rules:
        _print_comparison(console, result)
        return
    first, count = result.first_difference, len(result.pairs)
    if first is None:
        console.print(Text(f"✓ all {count} decisions are the same, bit for bit", "bold green"))
        return
    differing = sum(p.difference is not None for p in result.pairs)
    console.print(Text(f"✗ {differing} of {count} decisions differ; the first one:", "bold red"))
    console.print(Text(f"  {first}"))


def _print_comparison(console: Console, result: Replay) -> None:
    """The first place where they part, who acts how often, and every action side by side."""
    names = (_name(result.recorded, "this run"), _name(result.settings, "the other rules"))
    rows = [(p.rollout, changes_of(p.journalled), changes_of(p.recomputed)) for p in result.pairs]
    parting = next((row for row in rows if row[1] != row[2]), None)
    if parting is None:
        words = f"✓ the other rules would have done the same in all {len(rows)} rollouts"
        console.print(Text(words, "bold green"))
    else:
        rollout, old, new = parting
        console.print(Text(f"first difference: rollout {rollout} of {len(rows)}", "bold"))
        for name, words in zip(names, (old, new), strict=True):
            console.print(Text(f"  {name}: {', '.join(words) or 'nothing'}"))
    _print_counts(console, result)
    _print_actions(console, [row for row in rows if row[1] or row[2]], names)
    console.print("The metrics are those of the recorded run: its knobs, not the other rules', made them.")


def _name(settings: ControlSettings, who: str) -> str:
    own = f"schedule {settings.schedule}" if settings.schedule else f"{settings.profile}, {settings.mode}"
    return f"{who} ({own})"


def _print_counts(console: Console, result: Replay) -> None:
    counts = by_rule(result.pairs)
    if not counts:
        console.print("No rule acts, then or now.")
        return
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for name in ("rule", "acted then", "acts now", "alike"):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for rule, count in counts.items():
        table.add_row(rule, str(count.then), str(count.now), str(count.both))
    console.print(table)


def _print_actions(
    console: Console, rows: Sequence[tuple[int, list[str], list[str]]], names: tuple[str, str]
) -> None:
    if not rows:
        return
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for name in ("", "rollout", *names):
        table.add_column(name)
    for rollout, old, new in rows[:SHOWN]:
        cells = (Text("\n".join(words) or "·") for words in (old, new))
        table.add_row(Text("" if old == new else "≠", "yellow"), str(rollout), *cells)
    console.print(table)
    if len(rows) > SHOWN:
        console.print(f"… and {len(rows) - SHOWN} more rollouts with actions; --json has all of them")
