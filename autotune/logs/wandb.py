"""What a table exported from Weights & Biases calls its columns.

    _step,_runtime,train/reward                      `run.history()` or `scan_history()`, saved as CSV
    "Step","my-run - reward","my-run - reward__MIN"  "Export CSV" of a panel; one column set a run

Both become `step` and the trainer's own keys. W&B's clocks and the spread columns of a panel are no
metrics. In such a table an empty cell says that the key was not logged at that step, not that it failed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CLOCKS = ("_runtime", "_timestamp", "_wandb")
_PANEL = re.compile(r"(?P<run>.+) - (?P<key>\S.*)")
_SPREAD = ("__MIN", "__MAX")


def runs(header: Sequence[str]) -> list[str]:
    """Names of the runs that a panel's export holds, in its order; empty when it is none.

    Only a table whose first column is the step and whose others are all `RUN - KEY` is an export.
    """
    if len(header) < 2 or header[0].strip().lower() not in ("step", "_step", "train/global_step"):
        return []
    found = [_PANEL.fullmatch(name) for name in header[1:]]
    return list(dict.fromkeys(m["run"] for m in found if m)) if all(found) else []


def is_history(header: Sequence[str]) -> bool:
    """Whether this is a run's history: W&B adds `_step` and at least one of its clocks to every row."""
    return "_step" in header and any(name in header for name in CLOCKS)


def columns(header: Sequence[str], run: str = "") -> list[str]:
    """The trainer's key of each column; empty for a column that is left out.

    Args:
        header: the table's own names.
        run: which run of a panel's export; empty for its first.
    """
    names = runs(header)
    if not names:
        return ["step" if h == "_step" else "" if _clock(h) else h for h in header]
    prefix = f"{run if run in names else names[0]} - "
    return ["step", *(h.removeprefix(prefix) if _wanted(h, prefix) else "" for h in header[1:])]


def _clock(name: str) -> bool:
    return name.startswith(CLOCKS)


def _wanted(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and not name.endswith(_SPREAD) and not _clock(name.removeprefix(prefix))
