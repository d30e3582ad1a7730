"""One trial: the same settings under each seed, one run after the other, judged and told to the study.

    suggest -> settle -> seed 1 … seed S      trial-0003/seed-1, trial-0003/seed-2
    while a run goes on      each evaluation is reported; the pruner may end the run (first seed only:
                             the pruner compares equal rollouts, and a second run starts anew)
    between two seeds        the paired test may end the trial
    at the end               mean or lower bound of the held-out scores; costs beside it

What is not a number fails the trial with its reason. A trial that another worker had begun goes on in its
folder: finished seeds are read, the unfinished one is resumed from its checkpoint.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune import children
from autotune.children import HeldOut, Reading, carry_out, finished
from autotune.errors import JournalError, RunError
from autotune.journal import Line
from autotune.recipe import Recipe
from autotune.recipe.axes import axes, settle, with_values
from autotune.recipe.schema import SweepSection
from autotune.sweep import pairs, score
from autotune.sweep.storages import optuna
from autotune.sweep.studies import REASON, SLOT, settings, suggest


class Pruned(Exception):
    """The trial is given up, with the reason."""


class Failed(Exception):
    """The trial has no score, with the reason."""


class Lost(Exception):
    """The trial belongs to somebody else by now."""


@dataclass
class TrialRun:
    """One trial while a worker carries it out."""

    study: Any
    trial: Any
    recipe: Recipe
    folder: Path
    """Of the study."""
    threads: int
    lost: Callable[[], bool] = lambda: False
    done: pairs.Scores = field(default_factory=lambda: pairs.Scores([], []))

    @property
    def section(self) -> SweepSection:
        return settings(self.recipe)

    @property
    def own_folder(self) -> Path:
        return trial_folder(self.folder, self.trial.user_attrs[SLOT])

    def carry_out(self) -> None:
        """Run it and tell the study how it ended.

        Raises:
            Lost: another worker has it.
            KeyboardInterrupt: the run was interrupted; it has saved.
        """
        state = optuna().trial.TrialState
        try:
            values = self._values()
        except Pruned as reason:
            self._tell(state.PRUNED, str(reason))
        except Failed as reason:
            self._tell(state.FAIL, str(reason))
        else:
            self._tell(state.COMPLETE, "", values)
        if not self.section.keep_checkpoints:
            drop_checkpoints(self.own_folder)

    def _tell(self, state: Any, reason: str, values: list[float] | None = None) -> None:
        if self.lost():
            raise Lost
        if reason:
            self.trial.set_user_attr(REASON, reason)
        self.study.tell(self.trial, values, state=state, skip_if_finished=True)

    # -- the runs ----------------------------------------------------------------------------------

    def _values(self) -> list[float]:
        data = self._settled()
        costs = dict.fromkeys(("tokens", "time"), 0.0)
        for place, seed in enumerate(children.seeded(self.recipe, self.section.seeds)):
            reading = self._run({**data, "seed": seed}, self.own_folder / f"seed-{seed}", first=place == 0)
            costs["tokens"] += reading.tokens
            costs["time"] += reading.seconds
            self._take(reading, costs)
            if place < self.section.seeds - 1:
                self._compare()
        worth = score.objective(self.done.seeds, self.section)
        return [worth] + ([costs[self.section.second]] if self.section.second else [])

    def _settled(self) -> dict[str, Any]:
        """The trial's recipe as data, legal or the trial fails."""
        values = settle(self.recipe, suggest(self.trial, axes(self.recipe)))
        self.trial.set_user_attr("used", values)
        data = trial_data(self.recipe, values, self.folder, f"trial {self.trial.user_attrs[SLOT]}")
        try:
            Recipe.model_validate(data)
        except ValidationError as error:
            raise Failed(f"no legal recipe: {error.errors(include_url=False)[0]['msg']}") from error
        return data

    def _run(self, data: Mapping[str, Any], folder: Path, first: bool) -> Reading:
        if not finished(folder):
            pruned: list[str] = []
            ended = carry_out(data, folder, self.threads, lambda lines: self._tick(lines, first, pruned))
            if self.lost():
                raise Lost
            if pruned:
                self._keep_costs(folder)
                raise Pruned(pruned[0])
            if ended.code == children.INTERRUPTED:
                raise KeyboardInterrupt
            if ended.code != children.DONE:
                self._ended_badly(folder, ended)
        return children.read(folder)

    def _ended_badly(self, folder: Path, ended: children.Ended) -> None:
        self._keep_costs(folder)
        reason = ended.reason()
        with contextlib.suppress(JournalError):
            reason = children.read(folder).reason or reason
        if ended.code == children.STOPPED:
            raise Pruned(f"stopped by the controller: {reason}")
        raise Failed(f"{folder.name}: {reason}")

    def _keep_costs(self, folder: Path) -> None:
        """What an unfinished run has cost, for the bill."""
        with contextlib.suppress(JournalError):
            reading, attrs = children.read(folder), self.trial.user_attrs
            self.trial.set_user_attr("tokens", attrs.get("tokens", 0.0) + reading.tokens)
            self.trial.set_user_attr("time", attrs.get("time", 0.0) + reading.seconds)

    def _tick(self, lines: list[Line], first: bool, pruned: list[str]) -> bool:
        """Whether the run should end now: the trial was taken away, or is behind the others."""
        if self.lost():
            return True
        for line in lines if first and not self.section.second else ():
            if line["type"] == "eval" and 0 < line["rollout"] < self.recipe.trainer.rollouts:
                self._report(HeldOut(int(line["rollout"]), line), pruned)
        return bool(pruned)

    def _report(self, held: HeldOut, pruned: list[str]) -> None:
        value = held.score(self.section.score)
        if value is None:
            return  # the end of the run says what is wrong
        known = self.study._storage.get_trial(self.trial._trial_id).intermediate_values
        if held.rollout not in known:
            self.trial.report(value, held.rollout)
        if self.trial.should_prune():
            pruned.append(f"behind the other trials at rollout {held.rollout}: {value:.3g}")

    # -- judging -----------------------------------------------------------------------------------

    def _take(self, reading: Reading, costs: Mapping[str, float]) -> None:
        """One finished seed."""
        for name, cost in costs.items():
            self.trial.set_user_attr(name, cost)
        last = reading.evaluations[-1] if reading.evaluations else None
        value = last.score(self.section.score) if last else None
        if last is None or value is None:
            found = "no evaluation" if last is None else f"{last.line.get(self.section.score)!r}"
            raise Failed(f"the held-out score is not a number: {found}")
        prompts = [*self.done.prompts, last.per_prompt(self.section.score)]
        self.done = pairs.Scores([*self.done.seeds, value], prompts)
        self.trial.set_user_attr("scores", list(self.done.seeds))
        if pairs.wants_prompts(self.section):
            self.trial.set_user_attr("prompts", [list(row) for row in self.done.prompts])

    def _compare(self) -> None:
        if pairs.kind_of(self.section) == "none":
            return
        with contextlib.suppress(ValueError):  # no trial is complete yet
            best = self.study.best_trial.user_attrs
            theirs = pairs.Scores(best.get("scores", []), best.get("prompts", []))
            if reason := pairs.worse(self.section, self.done, theirs):
                raise Pruned(reason)


def trial_folder(study: Path, slot: int) -> Path:
    return study / f"trial-{slot:04d}"


def trial_data(
    recipe: Recipe, values: Mapping[str, Any], folder: Path, group: str, keep: int = 2
) -> dict[str, Any]:
    """The data of a study's run: these settings, no study inside, and a place below the study in MLflow.

    Raises:
        RunError: the values do not fit the recipe's shape.
    """
    plain = recipe.model_dump(mode="json", exclude={"sweep", "tune", "fingerprint"})
    section = settings(recipe)
    plain["eval"]["per_prompt"] = pairs.wants_prompts(section)
    plain["checkpoint"]["keep"] = keep
    mlflow = plain["tracking"]["mlflow"]
    mlflow["group"] = [*mlflow["group"], folder.name, group][:4]
    mlflow["uri"] = mlflow["uri"] or f"sqlite:///{folder.parent / 'mlflow.db'}"
    try:
        return with_values(plain, values)
    except (LookupError, TypeError, ValueError) as error:
        raise RunError(f"{dict(values)} does not fit the recipe: {error}") from error


def drop_checkpoints(folder: Path) -> None:
    """Of all runs below a folder; journals, recipes and logs stay."""
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints, ignore_errors=True)
