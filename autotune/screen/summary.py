"""The report after the last rollout: did it help, what was done and why, and where to look.

Everything comes from the journal's lines; nothing is remembered from the run itself, so the same
report can be printed again later from the file alone.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.screen import marks
from autotune.screen.marks import ACCENT, BAD, DIM, GOOD, WARN, number
from autotune.story import Act, Event, Story, What, acts_of

LAST = 10
"""Rollouts behind the reported mean reward."""


def print_summary(
    console: Console, lines: Iterable[Mapping[str, Any]], folder: Path | str, mlflow_hint: str = ""
) -> None:
    """Print the whole report of one run."""
    story = Story()
    for line in lines:
        story.add(line)
    _headline(console, story)
    _scores(console, story)
    _actions(console, story)
    _others(console, story)
    _times(console, story)
    _places(console, story, Path(folder), mlflow_hint)


def _headline(console: Console, story: Story) -> None:
    name, seed = story.recipe.get("name", "run"), story.recipe.get("seed", "")
    how, style = ending(story)
    console.print()
    console.rule(
        f"[bold {ACCENT}]autotune[/] [bold]{name}[/] [{DIM}]seed {seed} ·[/] [{style}]{how}[/]",
        style=DIM,
        align="left",
    )


def ending(story: Story) -> tuple[str, str]:
    """How the run ended, in words, and the colour of that."""
    done = f"{len(story.rows)} rollouts"
    if story.end is None:
        return f"{done}, no end recorded", WARN
    status = str(story.end.get("status", "done"))
    reason = story.end.get("reason") or story.end.get("error") or ""
    style = GOOD if status in ("done", "finished") else BAD
    return f"{status} after {done}" + (f": {reason}" if reason else ""), style


def _scores(console: Console, story: Story) -> None:
    table = _table("score", "before", "after", "change")
    if story.evaluations:
        first, last = story.evaluations[0], story.evaluations[-1]
        _score(table, "held-out, greedy", first.greedy, last.greedy)
        _score(table, "held-out, sampled", first.sampled, last.sampled)
    rewards = [v for v in story.series("reward_mean") if v is not None]
    if rewards:
        span = min(LAST, len(rewards))
        before, after = rewards[:span], rewards[-span:]
        label = f"training reward, mean of {span} rollouts"
        _score(table, label, sum(before) / span, sum(after) / span)
    console.print(table)


def _score(table: Table, name: str, before: float | None, after: float | None) -> None:
    change = Text("-", DIM)
    if before is not None and after is not None:
        change = Text(f"{after - before:+.3f}", GOOD if after >= before else WARN)
    table.add_row(name, number(before), Text(number(after), "bold"), change)


def _actions(console: Console, story: Story) -> None:
    """One table: what was changed, why, and what became of it."""
    acts = acts_of(story.events())
    if not acts:
        console.print(Text("No knob was changed.", DIM))
        return
    table = _table("rollout", "rule", "change", "why, and the verdict")
    for act in acts:
        table.add_row(*_action(act))
    console.print(table)


def _action(act: Act) -> tuple[Text, ...]:
    event = act.event
    when = str(act.first) if act.moves == 1 else f"{act.first}-{act.last}"
    moves = f" ({act.moves} moves)" if act.moves > 1 else ""
    value = Text.assemble(f"{event.knob}\n", (marks.arrow(event.before, act.after), "bold"), (moves, DIM))
    return Text(when), Text(event.rule, ACCENT), value, Text.assemble(event.reason, "\n", _verdict(act))


_UNJUDGED = {"regulator": "still regulating", "emergency": "emergency, not on probation"}


def _verdict(act: Act) -> Text:
    if act.event.what is What.REFUSED:
        return Text("✗ not what the trainer uses", BAD)
    if act.event.what is What.WOULD:
        return Text("△ not made (shadow)", DIM)
    if not act.verdict:
        return Text(f"· {_UNJUDGED.get(act.event.kind, 'not judged yet')}", DIM)
    sign, style = marks.SIGNS.get(act.verdict, ("·", ""))
    return Text.assemble((f"{sign} {act.verdict}", style), (f": {act.verdict_reason}", DIM))


def _others(console: Console, story: Story) -> None:
    """Restores, alarms and stops one by one; vetoes counted by their cause; silent rules."""
    events = story.events()
    loud = [e for e in events if e.what in (What.RESTORE, What.ALARM, What.STOP, What.COMMAND)]
    for event in loud:
        sign, style = marks.sign_of(event)
        console.print(Text.assemble((f"{sign} {event.what} ", style), f"at {event.rollout}: {event.reason}"))
    _vetoes(console, [e for e in events if e.what is What.VETO])
    _silent(console, story)


def _silent(console: Console, story: Story) -> None:
    """Rules that never spoke, together where they share the reason."""
    reasons: dict[str, list[str]] = {}
    for rule, why in sorted(story.silent().items()):
        reasons.setdefault(why, []).append(rule)
    if reasons:
        table = _table("silent rules", "why they could not speak")
        for why, rules in reasons.items():
            table.add_row(Text(", ".join(rules), ACCENT), why)
        console.print(table)


def _vetoes(console: Console, vetoes: Sequence[Event]) -> None:
    if not vetoes:
        return
    counts = Counter((e.rule, e.knob, e.guard) for e in vetoes)
    newest = {(e.rule, e.knob, e.guard): e.reason for e in vetoes}
    table = _table("vetoed", "guard", "times", "last reason")
    for key, count in counts.most_common():
        rule, knob, guard = key
        table.add_row(Text.assemble((rule, ACCENT), f" {knob}"), guard, str(count), newest[key])
    console.print(table)


def _times(console: Console, story: Story) -> None:
    totals: Counter[str] = Counter()
    for row in story.rows.values():
        totals.update(dict(row.times))
    whole = totals.pop("total", 0.0) or sum(totals.values())
    if not whole:
        return
    parts = [f"{p} {marks.duration(s)} ({s / whole:.0%})" for p, s in totals.most_common()]
    console.print(Text.assemble(("time ", "bold"), f"{marks.duration(whole)}: ", (" · ".join(parts), DIM)))


def _places(console: Console, story: Story, folder: Path, mlflow_hint: str) -> None:
    """Where everything is. Paths and commands stay on one line, to be copied as they are."""
    journal = short_path(folder / "journal.jsonl")
    _place(console, "journal", journal, f"autotune replay {shlex.quote(journal)}")
    _place(console, "report", f"autotune report {shlex.quote(short_path(folder))}")
    if story.checkpoints:
        model = short_path(story.checkpoints[-1].get("path", folder / "checkpoints"))
        _place(console, "model", model, f'AutoModelForCausalLM.from_pretrained("{model}")')
    if mlflow_hint:
        _place(console, "mlflow", *mlflow_hint.splitlines())


def _place(console: Console, name: str, where: str, *commands: str) -> None:
    console.print(Text.assemble((f"{name:<9}", "bold"), where), soft_wrap=True)
    for command in commands:
        console.print(Text(f"{'':<9}{command}", DIM), soft_wrap=True)


def short_path(path: Path | str) -> str:
    """Relative to where the user is, when it is below."""
    path = Path(path)
    with contextlib.suppress(ValueError):
        return str(path.resolve().relative_to(Path.cwd()))
    return str(path)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, header_style=DIM, padding=(0, 1), pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    return table
