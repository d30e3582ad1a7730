"""What the runs say, in words, before any chart: did the controller help, and what happened to each run.

Helped or not is only answered by a comparison: two groups of the same recipe, one with the controller
acting and one without, seed by seed. With two or more common seeds the mean paired difference has a
Student interval, and the word follows from it; with one seed the difference is told as that of one pair.
Without such a pair the page says so, and how to get one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.report.acts import tally
from autotune.report.groups import Group
from autotune.report.runs import RunData
from autotune.screen.marks import number

LAST = 10
"""Rollouts behind a mean training reward."""

T_95 = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)
"""Student's t at 97.5 % for 1 to 30 degrees of freedom; 1.96 is approached beyond."""


@dataclass(frozen=True, slots=True)
class Score:
    """One number before and after a run."""

    name: str
    before: float | None
    after: float | None


@dataclass(frozen=True, slots=True)
class Headline:
    """The answer, its colour and what it rests on."""

    word: str
    """helped, harmed, no difference, one pair, alone (a single run), or unknown."""
    text: str
    detail: str = ""


def scores(run: RunData) -> list[Score]:
    """Held-out greedy, held-out sampled, training reward; those that there are."""
    found = []
    if run.evaluations:
        first, last = run.evaluations[0], run.evaluations[-1]
        found += [
            Score(f"held-out, {kind}", getattr(first, kind), getattr(last, kind))
            for kind in ("greedy", "sampled")
        ]
    rewards = run.known("reward_mean")
    if rewards:
        span = min(LAST, max(len(rewards) // 2, 1))
        name = f"training reward, mean of {span} rollout{'s' * (span > 1)}"
        found.append(Score(name, statistics.fmean(rewards[:span]), statistics.fmean(rewards[-span:])))
    return [score for score in found if score.after is not None]


def final(run: RunData, held_out: bool) -> float | None:
    """The score that runs are compared by."""
    if held_out:
        known = [e.greedy if e.greedy is not None else e.sampled for e in run.evaluations]
        return next((v for v in reversed(known) if v is not None), None)
    rewards = run.known("reward_mean")
    return statistics.fmean(rewards[-LAST:]) if rewards else None


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Two-sided 95 % interval of the mean; infinitely wide below two values."""
    n = len(values)
    if n < 2:
        return -math.inf, math.inf
    t = T_95[n - 2] if n - 2 < len(T_95) else 1.96 + 2.4 / (n - 1)
    reach = t * statistics.stdev(values) / math.sqrt(n)
    mean = statistics.fmean(values)
    return mean - reach, mean + reach


def headlines(groups: Sequence[Group]) -> list[Headline]:
    """One per controlled group that has an uncontrolled twin; otherwise what is missing for an answer."""
    pairs = [
        (acting, off)
        for acting in groups
        if acting.controlled
        for off in groups
        if off.base == acting.base and off.mode in ("off", "shadow")
    ]
    if pairs:
        return [compare(acting, off) for acting, off in pairs]
    if len(groups) == 1 and len(groups[0].runs) == 1:
        return [_alone(groups[0])]
    if any(group.controlled for group in groups):
        return [Headline("unknown", "Whether the controller helped cannot be told from these runs.", _HOW)]
    return [Headline("unknown", "No controller acted in these runs.", "They show the recipes as they are.")]


_HOW = (
    "To learn whether the controller made the difference, train the same recipe and seed with"
    " control.mode=off and report both."
)


def _alone(group: Group) -> Headline:
    """A single run: what became of its score, without a claim about the cause."""
    run = group.runs[0]
    found = scores(run)
    if not found:
        return Headline("alone", "No score is known: neither a reward nor a held-out evaluation was logged.")
    score = found[0]
    name = score.name.partition(",")[0].capitalize()
    way = f"{score.before:.3f} → {score.after:.3f}" if score.before is not None else f"{score.after:.3f}"
    return Headline(
        "alone", f"{name} {way} in {len(run.rollouts)} rollouts.", _HOW if group.controlled else ""
    )


def compare(acting: Group, off: Group) -> Headline:
    """Seed by seed where seeds are common."""
    held_out = all(final(run, True) is not None for run in (*acting.runs, *off.runs))
    name = "held-out score" if held_out else f"reward of the last {LAST} rollouts"
    without = {run.seed: final(run, held_out) for run in off.runs}
    both = [
        (a, b)
        for run in acting.runs
        if (a := final(run, held_out)) is not None and (b := without.get(run.seed)) is not None
    ]
    if not both:
        text = f"{acting.label} and {off.label} share no seed, so they are not compared in pairs."
        return Headline("unknown", text, "Train the same seeds on both sides.")
    what = did(acting.runs)
    what = f" It moved {what}." if what else " It moved nothing."
    differences = [a - b for a, b in both]
    mean, (low, high) = statistics.fmean(differences), t_interval(differences)
    acted, plain = (statistics.fmean(side) for side in zip(*both, strict=True))
    levels = f"{plain:.3f} without, {acted:.3f} with the controller"
    if len(both) == 1:
        return Headline(
            "one pair",
            f"{acting.label}: {mean:+.3f} {name} with the controller.",
            f"{levels}; one seed only, so chance is not ruled out.{what}",
        )
    word = "helped" if low > 0 else "harmed" if high < 0 else "no difference"
    said = {
        "helped": "The controller helped",
        "harmed": "The controller did harm",
        "no difference": "No difference was shown",
    }
    detail = f"{levels}; {len(both)} seeds in pairs, 95 % interval {low:+.3f} to {high:+.3f}.{what}"
    return Headline(word, f"{said[word]} on {acting.label}: {mean:+.3f} {name}.", detail)


def did(runs: Sequence[RunData]) -> str:
    """What was moved from where to where, by which rules: `kl_coef 0.005 → 0.01 (B3c, 1 of 3 runs)`.

    Of several runs the lowest and highest end are told. What was taken back again is not counted as moved.
    """
    moved: dict[str, list[tuple[float, float, set[str]]]] = {}
    for run in runs:
        for name, (before, after, rules) in _moves(run).items():
            if after != before:
                moved.setdefault(name, []).append((before, after, rules))
    return ", ".join(_moved(name, found, len(runs)) for name, found in moved.items())


def _moves(run: RunData) -> dict[str, tuple[float, float, set[str]]]:
    """Knob -> (value before the first step, after the last one, rules)."""
    found: dict[str, tuple[float, float, set[str]]] = {}
    for step in run.steps:
        if step.what in ("change", "reverted") and step.before is not None and step.after is not None:
            before, _, rules = found.get(step.knob, (step.before, 0.0, set()))
            found[step.knob] = (before, step.after, rules | {step.rule})
    return found


def _moved(name: str, found: list[tuple[float, float, set[str]]], runs: int) -> str:
    ends = sorted({number(after) for _, after, _ in found}, key=float)
    way = f"{number(found[0][0])} → {ends[0]}" + (f" to {ends[-1]}" if len(ends) > 1 else "")
    rules = ", ".join(sorted(set().union(*(rules for _, _, rules in found))))
    return f"{name} {way} ({rules}{f', {len(found)} of {runs} runs' if runs > 1 else ''})"


def told(run: RunData) -> str:
    """One run in one sentence: how it ended and what was done."""
    planned = f" of {run.planned}" if run.planned and run.planned != len(run.rollouts) else ""
    how = _ENDS.get(run.status, run.status.capitalize())
    return f"{how} after {len(run.rollouts)}{planned} rollouts. {_done(run, tally(run.steps))}"


_ENDS = {
    "done": "Finished", "running": "In progress", "broken off": "Broken off", "failed": "Failed",
    "stopped": "Stopped by the controller", "interrupted": "Interrupted",
}  # fmt: skip


def _done(run: RunData, count: dict[str, int]) -> str:
    if run.mode == "off":
        return "No controller: every knob stayed as it was set."
    if run.mode == "shadow":
        return (
            f"In shadow: {count['would']} change{'s' * (count['would'] != 1)} would have been made, none was."
        )
    acts = count["acts"]
    if not acts and not count["restore"]:
        return "The controller found nothing to change."
    parts = [f"{acts} change{'s' * (acts != 1)}"]
    if count["moves"] > acts:
        parts[0] += f" ({count['moves']} moves)"
    parts += [f"{count[k]} {k}" for k in ("kept", "reverted", "inconclusive") if count[k]]
    if count["restore"]:
        parts.append(f"weights brought back {count['restore']} time{'s' * (count['restore'] != 1)}")
    what = did([run])
    moved = f" Moved: {what}." if what else ""
    return "; ".join(filter(None, [parts[0], ", ".join(parts[1:])])) + f".{moved}"
