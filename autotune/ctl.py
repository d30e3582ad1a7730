"""`autotune ctl`: what a live run is doing, told from its journal, and a human's hand on it.

`status` reads the journal and who holds it, nothing else, so it works on finished, killed and copied runs.
The other commands leave a file for the run (`autotune.commands`) and wait for the `command` line in
which the run's own loop says what came of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.commands import drop, parse
from autotune.decisions import State
from autotune.errors import InputError
from autotune.journal import Line, inspect_journal, is_written
from autotune.knobs import KNOBS, expand
from autotune.screen.marks import ACCENT, BAD, DIM, GOOD, WARN, duration, number
from autotune.story import Act, Event, Story, What, acts_of

LAST = 5
"""Decisions, alarms and commands that `status` shows."""
POLL_SECONDS = 0.2


# ------------------------------------------------------------------------------------------ status


@dataclass(frozen=True, slots=True)
class Knob:
    """One knob of the run."""

    start: float
    now: float
    pinned: bool


@dataclass(frozen=True, slots=True)
class Status:
    """A run as its journal tells it."""

    run: str
    state: str
    """running, paused, done, stopped, interrupted, failed, or broken off (without an end or a process)."""
    reason: str
    rollout: int
    """Finished rollouts."""
    rollouts: int
    mode: str
    controller: str
    """State of the controller's machine after the last rollout."""
    paused: bool
    pinned: list[str]
    knobs: dict[str, Knob]
    decisions: list[str]
    alarms: list[str]
    commands: list[str]
    quiet_seconds: float | None = field(default=None, compare=False)
    """Since the journal was last written."""


def journal_of(run: Path) -> Path:
    return run / "journal.jsonl" if run.is_dir() else run


def status(run: Path) -> Status:
    """Read a run's journal.

    Raises:
        JournalError: there is none, or it cannot be read.
    """
    path = journal_of(run)
    held = is_written(path)
    lines = inspect_journal(path).lines
    story = Story()
    for line in lines:
        story.add(line)
    paused, pinned = _held(story, lines)
    events, control = story.events(), story.recipe.get("control") or {}
    state, reason = story.state(path.parent, held)
    live = state == "running"
    return Status(
        run=str(story.recipe.get("name") or path.parent.name),
        state="paused" if live and paused else state,
        reason="" if live else reason,
        rollout=len(story.rows),
        rollouts=int((story.recipe.get("trainer") or {}).get("rollouts", 0)),
        mode=f"schedule {control['schedule']}" if control.get("schedule") else str(control.get("mode", "")),
        controller=story.last.state if story.last else "",
        paused=paused,
        pinned=pinned,
        knobs=_knobs(story, pinned),
        decisions=[_act(act) for act in acts_of(events)[-LAST:]],
        alarms=[_said(e) for e in events if e.what in (What.ALARM, What.STOP, What.RESTORE)][-LAST:],
        commands=[_said(e) for e in events if e.what is What.COMMAND][-LAST:],
        quiet_seconds=max(time.time() - path.stat().st_mtime, 0.0),
    )


def _held(story: Story, lines: Sequence[Line]) -> tuple[bool, list[str]]:
    """What a human's hand holds now; a command that a resume goes back behind no longer counts."""
    pins = (story.recipe.get("control") or {}).get("pin") or ()
    start = {"rollout": -1, "paused": False, "pinned": sorted({r for name in pins for r in expand(name)})}
    told: list[Mapping[str, Any]] = [start]
    for line in lines:
        if line["type"] == "resumed":
            told = [old for old in told if old["rollout"] <= int(line["from"])]
        elif line["type"] == "command" and "paused" in line:
            told.append(line)
    return bool(told[-1]["paused"]), list(told[-1]["pinned"])


def _knobs(story: Story, pinned: Sequence[str]) -> dict[str, Knob]:
    start, now = story.start_knobs, story.knobs
    return {
        name: Knob(start[name], now[name], name in pinned) for name in KNOBS if name in start and name in now
    }


def _act(act: Act) -> str:
    event = act.event
    when = str(act.first) if act.moves == 1 else f"{act.first}-{act.last}"
    move = f"{event.knob} {number(event.before)} -> {number(act.after)}"
    judged = f"{act.verdict}: {act.verdict_reason}" if act.verdict else "not judged yet"
    return f"rollout {when}: {event.rule} {move} ({event.reason}); {judged}"


def _said(event: Event) -> str:
    return f"rollout {event.rollout}: {event.reason}"


def report(found: Status) -> dict[str, Any]:
    """The status as JSON types."""
    return asdict(found)


def print_status(console: Console, found: Status) -> None:
    """State first, then the knobs that have moved or are pinned, then what was decided and said."""
    style = {"running": GOOD, "done": GOOD, "paused": WARN}.get(found.state, BAD)
    where = f"rollout {found.rollout} of {found.rollouts}"
    quiet = "" if found.quiet_seconds is None else f", journal written {duration(found.quiet_seconds)} ago"
    console.print(Text.assemble((found.run, "bold"), "  ", (found.state, style), f"  {where}{quiet}"))
    if found.reason:
        console.print(Text(f"  {found.reason}", style), soft_wrap=True)
    console.print(f"  control: {found.mode}" + (f", {found.controller}" if found.controller else ""))
    if found.controller == State.FROZEN:
        console.print("  tuning is frozen, emergencies are not; `autotune ctl RUN resume` thaws it")
    if found.pinned:
        console.print(f"  pinned: {', '.join(found.pinned)}")
    console.print(_knob_table(found))
    for title, said in (
        ("decisions", found.decisions),
        ("alarms", found.alarms),
        ("commands", found.commands),
    ):
        if said:
            console.print(Text(f"last {title}", "bold"))
            for text in said:
                console.print(Text(f"  {text}"))


def _knob_table(found: Status) -> Table:
    table = Table(box=None, padding=(0, 2), header_style=DIM)
    for title in ("knob", "start", "now", ""):
        table.add_column(title)
    for name, knob in found.knobs.items():
        moved = knob.now != knob.start
        now = Text(number(knob.now), "bold" if moved else DIM)
        table.add_row(
            Text(name, ACCENT if moved else ""), number(knob.start), now, "pinned" if knob.pinned else ""
        )
    return table


# ------------------------------------------------------------------------------------- commanding


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a command: the journal's line, or why there is none yet."""

    line: Line | None
    message: str

    @property
    def done(self) -> bool:
        return self.line is not None and self.line.get("outcome") == "done"


def command(run: Path, action: str, arguments: Sequence[str], timeout: float) -> Answer:
    """Leave a command for a live run and wait for its outcome.

    Args:
        run: the run's folder.
        action: pause, resume, pin, unpin or set.
        arguments: knobs, or `knob=value` texts for `set`.
        timeout: seconds to wait; 0 leaves the command and does not wait.

    Raises:
        InputError: the command is not one, or nobody runs this run.
        JournalError: there is no journal.
    """
    knobs, values = _read(action, arguments)
    path = journal_of(run)
    _must_live(path)
    offset = path.stat().st_size
    file = drop(path.parent, action, knobs, values)
    if timeout <= 0:
        return Answer(None, f"left for the run as {file}")
    return _wait(path, offset, file, timeout)


def _read(action: str, arguments: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    """Knobs and values, checked by the very rules of the reading end."""
    values: dict[str, float] = {}
    if action == "set":
        for text in arguments:
            name, equals, value = text.partition("=")
            if not equals:
                raise InputError(f"received {text!r}; expected KNOB=VALUE, such as kl_coef=0.01")
            values[name.strip()] = _number(text, value)
    knobs = [] if action == "set" else list(arguments)
    parse("", {"command": action, "knobs": knobs, "values": values})
    return knobs, values


def _number(text: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise InputError(f"received {text!r}; expected a number after the `=`, such as 2e-5") from None


def _must_live(path: Path) -> None:
    """A command is for a process: without one it would lie there until some later resume."""
    lines = inspect_journal(path).lines
    end = lines[-1] if lines and lines[-1]["type"] == "end" else None
    if end is None and is_written(path):
        return
    how = f"has ended ({end.get('status')})" if end else "is not being run by any process"
    raise InputError(f"{path.parent} {how}: there is nobody to obey. `autotune ctl RUN status` still works")


def _wait(path: Path, offset: int, file: Path, timeout: float) -> Answer:
    deadline = time.monotonic() + timeout
    while True:
        lines, offset = _new_lines(path, offset)
        for line in lines:
            if line.get("type") == "command" and line.get("id") == file.stem:
                return Answer(line, _outcome(line))
            if line.get("type") == "end":
                return Answer(
                    None, _withdrawn(file, f"the run ended ({line.get('status')}) before it obeyed")
                )
        if time.monotonic() >= deadline:
            return Answer(
                None, f"not obeyed within {timeout:g} s; it stays in {file} for the next rollout boundary"
            )
        time.sleep(min(POLL_SECONDS, max(deadline - time.monotonic(), 0.01)))


def _new_lines(path: Path, offset: int) -> tuple[list[dict[str, Any]], int]:
    """Whole lines behind `offset`, and where the next ones will begin."""
    with path.open("rb") as file:
        file.seek(offset)
        raw = file.read()
    whole = raw[: raw.rfind(b"\n") + 1]
    return list(_decoded(whole)), offset + len(whole)


def _decoded(raw: bytes) -> Iterator[dict[str, Any]]:
    for piece in raw.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(piece)


def _withdrawn(file: Path, why: str) -> str:
    with contextlib.suppress(OSError):
        os.unlink(file)
        return f"{why}; the command was withdrawn"
    return why


def _outcome(line: Mapping[str, Any]) -> str:
    if line.get("outcome") != "done":
        return f"refused: {line.get('reason')}"
    return f"{line.get('reason')} (from rollout {line.get('rollout')} on)"
