"""Decisions computed again from a journal: the same rules must say the same, bit for bit.

A new controller is built from the header (settings and facts) and fed with what the old one saw:
each winning rollout's snapshot, then what the trainer read back. Its own decisions are never fed
back, so a replay is no echo: alter one journalled metric and a decision differs.

With other rules it tells what they would have said to the same metrics. These were made under
the recorded knobs, so this is a study of the rules, not of what the run would have become.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.controller import Controller, ControlSettings
from autotune.decisions import Decision, applied_from_json, command_from_json, to_json
from autotune.doctor import policies_hash
from autotune.errors import InputError, JournalError
from autotune.journal import Line, inspect_journal, plain, winning_lines
from autotune.metrics import Snapshot
from autotune.recipe import ControlSection, facts_from_json

NOT_FINITE = ("nan", "inf", "-inf")


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
    controller = Controller(settings, facts_from_json(header["facts"]))
    pairs = list(_pairs(controller, lines))
    return Replay(
        pairs, settings, control is not None, _warnings(header, reading.torn), reading.altered
    )


def _header(lines: Sequence[Line], path: Path) -> Line:
    header = next((line for line in lines if line["type"] == "header"), None)
    if header is None or "facts" not in header or "recipe" not in header:
        raise JournalError(f"{path} has no header with recipe and facts; it cannot be replayed")
    return header


def _settings(header: Line, control: ControlSection | None) -> ControlSettings:
    recorded = header["recipe"]["control"]
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


def _pairs(controller: Controller, lines: Sequence[Line]) -> Iterator[Pair]:
    for line in lines:
        if line["type"] == "command" and line.get("outcome") == "done":
            controller.obey(command_from_json(line), [applied_from_json(a) for a in line["applied"]])
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
    }


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
    table = Table(box=None, padding=(0, 2), header_style="bold")
    for name in ("rollout", "this run did", f"{result.settings.profile} rules would have"):
        table.add_column(name)
    rows = [(p.rollout, changes_of(p.journalled), changes_of(p.recomputed)) for p in result.pairs]
    rows = [row for row in rows if row[1] or row[2]]
    for rollout, old, new in rows:
        cells = (Text("\n".join(words) or "·") for words in (old, new))
        table.add_row(str(rollout), *cells)
    if rows:
        console.print(table)
    same = sum(old == new for _, old, new in rows)
    console.print(
        f"{len(result.pairs)} rollouts: {sum(bool(r[1]) for r in rows)} with actions then,"
        f" {sum(bool(r[2]) for r in rows)} under the other rules, {same} the same.",
        "The metrics are those of the recorded run.",
    )
