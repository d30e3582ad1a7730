"""What is left in the procedure's folder: summary.md for people, tune.json for programs, rounds.svg."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune import procedure
from autotune.errors import InputError
from autotune.procedure import Condition, Gate
from autotune.recipe import Recipe
from autotune.recipe.rewrite import written
from autotune.tune.figure import overlay
from autotune.tune.plan import Plan
from autotune.tune.rounds import Stage


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was asked at one round, and the answers."""

    round: str
    gates: tuple[Gate, ...] = ()
    conditions: tuple[Condition, ...] = ()
    chosen: tuple[str, ...] = ()
    """Ids of the conditions that changed something."""


def write(
    plan: Plan, stages: Sequence[Stage], judgements: Sequence[Judgement], further: Mapping[str, list[float]],
    stopped: str,
) -> None:  # fmt: skip
    """All files of the procedure so far."""
    folder = plan.folder
    (folder / "rounds.svg").write_text(overlay(stages), "utf-8")
    (folder / "summary.md").write_text(summary(plan, stages, judgements, further, stopped), "utf-8")
    data = _data(stages, judgements, further, stopped)
    (folder / "tune.json").write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    if not stopped:
        tuned = Recipe.model_validate({**stages[-1].data, "seed": plan.recipe.seed})
        _tuned(tuned, folder / "tuned.yaml", len(stages))


def _tuned(recipe: Recipe, file: Path, stages: int) -> None:
    own = recipe.model_copy(update={"control": Recipe().control, "tracking": Recipe().tracking})
    file.write_text(written(own, f"What the staged procedure ended with, after {stages} rounds."), "utf-8")


def _data(
    stages: Sequence[Stage], judgements: Sequence[Judgement], further: Mapping[str, list[float]], stopped: str
) -> dict[str, Any]:
    return {
        "stopped": stopped,
        "rounds": [
            {
                "name": stage.name, "first": stage.first, "last": stage.last, "change": stage.change,
                "runs": {str(seed): str(folder) for seed, folder in stage.folders.items()},
                "reward": stage.rewards(), "held_out": stage.scores(), "knobs": dict(stage.pooled.knobs),
            }
            for stage in stages
        ],
        "judgements": [asdict(judgement) for judgement in judgements],
        "further": dict(further),
    }  # fmt: skip


def summary(
    plan: Plan, stages: Sequence[Stage], judgements: Sequence[Judgement], further: Mapping[str, list[float]],
    stopped: str,
) -> str:  # fmt: skip
    """The procedure as Markdown, the verdict first."""
    last = stages[-1]
    verdict = f"**Stopped.** {stopped}." if stopped else "**All rounds done.**"
    lines = [f"# {plan.folder.name}", "", verdict, ""]
    lines += [f"After {last.name}, rollout {last.last}: held-out score {_shown(last.scores())}.", ""]
    lines += [f"- `{name}`, held out: {_shown(values)}" for name, values in further.items()]
    lines += ["", "![reward and KL by round](rounds.svg)", "", "## Rounds", "", *_table(stages)]
    for name in dict.fromkeys(judgement.round for judgement in judgements):
        lines += ["", f"### {name}", ""]
        lines += [text for j in judgements if j.round == name for text in _answers(j)]
    return "\n".join(lines) + "\n"


def _table(stages: Sequence[Stage]) -> list[str]:
    head = ("round", "rollouts", "changed", "reward, last 10", "held-out", "mean KL", "than the one before")
    rows = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for at, stage in enumerate(stages):
        kl = [sum(run) / len(run) for run in stage.series("kl_ref") if run]
        against = _compared(stages[at - 1].scores(), stage.scores()) if at else "-"
        cells = [stage.name, f"{stage.first} to {stage.last}", stage.change or "nothing"]
        cells += [_shown(stage.rewards()), _shown(stage.scores()), _shown(kl), against]
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _compared(before: Sequence[float], after: Sequence[float]) -> str:
    try:
        found = procedure.compare(before, after)
    except InputError:
        return "not comparable"
    return "better" if found.better else "worse" if found.worse else "not told apart"


def _answers(judgement: Judgement) -> list[str]:
    lines = [f"- gate {g.id} {'met' if g.passed else '**not met**'}: {g.reason}" for g in judgement.gates]
    for condition in judgement.conditions:
        word = "**changed**" if condition.id in judgement.chosen else "met" if condition.met else "not met"
        lines.append(f"- {condition.id}: {word}: {condition.reason}")
    return lines


def _shown(values: Sequence[float]) -> str:
    try:
        return str(procedure.summary(values))
    except InputError:
        return ", ".join(f"{value:.3g}" for value in values) or "not measured"
