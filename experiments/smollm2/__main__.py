"""A real model on one GPU: SmolLM2-135M learns sums of three digits, without and with the controller.

    python -m experiments.smollm2 run --jobs 4       what is missing, four processes side by side
    python -m experiments.smollm2 table              table and curves, from the rows

These are runs of the rescue benchmark's real model (`experiments/rescue`, suite `gpu`), on the reporting
seeds of its freeze: one run serves both. A row is appended there as a run ends, so it can be stopped and
started again; table and curves are written here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.rescue import __main__ as rescue
from experiments.rescue import evidence, freezing, real, runs, suite

HERE = Path(__file__).resolve().parent
STARTS = ("well_set", "timid", "aggressive")


def jobs(commit: str) -> list[suite.Job]:
    """Off and acting from every start with every seed, and one run in shadow.

    Args:
        commit: of the freeze, which the seeds follow from.
    """
    seeds = suite.reporting_seeds(commit, real.TASK, real.SEEDS)
    return list(suite.jobs_of_sums(seeds, "report", STARTS))


def rows_of(commit: str, rows: Sequence[runs.Row]) -> list[runs.Row]:
    """The rows of this experiment among the rescue benchmark's."""
    own = evidence.of_freeze(rows, commit, {"report": real.SEEDS})
    return [row for row in real.of_purpose(own, "report") if row.start in STARTS]


def show(rows: Sequence[runs.Row], out: Path) -> None:
    """Print the table; write it and the curves."""
    text = real.whole(rows)
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.md").write_text(text, "utf-8")
    if picture := real.figure(rows):
        (out / "curves.svg").write_text(picture, "utf-8")
    print(text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.smollm2", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("--jobs", type=int, default=4, help="runs at a time")
    parser.add_argument("--minutes", type=float, default=0, help="begin no further run after so many")
    parser.add_argument("--rows", type=Path, default=rescue.HERE / "results", help="the benchmark's folder")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="for table and curves")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args(argv)
    rows = chosen.rows.resolve()
    if chosen.command == "run":
        frozen = freezing.frozen(rescue.FREEZE)
        runs.run_all(jobs(frozen), rows, chosen.jobs, chosen.set, 60 * chosen.minutes)
    done = freezing.freezes(rescue.FREEZE)
    if found := rows_of(done[-1]["commit"], runs.load(rows / "results.jsonl")) if done else []:
        show(found, chosen.out.resolve())
    else:
        print("no runs of the freeze in force yet; next: python -m experiments.smollm2 run")
    return 0


if __name__ == "__main__":
    sys.exit(main())
