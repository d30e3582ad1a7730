"""Groups side by side: one chart per quantity, one curve per group, mean with band over its seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.metrics import METRICS
from autotune.report.groups import Group, course, evaluated, metric
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
from autotune.report.scales import Axis, asinh, linear
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
