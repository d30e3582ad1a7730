"""The study: made once, its trials queued at once; every worker's view of it.

    study attribute `plan`    the resolved recipe and the folder: a worker needs nothing else
    study attribute `queued`  True once all trials wait
    trial attribute `slot`    the planned trial that this is; `attempt` counts the workers it has cost

A worker makes itself a new view for each trial, with a sampler seeded by study and slot: two workers never
draw the same random point, and who gets which trial does not matter.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.recipe import Recipe
from autotune.recipe.axes import Axis, axes, own_values
from autotune.recipe.schema import SweepSection
from autotune.sweep.storages import optuna

SLOT, ATTEMPT, REASON = "slot", "attempt", "reason"
STARTUP_SHARE, STARTUP = 3, 10
"""TPE draws at random in the first third of the trials, and in ten at most."""


def settings(recipe: Recipe) -> SweepSection:
    """The recipe's sweep.

    Raises:
        InputError: it has none.
    """
    if recipe.sweep is None:
        raise InputError(
            "the recipe has no `sweep` section; expected at least"
            " sweep: {space: {trainer.actor_learning_rate: {low: 1.0e-5, high: 1.0e-2}}}"
        )
    return recipe.sweep


def study_name(recipe: Recipe) -> str:
    return settings(recipe).study or f"{recipe.name}-sweep"


def study_folder(recipe: Recipe) -> Path:
    """Beside the recipe's own run folder."""
    return Path(recipe.folder()).resolve().parent / study_name(recipe)


def make(storage: Any, name: str, recipe: Recipe, folder: Path) -> Any:
    """The study with its trials queued; an existing one goes on where it was.

    Raises:
        InputError: a study of that name has another recipe, or the sampler's own package is not there.
    """
    package, section = optuna(), settings(recipe)
    if section.sampler == "cmaes" and importlib.util.find_spec("cmaes") is None:
        raise InputError("sweep.sampler cmaes needs the package cmaes: pip install cmaes, or take tpe")
    directions = ["maximize"] + (["minimize"] if section.second else [])
    study = package.create_study(
        storage=storage, study_name=name, directions=directions, load_if_exists=True
    )
    plan: dict[str, Any] = {"recipe": recipe.model_dump(mode="json"), "folder": str(folder)}
    known = study.user_attrs.get("plan")
    if known is None:
        study.set_user_attr("plan", plan)
    elif _essence(Recipe.model_validate(known["recipe"])) != _essence(recipe):
        raise InputError(
            f"the study {name!r} was made from another recipe; name this one anew with sweep.study=NAME,"
            f" or remove {folder} and its storage"
        )
    _queue(study, recipe)
    return study


MAY_CHANGE = ("trials", "storage", "heartbeat", "grace", "confirm", "keep_checkpoints")


def _essence(recipe: Recipe) -> dict[str, Any]:
    """What must stay while a study goes on; a larger number of `trials` extends it."""
    places = {"tracking", "run_dir", "fingerprint", "tune"}
    return recipe.model_dump(exclude={**dict.fromkeys(places, True), "sweep": set(MAY_CHANGE)})


def _queue(study: Any, recipe: Recipe) -> None:
    """All trials wait from the start, known settings first; what an earlier attempt queued stays."""
    first = known_settings(recipe)
    there = {t.user_attrs.get(SLOT) for t in study.get_trials(deepcopy=False)}
    for slot in range(settings(recipe).trials):
        if slot not in there:
            fixed = first[slot] if slot < len(first) else {}
            study.enqueue_trial(fixed, user_attrs={SLOT: slot, ATTEMPT: 0})
    study.set_user_attr("queued", True)


def known_settings(recipe: Recipe) -> list[dict[str, Any]]:
    """The recipe's own place in the space, then the ones that it calls known to be good."""
    own = own_values(recipe, axes(recipe))
    listed = [dict(values) for values in settings(recipe).known_good]
    return [values for values in ([own] if own is not None else []) + listed if values]


def view(storage: Any, name: str, recipe: Recipe, slot: int = 0) -> Any:
    """The study with the sampler of one slot."""
    study = optuna().load_study(
        storage=storage, study_name=name, sampler=sampler(recipe, slot), pruner=pruner(recipe)
    )
    study.get_trials(deepcopy=False)  # a view knows only trials that it has listed
    return study


def sampler(recipe: Recipe, slot: int) -> Any:
    """By name."""
    package, section = optuna(), settings(recipe)
    seed, kind = recipe.seed * 100_003 + slot, package.samplers
    startup = max(min(STARTUP, section.trials // STARTUP_SHARE), 1)
    makers: dict[str, Any] = {
        "tpe": lambda: kind.TPESampler(seed=seed, n_startup_trials=startup),
        "random": lambda: kind.RandomSampler(seed=seed),
        "gp": lambda: kind.GPSampler(seed=seed, n_startup_trials=startup),
        # One sequence for the whole study; the place in it is kept in the storage.
        "qmc": lambda: kind.QMCSampler(seed=recipe.seed, scramble=True),
        "nsgaii": lambda: kind.NSGAIISampler(seed=seed, population_size=max(startup, 2)),
        "cmaes": lambda: kind.CmaEsSampler(seed=seed, n_startup_trials=startup),
    }
    return makers[section.sampler]()


def pruner(recipe: Recipe) -> Any:
    """Of one run, by name; its resource is the rollout of an evaluation."""
    package, section = optuna(), settings(recipe)
    every, rollouts = recipe.eval.every or recipe.trainer.rollouts, recipe.trainer.rollouts
    name = section.pruner or ("none" if section.second else "median")
    makers: dict[str, Any] = {
        "none": package.pruners.NopPruner,
        "median": lambda: package.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=0),
        "hyperband": lambda: package.pruners.HyperbandPruner(min_resource=every, max_resource=rollouts),
    }
    return makers[name]()


def suggest(trial: Any, space: tuple[Axis, ...]) -> dict[str, Any]:
    """A value on every axis; the same ones again where the trial has them already."""
    return {axis.path: _suggest(trial, axis) for axis in space}


def _suggest(trial: Any, axis: Axis) -> Any:
    if axis.choices:
        return trial.suggest_categorical(axis.path, list(axis.choices))
    if axis.integer:
        step = int(axis.step or 1)
        return trial.suggest_int(axis.path, int(axis.low), int(axis.high), step=step, log=axis.log)
    return trial.suggest_float(axis.path, axis.low, axis.high, step=axis.step, log=axis.log)
