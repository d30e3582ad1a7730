"""One autotuned run against the best of a sweep, and no harm.

    python -m experiments.rescue run --suite cycle        tuning seeds, family A: for cycles of mending
    python -m experiments.rescue run --suite sweep        the opponent: random trials, then their winner again
    python -m experiments.rescue run --suite tuning       tuning seeds, all tasks: which starts are bad
    python -m experiments.rescue freeze                   write down the commit that is reported on
    python -m experiments.rescue run --suite cpu          once per freeze: reporting seeds, family B
    python -m experiments.rescue run --suite gpu          once per freeze: the real model, on a GPU
    python -m experiments.rescue table                    tables and the figure, from the rows
    python -m experiments.rescue evidence                 docs/evidence.md, from the rows of the freeze
    python -m experiments.rescue calibrate                the random arm's rate, from tuning rows

Every suite can be stopped and started again. Runs go side by side (`--jobs`), one thread each, and use a
GPU where there is one. `--set key=value` is added to every recipe (and to its hash).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.rescue import evidence, figure, freezing, goals, lot, real, report, runs, suite, sweep

HERE = Path(__file__).resolve().parent
FREEZE = HERE / "freeze.json"
FAMILY_B = [task for task in suite.TASKS if suite.TASKS[task].family == "B"]
SEEDS, HARM_SEEDS, WINNER_SEEDS = 5, 75, 5
"""Per task: seeds of every start, of the well-set recipe (150 over two tasks), and of the sweep's winner."""
CYCLE_SEEDS = suite.TUNING_SEEDS[:3]
SUITES = ("cycle", "tuning", "leave_one_out", "sweep", "cpu", "gpu", "gpu_tuning")


def same(tasks: Sequence[str], seeds: Sequence[int]) -> dict[str, Sequence[int]]:
    return dict.fromkeys(tasks, seeds)


def winners(
    rows: Sequence[runs.Row], tasks: Sequence[str], seeds: dict[str, Sequence[int]]
) -> Iterator[suite.Job]:
    """The best trial of each task's sweep, again on fresh seeds."""
    for task in tasks:
        trials = [r for r in rows if r.purpose == "sweep" and r.task == task and r.score is not None]
        if len(trials) < sweep.TRIALS:
            print(
                f"{task}: {len(trials)} of {sweep.TRIALS} trials have ended; no winner yet", file=sys.stderr
            )
            continue
        best = max(trials, key=lambda r: r.score or 0.0)
        fields = tuple(sweep.draw(int(best.start.removeprefix("trial"))).items())
        yield from (suite.Job(task, best.start, "fixed", seed, "winner", fields) for seed in seeds[task])


def jobs(name: str, out: Path, tasks: Sequence[str]) -> Iterator[suite.Job]:
    """The jobs of one suite."""
    tuning, rows = suite.TUNING_SEEDS, runs.load(out / "results.jsonl")
    if name == "cycle":
        yield from suite.jobs_of_starts(tasks or ["ops6x2"], same(tasks or ["ops6x2"], CYCLE_SEEDS), "tuning")
    elif name == "tuning":
        chosen = tasks or list(suite.SMALL_TASKS)
        yield from suite.jobs_of_starts(chosen, same(chosen, CYCLE_SEEDS), "tuning")
    elif name == "leave_one_out":
        task = (tasks or ["ops6x2"])[0]
        yield from with_all_rules(task)
        yield from suite.jobs_of_leave_one_out(task, CYCLE_SEEDS, suite.COMPARED_ON)
    elif name == "sweep":
        chosen = tasks or list(suite.SMALL_TASKS)
        yield from sweep.jobs_of_sweep(chosen)
        # The winner's seeds are tuning seeds that no trial of the sweep has won on: the last ones.
        yield from winners(rows, chosen, same(chosen, tuning[-WINNER_SEEDS:]))
    elif name == "cpu":
        yield from reported(rows, tasks or FAMILY_B)
    elif name == "gpu":
        seeds = suite.reporting_seeds(freezing.frozen(FREEZE), real.TASK, real.SEEDS)
        yield from suite.jobs_of_sums(seeds, "report", real.STARTS)
    elif name == "gpu_tuning":
        yield from suite.jobs_of_sums(tuning[:real.SEEDS], "tuning", real.STARTS)


def with_all_rules(task: str) -> Iterator[suite.Job]:
    """What every rule left out is compared with."""
    all_arms = suite.jobs_of_starts([task], same([task], CYCLE_SEEDS), "tuning", suite.COMPARED_ON)
    yield from (job for job in all_arms if job.arm == "recommended")


def listed(chosen: argparse.Namespace, out: Path) -> list[suite.Job]:
    """The jobs in the order in which they are begun; two machines meet in the middle of a suite."""
    found = list(jobs(chosen.suite, out, chosen.tasks))
    return found[::-1] if chosen.backwards else found


def reported(rows: Sequence[runs.Row], tasks: Sequence[str]) -> Iterator[suite.Job]:
    """Everything that is run once per freeze: the winner, every start, the well-set recipe many times."""
    commit = freezing.frozen(FREEZE)
    seeds = {task: suite.reporting_seeds(commit, task, HARM_SEEDS) for task in tasks}
    yield from winners(
        rows, tasks, {t: suite.reporting_seeds(commit, t, WINNER_SEEDS, "winner") for t in tasks}
    )
    yield from suite.jobs_of_starts(tasks, {task: s[:SEEDS] for task, s in seeds.items()}, "report")
    yield from suite.jobs_of_harm(tasks, seeds)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.rescue", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("command", choices=["run", "freeze", "table", "list", "evidence", "calibrate"])
    parser.add_argument("--suite", choices=SUITES, default="cycle")
    parser.add_argument("--tasks", nargs="*", default=[], choices=suite.SMALL_TASKS)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--minutes", type=float, default=0, help="begin no further run after so many")
    parser.add_argument("--backwards", action="store_true", help="last run first: for a second machine")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--purpose", default="tuning", help="rows that `table` shows: tuning or report")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    chosen = arguments(argv)
    out = chosen.out.resolve()
    if chosen.command == "freeze":
        freezing.freeze(FREEZE)
    elif chosen.command == "list":
        for job in listed(chosen, out):
            print(job.name)
    elif chosen.command == "run":
        while runs.run_all(listed(chosen, out), out, chosen.jobs, chosen.set, 60 * chosen.minutes):
            if chosen.minutes or chosen.suite != "sweep":
                break  # a sweep has a second round: its winner
    rows = runs.load(out / "results.jsonl")
    if chosen.command == "evidence":
        return prove(rows)
    if chosen.command == "calibrate":
        print(lot.told(lot.calibrate(rows)))
    elif chosen.command in ("run", "table") and rows:
        show(rows, out, "report" if chosen.suite in ("cpu", "gpu") else chosen.purpose)
    return 0


def show(rows: Sequence[runs.Row], out: Path, purpose: str) -> None:
    """Print what the rows say, and write it and its figures beside them."""
    small, sums = [r for r in rows if r.task != real.TASK], real.of_purpose(rows, purpose)
    tasks = report.tasks_of(small, purpose)
    text = f"{report.whole(small, purpose)}\n## Goals\n\n{goals.checklist(small, tasks, purpose)}"
    text += f"\n{real.whole(sums)}" if sums else ""
    (out / f"{purpose}.md").write_text(text, "utf-8")
    pictures = {purpose: figure.figure(small, tasks, purpose), f"{purpose}-sums": real.figure(sums)}
    for name, picture in pictures.items():
        if picture:
            (out / f"{name}.svg").write_text(picture, "utf-8")
    print(text)


def prove(rows: Sequence[runs.Row], docs: Path = runs.ROOT / "docs") -> int:
    """Write the page of evidence; without reporting rows say so, write nothing, and return 1."""
    done = freezing.freezes(FREEZE)
    counts = {"report": HARM_SEEDS, "winner": WINNER_SEEDS}
    made = None
    if done:
        own = evidence.of_freeze(rows, done[-1]["commit"], counts)
        earlier = [one["commit"] for one in done[:-1]]
        made = evidence.page(own, done[-1]["commit"], done[-1]["date"], earlier)
    if made is None:
        print("no reporting rows of a freeze yet, so nothing is written; next: freeze, then run --suite cpu")
        return 1
    evidence.write(docs, made)
    print(f"{docs / 'evidence.md'} and {docs / evidence.FIGURE} are written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
