"""What a recipe's `sweep` says about the rest of it: whether every axis leads to legal recipes."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import ValidationError

from autotune.recipe import axes, explain
from autotune.recipe.axes import Axis, default_of, settle, with_values
from autotune.recipe.schema import Recipe
from autotune.recipe.source import Key

Found = Iterator[tuple[Key, str]]

NOT_SWEPT = ("sweep", "tune", "seed", "name", "run_dir")
"""Fields that a study owns, or that would make its runs incomparable."""


def check_sweep(recipe: Recipe) -> Found:
    """Problems of the sweep section; none when there is no such section."""
    if recipe.sweep is None:
        return
    space: dict[str, Axis] = {}
    for path, section in recipe.sweep.space.items():
        key: Key = ("sweep", "space", path)
        try:
            default_of(recipe, path)
            space[path] = axes.axis(recipe, path, section)
        except ValueError as error:
            yield key, f"{path} {error}"
            continue
        if path.split(".")[0] in NOT_SWEPT:
            yield key, f"{path} belongs to the study itself and cannot be swept"
            continue
        yield from _ends(recipe, space[path], key)
    yield from _known_good(recipe, space)
    yield from _objective(recipe)


def _ends(recipe: Recipe, axis: Axis, key: Key) -> Found:
    """The outermost values, tried on the recipe."""
    plain = recipe.model_copy(update={"sweep": None}).model_dump(mode="json")
    for end in axis.ends:
        try:
            Recipe.model_validate(with_values(plain, settle(recipe, {axis.path: end})))
        except ValidationError as error:
            yield key, f"{axis.path} = {explain.shown(end)}: {error.errors(include_url=False)[0]['msg']}"
            return


def _known_good(recipe: Recipe, space: dict[str, Axis]) -> Found:
    assert recipe.sweep is not None
    for index, values in enumerate(recipe.sweep.known_good):
        for path, value in values.items():
            key: Key = ("sweep", "known_good", index, path)
            if path not in recipe.sweep.space:
                yield key, f"{path} is not in sweep.space; known settings are points of the space"
            elif path in space and not space[path].holds(value):
                yield key, f"{path} = {explain.shown(value)} lies outside its range in sweep.space"


def _objective(recipe: Recipe) -> Found:
    sweep = recipe.sweep
    assert sweep is not None
    if sweep.objective == "lower_bound" and sweep.seeds < 2:
        yield ("sweep", "objective"), "received lower_bound with 1 seed; expected 2 seeds or more, or mean"
    if sweep.score == "greedy" and not recipe.eval.greedy:
        yield ("sweep", "score"), "received greedy, but eval.greedy is false; expected sampled"
    if sweep.second is not None and sweep.pruner not in (None, "none"):
        yield ("sweep", "pruner"), f"received {sweep.pruner}; with a second objective nothing can be pruned"
    if sweep.second is not None and sweep.pairs not in (None, "none"):
        yield ("sweep", "pairs"), f"received {sweep.pairs}; with a second objective nothing can be pruned"
    if sweep.grace < 2 * sweep.heartbeat:
        yield ("sweep", "grace"), f"received {sweep.grace:g} s; expected at least twice sweep.heartbeat"
