"""`docs/evidence.md`: one page from the reporting rows of a freeze, with its figure and its limits.

Every number on the page is computed here from rows; the page has no other source. Where a freeze has no
reporting rows there is no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.rescue import figure, goals, real, report, suite
from experiments.rescue.runs import Row

PURPOSE = "report"
FIGURE = "evidence.svg"
_REAL = (
    "SmolLM2-135M on sums of three digits, on one H200; mean (lowest to highest) over seeds, equal tokens."
    " No sweep was run here, so there is no regret."
)


def of_freeze(rows: Sequence[Row], commit: str, counts: dict[str, int]) -> list[Row]:
    """The rows on this freeze's seeds, and all that were made before any freeze.

    Args:
        commit: the freeze; its seeds follow from it.
        counts: seeds of each purpose, `report` and `winner`.
    """
    seeds = {
        (task, purpose): set(suite.reporting_seeds(commit, task, count, purpose))
        for task in suite.TASKS
        for purpose, count in counts.items()
    }

    def belongs(row: Row) -> bool:
        own = row.purpose == PURPOSE or (row.purpose == "winner" and row.seed not in suite.TUNING_SEEDS)
        return not own or row.seed in seeds.get((row.task, row.purpose), ())

    return [row for row in rows if belongs(row)]


def page(rows: Sequence[Row], commit: str, date: str, earlier: Sequence[str] = ()) -> tuple[str, str] | None:
    """The page and its figure (SVG); None while there is nothing to report.

    Args:
        rows: those of the freeze, see `of_freeze`.
        commit: the freeze commit.
        date: of the freeze.
        earlier: commits of the freezes before it, whose reporting runs are published too.
    """
    tasks = [task for task in report.tasks_of(rows, PURPOSE) if report.yardstick(rows, task, PURPOSE)]
    ours = report.pooled(rows, tasks, "recommended", PURPOSE)
    if ours is None:
        return None
    missed = [goal for goal in goals.goals(rows, tasks, PURPOSE) if not goal.met]
    verdict = "Every goal was met." if not missed else f"{len(missed)} of the goals below were missed."
    parts = [
        "# Evidence: one autotuned run against the best of a sweep",
        f"From {_starts(rows, tasks)} bad starts on {_names(tasks)} the controller ended, in one run each,"
        f" at a normalised regret of {ours.regret} to the best of a sweep: {ours.rescued} of {ours.runs} runs"
        f" at 90 % of that best or more. {verdict}",
        f"![Every start, a sweep of growing size, and a recipe that was well set]({FIGURE})",
        goals.checklist(rows, tasks, PURPOSE).rstrip(),
        "## All arms\n\n" + report.pooled_tables(rows, tasks, PURPOSE).rstrip(),
        "## How it was measured\n\n" + _method(rows, tasks, commit, date, earlier),
        "## Limits\n\n" + _limits(rows, tasks),
    ]
    if sums := real.of_purpose(rows, PURPOSE):
        parts.insert(-2, f"## A real model\n\n{_REAL}{_so_far(sums)}\n\n{real.table(sums).rstrip()}")
    if rules := _rules(rows):
        parts.insert(-2, rules)
    return "\n\n".join(parts) + "\n", figure.figure(rows, tasks, PURPOSE)


def _so_far(sums: Sequence[Row]) -> str:
    planned = len(list(suite.jobs_of_sums(range(real.SEEDS), PURPOSE, real.STARTS)))
    return f" **{len(sums)} of {planned} runs are made so far.**" if len(sums) < planned else ""


def _rules(rows: Sequence[Row]) -> str:
    """What the compared starts lose without each rule, on the task that gains were tuned on."""
    left_out = dict.fromkeys(row.task for row in rows if row.arm.startswith("without_"))
    tables = [
        f"On `{task}`, tuning seeds:\n\n{report.earned(rows, task, suite.COMPARED_ON)}" for task in left_out
    ]
    return "## Which rule earned what\n\n" + "\n".join(tables).rstrip() if tables else ""


def _names(tasks: Sequence[str]) -> str:
    return " and ".join(f"`{task}`" for task in tasks)


def _starts(rows: Sequence[Row], tasks: Sequence[str]) -> int:
    return sum(len(report.bad_starts(rows, task)) for task in tasks)


def _method(rows: Sequence[Row], tasks: Sequence[str], commit: str, date: str, earlier: Sequence[str]) -> str:
    own = [r for r in rows if r.purpose == PURPOSE]
    failed = sum(r.score is None for r in own)
    before = (
        f" Earlier freezes, whose runs are in the same file: {', '.join(c[:12] for c in earlier)}."
        if earlier
        else ""
    )
    return (
        f"Rules and gains were frozen at commit {commit[:12]} on {date}; the seeds of every reporting"
        f" run are hashes of that commit.{before} All {len(own)} reporting runs are in"
        f" `experiments/rescue/results/results.jsonl`, {failed} of them failed and counted as nothing learnt."
        "\n\nThe score J is the mean reward over the last sixth of a run's tokens, on prompts that were not"
        " trained on. Regret is (best − J) / (best − untrained): 0 equals the sweep's winner on fresh seeds,"
        " 1 learnt nothing. A start is bad if its fixed arm lost a fifth of that on tuning seeds. k* is the"
        " smallest sweep whose expected best, without bias, is no worse than ours. Every run may spend the"
        " same tokens, what a restore throws away included. Intervals are 95 % bootstraps over seeds."
    )


def _limits(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """What the figures do not show."""
    return f"""\
- Two small synthetic tasks and models of 190 thousand parameters or fewer; a real model has a table of
  its own, with few seeds.
- The sweep draws at random, one seed a trial, from a space that spans every bad start. A person's space would
  be narrower, and a smaller sweep of it would do as well.
- The recipe that a person had set well beforehand, without controller: {_well_set(rows, tasks)}. Where it
  beats the sweep's best, so can a run that comes near it.
{_harm(rows, tasks)}\
- The rules were tuned on another task (`ops6x2`) of the same kind: digits in, digits out.
- Population-based training is the published algorithm on this project's checkpoints, four members with a
  quarter of the tokens each; with more tokens it would do better."""


def _harm(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    """What so few pairs can say of rare harm."""
    found = report.harm(rows, tasks, PURPOSE)
    if found is None:
        return ""
    return f"""\
- Harm: of {found.runs} well-set runs an arm, {found.below} with the controller and {found.below_off} without
  it ended below the 2 % quantile of those without. So few tell large harm from none, and no more: the excess
  may lie anywhere from {found.excess.low:.1%} to {found.excess.high:.1%}.
"""


def _well_set(rows: Sequence[Row], tasks: Sequence[str]) -> str:
    told = []
    for task in tasks:
        yard = report.yardstick(rows, task, PURPOSE)
        some = report.chosen(rows, task, "well_set", "fixed", PURPOSE)
        if yard and some:
            mean = sum(v for _, v in report.regrets(some, yard)) / len(some)
            told.append(f"regret {mean:.3f} on `{task}`")
    return ", ".join(told) or "not run"


def write(folder: Path, made: tuple[str, str]) -> None:
    """Put page and figure into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evidence.md").write_text(made[0], "utf-8")
    (folder / FIGURE).write_text(made[1], "utf-8")
