"""Every recipe in `experiments/` is valid, and twins differ in the controller alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from ruamel.yaml import YAML

from autotune.knobs import updates_per_rollout
from autotune.recipe import knob_vector
from autotune.recipe.load import load_control, load_recipe
from autotune.recipe.schema import Recipe

EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"
QUICKSTART = EXPERIMENTS / "quickstart"
CONTROLS = sorted(EXPERIMENTS.glob("*/control*.yaml"))
"""Sections for other trainers, not whole recipes."""
RECIPES = sorted(set(EXPERIMENTS.glob("*/*.yaml")) - set(CONTROLS))


def shape(path: Path) -> Recipe:
    """The recipe by its schema alone, whatever is installed on this machine."""
    return Recipe.model_validate(YAML(typ="safe", pure=True).load(path.read_text("utf-8")))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_recipe_validates(path: Path) -> None:
    assert shape(path).trainer.rollouts >= 1


@pytest.mark.parametrize("path", CONTROLS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_shipped_control_section_validates(path: Path) -> None:
    assert load_control(path).mode == "act"


@pytest.mark.parametrize("path", sorted(QUICKSTART.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_quickstart_recipe_passes_all_checks_and_takes_its_files_name(path: Path) -> None:
    assert load_recipe(path).name == path.stem


@pytest.mark.parametrize("name", ["well_set", "timid", "aggressive"])
def test_twins_differ_in_the_line_of_the_controller_only(name: str) -> None:
    on = (QUICKSTART / f"{name}.yaml").read_text("utf-8").splitlines()
    off = (QUICKSTART / f"{name}_off.yaml").read_text("utf-8").splitlines()
    assert len(on) == len(off)
    different = [(a, b) for a, b in zip(on, off, strict=True) if a != b]
    assert different == [("  mode: act", "  mode: off")]
    assert (shape(QUICKSTART / f"{name}.yaml").control.mode,
            shape(QUICKSTART / f"{name}_off.yaml").control.mode) == ("act", "off")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "learning_rate", "updates"),
    [("well_set", 3e-4, 4), ("timid", 3e-5, 1), ("aggressive", 1e-3, 32)],
)
def test_quickstart_recipes_are_set_as_their_names_say(name: str, learning_rate: float, updates: int) -> None:
    recipe = shape(QUICKSTART / f"{name}.yaml")
    assert recipe.trainer.actor_learning_rate == learning_rate
    assert updates_per_rollout(knob_vector(recipe)) == updates


def test_quickstart_recipes_differ_in_two_settings_only() -> None:
    """The learning rate and the updates; the micro batch follows and never changes a result."""
    well_set = shape(QUICKSTART / "well_set.yaml").model_dump()
    for name in ("timid", "aggressive"):
        other = shape(QUICKSTART / f"{name}.yaml").model_dump()
        different = {k for k, v in other["trainer"].items() if well_set["trainer"][k] != v}
        assert different - {"micro_batch_size"} == {"actor_learning_rate", "ppo_mini_batch_size"}
        assert {**other, "trainer": None} == {**well_set, "trainer": None}
