"""Runs for the tests of the report: the fake trainer under the real controller, with real journals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.controller import Controller, ControlSettings
from autotune.decisions import to_json
from autotune.hooks.loop import ControlLoop
from autotune.journal import Journal
from autotune.recipe.schema import Recipe
from autotune.testing import FakeTrainer

TIMID = {"actor_learning_rate": 3e-5, "ppo_mini_batch_size": 64}


def recipe_of(name: str, mode: str, seed: int, rollouts: int) -> Recipe:
    trainer = {"rollouts": rollouts, **TIMID}
    return Recipe.model_validate({"name": name, "seed": seed, "control": {"mode": mode}, "trainer": trainer})


def make_run(folder: Path, mode: str = "act", seed: int = 1, rollouts: int = 60, name: str = "timid") -> Path:
    """One whole run; greedy and sampled held-out scores before and after it are the plant's reward."""
    folder.mkdir(parents=True)
    recipe, trainer = recipe_of(name, mode, seed, rollouts), FakeTrainer(TIMID, seed=seed, rollouts=rollouts)
    settings = ControlSettings(**recipe.control.model_dump())
    controller = None if mode == "off" else Controller(settings, trainer.facts())
    header = {"recipe": recipe.model_dump(mode="json"), "facts": to_json(trainer.facts()), "environment": {}}
    with Journal(folder / "journal.jsonl") as journal:
        journal.append("header", -1, header)
        journal.append("eval", 0, {"greedy": 0.1, "sampled": 0.15})
        loop = ControlLoop(trainer, controller, journal)
        trainer.run(loop.on_rollout)
        last = 0.8 if mode == "act" else 0.3
        journal.append("eval", rollouts, {"greedy": last + 0.01 * seed, "sampled": last})
        journal.append("end", rollouts, {"status": "done", "reason": ""})
    return folder


def write_lines(folder: Path, lines: list[Mapping[str, Any]]) -> Path:
    """Lines as `tests.journal_lines` makes them, in a journal with a true chain."""
    folder.mkdir(parents=True, exist_ok=True)
    with Journal(folder / "journal.jsonl") as journal:
        for line in lines:
            rest = {k: v for k, v in line.items() if k not in ("v", "type", "rollout", "prev")}
            journal.append(line["type"], line["rollout"], rest)
    return folder
