"""The simulated acceptance, whole: prints a table and writes one JSON line per case.

    python experiments/controller_sim/run.py                     # everything, about 15 minutes of one core
    python experiments/controller_sim/run.py power harm          # some of it
    python experiments/controller_sim/run.py --seeds 20          # a quick look
    python experiments/controller_sim/run.py --table             # the README's table

A check that is run again replaces its own lines of `results.jsonl` and leaves the others. Exit code 1
says that a target was missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # so that it runs from a checkout without an install

from experiments.controller_sim import checks  # noqa: E402
from experiments.controller_sim.checks import Row  # noqa: E402

Check = Callable[[int], Iterator[Row]]
Measure = Callable[[int], Row]


def settled(measure: Measure, seeds: int, target: float) -> Row:
    """The row of so many seeds, or of four times as many where its interval holds the target."""
    row = measure(seeds)
    low, high = row["interval"]
    return measure(4 * seeds) if low < target <= high else row


def power(seeds: int) -> Iterator[Row]:
    for pair in checks.PAIRS:
        row = settled(partial(checks.power, pair), seeds, 0.9)
        yield verdict(row, row["right"] >= 0.9 and row["wrong"] <= 0.02)
    for pair in checks.ALSO:
        yield verdict(checks.power(pair, seeds), None)


def calm(seeds: int) -> Iterator[Row]:
    """At pace 1 a fifth of the seeds: ten settings x 40 runs x 1000 rollouts are 400,000."""
    rows = [checks.calm(s, max(seeds // 5, 1), 1000) for s in checks.HEALTHY_SETTINGS]
    for row in rows:
        yield verdict(row, None)
    whole = checks.together(rows, "all settings, 1000 rollouts, pace auto")
    yield verdict(whole, whole["per_500"] <= 1.0 and whole["emergencies"] == 0)


def calm_short(seeds: int) -> Iterator[Row]:
    rows = [checks.calm(s, max(seeds // 4, 1), 60, 0.1) for s in checks.HEALTHY_SETTINGS]
    for row in rows:
        yield verdict(row, None)
    whole = checks.together(rows, "all settings, 60 rollouts, pace 0.1")
    yield verdict(whole, whole["emergencies"] == 0)


def collapse(seeds: int) -> Iterator[Row]:
    for severity in checks.SEVERITIES:
        for rollouts in (60, 200):
            row = settled(partial(checks.collapse, severity, rollouts=rollouts), seeds, 0.95)
            yield verdict(row, row["within_10"] >= 0.95 and row["false"] == 0)


def flips(seeds: int) -> Iterator[Row]:
    for setting in checks.CONSTANT:
        for rollouts, pace in ((400, 0.1), (600, 1.0)):
            row = checks.flips(setting, max(seeds // 20, 1), rollouts, pace)
            yield verdict(row, row["per_200"] <= 1.0)


def harm(seeds: int) -> Iterator[Row]:
    for change in checks.HARM:
        for rollouts, pace in ((90, 0.1), (150, 1.0)):
            row = settled(partial(checks.harm, change, rollouts=rollouts, pace=pace), seeds, 0.95)
            yield verdict(row, None if change in checks.UNSEEN else row["reverted"] >= 0.95)


def bound(seeds: int) -> Iterator[Row]:
    row = checks.at_bound(max(seeds // 10, 1))
    yield verdict(row, row["last_push_latest"] < 20 and row["reports_least"] == row["reports_most"] == 1)


def sensors(seeds: int) -> Iterator[Row]:
    for name, check in checks.SENSORS.items():
        row = checks.sensors(name, check, max(seeds // 10, 1))
        yield verdict(row, row["held"] == row["seeds"])


def cost(seeds: int) -> Iterator[Row]:
    rows = checks.cost()
    for row in rows:
        yield verdict(row, row["median_ms"] <= 0.5)


CHECKS: dict[str, Check] = {
    "power": power,
    "calm": calm,
    "calm_short": calm_short,
    "collapse": collapse,
    "flips": flips,
    "harm": harm,
    "bound": bound,
    "sensors": sensors,
    "cost": cost,
}


def verdict(row: Row, met: bool | None) -> Row:
    """The row with its verdict; None where there is no target."""
    return {**row, "met": met}


def show(row: Row) -> str:
    mark = {True: "ok  ", False: "MISS", None: "    "}[row["met"]]
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
    rest = ", ".join(f"{k} {v}" for k, v in shown.items() if k not in ("check", "case", "met", "group"))
    return f"{mark} {row['check']:8} {row['case']}: {rest}"


def write(path: Path, group: str, rows: list[Row]) -> None:
    """Put these rows in place of the group's old ones, groups in the order of `CHECKS`."""
    old = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    kept = [row for row in old if row["group"] != group] + rows
    kept.sort(key=lambda row: list(CHECKS).index(row["group"]))
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def table(path: Path) -> str:
    """`results.jsonl` as Markdown."""
    lines = ["| check | case | figures | target met |", "|---|---|---|---|"]
    for row in map(json.loads, path.read_text().splitlines()):
        hidden = ("check", "case", "met", "group", "which", "first_signs", "state_bytes")
        shown = {k: _short(v) for k, v in row.items() if k not in hidden and v not in ({}, None)}
        met = {True: "yes", False: "**no**", None: "no target"}[row["met"]]
        figures = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in shown.items())
        lines.append(f"| {row['check']} | {row['case']} | {figures} | {met} |")
    return "\n".join(lines)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list):
        return "-".join(f"{v:.2f}" for v in value)
    if isinstance(value, dict):
        return ", ".join(f"{k}: {v}" for k, v in value.items())
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checks", nargs="*", help=f"some of {', '.join(CHECKS)}; all by default")
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--out", type=Path, default=HERE / "results.jsonl")
    parser.add_argument(
        "--table", action="store_true", help="print the results as Markdown and do nothing else"
    )
    args = parser.parse_args()
    if args.table:
        print(table(args.out))
        return 0
    if unknown := [name for name in args.checks if name not in CHECKS]:
        parser.error(f"unknown check {', '.join(unknown)}; expected some of {', '.join(CHECKS)}")
    missed = 0
    for name in args.checks or CHECKS:
        started, rows = perf_counter(), []
        for row in CHECKS[name](args.seeds):
            rows.append({"group": name, **row})
            print(show(row), flush=True)
            missed += row["met"] is False
        write(args.out, name, rows)
        print(f"     {name}: {perf_counter() - started:.0f} s", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
