"""The documentation's picture of the terminal is drawn from a journal and fetches nothing."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from autotune.journal import Journal
from autotune.recipe.schema import Recipe
from tests import journal_lines as j


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "docs" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_terminal_is_drawn_as_it_was_midway(tmp_path: Path, pictures: ModuleType) -> None:
    recipe = Recipe(name="small").model_dump(mode="json")
    (tmp_path / "recipe.resolved.json").write_text(json.dumps(recipe))
    with Journal(tmp_path / "journal.jsonl") as journal:
        for line in [j.header(), *(j.rollout(t) for t in range(60))]:
            rest = {k: v for k, v in line.items() if k not in ("v", "type", "rollout")}
            journal.append(line["type"], line["rollout"], rest)
    svg = pictures.terminal_svg(tmp_path, 0.5)
    assert ">30</text>" in svg
    assert "/60&#160;rollouts" in svg
    assert "small.yaml" in svg
    assert "@font-face" not in svg
    assert "url(http" not in svg
