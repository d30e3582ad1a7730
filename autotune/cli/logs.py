"""`advise`: another trainer's log through the controller."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli.endings import exits
from autotune.cli.output import AsJson, console, print_json
from autotune.errors import InputError


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
            print_json(report(shadow, found), indent=None if follow else 2)
        else:
            print_advice(console(), shadow, found)


def _load(recipe: Path) -> Any:
    from autotune.recipe import load_recipe

    return load_recipe(recipe, [])


def _follow(log: Path, options: dict[str, Any], as_json: bool) -> Any:
    """News as they come: lines for people, or one JSON object a line."""
    from autotune.advise import follow, print_verdict, said_line
    from autotune.decisions import to_json

    def on_wait(why: str) -> None:
        typer.echo(f"waiting: {why}", err=True)

    terminal = console()
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
        lambda item: terminal.print(said_line(item), soft_wrap=True),
        lambda found: print_verdict(terminal, found),
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
