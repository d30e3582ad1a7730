"""Groups side by side: one chart per quantity, one curve per group, mean with band over its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.knobs import ALIASES, KNOBS, Scale
from autotune.metrics import METRICS
from autotune.report.groups import Group, course, evaluated, knob, metric
from autotune.report.look import (
    CLIP_HIGH,
    CLIP_LOW,
    STEP_LIMIT,
    STEP_TARGET,
    Look,
    absent,
    curve,
    held_out,
    values,
)
from autotune.report.markup import tag
from autotune.report.panels import Panel, Reference
from autotune.report.scales import Axis, asinh, linear, log
from autotune.report.timelines import split_knobs
from autotune.screen.marks import KL_BAND, cells

COMPARED = (
    ("reward_mean", "Reward", "linear"),
    ("kl_ref", "KL to the reference", "asinh"),
    ("clip_ratio", "Clip ratio", "asinh"),
    ("kl_step", "Drift in one rollout (kl_step)", "asinh"),
    ("entropy", "Entropy", "linear"),
    ("tokens_per_second", "Throughput", "linear"),
)


def compared(groups: Sequence[Group], look: Look) -> Iterator[Panel]:
    """One chart per quantity, one curve per group."""
    yield _score_chart(groups, look)
    for name, title, kind in COMPARED:
        yield _compared(groups, look, name, title, kind)
    for name in apart(groups):
        yield _knob(groups, look, name)


def apart(groups: Sequence[Group]) -> list[str]:
    """Knobs that were moved in a group, or that the groups began with at different values."""
    moved = {names[0] for group in groups for names in split_knobs(group)[0]}
    found = [name for name in KNOBS if name in moved or len(_first_values(groups, name)) > 1]
    twin = ALIASES["clip_range"][1]  # drawn with its other side where both are the same
    return [name for name in found if name != twin or not _same_sides(groups)]


def _first_values(groups: Sequence[Group], name: str) -> set[float]:
    firsts = (run.knobs[name][0] for group in groups for run in group.runs if run.knobs.get(name))
    return {value for value in firsts if value is not None}


def _knob(groups: Sequence[Group], look: Look, name: str) -> Panel:
    """One knob of all groups: where the seeds of a group went different ways, mean and band."""
    known = [g for g in groups if any(run.knobs.get(name) for run in g.runs)]
    courses = {g.label: course(g, knob(name)) for g in known}
    curves = [curve(g.label, courses[g.label], color(g), dash=dash(g)) for g in known]
    seen, spec = values(*courses.values()), KNOBS[name]
    unit = "" if spec.unit == "1" else spec.unit
    # A band that reaches zero has no place on a logarithmic axis; `log` falls back by itself.
    axis = linear(seen, unit=unit) if spec.scale is Scale.LINEAR else log(seen, unit)
    title = "clip_range" if name == ALIASES["clip_range"][0] and _same_sides(known) else name
    return Panel(f"knob/{name}", title, look.span, axis, curves, height=120, points=look.points)


def _same_sides(groups: Sequence[Group]) -> bool:
    low, high = ALIASES["clip_range"]
    return all(run.knobs.get(low) == run.knobs.get(high) for group in groups for run in group.runs)


def _score_chart(groups: Sequence[Group], look: Look) -> Panel:
    curves = []
    for group in groups:
        score = evaluated(group, "greedy")
        score = score if score.x else evaluated(group, "sampled")
        if score.x:
            curves.append(held_out(group.label, score, color(group), dash=dash(group)))
    seen = [v for c in curves for column in (c.y, c.low, c.high) for v in column if v is not None]
    missing = "" if curves else "no held-out evaluation in these journals (recipe: eval.every)"
    return Panel(
        "eval_score",
        "Held-out score",
        look.span,
        linear(seen, low=0.0, unit="task units"),
        curves,
        height=190,
        missing=missing,
        points=look.points,
    )


def _compared(groups: Sequence[Group], look: Look, name: str, title: str, kind: str) -> Panel:
    known = [g for g in groups if not absent(g, name)]
    courses = {g.label: course(g, metric(name)) for g in known}
    curves = [curve(g.label, courses[g.label], color(g), dash=dash(g)) for g in known]
    seen = values(*courses.values())
    spec = METRICS[name]
    soft = {"kl_ref": 0.02, "clip_ratio": 0.005, "kl_step": 0.003}.get(name, 1.0)
    least = {"kl_ref": 0.12, "clip_ratio": 0.2, "kl_step": 0.03}.get(name, 0.0)
    axis = linear(seen, low=0.0) if kind == "linear" else asinh(seen, soft, least)
    axis = Axis(
        axis.kind, axis.low, axis.high, axis.soft, spec.unit.replace("share", ""), spec.unit == "share"
    )
    without = [f"{g.label}: {absent(g, name).partition(': ')[2]}" for g in groups if g not in known]
    missing = "" if known else "; ".join(sorted(set(without)))
    return Panel(
        name,
        title,
        look.span,
        axis,
        curves,
        references=_thresholds(name),
        height=190,
        missing=missing,
        note="" if missing else "; ".join(without),
        points=look.points,
    )


def _thresholds(name: str) -> list[Reference]:
    table = {
        "kl_ref": [Reference(KL_BAND[0], f"{KL_BAND[0]:g} to {KL_BAND[1]:g}", KL_BAND[1], color="kl")],
        "clip_ratio": [
            Reference(CLIP_LOW, "1 %", color="careful"),
            Reference(CLIP_HIGH, "15 %", color="danger"),
        ],
        "kl_step": [Reference(STEP_TARGET, "target"), Reference(STEP_LIMIT, "veto", color="danger")],
    }
    return table.get(name, [])


def color(group: Group) -> str:
    return f"c{1 + group.index % 8}"


def dash(group: Group) -> int:
    return group.index // 8 % 4


def spark(column: Sequence[float | None], width: int = 40) -> str:
    """A small curve without axes, for a table's cell."""
    known = [v for v in column if v is not None]
    if not known:
        return ""
    shown = cells(list(column), width, len(column))
    low, high = min(known), max(known)
    place = (lambda v: 90 - 80 * (v - low) / (high - low)) if high > low else (lambda v: 50.0)
    points = [
        f"{round(1000 * i / max(len(shown) - 1, 1))} {place(v):.0f}"
        for i, v in enumerate(shown)
        if v is not None
    ]
    path = tag("path", d="M" + "L".join(points) + ("h0" if len(points) == 1 else ""), class_="line reward")
    return tag(
        "svg", path, viewBox="0 0 1000 100", preserveAspectRatio="none", class_="spark", aria_hidden="true"
    )
