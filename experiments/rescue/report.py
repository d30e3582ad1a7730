"""Tables and the figure, from rows alone: `python -m experiments.rescue table`.

Nothing here chooses seeds, starts or runs: what is in `results.jsonl` is shown, failed runs as failures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from experiments.rescue import measures
from experiments.rescue.runs import Row
from experiments.rescue.suite import ARMS, COMPARED_ON, STARTS, TASKS
from experiments.rescue.sweep import equivalent_size, expected_best


@dataclass(frozen=True, slots=True)
class Yardstick:
    """What a task's runs are measured against."""

    best: float
    untrained: float
    trials: tuple[float, ...]
    """Scores of the sweep's trials; a failed one counts as an untrained model."""


def scored(row: Row) -> float:
    """J; a run without one learnt nothing."""
    return 0.0 if row.score is None else row.score


def yardstick(rows: Sequence[Row], task: str) -> Yardstick | None:
    """The sweep's winner on fresh seeds; None while there are no such runs."""
    winners = [r for r in rows if r.purpose == "winner" and r.task == task]
    trials = [r for r in rows if r.purpose == "sweep" and r.task == task]
    starts = [
        r.untrained for r in rows if r.task == task and r.start == "well_set" and r.untrained is not None
    ]
    if not winners or not starts:
        return None
    untrained = measures.mean(starts)
    scores = tuple(untrained if r.score is None else r.score for r in trials)
    return Yardstick(measures.mean(map(scored, winners)), untrained, scores)


def chosen(rows: Sequence[Row], task: str, start: str, arm: str, purpose: str) -> list[Row]:
    return [r for r in rows if (r.task, r.start, r.arm, r.purpose) == (task, start, arm, purpose)]


def regrets(rows: Sequence[Row], yard: Yardstick) -> list[tuple[int, float]]:
    return [(r.seed, measures.regret(scored(r), yard.best, yard.untrained)) for r in rows]


def bad_starts(rows: Sequence[Row], task: str, yard: Yardstick, purpose: str = "tuning") -> list[str]:
    """Starts whose fixed arm loses at least a fifth of what there is to learn, on tuning seeds."""
    bad = []
    for start in STARTS:
        fixed = regrets(chosen(rows, task, start, "fixed", purpose), yard)
        if start != "well_set" and fixed and measures.mean(v for _, v in fixed) >= measures.BAD:
            bad.append(start)
    return bad


def table(rows: Sequence[Row], task: str, purpose: str) -> str:
    """One line per start and arm."""
    yard = yardstick(rows, task)
    if yard is None:
        return f"## {task}\n\nNo winner of a sweep has been run yet.\n"
    bad = bad_starts(rows, task, yard)
    lines = [
        f"## {task} (family {TASKS[task].family})\n",
        f"Best of {len(yard.trials)} sweep trials on fresh seeds: {yard.best:.3f};"
        f" untrained: {yard.untrained:.3f}.\n",
        "| start | arm | runs | J | regret | rescued | k* | actions | kept | reverted | tokens to goal"
        " | failed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
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
    rescued = sum(scored(r) >= measures.RESCUED * yard.best for r in rows)
    size = equivalent_size(yard.trials, score.value) if yard.trials else None
    cells = [
        start,
        arm,
        len(rows),
        score,
        lost,
        f"{rescued} of {len(rows)}",
        size if size is not None else f"> {len(yard.trials)}",
        f"{measures.mean(r.actions for r in rows):.1f}",
        f"{measures.mean(r.kept for r in rows):.1f}",
        f"{measures.mean(r.reverted for r in rows):.1f}",
        _time_to_goal(rows, yard),
        sum(r.score is None for r in rows),
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def _time_to_goal(rows: Sequence[Row], yard: Yardstick) -> str:
    """Share of the tokens until the running reward is at 90 % of the best; of how many runs."""
    shares = [measures.tokens_to(r.curve, measures.RESCUED * yard.best) for r in rows]
    reached = [share for share in shares if share is not None]
    return f"{measures.mean(reached):.2f} ({len(reached)} of {len(rows)})" if reached else "never"


def pooled(rows: Sequence[Row], tasks: Sequence[str], arm: str, purpose: str) -> dict[str, object]:
    """The bad starts of all tasks together."""
    lost, rescued = [], []
    for task in tasks:
        yard = yardstick(rows, task)
        if yard is None:
            continue
        for start in bad_starts(rows, task, yard):
            some = chosen(rows, task, start, arm, purpose)
            lost += [(f"{task} {seed}", value) for seed, value in regrets(some, yard)]
            rescued += [scored(r) >= measures.RESCUED * yard.best for r in some]
    if not lost:
        return {}
    return {
        "regret": measures.bootstrap(measures.by_seed(lost)),
        "rescued": sum(rescued),
        "runs": len(rescued),
    }


def against(
    rows: Sequence[Row], tasks: Sequence[str], other: str, purpose: str
) -> tuple[float, float, int] | None:
    """Mean paired difference of regret (other - recommended) on the compared starts, its p, and pairs."""
    differences = []
    for task in tasks:
        yard = yardstick(rows, task)
        if yard is None:
            continue
        for start in COMPARED_ON:
            mine = dict(regrets(chosen(rows, task, start, "recommended", purpose), yard))
            its = dict(regrets(chosen(rows, task, start, other, purpose), yard))
            differences += measures.paired(its, mine)
    if not differences:
        return None
    return measures.mean(differences), measures.sign_flip_p(differences), len(differences)


def earned(rows: Sequence[Row], task: str, starts: Sequence[str]) -> str:
    """What the run loses without each rule, on tuning seeds."""
    lines = ["| without | runs | J | J with all rules | difference |", "|---|---|---|---|---|"]
    arms = sorted({r.arm for r in rows if r.task == task and r.arm.startswith("without_")})
    for arm in arms:
        pairs = []
        for start in starts:
            full = {r.seed: scored(r) for r in chosen(rows, task, start, "recommended", "tuning")}
            pairs += [
                (scored(r), full[r.seed]) for r in chosen(rows, task, start, arm, "tuning") if r.seed in full
            ]
        if pairs:
            less, full_mean = measures.mean(a for a, _ in pairs), measures.mean(b for _, b in pairs)
            name = arm.removeprefix("without_")
            lines.append(
                f"| {name} | {len(pairs)} | {less:.3f} | {full_mean:.3f} | {less - full_mean:+.3f} |"
            )
    return "\n".join(lines) + "\n"


def harm(rows: Sequence[Row], tasks: Sequence[str], purpose: str) -> str:
    """The well-set recipe with and without the controller."""
    lines = [
        "| task | runs an arm | J off | J on | paired difference | excess harm | actions a run |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in tasks:
        on = {r.seed: r for r in chosen(rows, task, "well_set", "recommended", purpose)}
        off = {r.seed: r for r in chosen(rows, task, "well_set", "fixed", purpose)}
        both = sorted(on.keys() & off.keys())
        if len(both) < 2:
            continue
        on_scores, off_scores = [scored(on[s]) for s in both], [scored(off[s]) for s in both]
        difference = measures.bootstrap([[a - b] for a, b in zip(on_scores, off_scores, strict=True)])
        excess = measures.excess_harm(on_scores, off_scores)
        lines.append(
            f"| {task} | {len(both)} | {measures.mean(off_scores):.3f} | {measures.mean(on_scores):.3f} |"
            f" {difference} | {excess} | {measures.mean(on[s].actions for s in both):.1f} |"
        )
    return "\n".join(lines) + "\n"


def sweep_curve(yard: Yardstick) -> str:
    sizes = [k for k in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64) if k <= len(yard.trials)]
    return ", ".join(f"{k}: {expected_best(yard.trials, k):.3f}" for k in sizes)


def actions_by_rule(rows: Sequence[Row], purpose: str) -> str:
    tally: Counter[str] = Counter()
    for row in rows:
        if row.purpose == purpose and row.arm == "recommended":
            tally.update(row.rules)
    return ", ".join(f"{rule} {count}" for rule, count in tally.most_common())


def whole(rows: Sequence[Row], purpose: str) -> str:
    """Everything that the rows say."""
    tasks = [task for task in TASKS if any(r.task == task and r.purpose == purpose for r in rows)]
    parts = [table(rows, task, purpose) for task in tasks]
    for arm in ("fixed", "recommended"):
        if found := pooled(rows, tasks, arm, purpose):
            parts.append(
                f"Pooled over the bad starts, {arm}: regret {found['regret']}, {found['rescued']} of"
                f" {found['runs']} runs at 90 % of the best or more.\n"
            )
    for other in ARMS:
        if other != "recommended" and (result := against(rows, tasks, other, purpose)):
            parts.append(
                f"- recommended against {other}: {result[0]:+.3f} of regret,"
                f" p = {result[1]:.4f}, {result[2]} pairs"
            )
    for task in tasks:
        if yard := yardstick(rows, task):
            parts.append(f"\nExpected best of k sweep trials, {task}: {sweep_curve(yard)}\n")
        if any(r.arm.startswith("without_") and r.task == task for r in rows):
            parts.append(f"## Which rule earned what, {task}\n\n{earned(rows, task, COMPARED_ON)}")
    parts.append(f"## Harm\n\n{harm(rows, tasks, purpose)}")
    parts.append(f"Actions by rule: {actions_by_rule(rows, purpose) or 'none'}\n")
    return "\n".join(parts)


# -- the figure ----------------------------------------------------------------------------------

WIDTH, LEFT, TOP, STEP = 760, 150, 46, 26
COLOURS = {"fixed": "#b35806", "recommended": "#2166ac"}


def figure(rows: Sequence[Row], task: str, purpose: str) -> str:
    """One line per start: J without and with the controller, every run a dot, the sweep's best a rule."""
    yard = yardstick(rows, task)
    starts = [s for s in STARTS if chosen(rows, task, s, "recommended", purpose)]
    if yard is None or not starts:
        return ""
    height = TOP + STEP * len(starts) + 40
    top = max(yard.best * 1.1, 0.1)

    def x(score: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * min(max(score, 0.0) / top, 1.0)

    marks = [_vertical(x(yard.best), height, f"best of the sweep {yard.best:.3f}", 14)]
    marks += [_vertical(x(yard.untrained), height, f"untrained {yard.untrained:.3f}", 30)]
    for at, start in enumerate(starts):
        y = TOP + STEP * (at + 0.7)
        marks.append(f'<text x="{LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(start)}</text>')
        for shift, arm in ((-4, "fixed"), (4, "recommended")):
            some = [scored(r) for r in chosen(rows, task, start, arm, purpose)]
            marks += [_dot(x(s), y + shift, 2.5, arm, 0.45) for s in some]
            if some:
                marks.append(_dot(x(measures.mean(some)), y + shift, 5, arm, 1.0))
    legend = "".join(
        f'<circle cx="{LEFT + 150 * i}" cy="{height - 14}" r="5" fill="{COLOURS[arm]}"/>'
        f'<text x="{LEFT + 150 * i + 10}" y="{height - 10}">{arm}</text>'
        for i, arm in enumerate(COLOURS)
    )
    title = f"Reward at the end, {task}: every start without and with the controller"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        f' font-family="sans-serif" font-size="12"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>{"".join(marks)}{legend}</svg>\n'
    )


def _vertical(x: float, height: int, text: str, y: int) -> str:
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 30}" stroke="#888"'
        ' stroke-dasharray="3 3"/>'
        f'<text x="{x:.1f}" y="{y}" text-anchor="middle" fill="#555">{escape(text)}</text>'
    )


def _dot(x: float, y: float, radius: float, arm: str, opacity: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{COLOURS[arm]}" opacity="{opacity}"/>'
