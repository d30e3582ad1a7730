"""The advice for people and for programs: the verdict, what would have been done, then the gaps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.advise.shadow import Said, Shadow
from autotune.advise.verdict import Kind, Verdict
from autotune.decisions import to_json
from autotune.policies.reads import READS

STYLES: dict[Kind, tuple[str, str]] = {
    Kind.HEALTHY: ("✓", "bold green"),
    Kind.TIMID: ("▽", "bold yellow"),
    Kind.AGGRESSIVE: ("△", "bold yellow"),
    Kind.COLLAPSING: ("✗", "bold red"),
    Kind.NO_SIGNAL: ("•", "bold yellow"),
    Kind.CANNOT_TELL: ("?", "bold cyan"),
}
MARKS: dict[str, str] = {
    "emergency": "red",
    "action": "green",
    "alarm": "yellow",
    "advice": "cyan",
    "hold": "dim",
}
MOST = 20
"""Lines of one kind that are shown before the rest is counted."""


def report(shadow: Shadow, found: Verdict) -> dict[str, Any]:
    """Everything as JSON types."""
    log = shadow.survey
    return {
        "verdict": {
            "kind": str(found.kind),
            "since_step": found.since,
            "headline": found.headline,
            "evidence": found.evidence,
        },
        "log": {
            "path": str(shadow.log.path),
            "format": shadow.log.format,
            "trainer": log.trainer,
            "rows": log.rows,
            "rollouts": len(shadow.steps),
            "decided": len(shadow.steps) - shadow.in_passing,
            "decided_from_step": shadow.steps[shadow.in_passing] if shadow.steps else None,
            "steps_per_row": log.steps_per_row,
            "metrics": {
                c.ours: {"key": k, "scale": c.scale, "estimator": c.estimator} for k, c in log.plan.items()
            },
        },
        "said": [to_json(s) for s in shadow.said],
        "silent": silent(shadow),
        "unseen": unseen(shadow),
        "knobs": shadow.known.known,
        "not_known": shadow.known.unknown,
        "noise": shadow.known.noise_words,
        "unknown_keys": log.unknown,
        "unused_keys": log.unused,
        "notes": [*shadow.known.notes, *shadow.log.hints.remarks, *_reading_notes(shadow)],
    }


def silent(shadow: Shadow) -> dict[str, str]:
    """Rule of the profile -> why it could not speak."""
    on = {p.id for p in shadow.controller.policies} | set(_profile(shadow))
    reasons = {**shadow.silent, **shadow.known.silent}
    return {rule: why for rule, why in sorted(reasons.items()) if rule in on}


def _profile(shadow: Shadow) -> Sequence[str]:
    from autotune.policies import PROFILES

    return PROFILES[shadow.known.settings.profile]


def unseen(shadow: Shadow) -> dict[str, str]:
    """Metrics that some rule needs and this log does not hold, with the reason."""
    wanted = {m for p in shadow.controller.policies for m in p.needs} | {"kl_step", "learning_rate"}
    table = shadow.known.facts.metric_capability
    return {m: table[m].reason for m in sorted(wanted) if m in table and table[m].reason}


def _reading_notes(shadow: Shadow) -> list[str]:
    notes = []
    if shadow.in_passing:
        notes.append(
            f"the rules looked at the newest {shadow.newest:,} rows only, from step"
            f" {shadow.steps[shadow.in_passing]:g} on; the {shadow.in_passing:,} rollouts before them are in"
            " the verdict's figures; --newest 0 decides on all"
        )
    if shadow.reader.orphans:
        notes.append(f"{shadow.reader.orphans} row(s) came before the first rollout and were left out")
    if shadow.reader.restarts:
        notes.append(
            f"the step counter ran backwards {shadow.reader.restarts} time(s): several runs in one log?"
        )
    return notes


# --------------------------------------------------------------------------------- on a terminal


def print_advice(console: Console, shadow: Shadow, found: Verdict) -> None:
    """The whole advice, readable from top to bottom."""
    print_verdict(console, found)
    for line in found.evidence:
        console.print(Text(f"    {line}", "dim"), soft_wrap=True)
    console.print(Text(f"  {_source_words(shadow)}", "dim"), soft_wrap=True)
    _print_said(console, shadow.said)
    _print_gaps(console, shadow)


def print_verdict(console: Console, found: Verdict) -> None:
    sign, style = STYLES[found.kind]
    console.print(Text.assemble((f"{sign} {found.title}", style), ": ", found.headline), soft_wrap=True)


def _source_words(shadow: Shadow) -> str:
    log = shadow.survey
    per = f", {log.steps_per_row} trainer steps a row" if log.steps_per_row > 1 else ""
    trainer = f" of {log.trainer}" if log.trainer else ""
    seen = f", of which the rules saw the newest {len(shadow.steps) - shadow.in_passing}"
    late = seen if shadow.in_passing else ""
    return f"{shadow.log.format}{trainer}: {log.rows} rows, {len(shadow.steps)} rollouts{per}{late}"


def said_line(item: Said) -> Text:
    """One line of what was said."""
    words = f"{item.change()}  " if item.change() else ""
    return Text.assemble(
        (f"  step {item.step:<8g}", "cyan"),
        (f"{item.kind:<10}", MARKS[item.kind]),
        (f"{item.rule:<5}", "bold"),
        (words, "bold"),
        item.reason,
    )


def _print_said(console: Console, said: Sequence[Said]) -> None:
    console.print(Text("\nWhat it would have done", "bold"))
    if not said:
        console.print("  nothing")
    for item in said[:MOST]:
        console.print(said_line(item), soft_wrap=True)
    if len(said) > MOST:
        console.print(Text(f"  … and {len(said) - MOST} more; --json has them all", "dim"))


def _print_gaps(console: Console, shadow: Shadow) -> None:
    console.print(Text("\nWhat it could not see", "bold"))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    for what, why in _gaps(shadow):
        table.add_row(Text(f"  {what}", "yellow"), Text(why))
    console.print(table)


def _gaps(shadow: Shadow) -> Iterator[tuple[str, str]]:
    """(rules or subject, reason), one row a reason."""
    reasons = silent(shadow)
    unknown = [rule for rule in reasons if rule in shadow.known.silent]
    if unknown:
        knobs = [k for k in shadow.known.unknown if any(k in READS[rule] for rule in unknown)]
        yield "knobs", f"not known: {', '.join(knobs)}"
        yield "", f"so {', '.join(unknown)} are silent; tell them with --recipe or --knob"
    for why in dict.fromkeys(why for rule, why in reasons.items() if rule not in unknown):
        yield ", ".join(rule for rule, reason in reasons.items() if reason == why), why
    yield "noise", f"the reward's noise floor stands on {shadow.known.noise_words}"
    if shadow.survey.unknown:
        yield "keys", f"unknown and not used: {', '.join(sorted(shadow.survey.unknown))}"
    unused = {
        key: why for key, why in shadow.survey.unused.items() if why and not why.endswith(" is read for step")
    }
    for why in dict.fromkeys(unused.values()):
        yield "not used", f"{', '.join(k for k, w in unused.items() if w == why)}: {why}"
    for note in (*shadow.known.notes, *shadow.log.hints.remarks, *_reading_notes(shadow)):
        yield "note", note
