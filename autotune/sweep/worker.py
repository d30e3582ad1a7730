"""A worker: claims one waiting trial after the other, until none waits and none runs any more.

Any number of them, on any number of machines, need nothing in common but the storage; a shared disk lets one
go on from the checkpoint of another, and without it a rescued trial begins anew.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.children import threads_for
from autotune.errors import InputError
from autotune.recipe import Recipe
from autotune.sweep import life, state
from autotune.sweep.storages import VARIABLE, open_storage, optuna
from autotune.sweep.studies import settings, view
from autotune.sweep.trial import Lost, TrialRun
from autotune.tracking.store import safe_uri

IDLE = 1.0
"""Seconds between two looks at the queue while others still run."""
PATIENCE = 120.0
"""Seconds that a worker waits for the study to be made."""


def work(url: str | None, name: str | None = None, folder: Path | None = None, jobs: int = 1) -> int:
    """Work on a study until it is finished; the number of trials carried out.

    Args:
        url: the storage; `AUTOTUNE_STORAGE` of the environment where it is not given.
        name: the study; may be left out where the storage holds one only.
        folder: where its runs are on this machine, when not where the study was made.
        jobs: workers that share this machine, for their threads.

    Raises:
        InputError: there is no such study.
        KeyboardInterrupt: Ctrl-C; the trial in work has saved and waits for another worker.
    """
    place = url or os.environ.get(VARIABLE, "")
    if not place:
        raise InputError(f"which storage? Expected --storage URL, or {VARIABLE} in the environment")
    storage = open_storage(place)
    name = name or _only_study(storage, place)
    study = _waited_for(storage, name, place)
    plan = study.user_attrs["plan"]
    recipe = Recipe.model_validate(plan["recipe"])
    worker = Worker(storage, place, name, recipe, folder or Path(plan["folder"]), threads_for(jobs))
    return worker.run()


def _only_study(storage: Any, url: str) -> str:
    names = [study.study_name for study in storage.get_all_studies()]
    if len(names) != 1:
        found = f"holds {', '.join(names)}" if names else "holds no study"
        raise InputError(f"{safe_uri(url)} {found}; name one with --study NAME")
    return str(names[0])


def _waited_for(storage: Any, name: str, url: str) -> Any:
    """The study, once whoever makes it has queued its trials."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        try:
            study = optuna().load_study(storage=storage, study_name=name)
        except KeyError:
            raise InputError(
                f"{safe_uri(url)} has no study {name!r}; make it with: autotune sweep RECIPE --storage URL"
            ) from None
        if study.user_attrs.get("queued"):
            return study
        time.sleep(IDLE)
    raise InputError(f"the study {name!r} has no queue after {PATIENCE:g} s; run autotune sweep RECIPE again")


@dataclass
class Worker:
    """One process's part in a study."""

    storage: Any
    url: str
    name: str
    recipe: Recipe
    folder: Path
    threads: int

    def run(self) -> int:
        count, watch = 0, life.Watch(view(self.storage, self.name, self.recipe), settings(self.recipe).grace)
        while True:
            study = view(self.storage, self.name, self.recipe)
            trial = life.claim(study)
            if trial is not None:
                self._carry_out(trial, watch)
                count += 1
            elif not study.get_trials(deepcopy=False, states=life.unfinished()):
                return count
            else:
                watch.rescue()
                time.sleep(IDLE)

    def _carry_out(self, trial: Any, watch: life.Watch) -> None:
        slot = trial.user_attrs["slot"]
        study = view(self.storage, self.name, self.recipe, slot)
        trial = optuna().trial.Trial(study, trial._trial_id)
        with life.Beating(study, trial, settings(self.recipe).heartbeat, watch) as beating:
            run = TrialRun(study, trial, self.recipe, self.folder, self.threads, lambda: beating.lost)
            try:
                run.carry_out()
            except Lost:
                pass
            except KeyboardInterrupt:
                life.hand_back(study, trial)
                raise
            except Exception as error:
                life.fail(study, trial, f"{type(error).__name__}: {error}")
                raise
        state.write(study, self.recipe, self.folder, self.url)
