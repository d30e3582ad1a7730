"""What a finished study has to say: the best recipe, confirmed on seeds that it was not chosen by.

The best of many trials owes part of its score to luck. So it is run again on fresh seeds, beside the recipe
as it was, and the figure to quote is the mean of those runs with its interval, never the trial's own score.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from autotune import children
from autotune.errors import RunError
from autotune.recipe import Recipe
from autotune.recipe.rewrite import rewritten
from autotune.recipe.source import parse_value
from autotune.sweep import state
from autotune.sweep.score import Interval, interval
from autotune.sweep.storages import optuna
from autotune.sweep.studies import REASON, SLOT, settings
from autotune.sweep.trial import trial_data

BEST, OWN = "best", "own"
LEAST_FOR_IMPORTANCE = 4
"""Complete trials below which importances are not computed."""

Say = Callable[[str], None]


class Source(NamedTuple):
    """A recipe as a person gave it."""

    file: Path
    overrides: tuple[str, ...] = ()
    """`key=value` texts of the command line."""

    def values(self) -> dict[str, Any]:
        """The overrides as dotted field -> value."""
        pairs = (text.partition("=") for text in self.overrides)
        return {name.strip(): parse_value(value) for name, _, value in pairs}


@dataclass(frozen=True, slots=True)
class Arm:
    """One recipe on the fresh seeds."""

    name: str
    values: Mapping[str, Any]
    scores: Mapping[int, float]
    """Seed -> held-out score at the end."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Seed -> why there is none."""
    tokens: float = 0.0

    @property
    def interval(self) -> Interval | None:
        return interval(list(self.scores.values())) if self.scores else None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a study."""

    study: str
    folder: Path
    slot: int
    """Of the best trial."""
    values: list[float]
    params: Mapping[str, Any]
    arms: tuple[Arm, ...]
    importance: Mapping[str, float]
    tokens: float
    """Of all trials and confirming runs."""
    states: Mapping[str, int]
    """State -> number of planned trials."""
    front: tuple[int, ...] = ()
    """With a second objective: the trials that no other one beats in both."""

    @property
    def gain(self) -> Interval | None:
        """Best minus own recipe, paired by seed."""
        found = {arm.name: arm.scores for arm in self.arms}
        common = sorted(set(found.get(BEST, {})) & set(found.get(OWN, {})))
        return interval([found[BEST][s] - found[OWN][s] for s in common]) if common else None


def best_trial(study: Any, recipe: Recipe) -> Any:
    """The trial with the highest score; with a second objective, of those that no other beats in both.

    Raises:
        RunError: no trial is complete; with what the trials say.
    """
    complete = [t for t in state.last_attempts(study).values() if t.state.name == "COMPLETE"]
    if not complete:
        reasons = sorted({t.user_attrs.get(REASON, "") for t in state.last_attempts(study).values()} - {""})
        told = "; ".join(reasons[:3]) or "nothing ran"
        raise RunError(f"no trial of {study.study_name} is complete: {told}")
    return max(complete, key=lambda t: (t.values[0], -t.number))


def front(study: Any) -> tuple[int, ...]:
    """With two objectives: slots of the trials that no other one beats in both."""
    best = study.best_trials if len(study.directions) > 1 else []
    return tuple(sorted(trial.user_attrs[SLOT] for trial in best))


def importances(study: Any, recipe: Recipe) -> dict[str, float]:
    """Share of the score's variance that each field explains (fANOVA); empty with too few trials."""
    complete = [t for t in study.get_trials(deepcopy=False) if t.state.name == "COMPLETE"]
    if len(complete) < LEAST_FOR_IMPORTANCE or len({t.values[0] for t in complete}) < 2:
        return {}
    importance = optuna().importance
    found = importance.get_param_importances(
        study, evaluator=importance.FanovaImportanceEvaluator(seed=recipe.seed), target=lambda t: t.values[0]
    )
    return {name: float(share) for name, share in found.items()}


def confirm(
    recipe: Recipe, folder: Path, arms: Mapping[str, Mapping[str, Any]], jobs: int, say: Say
) -> tuple[Arm, ...]:
    """Run each arm on seeds that no trial has seen; what is finished already is only read."""
    section = settings(recipe)
    first = recipe.seed + section.seeds
    seeds = range(first, first + section.confirm)
    todo = [(name, seed) for seed in seeds for name in arms]
    places = {(name, seed): folder / "confirm" / name / f"seed-{seed}" for name, seed in todo}
    runs = []
    for name, seed in todo:
        data = trial_data(recipe, arms[name], folder, f"confirm {name}", recipe.checkpoint.keep)
        runs.append(({**data, "seed": seed}, places[name, seed]))
    ended = children.together(runs, jobs, lambda place: say(f"{place.relative_to(folder)} has ended"))
    results: dict[tuple[str, int], children.Reading | str] = {}
    for job, end in zip(todo, ended, strict=True):
        bad = end is not None and end.code != children.DONE
        results[job] = end.reason() if end is not None and bad else children.read(places[job])
    return tuple(_arm(name, values, results, recipe) for name, values in arms.items())


def _score(reading: children.Reading, recipe: Recipe) -> float | None:
    last = reading.evaluations[-1] if reading.evaluations else None
    return last.score(settings(recipe).score) if last else None


def _arm(
    name: str, values: Mapping[str, Any], results: Mapping[tuple[str, int], Any], recipe: Recipe
) -> Arm:
    mine = {seed: result for (arm, seed), result in results.items() if arm == name}
    readings = {seed: r for seed, r in mine.items() if isinstance(r, children.Reading)}
    scores = {seed: s for seed, r in readings.items() if (s := _score(r, recipe)) is not None}
    bad = {seed: r for seed, r in mine.items() if seed not in scores}
    reasons = {seed: r if isinstance(r, str) else "no score" for seed, r in bad.items()}
    return Arm(name, values, scores, reasons, sum(r.tokens for r in readings.values()))


def conclude(
    study: Any, recipe: Recipe, folder: Path, storage: str, source: Source | None, jobs: int, say: Say
) -> Outcome:
    """Find the best, confirm it, write `best.yaml`, `summary.json` and `summary.md`.

    Args:
        source: the recipe as it was given; its text becomes that of the best recipe.
    """
    best = best_trial(study, recipe)
    used = best.user_attrs["used"]
    arms = {BEST: used} if not _differs(recipe, used) else {BEST: used, OWN: {}}
    confirmed = confirm(recipe, folder, arms, jobs, say)
    data = state.write(study, recipe, folder, storage)
    states = [entry["state"] for entry in data["trials"]]
    cost = sum(t.user_attrs.get("tokens", 0.0) for t in study.get_trials(deepcopy=False))
    outcome = Outcome(
        study.study_name, folder, best.user_attrs[SLOT], list(best.values), best.params, confirmed,
        importances(study, recipe), cost + sum(arm.tokens for arm in confirmed),
        {name: states.count(name) for name in sorted(set(states))}, front(study),
    )  # fmt: skip
    _write(outcome, recipe, source, data)
    return outcome


def _differs(recipe: Recipe, used: Mapping[str, Any]) -> bool:
    return trial_data(recipe, used, Path("x"), "x") != trial_data(recipe, {}, Path("x"), "x")


def _write(outcome: Outcome, recipe: Recipe, source: Source | None, data: Mapping[str, Any]) -> None:
    told = {**asdict(outcome), "folder": str(outcome.folder)}
    told["confirmed"] = {arm.name: str(arm.interval) for arm in outcome.arms}
    (outcome.folder / "summary.json").write_text(json.dumps(told, indent=1) + "\n", "utf-8")
    (outcome.folder / "summary.md").write_text(summary(outcome, recipe, data["trials"]), "utf-8")
    if source is not None:
        (outcome.folder / "best.yaml").write_text(_best_recipe(outcome, source), "utf-8")


def _best_recipe(outcome: Outcome, source: Source) -> str:
    best, trials = outcome.arms[0], sum(outcome.states.values())
    header = f"The best of {trials} trials of the study {outcome.study}: trial {outcome.slot}."
    header += f"\nHeld-out score on fresh seeds: {best.interval or 'not run'}."
    return rewritten(source.file, {**source.values(), **best.values}, header)


# -- for people --------------------------------------------------------------------------------------


def summary(outcome: Outcome, recipe: Recipe, trials: Sequence[Mapping[str, Any]]) -> str:
    """The study as Markdown, the verdict first."""
    lines = [f"# {outcome.study}", "", *verdict(outcome, recipe), "", "## Best settings", ""]
    lines += ["| field | value |", "|---|---|"]
    used = outcome.arms[0].values  # a drawn batch size is settled on the lattice
    lines += [f"| `{name}` | {text(used.get(name, value))} |" for name, value in outcome.params.items()]
    if outcome.importance:
        lines += ["", "## What mattered (share of the score's variance, fANOVA)", ""]
        lines += ["| field | share |", "|---|---|"]
        lines += [f"| `{name}` | {share:.2f} |" for name, share in outcome.importance.items()]
    lines += ["", "## Trials", "", *_trial_table(trials)]
    return "\n".join(lines) + "\n"


def verdict(outcome: Outcome, recipe: Recipe) -> list[str]:
    """A few sentences, each a line."""
    states = ", ".join(f"{count} {name}" for name, count in outcome.states.items())
    kind = settings(recipe).score
    lines = [f"Best: trial {outcome.slot}, {kind} held-out score {outcome.values[0]:.3f} (chosen by it)."]
    if outcome.front:
        second = f"{settings(recipe).second} {outcome.values[1]:.3g}"
        lines.append(f"It took {second}; not beaten in both: trials {', '.join(map(str, outcome.front))}.")
    for arm in outcome.arms if settings(recipe).confirm else ():
        what = "the best recipe" if arm.name == BEST else "this recipe as it was"
        lines.append(f"On fresh seeds {what}: {arm.interval or 'no run finished'}.")
        lines += [f"Seed {seed} of it failed: {reason}" for seed, reason in arm.reasons.items()]
    if outcome.gain is not None:
        lines.append(f"Gain, paired by seed: {outcome.gain}.")
    lines.append(f"Trials: {states}. Cost: {outcome.tokens / 1e6:.2f} million tokens.")
    return lines


def _trial_table(trials: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for entry in trials for name in entry["params"]))
    head = ["trial", "state", "score", *(f"`{name.rpartition('.')[2]}`" for name in names), "tokens", "why"]
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for entry in sorted(trials, key=lambda e: -(e["values"] or [float("-inf")])[0]):
        score = f"{entry['values'][0]:.3f}" if entry["values"] and entry["state"] == "complete" else "-"
        cells = [str(entry["slot"]), entry["state"], score]
        ran = {**entry["params"], **entry["used"]}
        cells += [text(ran.get(name, "-")) for name in names]
        cells += [f"{entry['tokens'] / 1e6:.2f} M", entry["reason"]]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def text(value: Any) -> str:
    """A value, short."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
