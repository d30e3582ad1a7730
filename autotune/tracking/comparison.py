"""A page that compares runs, as an artifact of a run of its own, so that MLflow's pages show it.

MLflow draws no reference lines and no bands in its own charts; an HTML artifact, which it shows in
a frame with its script running, has them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.tracking.groups import group_key
from autotune.tracking.names import TAG_LIMIT, cut
from autotune.tracking.store import Store

PAGE = "comparison.html"
KEY_TAG = "autotune.comparison"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where the page is."""

    experiment_id: str
    run_id: str

    @property
    def path(self) -> str:
        """Behind the address of MLflow's server."""
        return f"/#/experiments/{self.experiment_id}/runs/{self.run_id}/artifacts/{PAGE}"


def publish(
    uri: str, experiment: str, runs: Sequence[Path], html: str, note: str = ""
) -> Comparison:
    """Put the page of these runs into the store; the same runs have the same page, replaced.

    Args:
        runs: their folders, in order; these are the comparison's identity.
        note: Markdown, the description that MLflow shows.
    """
    store = Store(uri, runs[0])
    key, now = group_key([str(run.resolve()) for run in runs]), round(time.time() * 1000)
    tags = {
        "mlflow.runName": cut(f"comparison: {', '.join(run.name for run in runs)}", 100),
        "mlflow.source.name": "autotune dashboard", KEY_TAG: key,
    }  # fmt: skip
    store.open_marked(experiment, KEY_TAG, key, now, tags)
    store.log_text(html, PAGE)
    if note:
        store.set_tag("mlflow.note.content", cut(note, TAG_LIMIT))
    store.terminate("FINISHED", now)
    return Comparison(store.experiment_id, store.run_id)
