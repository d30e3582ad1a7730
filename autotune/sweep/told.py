"""What MLflow is told of a study itself: its plan, every trial's values and score, the conclusion.

The seeds are ordinary runs and tell their own story; this is about the two levels above them. The leader
writes a book (`autotune.tracking.book`) that another process delivers; the study notices neither a lost
server nor a full disk there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.recipe import Recipe
from autotune.recipe.axes import axes
from autotune.sweep.result import Outcome
from autotune.sweep.studies import settings
from autotune.tracking.book import Book, open_book

STATUS = {"complete": "done", "pruned": "interrupted", "fail": "failed"}
"""A trial's state -> how its run in MLflow ends."""


class Told:
    """Tells of one study; without a book it is silent."""

    def __init__(self, recipe: Recipe, folder: Path, book: Book | None) -> None:
        self._recipe = recipe
        self._folder = folder
        self._book = book
        self._names = (*recipe.tracking.mlflow.group, folder.name)

    def plan(self) -> None:
        """The study's own parameters."""
        section = settings(self._recipe)
        space = {f"space/{axis.path}": _range(axis) for axis in axes(self._recipe)}
        plan = {name: getattr(section, name) for name in ("trials", "seeds", "score", "objective", "sampler")}
        self._tell(*self._names, params={**plan, **space})

    def trial(self, entry: Mapping[str, Any]) -> None:
        """One trial that ended, as `study.json` has it; its values, its score, and why it ended."""
        points = {f"score/seed-{place}": float(v) for place, v in enumerate(entry["scores"])}
        points |= {name: float(entry[name]) for name in ("tokens", "time") if entry[name]}
        if entry["state"] == "complete":
            points["score"] = float(entry["values"][0])
            self._tell(*self._names, metrics={"score": points["score"]}, step=entry["slot"])
        self._tell(
            *self._names, f"trial {entry['slot']}", params=entry["params"], metrics=points,
            tags={"state": entry["state"]}, note=entry["reason"], status=STATUS[entry["state"]],
        )  # fmt: skip

    def outcome(self, outcome: Outcome) -> None:
        """The best trial, what it came to on fresh seeds, and the summary as the run's description."""
        points = {f"importance/{name}": share for name, share in outcome.importance.items()}
        for arm in outcome.arms:
            if arm.interval is not None:
                points[f"confirmed/{arm.name}"] = arm.interval.mean
        files = [path for name in ("summary.md", "best.yaml") if (path := outcome.folder / name).is_file()]
        note = (outcome.folder / "summary.md").read_text("utf-8")
        best = {f"best/{name}": value for name, value in outcome.params.items()}
        self._tell(*self._names, params=best, metrics=points, note=note, files=files)

    def _tell(self, *names: str, **what: Any) -> None:
        if self._book is not None:
            with contextlib.suppress(OSError):  # the study's own files are its record
                self._book.tell(*names, **what)


@contextlib.contextmanager
def telling(recipe: Recipe, folder: Path) -> Iterator[Told]:
    """While the study is led; silent where the recipe switches MLflow off."""
    mlflow = recipe.tracking.mlflow
    if not mlflow.enabled:
        yield Told(recipe, folder, None)
        return
    with open_book(folder, mlflow) as book:
        told = Told(recipe, folder, book)
        told.plan()
        yield told


def _range(axis: Any) -> str:
    shown = ", ".join(map(str, axis.choices)) if axis.choices else f"{axis.low:g} to {axis.high:g}"
    return f"{shown}{', log' if axis.log else ''}"
