"""The space of a sweep: completed from the knob table, settled on legal batches, checked before a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import RecipeError
from autotune.knobs import batch_problems
from autotune.recipe import Recipe, knob_vector, load_recipe
from autotune.recipe.axes import Axis, axes, own_values, settle, with_values
from autotune.recipe.rewrite import rewritten
from autotune.recipe.schema import SweepSection
from tests.series import QUICK


def recipe(space: dict[str, Any], **fields: Any) -> Recipe:
    return Recipe(sweep=SweepSection.model_validate({"space": space}), **fields)


@pytest.mark.parametrize(
    ("path", "given", "expected"),
    [
        ("trainer.kl_coef", {}, Axis("", 1e-5, 2.0, log=True)),
        ("trainer.actor_learning_rate", {"low": 1e-6}, Axis("", 1e-6, 1e-1, log=True)),
        ("trainer.clip_range", {}, Axis("", 0.02, 0.3)),
        ("trainer.temperature", {"step": 0.1}, Axis("", 0.1, 2.0, step=0.1)),
        ("trainer.ppo_epochs", {}, Axis("", 1, 8, integer=True)),
        ("trainer.ppo_mini_batch_size", {}, Axis("", 1, 64, log=True, integer=True)),
        ("trainer.rollout_n", {"high": 16}, Axis("", 2, 16, log=True, integer=True)),
        ("trainer.max_grad_norm", {"low": 0.1, "high": 2.0}, Axis("", 0.1, 2.0)),
        ("control.policies.A4.threshold", {"low": 0.05, "high": 0.3}, Axis("", 0.05, 0.3)),
        ("task.variant", {"choices": ["ops6x2", "sort6"]}, Axis("", choices=("ops6x2", "sort6"))),
    ],
)
def test_what_is_left_out_is_the_knob_tables(path: str, given: dict[str, Any], expected: Axis) -> None:
    (found,) = axes(recipe({path: given}))
    assert found.path == path
    assert [getattr(found, f) for f in ("low", "high", "log", "step", "integer", "choices")] == [
        getattr(expected, f) for f in ("low", "high", "log", "step", "integer", "choices")
    ]


@given(
    train=st.integers(1, 300), n=st.integers(2, 40), mini=st.integers(1, 300), at_once=st.integers(1, 4096)
)
@QUICK
def test_every_point_settles_on_a_legal_recipe(train: int, n: int, mini: int, at_once: int) -> None:
    point = {
        "trainer.train_batch_size": train, "trainer.rollout_n": n, "trainer.ppo_mini_batch_size": mini,
        "trainer.rollout_micro_batch_size": at_once,
    }  # fmt: skip
    settled = settle(Recipe(), point)
    made = Recipe.model_validate(with_values(Recipe().model_dump(mode="json"), settled))
    assert batch_problems(knob_vector(made), 1) == []
    assert 0.7 <= made.trainer.train_batch_size / train <= 1.42  # the nearest power of two


def test_a_mini_batch_alone_leaves_the_amount_of_data_alone() -> None:
    settled = settle(Recipe(), {"trainer.ppo_mini_batch_size": 23})
    sizes = [settled[f"trainer.{n}"] for n in ("ppo_mini_batch_size", "train_batch_size", "rollout_n")]
    assert sizes == [32, 64, 8]
    assert settle(Recipe(), {"trainer.kl_coef": 0.1}) == {"trainer.kl_coef": 0.1}


def test_clip_range_wins_over_the_recipes_own_sides() -> None:
    own = {"clip_range_low": 0.2, "clip_range_high": 0.28}
    base = Recipe.model_validate({"trainer": own}).model_dump(mode="json")
    made = Recipe.model_validate(with_values(base, settle(Recipe(), {"trainer.clip_range": 0.1})))
    assert (made.trainer.clip_low(), made.trainer.clip_high()) == (0.1, 0.1)


def test_a_rules_parameter_goes_into_its_mapping() -> None:
    base = Recipe.model_validate({"control": {"policies": {"A4": "on"}}}).model_dump(mode="json")
    made = Recipe.model_validate(with_values(base, {"control.policies.A4.threshold": 0.1}))
    assert made.control.policies == {"A4": {"threshold": 0.1}}


def test_the_recipes_own_place_in_the_space() -> None:
    space = {"trainer.clip_range": {}, "control.policies.A4.threshold": {"low": 0.1, "high": 0.2}}
    own = recipe(space)
    assert own_values(own, axes(own)) == {"trainer.clip_range": 0.2, "control.policies.A4.threshold": 0.15}
    outside = recipe({"trainer.kl_coef": {"low": 0.01, "high": 0.1}})
    assert own_values(outside, axes(outside)) is None


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("space: {trainer.kl_coeff: {}}", "is no field of a recipe"),
        ("space: {trainer.max_grad_norm: {}}", "give low and high, or choices"),
        ("space: {trainer.kl_coef: {low: 1, high: 0.1}}", "expected low below high"),
        ("space: {trainer.entropy_coef: {log: true}}", "expected low above 0"),
        ("space: {trainer.kl_coef: {choices: [0.1], low: 0.2}}", "expected one of them"),
        ("space: {trainer.kl_coef: {lowest: 0.1}}", "did you mean low?"),
        ("space: {trainer.temperature: {low: -1}}", "greater than 0"),
        ("space: {trainer.ppo_epochs: {low: 1.5}}", "expected whole numbers"),
        ("space: {control.policies.A4.limit: {low: 1, high: 2}}", "is no parameter of rule A4"),
        ("space: {seed: {low: 1, high: 2}}", "cannot be swept"),
        ("{space: {trainer.kl_coef: {}}, known_good: [{trainer.kl_coef: 3}]}", "outside its range"),
        ("{space: {trainer.kl_coef: {}}, known_good: [{trainer.clip_range: 0.1}]}", "not in sweep.space"),
        ("{space: {trainer.kl_coef: {}}, seeds: 1, objective: lower_bound}", "2 seeds or more"),
        ("{space: {trainer.kl_coef: {}}, second: time, pruner: median}", "nothing can be pruned"),
        ("{space: {trainer.kl_coef: {}}, second: time, pairs: auto}", "nothing can be pruned"),
        ("{space: {trainer.kl_coef: {}}, grace: 15, heartbeat: 10}", "at least twice"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(tmp_path: Path, sweep: str, words: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"seed: 1\nsweep:\n  {sweep}\n")
    with pytest.raises(RecipeError) as refused:
        load_recipe(file)
    assert words in str(refused.value), str(refused.value)
    assert ":3: sweep." in str(refused.value)


def test_the_best_recipe_is_the_users_own_text(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# mine\ntrainer:\n  kl_coef: 0.1  # pull\n  rollouts: 7\n")
    text = rewritten(file, {"trainer.kl_coef": 0.02, "trainer.clip_range": 0.1}, "best of 3\nquote this")
    assert text.startswith("# best of 3\n# quote this\n# mine\n")
    assert "kl_coef: 0.02 # was 0.1; pull" in text.replace("  #", " #")
    file.write_text(text)
    trainer = load_recipe(file).trainer
    assert (trainer.kl_coef, trainer.clip_range, trainer.rollouts) == (0.02, 0.1, 7)
