"""`sweep` and `tune`: many runs of one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.endings import exits
from autotune.cli.output import Overrides, RecipeFile
from autotune.errors import InputError


def sweep(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="A recipe with a `sweep` section.")
    ] = None,
    overrides: Overrides = None,
    workers: Annotated[
        int, typer.Option("--workers", min=0, metavar="K", help="Workers on this machine, threads divided.")
    ] = 1,
    storage: Annotated[
        str | None,
        typer.Option("--storage", metavar="URL", envvar="AUTOTUNE_STORAGE", help="Where the study is kept."),
    ] = None,
    worker: Annotated[
        bool, typer.Option("--worker", help="Only work on a study that exists, from any machine.")
    ] = False,
    study: Annotated[str | None, typer.Option("--study", help="With --worker: the study's name.")] = None,
    folder: Annotated[
        Path | None, typer.Option("--folder", help="With --worker: where the runs are on this machine.")
    ] = None,
) -> None:
    """Search good values of a recipe's fields over several seeds, and confirm the best on fresh ones."""
    with exits():
        from autotune import sweep as study_of
        from autotune.children import sigterm_as_ctrl_c
        from autotune.recipe import load_recipe

        if worker:
            with sigterm_as_ctrl_c():
                study_of.work(storage, study, folder, workers)
        elif recipe is None:
            raise InputError("which recipe? Expected: autotune sweep recipe.yaml")
        else:
            source = study_of.Source(Path(recipe), tuple(overrides or ()))
            study_of.sweep(load_recipe(*source), source, workers=workers, storage=storage)


def tune(
    recipe: RecipeFile,
    overrides: Overrides = None,
    budget: Annotated[
        int | None, typer.Option("--budget", metavar="N", help="Rollouts of all rounds; 1000 as documented.")
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", min=1, metavar="K", help="Runs at a time, threads divided.")
    ] = 1,
) -> None:
    """Carry out the staged procedure: baseline, KL and clip, throughput and quality, with gates."""
    with exits():
        from autotune import tune as staged
        from autotune.recipe import load_recipe

        checked = load_recipe(recipe, staged.with_preset(recipe, overrides or []))
        staged.tune(checked, budget=budget, jobs=workers)
