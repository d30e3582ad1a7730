"""A real model on one GPU: SmolLM2-135M learns sums of three digits, without and with the controller.

    python -m experiments.smollm2 run --jobs 6       what is missing, six processes side by side
    python -m experiments.smollm2 table              tables and the figure, from the rows

The starts are those of `experiments/rescue/suite.py`: well set, a tenth of its learning rate with one update
a rollout, three times its learning rate with 32 updates. Every run appends a row to
`results/results.jsonl` as it ends, so the experiment may take several sittings. Engines are started one after
another: each measures the free memory of a card that they share.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path

from experiments.rescue import runs, suite

HERE = Path(__file__).resolve().parent
STARTS = ("well_set", "timid", "aggressive")
SEEDS = (1, 2, 3)
ARMS = ("fixed", "recommended", "shadow")


def chosen(rows: Sequence[runs.Row], start: str, arm: str) -> list[runs.Row]:
    return [r for r in rows if (r.start, r.arm) == (start, arm)]


def spread(values: Sequence[float]) -> str:
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def table(rows: Sequence[runs.Row]) -> str:
    """One line per start and arm: mean (lowest to highest) over seeds."""
    lines = [
        "| start | controller | seeds | reward, last sixth | held-out, greedy | held-out, sampled | actions |"
        " restores | s a run |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for start in STARTS:
        for arm in ARMS:
            some = [r for r in chosen(rows, start, arm) if r.score is not None]
            if some:
                lines.append(line(start, arm, some))
    failed = [f"{r.start} {r.arm} {r.seed}" for r in rows if r.score is None]
    return "\n".join(lines) + "\n" + (f"\nFailed: {', '.join(failed)}\n" if failed else "")


def line(start: str, arm: str, rows: Sequence[runs.Row]) -> str:
    cells = [
        start,
        {"fixed": "off", "recommended": "act"}.get(arm, arm),
        str(len(rows)),
        spread([r.score or 0.0 for r in rows]),
        spread([r.greedy or 0.0 for r in rows]),
        spread([r.sampled or 0.0 for r in rows]),
        f"{statistics.fmean(r.actions for r in rows):.1f}",
        f"{statistics.fmean(r.restores for r in rows):.1f}",
        f"{statistics.fmean(r.seconds for r in rows):.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def decisions(rows: Sequence[runs.Row]) -> str:
    """Every action of every run."""
    parts = []
    for row in rows:
        if row.decisions:
            told = [
                f"{t}: {rule} {knob} {a:g} → {b:g} {verdict}".rstrip()
                for t, rule, knob, a, b, verdict in row.decisions
            ]
            parts.append(f"- **{row.start}, {row.arm}, seed {row.seed}**: {'; '.join(told)}")
    return "\n".join(parts) + "\n"


# -- the figure ----------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP = 780, 260, 44, 34
COLOURS = {"fixed": "#b35806", "recommended": "#2166ac", "shadow": "#666666"}


def figure(rows: Sequence[runs.Row]) -> str:
    """Reward over the run, one panel a start, one line a run."""
    panel = (WIDTH - LEFT) / len(STARTS)
    top = max((max(r.curve) for r in rows if r.curve), default=1.0) or 1.0
    marks = []
    for at, start in enumerate(STARTS):
        x0, wide, high = LEFT + at * panel, panel - 16, HEIGHT - TOP - 46
        marks.append(f'<text x="{x0 + wide / 2:.0f}" y="22" text-anchor="middle">{escape(start)}</text>')
        marks += [_grid(x0, wide, TOP + high * (1 - v / top), v if at == 0 else None) for v in _ticks(top)]
        for arm in ARMS:
            for row in chosen(rows, start, arm):
                points = " ".join(
                    f"{x0 + wide * (i + 0.5) / len(row.curve):.1f},{TOP + high * (1 - v / top):.1f}"
                    for i, v in enumerate(row.curve)
                )
                marks.append(
                    f'<polyline points="{points}" fill="none" stroke="{COLOURS[arm]}" stroke-width="1.3"/>'
                )
    names = {"fixed": "controller off", "recommended": "controller on", "shadow": "shadow"}
    legend = "".join(
        f'<rect x="{LEFT + 150 * i}" y="{HEIGHT - 24}" width="18" height="4" fill="{COLOURS[arm]}"/>'
        f'<text x="{LEFT + 150 * i + 24}" y="{HEIGHT - 18}">{names[arm]}</text>'
        for i, arm in enumerate(ARMS)
    )
    title = "Mean reward of each rollout, SmolLM2-135M on sums of three digits"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' font-family="sans-serif" font-size="12"><title>{title}</title>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(marks)}{legend}</svg>\n'
    )


def _ticks(top: float) -> list[float]:
    return [v / 5 for v in range(6) if v / 5 <= top]


def _grid(x: float, wide: float, y: float, value: float | None) -> str:
    label = (
        "" if value is None else f'<text x="{x - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:.1f}</text>'
    )
    return f'<line x1="{x:.1f}" x2="{x + wide:.1f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>{label}'


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.smollm2")
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=0, help="begin no further run after so many")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=tuple(suite.SUMS_STARTS))
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="added to every recipe")
    given = parser.parse_args(argv)
    out = given.out.resolve()
    if given.command == "run":
        todo = suite.jobs_of_sums(given.seeds, "smollm2", given.starts)
        runs.run_all(todo, out, given.jobs, given.set, 60 * given.minutes)
    rows = runs.load(out / "results.jsonl")
    if rows:
        text = f"{table(rows)}\n{decisions(rows)}"
        (out / "table.md").write_text(text, "utf-8")
        (out / "curves.svg").write_text(figure(rows), "utf-8")
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
