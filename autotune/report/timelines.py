"""The knobs over time, and every decision as a mark: where it was made, on what, and what became of it.

A knob that somebody wanted moved has a chart of its own, with one line per seed. A knob that only followed
another one (the batch arithmetic re-derives it) is told in words, as are those that never moved. In groups of
more than a few seeds the lines become mean and band, and the decisions are in each run's own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.knobs import ALIASES, KNOBS, Scale, expand
from autotune.report.acts import Step
from autotune.report.groups import Group, course, knob
from autotune.report.look import MOST_MARKED_RUNS, Look, curve, decided
from autotune.report.panels import Curve, Mark, Panel
from autotune.report.runs import RunData
from autotune.report.scales import Axis, linear, log
from autotune.screen.marks import arrow, number

SIGNS = {
    "kept": "✓",
    "reverted": "↩",
    "inconclusive": "?",
    "regulating": "~",
    "emergency": "‼",
    "open": "▲",
    "would": "△",
    "refused": "✗",
    "restore": "↺",
    "alarm": "!",
    "stop": "■",
    "command": "☞",
}
"""Outcome of a step -> its sign; colour is never the only difference."""


def knobs(group: Group, look: Look) -> Iterator[Panel]:
    """A chart per knob that was ever touched; the others are told in one line."""
    touched, words = split_knobs(group)
    if not touched:
        yield Panel(
            "knobs", "Knobs", look.span, Axis("linear", 0, 1), missing=f"no knob was changed; {words}"
        )
    for names in touched:
        yield _timeline(group, look, names, words if names is touched[-1] else "")


def split_knobs(group: Group) -> tuple[list[tuple[str, ...]], str]:
    """(knobs that have a chart, with both sides of one clip range in one; the others in words)."""
    names = list(dict.fromkeys(name for run in group.runs for name in run.knobs))
    wanted = {real for run in group.runs for s in run.steps if s.knob for real in expand(s.knob)}
    moved = [n for n in names if any(_varies(run.knobs.get(n, ())) for run in group.runs)]
    followed = [n for n in moved if n not in wanted and all(_followed(run, n) for run in group.runs)]
    shown = [n for n in names if n in wanted or (n in moved and n not in followed)]
    still = [n for n in names if n not in shown and n not in followed]
    words = [f"followed from the batch sizes: {', '.join(followed)}"] if followed else []
    words += [f"never changed: {', '.join(_with_value(group, n) for n in still)}"] if still else []
    return _paired(group, shown), "; ".join(words)


def _paired(group: Group, names: Sequence[str]) -> list[tuple[str, ...]]:
    both = ALIASES["clip_range"]
    if not all(name in names and _same(group, *both) for name in both):
        return [(name,) for name in names]
    return [both if name == both[0] else (name,) for name in names if name != both[1]]


def _followed(run: RunData, name: str) -> bool:
    """Whether every jump of this knob came with a decision on another one."""
    column = run.knobs.get(name, ())
    decided = {step.rollout for step in run.steps if step.after is not None}
    jumps = [t for t, old, new in zip(run.rollouts, column, column[1:], strict=False) if old != new]
    return all(t in decided for t in jumps)


def _with_value(group: Group, name: str) -> str:
    values = {number(run.knobs[name][0]) for run in group.runs if run.knobs.get(name)}
    return f"{name} {' or '.join(sorted(values))}"


def _varies(column: Sequence[float | None]) -> bool:
    return len({v for v in column if v is not None}) > 1


def _same(group: Group, one: str, other: str) -> bool:
    return all(run.knobs.get(one) == run.knobs.get(other) for run in group.runs)


def _timeline(group: Group, look: Look, names: tuple[str, ...], note: str) -> Panel:
    name = names[0]
    title = "clip_range" if len(names) > 1 else name
    spec = KNOBS.get(name)
    seen = [v for run in group.runs for v in run.knobs.get(name, ()) if v is not None]
    shown = [s for run in group.runs for s in run.steps if s.knob in (title, name)]
    seen += [v for s in shown for v in (s.before, s.after) if v is not None]
    positive = spec is not None and spec.scale is not Scale.LINEAR and min(seen, default=0.0) > 0
    unit = "" if spec is None or spec.unit == "1" else spec.unit
    axis = log(seen, unit) if positive else linear(seen, unit=unit)
    return Panel(
        f"knob/{title}",
        title,
        look.span,
        axis,
        list(_knob_curves(group, name)),
        marks=_marks(group, look, title, name),
        lines=decided(group),
        height=64,
        numbered=False,
        note=note,
        points=look.points,
    )


def _knob_curves(group: Group, name: str) -> Iterator[Curve]:
    """One line per seed; of many seeds, mean and band."""
    if len(group.runs) > MOST_MARKED_RUNS:
        yield curve(name, course(group, knob(name)), "ink")
        return
    for i, run in enumerate(group.runs):
        column = run.knobs.get(name)
        if column:
            label = f"seed {run.seed}" if len(group.runs) > 1 else name
            yield Curve(
                label,
                run.rollouts,
                column,
                "ink" if len(group.runs) == 1 else f"c{1 + i % 8}",
                step=True,
                dash=i // 8,
            )


def _marks(group: Group, look: Look, *names: str) -> list[Mark]:
    if len(group.runs) > MOST_MARKED_RUNS:
        return []
    found = []
    for run in group.runs:
        for i, step in enumerate(run.steps):
            anchor = look.anchors.get((run.folder, i))
            if step.knob in names and anchor and step.after is not None:
                seed = f"seed {run.seed}, " if len(group.runs) > 1 else ""
                found.append(
                    Mark(
                        step.rollout + 0.5, anchor, mark_class(step), seed + say(step), step.after, sign(step)
                    )
                )
    return sorted(found, key=lambda mark: mark.x)


def rail(group: Group, look: Look) -> Panel | None:
    """Every step of the group in one row of marks, above all charts."""
    if len(group.runs) > MOST_MARKED_RUNS or not any(run.steps for run in group.runs):
        return None
    rows = len(group.runs)
    found = []
    for at, run in enumerate(group.runs):
        for i, step in enumerate(run.steps):
            anchor = look.anchors.get((run.folder, i))
            if anchor and not step.again:
                seed = f"seed {run.seed}, " if rows > 1 else ""
                height = 1 - (at + 0.5) / rows
                found.append(
                    Mark(step.rollout + 0.5, anchor, mark_class(step), seed + say(step), height, sign(step))
                )
    found.sort(key=lambda mark: mark.x)
    title = "Decisions" if rows == 1 else "Decisions, a row per seed"
    return Panel(
        "decisions", title, look.span, Axis("linear", 0.0, 1.0), marks=found, height=max(30, 24 * rows)
    )


def sign(step: Step) -> str:
    return SIGNS.get(step.outcome, "·")


def mark_class(step: Step) -> str:
    return step.outcome + (" again" if step.again else "")


def say(step: Step) -> str:
    """One step as a screen reader says it."""
    what = f"{step.knob} {arrow(step.before, step.after)}" if step.after is not None else step.what
    verdict = f"{step.verdict}: {step.verdict_reason}" if step.verdict else step.outcome
    return f"rollout {step.rollout}, {step.rule} {what}, because {step.reason}; {verdict}".replace("  ", " ")
