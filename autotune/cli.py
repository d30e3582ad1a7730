"""The command line. Each command imports what it needs when it is called, so that help is quick.

Exit codes: 0 done, 1 the run failed or a gate was not met, 2 bad input and nothing started,
3 stopped by the controller with everything saved, 130 interrupted and resumable.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import autotune
from autotune.errors import AutotuneError, ControlStop, ElsewhereError, InputError, Problem, RecipeError

INTERRUPTED = 130

app = typer.Typer(
    help="Keeps an LLM reinforcement-learning run healthy and fast by itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="The recipe, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Fields to set, such as trainer.kl_coef=0.01."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def main() -> None:
    """Entry point of the command `autotune`."""
    try:
        app()
    except SystemExit as leaving:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "autotune.trainer.group" in sys.modules:
            from autotune.trainer.group import leave_now

            leave_now(leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code)))
        raise


def _version(wanted: bool) -> None:
    if wanted:
        print(f"autotune {autotune.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    local_rank: Annotated[int, typer.Option("--local_rank", hidden=True)] = 0,
) -> None:
    """Keeps an LLM reinforcement-learning run healthy and fast by itself."""
    # The launcher of DeepSpeed passes --local_rank, and sets LOCAL_RANK too, which is what is read.


@app.command()
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


@app.command()
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
            _print_json(report(checked))
        else:
            print_check(_console(), checked)


@app.command()
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
            _print_json(report(result))
        else:
            print_replay(_console(), result)
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
            _print_json({"file": str(file), "changes": len(schedule.changes), "warning": warning})
            return
        count, rollouts = len(schedule.changes), schedule.source.rollouts
        words = f"✓ {file}: {count} change{'s' * (count != 1)} in {rollouts} rollouts"
        _console().print(Text(words, "bold green"), soft_wrap=True)
        if warning:
            _console().print(Text(f"• {warning}", "yellow"))


class Action(StrEnum):
    """What `autotune ctl` can do."""

    STATUS = "status"
    PAUSE = "pause"
    RESUME = "resume"
    PIN = "pin"
    UNPIN = "unpin"
    SET = "set"


@app.command()
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
                _print_json(report(found))
            else:
                print_status(_console(), found)
            return
        answer = command(folder, str(action), arguments or [], timeout)
        if as_json:
            _print_json({"done": answer.done, "message": answer.message, "line": answer.line})
        else:
            style = "green" if answer.done else "yellow" if answer.line is None else "red"
            sign = "✓" if answer.done else "·" if answer.line is None else "✗"
            _console().print(Text(f"{sign} {answer.message}", style), soft_wrap=True)
    if not answer.done and timeout > 0:
        raise typer.Exit(1)


@app.command()
def advise(
    log: Annotated[
        Path,
        typer.Argument(metavar="LOG", help="A log file, an MLflow run or database, or an event folder."),
    ],
    recipe: Annotated[
        Path | None, typer.Option("--recipe", help="A recipe that says what the log does not: batch sizes …")
    ] = None,
    knob: Annotated[
        list[str] | None,
        typer.Option("--knob", metavar="NAME=VALUE", help="One such number, such as rollout_n=8."),
    ] = None,
    map_: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="OURS=THEIRS", help="Which key is which: reward_mean=score*0.01."),
    ] = None,
    trainer: Annotated[
        str, typer.Option("--trainer", help="trl, verl, … when the keys do not tell it.")
    ] = "",
    run_name: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Id or name of the run in an MLflow database.")
    ] = "",
    newest: Annotated[
        int, typer.Option("--newest", min=0, help="Decide on so many newest rows only; 0: on all.")
    ] = 20_000,
    follow: Annotated[bool, typer.Option("--follow", help="Go on while the log grows.")] = False,
    as_json: AsJson = False,
) -> None:
    """Judge another trainer's log, and say what the controller would have done."""
    with exits(as_json):
        from autotune.advise import advise, print_advice, report, verdict

        options: dict[str, Any] = {
            "recipe": _load(recipe) if recipe else None,
            "knobs": {name: _number("--knob", name, text) for name, text in _pairs("--knob", knob)},
            "mapping": dict(_pairs("--map", map_)),
            "trainer": trainer,
            "run": run_name,
            "newest": newest,
        }
        shadow = _follow(log, options, as_json) if follow else advise(log, **options)
        found = verdict(shadow)
        if as_json:
            _print_json(report(shadow, found), indent=None if follow else 2)
        else:
            print_advice(_console(), shadow, found)


def _load(recipe: Path) -> Any:
    from autotune.recipe import load_recipe

    return load_recipe(recipe, [])


def _follow(log: Path, options: dict[str, Any], as_json: bool) -> Any:
    """News as they come: lines for people, or one JSON object a line."""
    from autotune.advise import follow, print_verdict, said_line
    from autotune.decisions import to_json

    def on_wait(why: str) -> None:
        typer.echo(f"waiting: {why}", err=True)

    console = _console()
    if as_json:
        return follow(
            log,
            lambda item: print(json.dumps({"said": to_json(item)}), flush=True),
            lambda found: print(json.dumps({"verdict": to_json(found)}), flush=True),
            options,
            on_wait=on_wait,
        )
    return follow(
        log,
        lambda item: console.print(said_line(item), soft_wrap=True),
        lambda found: print_verdict(console, found),
        options,
        on_wait=on_wait,
    )


def _pairs(option: str, given: list[str] | None) -> Iterator[tuple[str, str]]:
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name or not value:
            raise InputError(f"{option} {text}: expected {option} NAME=VALUE")
        yield name.strip(), value.strip()


def _number(option: str, name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"{option} {name}={text}: {text!r} is not a number") from None


@app.command()
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


@app.command()
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


@app.command()
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

            _print_json({"findings": to_json(findings)})
        else:
            print_findings(_console(), findings)
    if any(finding.level is Level.BAD for finding in findings):
        raise typer.Exit(1)


@app.command()
def sync(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    uri: Annotated[str | None, typer.Option("--uri", help="Another tracking server.")] = None,
) -> None:
    """Deliver to MLflow what it has not got yet of a run."""
    with exits():
        from autotune.tracking import sync

        code = sync(folder, uri)
    raise typer.Exit(code)


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or a folder that holds some.")
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The page; otherwise report.html in the run, or here."),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option("--png", metavar="FOLDER", help="The charts as PNG too; needs Chromium or Chrome."),
    ] = None,
) -> None:
    """Show runs as one page in a file: what the controller did, and whether it helped."""
    with exits():
        from autotune.report.command import write_report

        written = write_report(runs, out, png)
        words = f"✓ {written.file}: {written.runs} run{'s' * (written.runs != 1)}"
        _console().print(Text(words, "bold green"), soft_wrap=True)
        if written.pictures:
            _console().print(Text(f"✓ {png}: {len(written.pictures)} pictures", "bold green"), soft_wrap=True)
        for problem in written.problems:
            _console().print(Text(f"• not shown: {problem}", "yellow"), soft_wrap=True)


@app.command()
def dashboard(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN]...", help="Folders of runs, or folders that hold some; default: runs."),
    ] = None,
    uri: Annotated[str | None, typer.Option("--uri", help="Another tracking server.")] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Of MLflow's interface.")] = 5000,
    study: Annotated[
        str | None, typer.Option("--study", metavar="URL", help="Optuna storage to show beside it.")
    ] = None,
    browser: Annotated[bool, typer.Option(help="Open a browser, where there is a screen.")] = True,
) -> None:
    """Compare runs in MLflow: reward, KL, clip ratio, knobs and held-out scores on one page."""
    with exits():
        from autotune.dashboard import Wanted, dashboard

        dashboard(Wanted(folders or [Path("runs")], uri, port, study, browser), _console())


# ------------------------------------------------------------------------------------- endings


@contextmanager
def exits(as_json: bool = False) -> Iterator[None]:
    """Errors of ours become a few readable lines and their exit code; others keep their trace."""
    try:
        yield
    except AutotuneError as error:
        _fail(error, as_json)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:  # `autotune check … | head`
        sys.stderr.close()
        raise typer.Exit(0) from None


def _fail(error: AutotuneError, as_json: bool) -> NoReturn:
    if as_json:
        _print_json({"valid": False, "error": str(error), "problems": _problems(error)})
    elif not _said_by_rank_0(error):
        print_error(Console(stderr=True, soft_wrap=True, highlight=False), error)
    raise typer.Exit(error.exit_code) from None


def _said_by_rank_0(error: AutotuneError) -> bool:
    """Whether this is another rank of the same machine, with an error that rank 0 has just as well."""
    shared = isinstance(error, (InputError, ControlStop, ElsewhereError))
    return shared and os.environ.get("RANK", "0") != "0" and os.environ.get("LOCAL_RANK", "0") != "0"


def _problems(error: AutotuneError) -> list[dict[str, str]]:
    problems = error.problems if isinstance(error, RecipeError) else ()
    return [{"where": p.where, "path": p.path, "message": p.message} for p in problems]


def print_error(console: Console, error: AutotuneError) -> None:
    """The place, the field and what to do, each where the eye expects it."""
    if not isinstance(error, RecipeError):
        kind = {2: "cannot start", 3: "stopped by the controller"}.get(error.exit_code, "failed")
        console.print(Text.assemble((f"✗ {kind}: ", "bold red"), str(error)))
        return
    count = len(error.problems)
    console.print(
        Text(f"✗ {count} problem{'s' if count > 1 else ''}, nothing was started", "bold red")
    )
    rows = [_problem(problem) for problem in error.problems]
    if console.is_terminal and max(len(place) for place, _ in rows) <= console.width // 3:
        table = Table.grid(padding=(0, 1))  # messages wrap beside their places
        table.add_column(no_wrap=True)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for place, message in rows:
            console.print(Text.assemble(place, " ", message))


def _problem(problem: Problem) -> tuple[Text, Text]:
    place = Text(f"  {problem.where or 'command line'}:", "cyan")
    name = Text(f"{problem.path}: " if problem.path else "", "bold")
    return place, Text.assemble(name, problem.message)


def _console() -> Console:
    return Console(highlight=False)


def _print_json(data: Any, indent: int | None = 2) -> None:
    print(json.dumps(data, indent=indent, ensure_ascii=False))
