"""Runs that hold other runs: a sweep above its trials, a trial above its seeds.

A group is found in the store by its names, so the runs below it need no common process: whoever
delivers first makes it. MLflow has no unique names for runs, so two who make the same group at the
same moment are told apart afterwards: the smallest run id stays, the other is deleted.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

PARENT_TAG = "mlflow.parentRunId"
GROUP_TAG = "autotune.group"
BOOK_TAG = "autotune.book"
"""On a group that somebody tells of (`autotune.tracking.book`) and will end."""
SETTLE_SECONDS = 1.0
"""How long a maker waits for the other makers' runs to be seen."""


def group_key(names: Sequence[str]) -> str:
    """What marks the group of these names, outermost first; short, and free of quotes."""
    return hashlib.sha256(json.dumps(list(names)).encode()).hexdigest()[:32]


def open_group(client: Any, experiment_id: str, names: Sequence[str], start_ms: int) -> str:
    """Run id of the innermost group, each made under the one before; empty without names."""
    parent = ""
    for depth in range(1, len(names) + 1):
        path = names[:depth]
        found = _find(client, experiment_id, path)
        parent = found or _make(client, experiment_id, path, parent, start_ms)
    return parent


def _find(client: Any, experiment_id: str, names: Sequence[str]) -> str:
    """The group's run that every reader agrees on."""
    where = f"tags.`{GROUP_TAG}` = '{group_key(names)}'"
    runs = client.search_runs([experiment_id], where, max_results=50)
    return min((run.info.run_id for run in runs), default="")


def _make(client: Any, experiment_id: str, names: Sequence[str], parent: str, start_ms: int) -> str:
    tags = {GROUP_TAG: group_key(names), "mlflow.runName": names[-1], "mlflow.source.name": "autotune"}
    above = {PARENT_TAG: parent} if parent else {}
    run = client.create_run(experiment_id, start_time=start_ms, tags={**tags, **above})
    time.sleep(SETTLE_SECONDS)
    chosen = _find(client, experiment_id, names) or run.info.run_id
    if chosen != run.info.run_id:
        client.delete_run(run.info.run_id)
    return str(chosen)


def end_groups(client: Any, run_id: str, status: str, end_ms: int) -> None:
    """The groups above a run that ended: those that nobody tells of end with their latest run."""
    for group in _above(client, run_id):
        if BOOK_TAG not in group.data.tags:
            client.set_terminated(group.info.run_id, status=status, end_time=end_ms)


def reopen_groups(client: Any, run_id: str) -> None:
    """The groups above a run that begins, or goes on, are running."""
    for group in _above(client, run_id):
        if BOOK_TAG not in group.data.tags and group.info.status != "RUNNING":
            client.update_run(group.info.run_id, status="RUNNING")


def _above(client: Any, run_id: str) -> Iterator[Any]:
    """The runs that a run is nested under, innermost first."""
    above = client.get_run(run_id).data.tags.get(PARENT_TAG)
    while above:
        run = client.get_run(above)
        if GROUP_TAG not in run.data.tags:
            return
        yield run
        above = run.data.tags.get(PARENT_TAG)
