"""From a recipe file and overrides to a checked `Recipe`, or to every problem at once.

    text -> data with lines        source     YAML 1.2, no tags, no duplicate keys
    key=value of the command line  here       each value read by the rules of the file
    shape and single fields        schema     pydantic; said in our words by `explain`
    what fields say together       checks     batch algebra, rule ids, model and data files

The cross checks also run when some fields are wrong: those fields are left out first, so that one
look at the message is enough to repair a file. Nothing heavy is imported here.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.errors import Problem, RecipeError
from autotune.recipe import checks, explain
from autotune.recipe.schema import ControlSection, Recipe
from autotune.recipe.source import Document, Key, parse_value, read_document, walk

MOVED: dict[Key, Key] = {("rollout", "n"): ("trainer", "rollout_n")}
"""Accepted spellings -> the field that they stand for."""


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, world_size: int | None = None
) -> Recipe:
    """Read, override and check one recipe.

    Args:
        path: a YAML or JSON file, such as the `recipe.resolved.json` of a run.
        overrides: `dotted.path=value` texts; they win over the file.
        world_size: ranks of the run; `WORLD_SIZE` of the environment, else 1.

    Raises:
        RecipeError: with all problems, each with `file:line`, path, value and what was expected.
    """
    document = read_document(Path(path))
    ranks = world_size or int(os.environ.get("WORLD_SIZE") or 1)
    if document.data or not document.problems:
        _override(document, overrides)
        _move_aliases(document)
        _fill_in(document, Path(path), ranks)
    recipe = _validate(document, ranks)
    if document.problems or recipe is None:
        raise RecipeError(_in_order(document.problems))
    return recipe


def load_control(path: str | Path) -> ControlSection:
    """Read a `control.yaml`: a recipe's control section alone, or a whole recipe for that section.

    Raises:
        RecipeError: with all problems of that section.
    """
    document = read_document(Path(path))
    if not set(document.data) & set(Recipe.model_fields):
        document.data = {"control": document.data}
        document.lines = {("control", *key): line for key, line in document.lines.items()}
    document.data = {"control": document.data.get("control", {})}
    recipe = _validate(document, 1)
    if document.problems or recipe is None:
        raise RecipeError(_in_order(document.problems))
    return recipe.control


def _in_order(problems: Iterable[Problem]) -> list[Problem]:
    def place(problem: Problem) -> tuple[int, str]:
        line = problem.where.rpartition(":")[2]
        return (int(line) if line.isdigit() else 0, problem.path)

    return sorted(dict.fromkeys(problems), key=place)


def _override(document: Document, overrides: Sequence[str]) -> None:
    for text in overrides:
        name, equals, value = text.partition("=")
        parts = name.strip().split(".")
        if not equals or not all(parts):
            message = f"received {text!r}; expected key.path=value, such as trainer.kl_coef=0.01"
            document.problems.append(Problem("", message))
            continue
        try:
            _set(document, parts, parse_value(value), text)
        except ValueError as error:
            document.problems.append(Problem(name, f"received {value!r}, which {error}"))


def _set(document: Document, parts: Sequence[str], value: Any, text: str) -> None:
    """Put one value into the data, making sections on the way.

    Raises:
        ValueError: if the path leads through something that is no section.
    """
    here: Any = document.data
    key: Key = ()
    for part in parts[:-1]:
        step = _step(here, part, parts)
        if isinstance(here, dict) and here.get(part) is None:
            here[part] = {}
        here, key = here[step], (*key, step)
    last = _step(here, parts[-1], parts)
    here[last] = value
    document.overridden[(*key, last)] = text


def _step(here: Any, part: str, parts: Sequence[str]) -> str | int:
    if isinstance(here, dict):
        return part
    if isinstance(here, list) and part.isdigit() and int(part) < len(here):
        return int(part)
    what = f"a list of {len(here)}" if isinstance(here, list) else f"the value {here!r}"
    raise ValueError(f"cannot be set: `{part}` of `{'.'.join(parts)}` would be inside {what}")


def _move_aliases(document: Document) -> None:
    for old, new in MOVED.items():
        section = document.data.get(str(old[0]))
        target = document.data.setdefault(str(new[0]), {})
        if not isinstance(section, dict) or old[1] not in section or not isinstance(target, dict):
            continue
        if new[1] in target:
            document.add(old, f"is another name of {'.'.join(map(str, new))}, which is also set")
        target.setdefault(str(new[1]), section.pop(str(old[1])))
        if old in document.lines:
            document.lines.setdefault(new, document.lines[old])


def _fill_in(document: Document, path: Path, ranks: int) -> None:
    """Defaults that depend on the file's name, on its folder or on other fields."""
    if "name" not in document.data:
        stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-._")[:100]
        document.data["name"] = stem or "run"
    checks.find_beside(document.data, path.parent)
    checks.fit_unset_batches(document.data, ranks)


def _validate(document: Document, ranks: int) -> Recipe | None:
    """The recipe, its problems noted; the right parts are checked even when others are wrong."""
    recipe, wrong = _parse(document)
    if recipe is None and wrong:
        recipe = _parse_rest(document.data, wrong)
    if recipe is not None:
        checks.check_recipe(document, recipe, wrong, ranks)
    return recipe


def _parse(document: Document) -> tuple[Recipe | None, set[Key]]:
    _integers(document.data)
    try:
        return Recipe.model_validate_json(json.dumps(document.data), strict=True), set()
    except ValidationError as error:
        return None, explain.add_validation_problems(document, error)


def _integers(data: Any) -> None:
    """`1e3` and `60.0` where a whole number is wanted: the only conversion between types."""
    try:
        Recipe.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            value = item["input"]
            if item["type"] == "int_type" and isinstance(value, float) and value.is_integer():
                _replace(data, explain.real_key(data, item["loc"], item["type"]), int(value))


def _replace(data: Any, key: Key, value: int) -> None:
    for part in key[:-1]:
        data = data[part]
    data[key[-1]] = value


def _parse_rest(data: dict[str, Any], wrong: set[Key]) -> Recipe | None:
    """The recipe without its wrong parts; a section that cannot do without them goes as a whole."""
    data = copy.deepcopy(data)
    for _ in range(4):
        for key in sorted(wrong, key=lambda k: (len(k), str(k)), reverse=True):
            _remove(data, key)
        try:
            return Recipe.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            locations = [(e["loc"], e["type"]) for e in error.errors(include_url=False)]
            wrong = {explain.real_key(data, loc, kind)[:1] for loc, kind in locations}
    return None


def _remove(data: Any, key: Key) -> None:
    holder = dict(walk(data)).get(key[:-1])
    if isinstance(holder, dict):
        holder.pop(str(key[-1]), None)
    elif isinstance(holder, list) and isinstance(key[-1], int) and key[-1] < len(holder):
        del holder[key[-1]]
