"""A real model on one GPU: SmolLM2-135M learns sums of three digits, without and with the controller.

    python -m experiments.smollm2 run --jobs 4       what is missing, four processes side by side
    python -m experiments.smollm2 table              table and curves, from the rows

Starts, tokens and tables are those of the rescue benchmark's real model (`experiments/rescue`), on tuning
seeds. Every run appends a row to `results/results.jsonl` as it ends, so the experiment can be stopped and
started again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.rescue import real, runs, suite

HERE = Path(__file__).resolve().parent
STARTS = ("well_set", "timid", "aggressive")
SEEDS = suite.TUNING_SEEDS[:3]


def jobs() -> list[suite.Job]:
    """Off and acting from every start with every seed, and one run in shadow."""
    return list(suite.jobs_of_sums(SEEDS, "tuning", STARTS))


def show(out: Path) -> None:
    """Print the table; write it and the curves beside the rows."""
    rows = real.of_purpose(runs.load(out / "results.jsonl"), "tuning")
    text = real.whole(rows)
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
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    chosen = parser.parse_args(argv)
    out = chosen.out.resolve()
    if chosen.command == "run":
        runs.run_all(jobs(), out, chosen.jobs, chosen.set, 60 * chosen.minutes)
    if (out / "results.jsonl").exists():
        show(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
