"""Held-out scores: the same prompts and noise every time, and the recipe's settings, not live ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.recipe import Recipe
from autotune.trainer.evaluate import draws
from autotune.trainer.loop import Trainer
from autotune.trainer.rollout.hf import HfSampler

MakeRecipe = Callable[..., Recipe]


def test_repeatable_and_deaf_to_live_knobs(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    trainer = Trainer(make_recipe({"eval": {"prompts": 4}}), tmp_path)
    first = trainer.evaluate()
    assert set(first) == {"greedy", "sampled"}
    trainer.live.set("temperature", 2.0)
    trainer.live.set("max_response_length", 1)
    assert trainer.evaluate() == first
    trainer.close()


def test_scores_are_the_share_of_right_answers(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    trainer = Trainer(make_recipe({"eval": {"prompts": 4}}), tmp_path)
    parts = trainer.parts
    assert parts.held_out is not None
    assert isinstance(parts.sampler, HfSampler)
    right = 0
    for example in parts.held_out.examples:
        ids = parts.tokenizer(example.prompt, return_tensors="pt").input_ids
        out = parts.model.generate(ids, do_sample=False, max_new_tokens=6)
        text = parts.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        digits = [c for c in text if c.isdigit()]
        right += bool(digits) and digits[-1] == example.answer
    assert trainer.evaluate()["greedy"] == right / 4
    trainer.close()


def test_greedy_can_be_left_out(make_recipe: MakeRecipe) -> None:
    assert set(draws(make_recipe({"eval": {"greedy": False}}))) == {"sampled"}
    both = draws(make_recipe())
    assert both["greedy"].greedy
    assert not both["sampled"].greedy
    assert both["sampled"].rollout < 0  # training never uses this noise
