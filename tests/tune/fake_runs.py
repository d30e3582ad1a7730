"""Runs that only write their journals: the procedure's decisions in seconds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.children import Ended
from autotune.journal import Journal
from autotune.recipe import Recipe
from autotune.recipe.facts import knob_vector
from autotune.run import JOURNAL, RESOLVED

Metrics = Callable[[Recipe, int], Mapping[str, float]]
"""(recipe of the run, rollout) -> what is measured there."""


def healthy(recipe: Recipe, rollout: int) -> dict[str, float]:
    """A reward that rises to 1 with a little noise that a seed decides; KL below its band."""
    noise = 0.01 * ((rollout * 7 + recipe.seed * 3) % 5 - 2)
    return {
        "reward_mean": min(0.2 + 0.008 * rollout, 0.9) + noise, "reward_std": 0.3, "kl_ref": 0.02,
        "rollout_success_rate": 1.0, "ratio_low": 0.02, "ratio_high": 0.02, "response_length_mean": 7.0,
    }  # fmt: skip


class FakeRuns:
    """In place of `children.together`."""

    def __init__(self, metrics: Metrics = healthy) -> None:
        self.metrics = metrics
        self.recipes: dict[str, Recipe] = {}
        """Stage and seed, such as `P2/seed-1` -> the recipe that it was run with."""

    def __call__(
        self, runs: Sequence[tuple[Mapping[str, Any], Path]], jobs: int, done: Callable[[Path], None]
    ) -> list[Ended | None]:
        for data, folder in runs:
            self._run(Recipe.model_validate({**data, "run_dir": str(folder)}), folder)
            done(folder)
        return [Ended(0, False, folder) for _, folder in runs]

    def _run(self, recipe: Recipe, folder: Path) -> None:
        self.recipes[f"{folder.parent.name}/{folder.name}"] = recipe
        folder.mkdir(parents=True)
        (folder / RESOLVED).write_text(json.dumps(recipe.model_dump(mode="json")))
        start = int(recipe.checkpoint.start[-5:]) if recipe.checkpoint.start else 0
        with Journal(folder / JOURNAL) as journal:
            journal.append("header", -1, {"recipe": recipe.model_dump(mode="json")})
            for rollout in range(start, recipe.trainer.rollouts):
                journal.append("rollout", rollout, self._line(recipe, rollout))
            parts = {"greedy": {"exact_match": 0.9, "kind": 0.7}}
            scores = {"greedy": 0.9, "sampled": 0.8, "components": parts}
            journal.append("eval", recipe.trainer.rollouts, scores)
            journal.append("end", recipe.trainer.rollouts, {"status": "done", "reason": ""})

    def _line(self, recipe: Recipe, rollout: int) -> dict[str, Any]:
        metrics = {**self.metrics(recipe, rollout), "tokens_per_second": 100.0}
        snapshot = {"rollout": rollout, "knobs": knob_vector(recipe), "metrics": metrics}
        return {"snapshot": snapshot, "decision": None, "applied": [], "times": {"total": 2.0}}
