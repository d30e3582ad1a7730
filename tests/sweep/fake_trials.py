"""Trials whose runs only write their journals: a score is a function of the recipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.children import Ended, Tick
from autotune.journal import Journal
from autotune.recipe import Recipe
from autotune.run import JOURNAL, RESOLVED
from autotune.sweep import life, studies, trial

Score = Callable[[Recipe, int], Any]
"""(recipe of the run, rollout of the evaluation) -> greedy score."""


class FakeChild:
    """In place of `children.carry_out`: a run with an evaluation every 10 rollouts."""

    def __init__(self, score: Score, prompts: Callable[[Recipe], list[float]] | None = None) -> None:
        self.score, self.prompts = score, prompts
        self.runs: list[Path] = []

    def __call__(self, recipe: Mapping[str, Any], folder: Path, threads: int, tick: Tick) -> Ended:
        self.runs.append(folder)
        resolved = Recipe.model_validate({**recipe, "run_dir": str(folder)})
        folder.mkdir(parents=True)
        (folder / "checkpoints").mkdir()
        (folder / RESOLVED).write_text(json.dumps(resolved.model_dump(mode="json")))
        with Journal(folder / JOURNAL) as journal:
            return self._run(resolved, journal, folder, tick)

    def _run(self, recipe: Recipe, journal: Journal, folder: Path, tick: Tick) -> Ended:
        for rollout in range(10, recipe.trainer.rollouts + 1, 10):
            snapshot = {"metrics": {"tokens_per_second": 500.0}}
            journal.append("rollout", rollout - 1, {"snapshot": snapshot, "times": {"total": 2.0}})
            scores = {"scores": {"greedy": self.prompts(recipe)}} if self.prompts else {}
            line = {"greedy": self.score(recipe, rollout), "sampled": 0.0, **scores}
            if tick([journal.append("eval", rollout, line)]):
                return Ended(130, True, folder)
        journal.append("end", recipe.trainer.rollouts, {"status": "done"})
        return Ended(0, False, folder)


def carry_out(storage: Any, name: str, recipe: Recipe, folder: Path) -> Any:
    """Every waiting trial, one after the other; the study."""
    studies.make(storage, name, recipe, folder)
    while True:
        waiting = life.claim(studies.view(storage, name, recipe))
        if waiting is None:
            return studies.view(storage, name, recipe)
        study = studies.view(storage, name, recipe, waiting.user_attrs[studies.SLOT])
        own = study._storage.get_trial(waiting._trial_id)
        from optuna.trial import Trial

        trial.TrialRun(study, Trial(study, own._trial_id), recipe, folder, 1).carry_out()
