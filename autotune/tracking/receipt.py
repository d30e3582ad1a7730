"""RUN/mlflow.json: what is known to have been delivered, and where to.

Written atomically after every delivered batch. A crash between the delivery and this file leads
to the same points being sent again, which MLflow's store drops: a point's timestamp is derived
from the journal, so a repeated point is equal in every column.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

FILE = "mlflow.json"
URI_VARIABLE = "AUTOTUNE_MLFLOW_URI"
"""How the run hands the store to its feeder: a command line would show a password to everybody."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The state of one run's delivery to one store."""

    store: str
    """URI of the store, without its password."""
    key: str = ""
    """Random name of this delivery, written before the run is created and a tag of it: a crash
    between the two finds the run again."""
    run_id: str = ""
    experiment_id: str = ""
    lines: int = 0
    """Complete journal lines behind us."""
    rollout: int = -1
    """Highest rollout whose metrics were delivered."""
    eval: int = -1
    """Highest rollout whose held-out scores were delivered."""
    system: int = 0
    """Samples of system metrics behind us."""
    finished: bool = False
    """Artifacts and final status were delivered for the last `end` line."""


def read_receipt(folder: Path, name: str = FILE) -> Receipt | None:
    """The receipt of a run folder; None when there is none or it cannot be used."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        return Receipt(**{f.name: data[f.name] for f in dataclasses.fields(Receipt) if f.name in data})
    return None


def write_receipt(folder: Path, receipt: Receipt, name: str = FILE) -> None:
    """Replace the receipt in one step."""
    path = folder / name
    draft = path.with_suffix(".json.tmp")
    with draft.open("w", encoding="utf-8") as file:
        json.dump(dataclasses.asdict(receipt), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
