"""The command line. Each command imports what it needs when it is called, so that help is quick.

Exit codes: 0 done, 1 the run failed or a gate was not met, 2 bad input and nothing started,
3 stopped by the controller with everything saved, 130 interrupted and resumable.

running.py   `run`, `check`, `replay`, `ctl`, `doctor`
logs.py      `advise`
searches.py  `sweep`, `tune`
pages.py     `sync`, `report`, `dashboard`
endings.py   errors as lines and exit codes;  output.py  what commands share
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import autotune
from autotune.cli import logs, pages, running, searches

app = typer.Typer(
    help="Keeps an LLM reinforcement-learning run healthy and fast by itself.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


for command in (
    *(running.run, running.check, running.replay, running.ctl, logs.advise, searches.sweep, searches.tune),
    *(running.doctor, pages.sync, pages.report, pages.dashboard),
):
    app.command()(command)
