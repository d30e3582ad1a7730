"""`autotune report RUN…`: find the runs, write one page, and say where it is.

A folder that is no run but holds run folders stands for all of them. What cannot be read is said on the
page and at the terminal, and the others are shown; only when nothing can be read is it an error.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError, InputError
from autotune.report.page import GENERATOR, render
from autotune.report.pictures import browser, write_pictures
from autotune.report.runs import JOURNAL, RunData, read_run

NAME = "report.html"


@dataclass(frozen=True, slots=True)
class Written:
    """What was made."""

    file: Path
    runs: int
    pictures: list[Path]
    problems: list[str]
    """What could not be read, in words with the next move."""


def write_report(paths: Sequence[Path], out: Path | None = None, png: Path | None = None) -> Written:
    """Read the runs and write the page.

    Args:
        paths: run folders, journals, or folders of run folders.
        png: a folder for the charts as PNG files, which a browser draws.
        out: the file; otherwise `report.html` in the run's folder, or here when there are several runs.

    Raises:
        InputError: nothing can be read, or the file cannot be written; with every reason.
    """
    if png is not None:
        browser()  # before anything is written
    runs, problems = read_all(paths)
    file = out or (Path(runs[0].folder) / NAME if len(runs) == 1 else Path(NAME))
    _write(file, render(runs, problems))
    pictures = write_pictures(runs, png) if png is not None else []
    return Written(file, len(runs), pictures, problems)


def read_all(paths: Sequence[Path]) -> tuple[list[RunData], list[str]]:
    """(runs, what could not be read).

    Raises:
        InputError: there is not one run.
    """
    runs: list[RunData] = []
    problems: list[str] = []
    for path in dict.fromkeys(Path(os.path.normpath(p)) for given in paths for p in _expanded(given)):
        try:
            runs.append(read_run(path))
        except AutotuneError as error:
            problems.append(str(error))
    if not runs:
        raise InputError("\n".join(problems) or "which runs? Expected: autotune report RUN…")
    return runs, problems


def _expanded(path: Path) -> Iterator[Path]:
    """The path itself, or the run folders inside it when it is none."""
    inside = sorted(file.parent for file in path.glob(f"*/{JOURNAL}")) if path.is_dir() else []
    yield from [path] if (path / JOURNAL).exists() or not inside else inside


def _write(file: Path, page: str) -> None:
    """Whole or not at all, and never over something that is no report."""
    if file.is_dir():
        raise InputError(f"{file} is a folder; give a file, such as --out {shlex.quote(str(file / NAME))}")
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        if file.exists() and GENERATOR not in file.read_text("utf-8", "replace")[:2000]:
            raise InputError(f"{file} exists and is no report of autotune; choose another file with --out")
        beside.write_text(page, "utf-8")
        beside.replace(file)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise InputError(
            f"{file} cannot be written ({error.strerror}); choose another file with --out FILE"
        ) from error
