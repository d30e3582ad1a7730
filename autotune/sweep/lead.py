"""The command: make the study, start workers on this machine, tell what they do, conclude.

A study goes on where it was when the same command is given again. A worker that was killed is replaced
here; workers on other machines come and go as they like.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from autotune import doctor
from autotune.children import sigterm_as_ctrl_c, thread_variables, threads_for
from autotune.errors import InputError, RunError
from autotune.launch import ends_with_parent
from autotune.recipe import Recipe
from autotune.recipe.axes import axes
from autotune.sweep import life, state
from autotune.sweep.result import Outcome, Source, conclude, text, verdict
from autotune.sweep.storages import VARIABLE, open_storage, wanted
from autotune.sweep.studies import make, settings, study_folder, study_name, view
from autotune.sweep.told import Told, telling
from autotune.tracking.store import safe_uri

POLL = 1.0
INTERRUPTED = 130


def sweep(
    recipe: Recipe, source: Source | None = None, *, workers: int = 1, storage: str | None = None,
    console: Console | None = None,
) -> Outcome:  # fmt: skip
    """Carry out the recipe's study, or go on with it, to its conclusion.

    Args:
        recipe: with a `sweep` section.
        source: where it came from; `best.yaml` is written from that text.
        workers: processes on this machine, with its threads divided among them. 0 leaves all work to workers
            elsewhere and waits for them.
        storage: URL; the environment's, the recipe's, or SQLite in the study's folder where it is not given.

    Raises:
        InputError: the recipe has no study, the storage does not answer, or somebody leads it already.
        RunError: no trial came to a score.
        KeyboardInterrupt: Ctrl-C; the trials in work have saved.
    """
    section, name, folder = settings(recipe), study_name(recipe), study_folder(recipe)
    doctor.require(recipe)
    console = console or Console(highlight=False)
    url = wanted(storage, section.storage, folder)
    with _leading(folder), sigterm_as_ctrl_c(), telling(recipe, folder) as told:
        opened = open_storage(url)
        make(opened, name, recipe, folder)
        _announce(console, recipe, name, url, workers)
        Lead(opened, url, name, recipe, folder, workers, console, told).until_finished()
        study = view(opened, name, recipe)
        say = lambda news: console.print(f"· {news}", markup=False)  # noqa: E731
        outcome = conclude(study, recipe, folder, url, source, max(workers, 1), say)
        told.outcome(outcome)
    _tell(console, outcome, recipe)
    return outcome


@contextlib.contextmanager
def _leading(folder: Path) -> Iterator[None]:
    """One leader a folder: two would start twice as many workers as asked for."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lead").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            more = "add workers with: autotune sweep --worker"
            raise InputError(f"another process leads the study in {folder}; {more}") from None
        yield


def _announce(console: Console, recipe: Recipe, name: str, url: str, workers: int) -> None:
    section = settings(recipe)
    size = f"{section.trials} trials x {section.seeds} seeds"
    console.print(f"study {name}: {size}, {workers} workers here", style="bold")
    for axis in axes(recipe):
        shown = ", ".join(map(str, axis.choices)) if axis.choices else f"{axis.low:g} to {axis.high:g}"
        console.print(f"  {axis.path}: {shown}{', log' if axis.log else ''}", markup=False)
    more = f"AUTOTUNE_STORAGE={safe_uri(url)} autotune sweep --worker --study {name}"
    console.print(f"  more workers, also elsewhere: {more}", markup=False, soft_wrap=True)


class Lead:
    """The leader while workers work."""

    def __init__(
        self, storage: Any, url: str, name: str, recipe: Recipe, folder: Path, workers: int,
        console: Console, told: Told,
    ) -> None:  # fmt: skip
        self.storage, self.url, self.name, self.recipe = storage, url, name, recipe
        self.folder, self.workers, self.console = folder, workers, console
        self.tracker = told
        self.processes: list[subprocess.Popen[bytes]] = []
        self.replacements = workers
        self.told: set[int] = set()

    def until_finished(self) -> None:
        """Workers at work until no trial waits or runs."""
        self.processes = [self._start(place) for place in range(self.workers)]
        watch = life.Watch(view(self.storage, self.name, self.recipe), settings(self.recipe).grace)
        try:
            while self._unfinished():
                self._tell_news()
                self._replace_dead()
                watch.rescue()
                time.sleep(POLL)
        except BaseException:
            self._end()
            raise
        for process in self.processes:
            process.wait()
        self._tell_news()

    def _unfinished(self) -> bool:
        study = view(self.storage, self.name, self.recipe)
        return bool(study.get_trials(deepcopy=False, states=life.unfinished()))

    def _start(self, place: int) -> subprocess.Popen[bytes]:
        shared = thread_variables(threads_for(self.workers)) | device_of(place)
        with (self.folder / "workers.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "autotune", "sweep", "--worker", "--study", self.name],
                env={**os.environ, **shared, VARIABLE: self.url},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=ends_with_parent(),
            )

    def _replace_dead(self) -> None:
        """A killed worker gets a successor, as often as there were workers; nobody waits for nobody."""
        for place, process in enumerate(self.processes):
            if process.poll() not in (None, 0) and self.replacements > 0:
                self.replacements -= 1
                self.console.print(f"! a worker ended with {process.returncode}; another one takes its place")
                self.processes[place] = self._start(place)
        ended = self.processes and all(process.poll() is not None for process in self.processes)
        if ended and self._unfinished():
            log = self.folder / "workers.log"
            raise RunError(f"all workers have ended before the trials: see {log}; give the command again")

    def _tell_news(self) -> None:
        study = view(self.storage, self.name, self.recipe)
        data = state.snapshot(study, self.recipe, self.folder, self.url)
        for entry in data["trials"]:
            if entry["state"] in ("complete", "pruned", "fail") and entry["number"] not in self.told:
                self.told.add(entry["number"])
                self.console.print(_line(entry), markup=False, soft_wrap=True)
                self.tracker.trial(entry)

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()


def device_of(place: int) -> dict[str, str]:
    """The one GPU of a worker, where the environment names several; they are handed out in turns."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return {"CUDA_VISIBLE_DEVICES": names[place % len(names)]} if len(names) > 1 else {}


def _line(entry: dict[str, Any]) -> str:
    params = ", ".join(f"{name.rpartition('.')[2]} {text(v)}" for name, v in entry["params"].items())
    sign = {"complete": "✓", "pruned": "-", "fail": "✗"}[entry["state"]]
    what = f"{entry['state']}: {entry['reason']}"
    if entry["state"] == "complete":
        what = f"{entry['values'][0]:.3f}"
    return f"{sign} trial {entry['slot']}: {what} ({params})"


def _tell(console: Console, outcome: Outcome, recipe: Recipe) -> None:
    for number, line in enumerate(verdict(outcome, recipe)):
        console.print(line, style="bold" if number == 0 else "", markup=False, soft_wrap=True)
    for name, share in outcome.importance.items():
        console.print(f"  importance {share:.2f}  {name}", markup=False)
    for name in ("best.yaml", "summary.md"):
        console.print(str(outcome.folder / name), soft_wrap=True, markup=False)
