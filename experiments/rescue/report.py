"""Tables, from rows alone: `python -m experiments.rescue table`.

Nothing here chooses seeds, starts or runs: what is in `results.jsonl` is shown, failed runs as failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from experiments.rescue import measures
from experiments.rescue.measures import Estimate
from experiments.rescue.runs import Row
from experiments.rescue.suite import ARMS, COMPARED_ON, STARTS, TASKS, TUNING_SEEDS
from experiments.rescue.sweep import equivalent_size, expected_best

RIVALS = ("random", "adaptive_kl", "adaptive_entropy")
"""Arms that the controller must beat."""


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a task's runs are measured against."""

    best: float
    untrained: float
    trials: tuple[float, ...]
    """Scores of the sweep's trials; a failed one counts as an untrained model."""
    trial_tokens: float
    """Mean tokens of a trial."""

    def regret(self, score: float) -> float:
        return measures.regret(score, self.best, self.untrained)

    def regret_of_sweep(self, k: int) -> float:
        """Expected regret of the best of k trials."""
        return self.regret(expected_best(self.trials, k))


def scored(row: Row) -> float:
    """J; a run without one learnt nothing."""
    return 0.0 if row.score is None else row.score


def yardstick(rows: Sequence[Row], task: str, purpose: str = "tuning") -> Yardstick | None:
    """The sweep's winner on fresh seeds; None while there are no such runs.

    A report has its own winner's runs, on seeds of the freeze; tuning has them on tuning seeds.
    """
    own = [r for r in rows if r.purpose == "winner" and r.task == task]
    winners = [r for r in own if (r.seed in TUNING_SEEDS) == (purpose != "report")]
    trials = [r for r in rows if r.purpose == "sweep" and r.task == task]
    starts = [
        r.untrained for r in rows if r.task == task and r.start == "well_set" and r.untrained is not None
    ]
    if not winners or not starts or not trials:
        return None
    untrained = measures.mean(starts)
    scores = tuple(untrained if r.score is None else r.score for r in trials)
    best = measures.mean(map(scored, winners))
    return Yardstick(best, untrained, scores, measures.mean(r.tokens for r in trials))


def chosen(rows: Sequence[Row], task: str, start: str, arm: str, purpose: str) -> list[Row]:
    return [r for r in rows if (r.task, r.start, r.arm, r.purpose) == (task, start, arm, purpose)]


def regrets(rows: Sequence[Row], yard: Yardstick) -> list[tuple[int, float]]:
    return [(r.seed, yard.regret(scored(r))) for r in rows]


def bad_starts(rows: Sequence[Row], task: str) -> list[str]:
    """Starts whose fixed arm loses at least a fifth of what there is to learn, on tuning seeds."""
    yard = yardstick(rows, task)
    if yard is None:
        return []
    bad = []
    for start in STARTS:
        fixed = regrets(chosen(rows, task, start, "fixed", "tuning"), yard)
        if start != "well_set" and fixed and measures.mean(v for _, v in fixed) >= measures.BAD:
            bad.append(start)
    return bad


# -- one task ------------------------------------------------------------------------------------


def table(rows: Sequence[Row], task: str, purpose: str) -> str:
    """One line per start and arm."""
    yard = yardstick(rows, task, purpose)
    if yard is None:
        return f"## {task}\n\nNo winner of a sweep has been run yet.\n"
    bad = bad_starts(rows, task)
    lines = [
        f"## {task} (family {TASKS[task].family})\n",
        f"Best of {len(yard.trials)} sweep trials on fresh seeds: {yard.best:.3f};"
        f" untrained: {yard.untrained:.3f}.\n",
        "| start | arm | runs | J | regret | rescued | k* | tokens of that sweep | actions | kept | reverted"
        " | tokens to goal | failed |",
        "|" + "---|" * 13,
    ]
    for start in STARTS:
        for arm in ARMS:
            some = chosen(rows, task, start, arm, purpose)
            if some:
                name = start + (" (bad)" if start in bad else "")
                lines.append(_line(name, arm, some, yard))
    return "\n".join(lines) + "\n"


def _line(start: str, arm: str, rows: Sequence[Row], yard: Yardstick) -> str:
    score = measures.bootstrap(measures.by_seed((r.seed, scored(r)) for r in rows))
    lost = measures.bootstrap(measures.by_seed(regrets(rows, yard)))
    size = equivalent_size(yard.trials, score.value)
    spent = measures.mean(r.tokens for r in rows)
    cells = [
        start,
        arm,
        len(rows),
        score,
        lost,
        f"{_rescued(rows, yard)} of {len(rows)}",
        sweep_size(size, len(yard.trials)),
        token_ratio(size, len(yard.trials), yard.trial_tokens, spent),
        *actions_of(rows),
        time_to_goal([(r, yard) for r in rows]),
        sum(r.score is None for r in rows),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _rescued(rows: Sequence[Row], yard: Yardstick) -> int:
    return sum(scored(r) >= measures.RESCUED * yard.best for r in rows)


def sweep_size(size: int | None, trials: int) -> str:
    """k* in words; a sweep of all trials may not be enough."""
    return str(size) if size is not None else f"> {trials}"


def token_ratio(size: int | None, trials: int, trial_tokens: float, ours: float) -> str:
    """Tokens of the sweep that is worth one of our runs, in runs of ours."""
    if not ours:
        return "unknown"
    return f"{'' if size is not None else '> '}{(size or trials) * trial_tokens / ours:.1f} x"


def actions_of(rows: Sequence[Row]) -> list[str]:
    """Mean actions a run, kept ones, reverted ones."""
    return [
        f"{measures.mean(getattr(r, name) for r in rows):.1f}" for name in ("actions", "kept", "reverted")
    ]


def time_to_goal(runs: Sequence[tuple[Row, Yardstick]]) -> str:
    """Share of the tokens until the running reward is at 90 % of the best; of how many runs."""
    shares = [measures.tokens_to(r.curve, measures.RESCUED * yard.best) for r, yard in runs]
    reached = [share for share in shares if share is not None]
    return f"{measures.mean(reached):.2f} ({len(reached)} of {len(runs)})" if reached else "never"


# -- the bad starts of all tasks together --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pooled:
    """One arm on the bad starts of several tasks."""

    regret: Estimate
    rescued: int
    runs: int
    size: int | None
    """k*: the smallest sweep with no more expected regret; None if even all trials have more."""
    size_low: int | None
    """k* at the interval's upper end of the regret: the least that this arm is worth."""
    trials: int
    ratio: str
    goal: str
    actions: tuple[str, ...]
    failed: int


def pooled_runs(
    rows: Sequence[Row], tasks: Sequence[str], arm: str, purpose: str, starts: Sequence[str] | None = None
) -> Iterator[tuple[Row, Yardstick]]:
    """Every run of the arm on bad starts (or on some of them), with what it is measured against."""
    for task in tasks:
        yard = yardstick(rows, task, purpose)
        for start in bad_starts(rows, task):
            if yard is not None and (starts is None or start in starts):
                yield from ((row, yard) for row in chosen(rows, task, start, arm, purpose))


def pooled(
    rows: Sequence[Row], tasks: Sequence[str], arm: str, purpose: str, starts: Sequence[str] | None = None
) -> Pooled | None:
    """The bad starts of all tasks together; None where the arm has no run."""
    found = list(pooled_runs(rows, tasks, arm, purpose, starts))
    if not found:
        return None
    lost = measures.bootstrap(
        measures.by_seed((f"{r.task} {r.seed}", yard.regret(scored(r))) for r, yard in found)
    )
    yards = [yard for _, yard in found]
    size = pooled_size(yards, lost.value)
    trials = min(len(yard.trials) for yard in yards)
    spent, its = measures.mean(r.tokens for r, _ in found), measures.mean(y.trial_tokens for y in yards)
    return Pooled(
        regret=lost,
        rescued=sum(_rescued([r], yard) for r, yard in found),
        runs=len(found),
        size=size,
        size_low=pooled_size(yards, lost.high),
        trials=trials,
        ratio=token_ratio(size, trials, its, spent),
        goal=time_to_goal(found),
        actions=tuple(actions_of([r for r, _ in found])),
        failed=sum(r.score is None for r, _ in found),
    )


def pooled_size(yards: Sequence[Yardstick], regret: float) -> int | None:
    """Smallest k whose expected regret, over these runs' tasks, is no more than `regret`."""
    counts = Counter(yards)  # one entry a run: tasks weigh as they do in the regret
    for k in range(1, min(len(yard.trials) for yard in yards) + 1):
        if sum(n * yard.regret_of_sweep(k) for yard, n in counts.items()) <= regret * len(yards):
            return k
    return None


EVERYWHERE = ("fixed", "recommended")
"""Arms that are run on every start."""


def pooled_tables(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> str:
    """All bad starts for the arms that have them, then those on which every arm was run."""
    return (
        f"Every bad start:\n\n{_pooled_table(rows, tasks, purpose, EVERYWHERE, None)}\n"
        f"Of them {', '.join(COMPARED_ON)}, on which all arms were run:\n\n"
        f"{_pooled_table(rows, tasks, purpose, tuple(ARMS), COMPARED_ON)}"
    )


def _pooled_table(
    rows: Sequence[Row],
    tasks: Sequence[str],
    purpose: str,
    arms: Sequence[str],
    starts: Sequence[str] | None,
) -> str:
    lines = [
        "| arm | runs | regret | rescued | k* | tokens of that sweep | tokens to goal | actions | kept"
        " | reverted | failed |",
        "|" + "---|" * 11,
    ]
    for arm in arms:
        if found := pooled(rows, tasks, arm, purpose, starts):
            lines.append(
                f"| {arm} | {found.runs} | {found.regret} | {found.rescued} of {found.runs}"
                f" | {sweep_size(found.size, found.trials)} | {found.ratio} | {found.goal}"
                f" | {' | '.join(found.actions)} | {found.failed} |"
            )
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True)
class Compared:
    """Another arm's regret minus ours, on the starts that all arms were run on."""

    difference: Estimate
    p: float
    """One-sided, signs flipped for whole seeds."""
    pairs: int


def against(rows: Sequence[Row], tasks: Sequence[str], other: str, purpose: str) -> Compared | None:
    """Paired by task, start and seed; None where there is no pair."""
    pairs: list[tuple[int | str, float]] = []
    for task in tasks:
        yard = yardstick(rows, task, purpose)
        if yard is None:
            continue
        for start in COMPARED_ON:
            mine = dict(regrets(chosen(rows, task, start, "recommended", purpose), yard))
            its = dict(regrets(chosen(rows, task, start, other, purpose), yard))
            pairs += [(f"{task} {seed}", its[seed] - mine[seed]) for seed in mine if seed in its]
    if not pairs:
        return None
    seeds = measures.by_seed(pairs)
    p = measures.sign_flip_p([measures.mean(group) for group in seeds])
    return Compared(measures.bootstrap(seeds), p, len(pairs))


# -- which rule earned what ----------------------------------------------------------------------


def earned(rows: Sequence[Row], task: str, starts: Sequence[str]) -> str:
    """What the run loses without each rule, on tuning seeds."""
    lines = ["| without | runs | J | J with all rules | difference |", "|---|---|---|---|---|"]
    arms = sorted({r.arm for r in rows if r.task == task and r.arm.startswith("without_")})
    for arm in arms:
        pairs = []
        for start in starts:
            full = {r.seed: scored(r) for r in chosen(rows, task, start, "recommended", "tuning")}
            pairs += [
                (r.seed, scored(r), full[r.seed])
                for r in chosen(rows, task, start, arm, "tuning")
                if r.seed in full
            ]
        if pairs:
            less, whole = measures.mean(p[1] for p in pairs), measures.mean(p[2] for p in pairs)
            lost = measures.bootstrap(measures.by_seed((seed, a - b) for seed, a, b in pairs))
            name = arm.removeprefix("without_")
            lines.append(f"| {name} | {len(pairs)} | {less:.3f} | {whole:.3f} | {lost} |")
    return "\n".join(lines) + "\n"


def actions_by_rule(rows: Sequence[Row], purpose: str) -> str:
    tally: Counter[str] = Counter()
    for row in rows:
        if row.purpose == purpose and row.arm == "recommended":
            tally.update(row.rules)
    return ", ".join(f"{rule} {count}" for rule, count in tally.most_common())


# -- harm ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Harm:
    """The well-set recipe under the controller against without it, paired by seed."""

    runs: int
    on: float
    off: float
    difference: Estimate
    excess: Estimate
    below: int
    """Runs with the controller below the 2 % quantile of those without."""
    below_off: int
    """Runs without it below their own quantile: what chance alone gives."""
    actions: float

    @property
    def verdict(self) -> str:
        return "not inferior" if measures.non_inferior(self.difference) else "not shown"


def well_set_pairs(rows: Sequence[Row], task: str, purpose: str) -> list[tuple[Row, Row]]:
    on = {r.seed: r for r in chosen(rows, task, "well_set", "recommended", purpose)}
    off = {r.seed: r for r in chosen(rows, task, "well_set", "fixed", purpose)}
    return [(on[seed], off[seed]) for seed in sorted(on.keys() & off.keys())]


def harm(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> Harm | None:
    """Of one task, or of several together; None below two pairs."""
    pairs = [found for task in tasks if (found := well_set_pairs(rows, task, purpose))]
    flat = [pair for task in pairs for pair in task]
    if len(flat) < 2:
        return None
    scores = [([scored(a) for a, _ in task], [scored(b) for _, b in task]) for task in pairs]
    return Harm(
        runs=len(flat),
        on=measures.mean(scored(a) for a, _ in flat),
        off=measures.mean(scored(b) for _, b in flat),
        difference=measures.bootstrap([[scored(a) - scored(b)] for a, b in flat]),
        excess=measures.excess_harm(scores),
        below=measures.below_quantile(scores),
        below_off=measures.below_quantile([(off, off) for _, off in scores]),
        actions=measures.mean(a.actions for a, _ in flat),
    )


def harm_table(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> str:
    lines = [
        f"| task | runs an arm | J off | J on | paired difference | mean, margin {measures.MARGIN:g}"
        " | excess harm | actions a run |",
        "|" + "---|" * 8,
    ]
    groups = [[task] for task in tasks] + ([list(tasks)] if len(tasks) > 1 else [])
    for group in groups:
        if found := harm(rows, group, purpose):
            name = group[0] if len(group) == 1 else "all"
            lines.append(
                f"| {name} | {found.runs} | {found.off:.3f} | {found.on:.3f} | {found.difference} |"
                f" {found.verdict} | {found.excess} | {found.actions:.1f} |"
            )
    return "\n".join(lines) + "\n"


# -- everything ----------------------------------------------------------------------------------


def sweep_curve(yard: Yardstick) -> str:
    sizes = [k for k in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if k <= len(yard.trials)]
    return ", ".join(f"{k}: {expected_best(yard.trials, k):.3f}" for k in sizes)


def failures(rows: Sequence[Row], purpose: str) -> str:
    """Every run without a score, by name, with its exit code."""
    failed = [r for r in rows if r.purpose == purpose and r.score is None]
    told = [
        f"- {r.task} {r.start} {r.arm} {r.seed}: exit code {r.exit_code} {r.error}".rstrip() for r in failed
    ]
    return "\n".join(told or ["None."]) + "\n"


def tasks_of(rows: Sequence[Row], purpose: str) -> list[str]:
    return [task for task in TASKS if any(r.task == task and r.purpose == purpose for r in rows)]


def whole(rows: Sequence[Row], purpose: str) -> str:
    """Everything that the rows say."""
    tasks = tasks_of(rows, purpose)
    parts = [table(rows, task, purpose) for task in tasks]
    parts.append(f"## The bad starts together\n\n{pooled_tables(rows, tasks, purpose)}")
    for other in ARMS:
        if other != "recommended" and (found := against(rows, tasks, other, purpose)):
            parts.append(
                f"- recommended against {other}: {found.difference} of regret,"
                f" p = {found.p:.4f}, {found.pairs} pairs"
            )
    for task in tasks:
        if yard := yardstick(rows, task, purpose):
            parts.append(f"\nExpected best of k sweep trials, {task}: {sweep_curve(yard)}\n")
        if any(r.arm.startswith("without_") and r.task == task for r in rows):
            parts.append(f"## Which rule earned what, {task}\n\n{earned(rows, task, COMPARED_ON)}")
    parts.append(f"## Harm\n\n{harm_table(rows, tasks, purpose)}")
    parts.append(f"Actions by rule: {actions_by_rule(rows, purpose) or 'none'}\n")
    parts.append(f"## Failed runs\n\n{failures(rows, purpose)}")
    return "\n".join(parts)
