"""A run that begins with another run's checkpoint: its weights and its clock, under knobs of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import RecipeError
from autotune.recipe import Recipe, load_recipe
from autotune.trainer.loop import Trainer

SMALL: dict[str, Any] = {
    "train_batch_size": 8, "rollout_n": 4, "ppo_mini_batch_size": 4,
    "micro_batch_size": 16, "rollout_micro_batch_size": 32,
}  # fmt: skip


def recipe(rollouts: int, start: Path | None = None, **trainer: Any) -> Recipe:
    checkpoint = {"start": str(start) if start else None}
    return Recipe.model_validate({
        "trainer": {**SMALL, "rollouts": rollouts, **trainer}, "checkpoint": checkpoint,
        "eval": {"every": 0, "prompts": 16, "per_prompt": True}, "control": {"mode": "off"},
    })  # fmt: skip


def train(recipe: Recipe, folder: Path) -> tuple[list[int], list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Rollouts trained, evaluations, and the weights at the end."""
    events: list[dict[str, Any]] = []
    trainer = Trainer(recipe, folder, on_event=lambda name, p: events.append(p) if name == "eval" else None)
    rollouts: list[int] = []
    trainer.run(lambda record: rollouts.append(record.rollout))
    weights = {name: p.detach().clone() for name, p in trainer.parts.model.named_parameters()}
    trainer.close()
    return rollouts, events, weights


@pytest.mark.slow
def test_it_goes_on_where_the_other_run_was(tmp_path: Path) -> None:
    train(recipe(2), tmp_path / "first")
    start = tmp_path / "first/checkpoints/rollout-00002"
    rollouts, _, continued = train(recipe(4, start), tmp_path / "second")
    _, evaluations, straight = train(recipe(4), tmp_path / "straight")
    assert rollouts == [2, 3]
    assert all(torch.equal(continued[name], straight[name]) for name in straight)
    assert (tmp_path / "second/checkpoints/rollout-00002").is_dir()
    other, _, changed = train(recipe(4, start, actor_learning_rate=3e-3), tmp_path / "other")
    assert other == [2, 3] and any(not torch.equal(changed[n], straight[n]) for n in straight)
    nothing, last, _ = train(recipe(2, start), tmp_path / "nothing")
    assert nothing == [] and [e["rollout"] for e in last] == [2]
    for kind in ("greedy", "sampled"):
        scores = evaluations[-1]["scores"][kind]
        assert len(scores) == 16 and sum(scores) / 16 == pytest.approx(evaluations[-1][kind])


@pytest.mark.parametrize(
    ("place", "rollouts", "words"),
    [("nowhere", 9, "is no checkpoint"), ("rollout-00007", 6, "expected at least 7, the checkpoint's")],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, place: str, rollouts: int, words: str) -> None:
    (tmp_path / "rollout-00007").mkdir()
    (tmp_path / "rollout-00007/manifest.json").write_text("{}")
    file = tmp_path / "a.yaml"
    file.write_text(f"trainer: {{rollouts: {rollouts}}}\ncheckpoint: {{start: {place}}}\n")
    with pytest.raises(RecipeError, match=words):
        load_recipe(file)
