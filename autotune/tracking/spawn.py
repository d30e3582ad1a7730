"""What the training process knows of MLflow: how to start the feeder and how to ask how it went.

Nothing here imports mlflow or raises into the run. The feeder gets its own session, so that
Ctrl-C reaches only the run; it ends by itself when the journal's `end` line is delivered or when
this process is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.tracking.receipt import FILE, URI_VARIABLE, Receipt, read_receipt
from autotune.tracking.store import ARTIFACTS

if TYPE_CHECKING:
    from autotune.recipe.schema import MlflowSection, Recipe

LOG = "mlflow.log"
JOURNAL = "journal.jsonl"
BOOKS = "groups*.jsonl"
"""What books of groups are called; each further worker in a folder has one of its own."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the delivery of a run went."""

    complete: bool
    message: str
    """For the person at the terminal: where the run is, or what to do."""


class FeederHandle:
    """A feeder process, or the reason why there is none."""

    def __init__(
        self, folder: Path, process: subprocess.Popen[bytes] | None, problem: str = "", receipt: str = FILE
    ) -> None:
        self.folder = folder
        self.process = process
        self.problem = problem
        self.receipt = receipt

    def finish(self, timeout: float = 60.0) -> Delivery:
        """Wait until everything is delivered; call it after the journal's `end` line.

        A feeder that needs longer goes on by itself for as long as its patience lasts; the journal
        is the spool, nothing is lost.
        """
        if self.process is None:
            return Delivery(False, self.problem)
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return Delivery(False, f"still delivering; should that be cut short: autotune sync {self.folder}")
        receipt = read_receipt(self.folder, self.receipt)
        if code == 0 and receipt is not None and receipt.finished:
            return Delivery(True, store_hint(self.folder, receipt))
        return Delivery(
            False, f"not complete (see {self.folder / LOG}); finish it with: autotune sync {self.folder}"
        )


def start_feeder(folder: Path, recipe: Recipe) -> FeederHandle:
    """Start delivering a run that is about to be journalled in `folder`."""
    folder = Path(folder)
    return _start("autotune.tracking.feeder", folder, folder, recipe.tracking.mlflow, FILE)


def start_book_feeder(book: Path, settings: MlflowSection) -> FeederHandle:
    """Start delivering a book of groups (`autotune.tracking.book`)."""
    receipt = book.with_suffix(".mlflow.json").name
    return _start("autotune.tracking.book_feeder", book, book.parent, settings, receipt)


def _start(module: str, target: Path, folder: Path, settings: MlflowSection, receipt: str) -> FeederHandle:
    """`python -m module target`, or why there is none."""
    if not settings.enabled:
        return FeederHandle(folder, None, "switched off by the recipe (tracking.mlflow.enabled)")
    if importlib.util.find_spec("mlflow") is None:
        problem = f"not installed: pip install 'autotune-rl[track]', then autotune sync {folder}"
        return FeederHandle(folder, None, problem)
    try:
        process = _spawn(module, target, folder / LOG, settings.uri)
    except OSError as error:
        return FeederHandle(folder, None, f"could not start ({error}); later: autotune sync {folder}")
    return FeederHandle(folder, process, receipt=receipt)


def _spawn(module: str, target: Path, log: Path, uri: str | None) -> subprocess.Popen[bytes]:
    store = {URI_VARIABLE: uri} if uri else {}
    command = [sys.executable, "-m", module, str(target), "--follow", str(os.getpid())]
    with log.open("ab") as file:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, **store},
        )  # fmt: skip


def sync(folder: Path, uri: str | None = None) -> int:
    """Deliver what the tracker has missed of a run, or of every run and book below a folder.

    Returns:
        The exit code: 0 when everything is there, else the worst of the feeders' codes.
    """
    from autotune.tracking import book_feeder, feeder

    store = ("--uri", uri) if uri else ()
    if (folder / JOURNAL).exists() or not folder.is_dir():
        return feeder.main([str(folder), *store])
    runs, books = runs_below(folder), list(_below(folder, BOOKS))
    if not (runs or books):
        print(f"{folder} has no {JOURNAL}, nor has a folder in it; give the folder of a run", file=sys.stderr)
    codes = [feeder.main([str(run), *store]) for run in runs]
    return max([*codes, *(book_feeder.main([str(book), *store]) for book in books)], default=2)


def runs_below(folder: Path) -> list[Path]:
    """Every run folder in a folder, in order of path."""
    return [path.parent for path in _below(folder, JOURNAL)]


def _below(folder: Path, name: str) -> Iterator[Path]:
    """Files of a name, but for the copies that were uploaded beside a local store."""
    return (path for path in sorted(folder.rglob(name)) if ARTIFACTS not in path.parts)


def store_hint(folder: Path, receipt: Receipt | None = None) -> str:
    """Where the run is, and the command or address to look at it."""
    receipt = receipt or read_receipt(folder)
    if receipt is None or not receipt.run_id:
        return f"nothing delivered yet; deliver with: autotune sync {folder}"
    page = f"/#/experiments/{receipt.experiment_id}/runs/{receipt.run_id}"
    if receipt.store.startswith("http"):
        return receipt.store.rstrip("/") + page
    store = _from_here(receipt.store)
    return f"run {receipt.run_id} in {store}\nautotune dashboard {shlex.quote(str(folder))}"


def _from_here(store: str) -> str:
    """A SQLite file below the working folder by its relative path."""
    prefix = "sqlite:///"
    with contextlib.suppress(ValueError):
        return prefix + str(Path(store.removeprefix(prefix)).relative_to(Path.cwd()))
    return store
