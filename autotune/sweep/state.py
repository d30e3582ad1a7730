"""`study.json` in the study's folder: what others may read of a study without knowing Optuna.

    {"study", "storage", "score", "objective", "second",
     "trials": [{"slot", "number", "state", "values", "params", "used", "folder", "runs": {seed: folder},
                 "scores", "tokens", "time", "reason", "attempts"}]}

One entry per planned trial: its last attempt. Written anew, as a whole, whenever a trial ends.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from autotune.children import seeded
from autotune.recipe import Recipe
from autotune.sweep.studies import ATTEMPT, REASON, SLOT, settings
from autotune.sweep.trial import trial_folder
from autotune.tracking.store import safe_uri

FILE = "study.json"


def snapshot(study: Any, recipe: Recipe, folder: Path, storage: str) -> dict[str, Any]:
    """The study as plain data."""
    section = settings(recipe)
    trials = [_entry(trial, recipe, folder) for trial in last_attempts(study).values()]
    return {
        "study": study.study_name,
        "storage": safe_uri(storage),
        "score": section.score,
        "objective": section.objective,
        "second": section.second,
        "trials": trials,
    }


def last_attempts(study: Any) -> dict[int, Any]:
    """Slot -> the newest trial of it."""
    trials = sorted(study.get_trials(deepcopy=False), key=lambda t: t.number)
    found = {t.user_attrs[SLOT]: t for t in trials if SLOT in t.user_attrs}
    return dict(sorted(found.items()))


def _entry(trial: Any, recipe: Recipe, folder: Path) -> dict[str, Any]:
    attrs, own = trial.user_attrs, trial_folder(folder, trial.user_attrs[SLOT])
    return {
        "slot": attrs[SLOT],
        "number": trial.number,
        "state": trial.state.name.lower(),
        "values": trial.values,
        "params": trial.params,
        "used": attrs.get("used", {}),
        "folder": str(own),
        "runs": {str(s): str(own / f"seed-{s}") for s in seeded(recipe, settings(recipe).seeds)},
        "scores": attrs.get("scores", []),
        "tokens": attrs.get("tokens", 0.0),
        "time": attrs.get("time", 0.0),
        "reason": attrs.get(REASON, ""),
        "attempts": attrs.get(ATTEMPT, 0) + 1,
    }


def write(study: Any, recipe: Recipe, folder: Path, storage: str) -> dict[str, Any]:
    """Write the file and return what is in it."""
    data = snapshot(study, recipe, folder, storage)
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f".{FILE}.{os.getpid()}"
    draft.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    draft.replace(folder / FILE)
    return data
