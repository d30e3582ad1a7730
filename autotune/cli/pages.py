"""`sync`, `report`, `dashboard`: what is shown of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from autotune.cli.endings import exits
from autotune.cli.output import console


def sync(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")],
    uri: Annotated[str | None, typer.Option("--uri", help="Another tracking server.")] = None,
) -> None:
    """Deliver to MLflow what it has not got yet of a run."""
    with exits():
        from autotune.tracking import sync

        code = sync(folder, uri)
    raise typer.Exit(code)


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
        console().print(Text(words, "bold green"), soft_wrap=True)
        if written.pictures:
            console().print(Text(f"✓ {png}: {len(written.pictures)} pictures", "bold green"), soft_wrap=True)
        for problem in written.problems:
            console().print(Text(f"• not shown: {problem}", "yellow"), soft_wrap=True)


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

        dashboard(Wanted(folders or [Path("runs")], uri, port, study, browser), console())
