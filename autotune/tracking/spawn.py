"""What the training process knows of MLflow: how to start the feeder and how to ask how it went.

Nothing here imports mlflow or raises into the run. The feeder gets its own session, so that
Ctrl-C reaches only the run; it ends by itself when the journal's `end` line is delivered or when
this process is gone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.tracking.receipt import URI_VARIABLE, Receipt, read_receipt

if TYPE_CHECKING:
    from autotune.recipe.schema import Recipe

LOG = "mlflow.log"
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


@dataclass(frozen=True, slots=True)
class Delivery:
    """How the delivery of a run went."""

    complete: bool
    message: str
    """For the person at the terminal: where the run is, or what to do."""


class FeederHandle:
    """A feeder process, or the reason why there is none."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes] | None, problem: str = "") -> None:
        self.folder = folder
        self.process = process
        self.problem = problem

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
        receipt = read_receipt(self.folder)
        if code == 0 and receipt is not None and receipt.finished:
            return Delivery(True, store_hint(self.folder, receipt))
        return Delivery(
            False, f"not complete (see {self.folder / LOG}); finish it with: autotune sync {self.folder}"
        )


def start_feeder(folder: Path, recipe: Recipe) -> FeederHandle:
    """Start delivering a run that is about to be journalled in `folder`."""
    settings, folder = recipe.tracking.mlflow, Path(folder)
    if not settings.enabled:
        return FeederHandle(folder, None, "switched off by the recipe (tracking.mlflow.enabled)")
    if importlib.util.find_spec("mlflow") is None:
        return FeederHandle(
            folder, None, f"not installed: pip install 'autotune-rl[track]', then autotune sync {folder}"
        )
    try:
        process = _start(folder, settings.uri, "--follow", str(os.getpid()))
    except OSError as error:
        return FeederHandle(folder, None, f"could not start ({error}); later: autotune sync {folder}")
    return FeederHandle(folder, process)


def _start(folder: Path, uri: str | None, *options: str) -> subprocess.Popen[bytes]:
    store = {URI_VARIABLE: uri} if uri else {}
    command = [sys.executable, "-m", "autotune.tracking.feeder", str(folder), *options]
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **_ENVIRONMENT, **store},
        )  # fmt: skip


def sync(folder: Path, uri: str | None = None) -> int:
    """Deliver what a run's tracker has missed; the exit code of the feeder."""
    from autotune.tracking.feeder import main

    return main([str(folder), *(("--uri", uri) if uri else ())])


def store_hint(folder: Path, receipt: Receipt | None = None) -> str:
    """Where the run is, and the command or address to look at it."""
    receipt = receipt or read_receipt(folder)
    if receipt is None or not receipt.run_id:
        return f"nothing delivered yet; deliver with: autotune sync {folder}"
    page = f"/#/experiments/{receipt.experiment_id}/runs/{receipt.run_id}"
    if receipt.store.startswith("http"):
        return receipt.store.rstrip("/") + page
    store = _from_here(receipt.store)
    look = f"mlflow ui --backend-store-uri {store}"
    return f"run {receipt.run_id} in {store}\n{look}\nhttp://127.0.0.1:5000{page}"


def _from_here(store: str) -> str:
    """A SQLite file below the working folder by its relative path."""
    prefix = "sqlite:///"
    with contextlib.suppress(ValueError):
        return prefix + str(Path(store.removeprefix(prefix)).relative_to(Path.cwd()))
    return store
