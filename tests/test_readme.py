"""What README.md shows must be so: its recipe loads, its paths exist, its tree names every part."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from autotune.recipe import load_recipe
from autotune.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCES = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
TREE = next(text for kind, text in FENCES if not kind)
RECIPES = [text for kind, text in FENCES if kind == "yaml"]
PARTS = sorted(
    [p.name for p in (ROOT / "autotune").glob("[!_]*.py")]
    + [f"{p.parent.name}/" for p in (ROOT / "autotune").glob("*/__init__.py")]
)


def test_the_first_recipe_is_complete_and_valid(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(RECIPES[0], encoding="utf-8")
    recipe = load_recipe(path)
    assert recipe.trainer.rollouts == 60
    assert recipe.control.pin == ("kl_coef",)
    defaults = Recipe(name="my", control=recipe.control)
    assert recipe.trainer.actor_learning_rate == defaults.trainer.actor_learning_rate


def test_the_recipe_for_own_data_is_valid(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "mine" / name).write_text("{}", encoding="utf-8")
    line = '{"question": "1 + 1?", "answer": "2"}\n'
    (tmp_path / "prompts.jsonl").write_text(line * 640, encoding="utf-8")
    path = tmp_path / "own.yaml"
    path.write_text(RECIPES[1].replace("/models/mine", "mine"), encoding="utf-8")
    assert load_recipe(path).task.type == "jsonl"


def test_every_path_exists() -> None:
    named = re.findall(r"(?:experiments|tests|scripts|constraints|autotune)/[\w./]+\.\w+", README)
    missing = sorted({path for path in named if not (ROOT / path).exists()})
    assert len(named) > 8
    assert not missing, f"README.md names files that are not there: {missing}"


@pytest.mark.parametrize("name", PARTS)
def test_the_tree_names_every_part(name: str) -> None:
    """Every module and package right under `autotune/`; inside packages, those that help."""
    assert re.search(rf"(^|\s){re.escape(name)}(\s|$)", TREE), f"add {name} to README.md's tree"
