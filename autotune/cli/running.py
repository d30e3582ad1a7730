"""`run`, `check`, `replay`, `ctl`, `doctor`: before, during and after one run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from autotune.cli.endings import exits
from autotune.cli.output import AsJson, Overrides, RecipeFile, console, print_json
from autotune.errors import InputError, Problem, RecipeError


def run(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="The recipe; with --resume it may be left out."),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="RUN", help="Continue the run in this folder."),
    ] = None,
    nproc: Annotated[
        int, typer.Option("--nproc", min=1, metavar="N", help="Train on N ranks of this machine.")
    ] = 1,
) -> None:
    """Train a recipe while the controller keeps it healthy."""
    code = 0
    with exits():
        from autotune.recipe import load_recipe
        from autotune.run import RESOLVED, run

        path, changes = _recipe_or_resolved(recipe, overrides or [], resume, RESOLVED)
        if nproc == 1:
            run(load_recipe(path, changes), resume=resume or False)
        else:
            from autotune.launch import launch

            load_recipe(path, changes, world_size=nproc)  # bad input is told once, and nothing starts
            again = ["--resume", str(resume)] if resume else []
            code = launch(nproc, ["run", *again, "--", str(path), *changes])
    raise typer.Exit(code)


def _recipe_or_resolved(
    recipe: str | None, overrides: list[str], resume: Path | None, resolved: str
) -> tuple[Path, list[str]]:
    """With --resume and no recipe, the run's own one; a first `key=value` is then no recipe."""
    if recipe is not None and (resume is None or "=" not in recipe or Path(recipe).exists()):
        return Path(recipe), overrides
    overrides = [recipe, *overrides] if recipe is not None else overrides
    if resume is None:
        raise RecipeError([Problem("", "which recipe? Expected: autotune run recipe.yaml")])
    if not (resume / resolved).is_file():
        message = f"there is no run in {resume}: expected its {resolved}"
        raise RecipeError([Problem("", message, "--resume")])
    return resume / resolved, overrides


def check(
    recipe: RecipeFile,
    overrides: Overrides = None,
    as_json: AsJson = False,
    nproc: Annotated[int, typer.Option("--nproc", min=1, metavar="N", help="For a run on N ranks.")] = 1,
) -> None:
    """Validate a recipe, show its batch arithmetic, and say which rules can act on it."""
    with exits(as_json):
        from autotune.check import check, print_check, report
        from autotune.recipe import load_recipe

        checked = check(load_recipe(recipe, overrides or [], world_size=nproc), nproc)
        if as_json:
            print_json(report(checked))
        else:
            print_check(console(), checked)


def replay(
    journal: Annotated[
        Path, typer.Argument(metavar="JOURNAL", help="A journal.jsonl, or its run folder.")
    ],
    control: Annotated[
        Path | None, typer.Option("--control", help="Other rules: a control.yaml or a recipe.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option("--export", metavar="FILE", help="Write the knobs of every rollout as a schedule."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a run's decisions again: the same rules must decide the same, bit for bit."""
    if export is not None:
        _export(journal, export, as_json)
        return
    with exits(as_json):
        from autotune.recipe import load_control
        from autotune.replay import print_replay, replay, report

        result = replay(journal, load_control(control) if control else None)
        if as_json:
            print_json(report(result))
        else:
            print_replay(console(), result)
    if result.altered or not (result.equal or result.other_rules):
        raise typer.Exit(1)


def _export(journal: Path, file: Path, as_json: bool) -> None:
    """What a run's rollouts used, as a file for `control: {schedule: …}`."""
    with exits(as_json):
        from autotune.recipe import dump_schedule
        from autotune.replay import export

        schedule = export(journal)
        try:
            file.write_text(dump_schedule(schedule), "utf-8")
        except OSError as error:
            raise InputError(f"{file} cannot be written: {error.strerror}") from error
        warning = schedule.warning()
        if as_json:
            print_json({"file": str(file), "changes": len(schedule.changes), "warning": warning})
            return
        count, rollouts = len(schedule.changes), schedule.source.rollouts
        words = f"✓ {file}: {count} change{'s' * (count != 1)} in {rollouts} rollouts"
        console().print(Text(words, "bold green"), soft_wrap=True)
        if warning:
            console().print(Text(f"• {warning}", "yellow"))


class Action(StrEnum):
    """What `autotune ctl` can do."""

    STATUS = "status"
    PAUSE = "pause"
    RESUME = "resume"
    PIN = "pin"
    UNPIN = "unpin"
    SET = "set"


def ctl(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    action: Annotated[Action, typer.Argument(help="What to do.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KNOB | KNOB=VALUE]...", help="Knobs for pin and unpin, values for set."),
    ] = None,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds to wait for the outcome; 0 does not wait.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Lay a hand on a live run: look at it, pause its controller, pin a knob, set one."""
    with exits(as_json):
        from autotune.ctl import command, print_status, report, status

        if action is Action.STATUS:
            found = status(folder)
            if as_json:
                print_json(report(found))
            else:
                print_status(console(), found)
            return
        answer = command(folder, str(action), arguments or [], timeout)
        if as_json:
            print_json({"done": answer.done, "message": answer.message, "line": answer.line})
        else:
            style = "green" if answer.done else "yellow" if answer.line is None else "red"
            sign = "✓" if answer.done else "·" if answer.line is None else "✗"
            console().print(Text(f"{sign} {answer.message}", style), soft_wrap=True)
    if not answer.done and timeout > 0:
        raise typer.Exit(1)


def doctor(
    trainer: Annotated[
        str, typer.Argument(help="native, trl, verl or openrlhf: whose versions to look at.")
    ] = "native",
    config: Annotated[
        Path | None, typer.Option("--config", help="Your file or script: searched for old names.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look at this machine: versions, GPU, memory, compiler, disk."""
    with exits(as_json):
        from autotune.doctor import Level, examine, print_findings

        findings = examine(trainer, config)
        if as_json:
            from autotune.decisions import to_json

            print_json({"findings": to_json(findings)})
        else:
            print_findings(console(), findings)
    if any(finding.level is Level.BAD for finding in findings):
        raise typer.Exit(1)
