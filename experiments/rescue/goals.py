"""What the benchmark set out to reach, each goal beside its figure: met, or missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from experiments.rescue import measures, report
from experiments.rescue.report import RIVALS, Harm, Pooled
from experiments.rescue.runs import Row
from experiments.rescue.sweep import TRIALS

REGRET, REGRET_HIGH, RESCUED, EXCESS, SIZE, SIGNIFICANT = 0.10, 0.15, 0.9, 0.02, 12, 0.05
SEEDS, HARM_RUNS = 5, 150


@dataclass(frozen=True, slots=True)
class Goal:
    """One line of the list."""

    wanted: str
    found: str
    met: bool

    @property
    def line(self) -> str:
        return f"| {self.wanted} | {self.found} | {'met' if self.met else '**missed**'} |"


def goals(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> list[Goal]:
    """All goals; what was not run is missed."""
    ours = report.pooled(rows, tasks, "recommended", purpose)
    return [
        *(_rescue(ours) if ours else [Goal("bad starts under the controller", "not run", False)]),
        *(_beaten(rows, tasks, rival, purpose) for rival in RIVALS),
        *_harmless(report.harm(rows, tasks, purpose)),
        *_complete(rows, tasks, purpose),
    ]


def _rescue(ours: Pooled) -> list[Goal]:
    share = ours.rescued / ours.runs
    size = report.sweep_size(ours.size, ours.trials)
    least = report.sweep_size(ours.size_low, ours.trials)
    return [
        Goal(
            f"pooled regret of the bad starts ≤ {REGRET:.2f}, interval's upper end ≤ {REGRET_HIGH:.2f}",
            str(ours.regret),
            ours.regret.value <= REGRET and ours.regret.high <= REGRET_HIGH,
        ),
        Goal(
            f"≥ {RESCUED:.0%} of the bad-start runs end at {measures.RESCUED:.0%} of the best or more",
            f"{ours.rescued} of {ours.runs} ({share:.0%})",
            share >= RESCUED,
        ),
        Goal(
            f"k* ≥ {SIZE}: a sweep so large is expected to do no better than one run of ours",
            f"{size} ({least} at the interval's upper end); tokens {ours.ratio}",
            ours.size is None or ours.size >= SIZE,
        ),
    ]


def _beaten(rows: Sequence[Row], tasks: Sequence[str], rival: str, purpose: str) -> Goal:
    wanted = f"less regret than `{rival}`, paired, p < {SIGNIFICANT:g}"
    found = report.against(rows, tasks, rival, purpose)
    if found is None:
        return Goal(wanted, "not run", False)
    told = f"{found.difference} less, p = {found.p:.4f}, {found.pairs} pairs"
    return Goal(wanted, told, found.difference.value > 0 and found.p < SIGNIFICANT)


def _harmless(harm: Harm | None) -> list[Goal]:
    excess, mean = (
        f"excess harm on the well-set recipe ≤ {EXCESS:.0%}",
        f"its mean is not lower by {measures.MARGIN:g} (whole interval)",
    )
    if harm is None:
        return [Goal(excess, "not run", False), Goal(mean, "not run", False)]
    return [
        Goal(excess, str(harm.excess), harm.excess.value <= EXCESS),
        Goal(mean, f"{harm.difference}: {harm.verdict}", measures.non_inferior(harm.difference)),
    ]


def _complete(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> list[Goal]:
    """Whether as much was run as was planned."""
    trials = [sum(r.purpose == "sweep" and r.task == task for r in rows) for task in tasks]
    seeds = [
        len({r.seed for r in report.chosen(rows, task, start, "recommended", purpose)})
        for task in tasks
        for start in report.bad_starts(rows, task)
    ]
    harm = report.harm(rows, tasks, purpose)
    pairs = harm.runs if harm else 0
    return [
        Goal(f"≥ {TRIALS} trials a sweep", str(min(trials, default=0)), min(trials, default=0) >= TRIALS),
        Goal(f"≥ {SEEDS} seeds a start", str(min(seeds, default=0)), min(seeds, default=0) >= SEEDS),
        Goal(f"≥ {HARM_RUNS} well-set runs an arm", str(pairs), pairs >= HARM_RUNS),
    ]


def checklist(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> str:
    lines = [goal.line for goal in goals(rows, tasks, purpose)]
    return "\n".join(["| goal | found | |", "|---|---|---|", *lines]) + "\n"
