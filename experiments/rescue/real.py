"""The real model's own table and curves: SmolLM2-135M on sums of three digits, controller off and on.

No sweep was paid for on a GPU, so there is no regret here: a run is measured against the mean of the well-set
recipe without controller, which spends the same tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from experiments.rescue.runs import Row

TASK = "sums"
SEEDS = 3
STARTS = ("well_set", "timid", "aggressive", "lr_x30")
ARMS = ("fixed", "recommended", "shadow")
NAMES = {"fixed": "off", "recommended": "act", "shadow": "shadow"}


def of_purpose(rows: Sequence[Row], purpose: str) -> list[Row]:
    return [row for row in rows if row.task == TASK and row.purpose == purpose]


def chosen(rows: Sequence[Row], start: str, arm: str) -> list[Row]:
    return [row for row in rows if (row.start, row.arm) == (start, arm)]


def whole(rows: Sequence[Row]) -> str:
    """Table, failures, and every decision."""
    failed = [f"{r.start} {r.arm} {r.seed} (exit code {r.exit_code})" for r in rows if r.score is None]
    told = f"\nFailed: {', '.join(failed)}\n" if failed else ""
    return f"## {TASK}: SmolLM2-135M\n\n{table(rows)}{told}\n{decisions(rows)}"


def table(rows: Sequence[Row]) -> str:
    """One line per start and arm: mean (lowest to highest) over seeds."""
    lines = [
        "| start | controller | seeds | J | of the well-set mean | held-out, greedy | held-out, sampled"
        " | actions | kept | reverted | restores | s a run |",
        "|" + "---|" * 12,
    ]
    usual = [r.score or 0.0 for r in chosen(rows, "well_set", "fixed")]
    for start in STARTS:
        for arm in ARMS:
            some = [r for r in chosen(rows, start, arm) if r.score is not None]
            if some:
                lines.append(_line(start, arm, some, statistics.fmean(usual) if usual else 0.0))
    return "\n".join(lines) + "\n"


def _line(start: str, arm: str, rows: Sequence[Row], usual: float) -> str:
    scores = [r.score or 0.0 for r in rows]
    means = [
        f"{statistics.fmean(getattr(r, name) for r in rows):.1f}"
        for name in ("actions", "kept", "reverted", "restores")
    ]
    cells = [
        start,
        NAMES[arm],
        str(len(rows)),
        spread(scores),
        f"{statistics.fmean(scores) / usual:.0%}" if usual else "unknown",
        spread([r.greedy or 0.0 for r in rows]),
        spread([r.sampled or 0.0 for r in rows]),
        *means,
        f"{statistics.fmean(r.seconds for r in rows):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def decisions(rows: Sequence[Row]) -> str:
    """Every action of every run."""
    parts = []
    for row in rows:
        if row.decisions:
            told = [
                f"{t}: {rule} {knob} {a:g} → {b:g} {verdict}".rstrip()
                for t, rule, knob, a, b, verdict in row.decisions
            ]
            parts.append(f"- **{row.start}, {NAMES[row.arm]}, seed {row.seed}**: {'; '.join(told)}")
    return "\n".join(parts) + "\n"


# -- the figure ----------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP = 860, 250, 44, 34
COLOURS = {"fixed": "#d55e00", "recommended": "#0072b2", "shadow": "#666666"}
DASHES = {"fixed": "5 3", "recommended": "", "shadow": "1 3"}
LEGEND = {"fixed": "controller off", "recommended": "controller on", "shadow": "shadow"}


def figure(rows: Sequence[Row]) -> str:
    """Reward over the run, one panel a start, one line a run; an empty string without any curve."""
    top = max((max(r.curve) for r in rows if r.curve), default=0.0)
    if not top:
        return ""
    starts = [start for start in STARTS if any(row.start == start for row in rows)]
    panel, high = (WIDTH - LEFT) / len(starts), HEIGHT - TOP - 46
    marks = []
    for at, start in enumerate(starts):
        x, wide = LEFT + at * panel, panel - 16
        marks.append(f'<text x="{x + wide / 2:.0f}" y="22" text-anchor="middle">{escape(start)}</text>')
        ticks = [v / 5 for v in range(6) if v / 5 <= top]
        marks += [_grid(x, wide, TOP + high * (1 - v / top), v if at == 0 else None) for v in ticks]
        marks += [_curve(row, x, wide, high, top) for arm in ARMS for row in chosen(rows, start, arm)]
    legend = "".join(_key(arm, LEFT + 170 * at) for at, arm in enumerate(ARMS))
    title = "Mean reward over a run's tokens, SmolLM2-135M on sums of three digits"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' font-family="Helvetica, Arial, sans-serif" font-size="13"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(marks)}{legend}</svg>\n'
    )


def _curve(row: Row, x: float, wide: float, high: float, top: float) -> str:
    points = " ".join(
        f"{x + wide * (i + 0.5) / len(row.curve):.1f},{TOP + high * (1 - v / top):.1f}"
        for i, v in enumerate(row.curve)
    )
    return f'<polyline points="{points}" fill="none" {_stroke(row.arm)} stroke-width="1.4"/>'


def _stroke(arm: str) -> str:
    return f'stroke="{COLOURS[arm]}"' + (f' stroke-dasharray="{DASHES[arm]}"' if DASHES[arm] else "")


def _key(arm: str, x: float) -> str:
    y = HEIGHT - 20
    return (
        f'<line x1="{x}" x2="{x + 26}" y1="{y}" y2="{y}" {_stroke(arm)} stroke-width="2.5"/>'
        f'<text x="{x + 32}" y="{y + 4}">{LEGEND[arm]}</text>'
    )


def _grid(x: float, wide: float, y: float, value: float | None) -> str:
    label = (
        "" if value is None else f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:.1f}</text>'
    )
    return f'<line x1="{x:.1f}" x2="{x + wide:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>{label}'
