"""How a command ends: errors of ours as a few readable lines and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autotune.cli.output import print_json
from autotune.errors import AutotuneError, ControlStop, ElsewhereError, InputError, Problem, RecipeError

INTERRUPTED = 130


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
        print_json({"valid": False, "error": str(error), "problems": _problems(error)})
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
