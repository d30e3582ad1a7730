"""The rounds in order.

    P1  baseline from scratch           gates: environment, success, reward clearly up
    P2  from P1's checkpoints           P1's log: the most severe condition changes one parameter
                                        gate, if one was changed: the reward's spread narrowed
    P3  from P2's checkpoints           P2's log: every condition that is met, one after the other, in
                                        equal parts of the round
    at the end                          held-out score, and the user's further scores

Every round is repeated under several seeds; each comparison is of means with standard deviations. A gate that
is not met stops the procedure with its reason, everything kept; the same command goes on where it stopped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune import children, doctor, procedure
from autotune.children import sigterm_as_ctrl_c
from autotune.errors import InputError, RunError
from autotune.procedure import Condition, Gate
from autotune.recipe import Recipe
from autotune.recipe.facts import component_names
from autotune.run import JOURNAL
from autotune.tune import rounds
from autotune.tune.plan import Plan, plan_for
from autotune.tune.rounds import Stage
from autotune.tune.written import Judgement, write

PLAN = "plan.json"
TITLES = {"P1": "baseline", "P2": "KL and clip", "P3": "throughput and quality"}


def tune(
    recipe: Recipe, *, budget: int | None = None, jobs: int = 1, console: Console | None = None
) -> Path:
    """Carry out the procedure, or go on with it; the folder with `summary.md` and `rounds.svg`.

    Args:
        recipe: checked.
        budget: rollouts of all rounds; the recipe's where it is not given.
        jobs: runs at a time.

    Raises:
        InputError: the plan cannot be judged, or the folder is of another one.
        RunError: a gate was not met or a run failed; the summary says where it stopped and why.
        KeyboardInterrupt: Ctrl-C; the runs have saved.
    """
    plan = plan_for(recipe, budget)
    doctor.require(recipe)
    _claim(plan)
    drive = Drive(plan, jobs, console or Console(highlight=False))
    with sigterm_as_ctrl_c():
        drive.run()
    if drive.stopped:
        raise RunError(f"{drive.stopped}; all of it is in {plan.folder / 'summary.md'}")
    return plan.folder


def _claim(plan: Plan) -> None:
    """The folder belongs to one plan."""
    mine = {"recipe": plan.recipe.model_dump(mode="json"), "budget": plan.budget}
    file = plan.folder / PLAN
    known = json.loads(file.read_text("utf-8")) if file.exists() else mine
    # Read as a recipe first: a newer version may know more fields than the one that wrote it.
    if (Recipe.model_validate(known["recipe"]), known["budget"]) != (plan.recipe, plan.budget):
        raise InputError(
            f"{plan.folder} holds the rounds of another recipe or budget; give this one a name: name=NAME"
        )
    plan.folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(mine, indent=1) + "\n", "utf-8")


@dataclass
class Drive:
    """The procedure while it lasts."""

    plan: Plan
    jobs: int
    console: Console
    stages: list[Stage] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """Fields changed so far."""
    further: dict[str, list[float]] = field(default_factory=dict)
    """The user's further scores at the end, one per run."""
    stopped: str = ""

    def run(self) -> None:
        """All rounds, until one stops; the summary is written whatever happens."""
        try:
            self.stopped = self._baseline() or self._kl_and_clip() or self._speed_and_length() or ""
            if not self.stopped:
                self._further_scores()
        finally:
            if self.stages:
                write(self.plan, self.stages, self.judgements, self.further, self.stopped)
        self._say(f"summary: {self.plan.folder / 'summary.md'}")

    # -- the rounds: each returns why it stopped, or nothing ---------------------------------------

    def _baseline(self) -> str:
        stage = self._stage("P1", 0, self.plan.end("P1"), None)
        faults = [f"{f.what}: {f.found}" for f in doctor.examine() if f.level is doctor.Level.BAD]
        return self._pass("P1", procedure.baseline_gates(stage.pooled, faults))

    def _kl_and_clip(self) -> str:
        before = self.stages[-1]
        conditions = rounds.in_most([procedure.kl_and_clip(run) for run in before.runs])
        change = procedure.most_severe(conditions, relative=self.plan.section.relative_variance)
        self._judge("P2", conditions, [change] if change else [])
        stage = self._stage("P2", before.last, self.plan.end("P2"), change)
        if change is None:
            return ""  # there is nothing to confirm
        relative = self.plan.section.relative_variance
        return self._pass("P2", (procedure.confirmed(before.pooled, stage.pooled, relative=relative),))

    def _speed_and_length(self) -> str:
        before = self.stages[-1]
        conditions = rounds.in_most([procedure.speed_and_length(run) for run in before.runs])
        changes = [c for c in conditions if c.met]
        self._judge("P3", conditions, changes)
        first, last, parts = before.last, self.plan.end("P3"), max(len(changes), 1)
        for part in range(parts):
            end = first + round((last - first) * (part + 1) / parts)
            name = "P3" if parts == 1 else f"P3-{part + 1}"
            self._stage(name, self.stages[-1].last, end, changes[part] if changes else None)
        return ""

    def _further_scores(self) -> None:
        """The last weights on the held-out prompts, scored by the user's own metrics too."""
        if not self.plan.section.metrics:
            return
        last = self.stages[-1]
        data = self.plan.judged(last.data)
        folders = {seed: self.plan.folder / "final" / f"seed-{seed}" for seed in self.plan.seeds}
        stage = Stage("final", last.last, last.last, "", data, folders)
        runs = rounds.carry_out(stage, self.jobs, self._checkpoints(last), self._done).readings
        names = component_names(Recipe.model_validate(data).rewards)[len(self.plan.recipe.rewards) :]
        kind = "greedy" if self.plan.recipe.eval.greedy else "sampled"
        for name in names:
            found = [r.evaluations[-1].line["components"][kind][name] for r in runs.values()]
            self.further[name] = [float(value) for value in found]

    # -- parts -------------------------------------------------------------------------------------

    def _stage(self, name: str, first: int, last: int, change: Condition | None) -> Stage:
        before = self.stages[-1] if self.stages else None
        words = ""
        if change is not None and before is not None:
            changed = values_of(change, before.pooled.knobs)
            self.values |= changed
            words = ", ".join(f"{path.rpartition('.')[2]} = {value:g}" for path, value in changed.items())
        title = f"{name} {TITLES[name[:2]]}: rollouts {first} to {last}"
        self._say(f"{title}, {len(self.plan.seeds)} runs, {words or 'no change'}")
        folders = {seed: self.plan.folder / name / f"seed-{seed}" for seed in self.plan.seeds}
        stage = Stage(name, first, last, words, self.plan.data(name, last, self.values), folders)
        starts = self._checkpoints(before) if before else {}
        stage = rounds.carry_out(stage, self.jobs, starts, self._done)
        self.stages.append(stage)
        self._say(f"  reward {_shown(stage.rewards())}, held-out {_shown(stage.scores())}")
        if before is not None:
            gate = procedure.one_parameter(before.pooled.knobs, stage.pooled.knobs)
            self.judgements.append(Judgement(name, gates=(gate,)))
            if not gate.passed:
                raise RunError(f"{name}: more than one parameter differs, a fault of ours: {gate.reason}")
        return stage

    def _checkpoints(self, stage: Stage) -> dict[int, Path]:
        """Seed -> the stage's last checkpoint."""
        name = f"rollout-{stage.last:05d}"
        return {seed: folder / "checkpoints" / name for seed, folder in stage.folders.items()}

    def _pass(self, name: str, gates: tuple[Gate, ...]) -> str:
        """Tell gates; why the first closed one is closed."""
        self.judgements.append(Judgement(name, gates=gates))
        for gate in gates:
            self._say(f"  {'✓' if gate.passed else '✗'} gate {gate.id}: {gate.reason}")
        return next((f"{name}, gate {g.id} is not met: {g.reason}" for g in gates if not g.passed), "")

    def _judge(self, name: str, conditions: tuple[Condition, ...], chosen: list[Condition]) -> None:
        self.judgements.append(Judgement(name, conditions=conditions, chosen=tuple(c.id for c in chosen)))
        for condition in conditions:
            self._say(f"  {'→' if condition in chosen else '·'} {condition.id}: {condition.reason}")

    def _done(self, folder: Path) -> None:
        reading = children.read(folder) if (folder / JOURNAL).exists() else None
        self._say(f"  {folder.parent.name}/{folder.name}: {reading.status if reading else 'no journal'}")

    def _say(self, words: str) -> None:
        self.console.print(words, markup=False, soft_wrap=True)


def values_of(change: Condition, knobs: Mapping[str, float]) -> dict[str, Any]:
    """Fields of a recipe that carry one change out; both sides of a clip range keep their ratio."""
    assert change.after is not None
    if change.knob != "clip_range":
        whole = change.knob in ("max_response_length", "rollout_micro_batch_size")
        return {f"trainer.{change.knob}": int(change.after) if whole else change.after}
    sides = ("clip_range_low", "clip_range_high")
    factor = change.after / max(knobs[side] for side in sides)
    return {f"trainer.{side}": knobs[side] * factor for side in sides}


def _shown(values: list[float]) -> str:
    try:
        return str(procedure.summary(values))
    except InputError as error:
        return f"not comparable ({error})"
