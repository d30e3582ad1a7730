"""What is known of runs that hold other runs, as a file: `FOLDER/groups.jsonl`.

A sweep tells of itself and of its trials here, and a process of its own delivers that to MLflow
(`book_feeder`), as the journal of a run is delivered. The file is the spool: the store may be down
for as long as it likes, and `autotune sync FOLDER` delivers the rest.

    with open_book(folder, recipe.tracking.mlflow) as book:
        book.tell("my sweep", params={"trials": 24})
        book.tell("my sweep", "trial 3", params={"kl_coef": 0.01}, metrics={"score": 0.71}, status="done")

The seeds of a trial are ordinary runs with `tracking.mlflow` as `book.below("my sweep", "trial 3")`
gives it. Nothing here imports mlflow, and nothing but the writing of the file raises.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autotune.recipe.schema import MlflowSection
from autotune.tracking.spawn import Delivery, FeederHandle, start_book_feeder
from autotune.tracking.store import local_uri

BOOK = "groups.jsonl"


class Book:
    """The writing end; one process holds it, several workers have a file each."""

    def __init__(self, path: Path, settings: MlflowSection) -> None:
        self.path = path
        self.settings = settings
        self.feeder: FeederHandle | None = None
        self.delivery: Delivery | None = None
        """How the delivery went, once the book is closed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._append({"type": "header", "experiment": settings.experiment, "uri": settings.uri})

    def tell(
        self, *names: str, params: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None, step: int = 0,
        tags: Mapping[str, Any] | None = None, note: str = "", files: Sequence[Path] = (),
        status: str = "",
    ) -> None:  # fmt: skip
        """Something new of one group; what was told before stays.

        Args:
            names: the group, outermost first.
            params: written once; a value that is told again is left as it was.
            metrics: points of series at `step`; each (name, step) once.
            note: Markdown, the description that MLflow shows.
            files: uploaded as they are when this is delivered.
            status: `done`, `failed`, `interrupted`, or `running` after one of these; a group that was
                told of without one ends with the book.
        """
        self._append({
            "type": "group", "names": list(names), "at": _now(), "params": dict(params or {}),
            "metrics": dict(metrics or {}), "step": step, "tags": dict(tags or {}), "note": note,
            "files": [str(Path(file).resolve()) for file in files], "status": status,
        })  # fmt: skip

    def below(self, *names: str) -> MlflowSection:
        """`tracking.mlflow` of a run that is nested under this group, in this book's store."""
        uri = self.settings.uri or local_uri(self.path.parent)
        return self.settings.model_copy(update={"uri": uri, "group": names})

    def end(self, status: str) -> None:
        self._append({"type": "end", "status": status, "at": _now()})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self.path.open("ab") as file:
            file.write(json.dumps({"v": 1, **line}, ensure_ascii=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@contextlib.contextmanager
def open_book(folder: Path, settings: MlflowSection, name: str = BOOK, wait: float = 60.0) -> Iterator[Book]:
    """A book in `folder` whose lines go to MLflow while it is open, where the recipe wants that.

    Args:
        folder: of the sweep; without `settings.uri` the store is the SQLite file beside it.
        name: another file for each further worker in the same folder.
        wait: seconds that the end waits for the delivery; it goes on by itself afterwards.
    """
    book = Book(Path(folder) / name, settings)
    book.feeder = start_book_feeder(book.path, settings)
    try:
        yield book
    except BaseException as error:
        book.end("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    else:
        book.end("done")
    finally:
        book.delivery = book.feeder.finish(wait)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
