"""Whether the `deepspeed` section, and the JSON file that it names, can be done here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.recipe import deepspeed
from autotune.recipe.schema import DeepSpeedSection, Recipe
from autotune.recipe.source import Key

Found = Iterator[tuple[Key, str]]

SECTION: Key = ("deepspeed",)
FILE: Key = ("deepspeed", "config")


def check_deepspeed(recipe: Recipe) -> Found:
    section = recipe.deepspeed
    if section.config is None:
        yield from _supported(recipe, section.zero_stage, section.offload, SECTION)
    else:
        yield from _file(recipe, section, section.config)


def _file(recipe: Recipe, section: DeepSpeedSection, path: str) -> Found:
    try:
        data = deepspeed.read_config(path)
    except ValueError as error:
        yield FILE, str(error)
        return
    wrong = list(deepspeed.problems(data))
    for name, message in wrong:
        yield FILE, f"{path}: {name}: {message}"
    if not wrong:
        yield from _said_twice(section, data)
        yield from _supported(recipe, deepspeed.stage_of(data), deepspeed.offload_of(data), FILE)


def _supported(recipe: Recipe, stage: int, offload: str, key: Key) -> Found:
    dtypes = deepspeed.DTYPES if recipe.model.dtype == "auto" else (recipe.model.dtype,)
    reasons = dict.fromkeys(deepspeed.refusal(stage, dtype, offload) for dtype in dtypes)
    yield from ((key, reason) for reason in reasons if reason)


def _said_twice(section: DeepSpeedSection, data: dict[str, Any]) -> Found:
    """A stage or an offloading that is one thing in the recipe and another in the file."""
    said = {"zero_stage": deepspeed.stage_of(data), "offload": deepspeed.offload_of(data)}
    for name, there in said.items():
        here = getattr(section, name)
        if here not in (there, DeepSpeedSection.model_fields[name].default):
            message = f"received {here!r}, but {section.config} says {there!r}; say it in one place"
            yield ("deepspeed", name), message
