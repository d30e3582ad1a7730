"""One line per rollout, for pipes, log files and CI; decisions follow on lines of their own.

The fields keep their order and their names, so that `grep` and `awk` work on the output.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.metrics import Validity
from autotune.screen import marks
from autotune.screen.marks import number
from autotune.screen.panel import Clock, Run
from autotune.story import Event, Line, Row, Story, What

_SENSORS = {"reward_mean": "reward", "kl_ref": "kl_ref", "kl_step": "kl_step", "clip_ratio": "clip"}


def plain_lines(run: Run, story: Story, line: Line, clock: Clock) -> Iterator[str]:
    """What one journal line, already folded into `story`, is worth saying."""
    kind = line.get("type")
    if kind == "rollout" and story.last is not None:
        yield _rollout(run, story.last, clock)
        yield from (_event(e) for e in story.last.events if e.what is not What.VETO)
    elif kind == "eval" and story.evaluations:
        last = story.evaluations[-1]
        yield f"held-out after {last.rollout}: greedy {number(last.greedy)} sampled {number(last.sampled)}"
    elif kind == "checkpoint":
        yield f"checkpoint {line.get('path', '')}"
    elif kind == "resumed":
        yield f"resumed from rollout {story.resumed[-1]}"
    elif kind == "note":
        yield f"note on {line.get('about', '')}: {line.get('text', '')}"
    elif kind == "command":
        yield f"command {story.commands[-1].reason}"


def _rollout(run: Run, row: Row, clock: Clock) -> str:
    sensors = " ".join(f"{short} {_reading(row, name)}" for name, short in _SENSORS.items())
    knobs = " ".join(
        f"{short} {number(row.knobs[name])}"
        for name, short in (("actor_learning_rate", "lr"), ("kl_coef", "kl_coef"))
        if name in row.knobs
    )
    left = "-" if clock.left is None else marks.duration(clock.left)
    state = f" {row.state}" if row.state else ""
    return f"{row.rollout + 1}/{run.rollouts} rollout {row.rollout} {sensors} | {knobs} |{state} left {left}"


def _reading(row: Row, name: str) -> str:
    value = row.metrics.get(name)
    if value is not None:
        return f"{value:.2%}" if name == "clip_ratio" else number(value)
    state, _ = row.invalid.get(name, ("-", ""))
    return "structurally-zero" if state == Validity.STRUCTURAL_ZERO else state.replace("_", "-")


def _event(event: Event) -> str:
    if event.what is What.VERDICT:
        return f"  {event.rule} {event.knob} {event.outcome}: {event.reason}"
    move = f" {event.knob} {number(event.before)} -> {number(event.after)}" if event.knob else ""
    return f"  {event.rule or 'controller'} {event.what}{move}: {event.reason}"
