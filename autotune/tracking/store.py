"""The only file that imports mlflow: one run in one tracking store.

Runs, metrics, params, tags and plain files only; nothing is ever loaded back from the store except
the run's own fields. Usage statistics and git look-ups of mlflow are switched off before it is
imported, and its own retries are kept short because the feeder has its own.
"""

from __future__ import annotations

import contextlib
import copy
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from autotune.tracking.groups import PARENT_TAG, end_groups, open_group, reopen_groups
from autotune.tracking.names import METRICS_PER_CALL, PARAMS_PER_CALL, chunks
from autotune.tracking.payload import Point

QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
KEY_TAG = "autotune.delivery"
"""The receipt's key: finds a run whose id could not be written down any more."""


ARTIFACTS = "mlflow-artifacts"
"""Folder beside a local SQLite store."""


def local_uri(folder: Path) -> str:
    """One SQLite store beside the run folders, so that runs compare."""
    return f"sqlite:///{folder.resolve().parent / 'mlflow.db'}"


def safe_uri(uri: str) -> str:
    """A URI without its password, fit for files and messages."""
    parts = urlsplit(uri)
    if parts.password is None:
        return uri
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{host}"))


def hide_password(text: str, uri: str) -> str:
    """A message of a library that may quote the URI, without the password."""
    password = urlsplit(uri).password
    return text.replace(password, "***") if password else text


class Store:
    """One MLflow run; every method may raise whatever the store raises."""

    def __init__(self, uri: str, folder: Path) -> None:
        os.environ.update(QUIET)
        import mlflow

        self.uri = uri
        self._folder = folder.resolve()
        with self._first_use():
            self._client = mlflow.MlflowClient(tracking_uri=uri)
            self._client.search_experiments(max_results=1)
        self.run_id = self.experiment_id = ""
        self.start_ms = 0

    @contextlib.contextmanager
    def _first_use(self) -> Iterator[None]:
        """Two feeders must not create the tables of one new SQLite file at the same time."""
        if not self.uri.startswith("sqlite:"):
            yield
            return
        with (self._beside() / ".mlflow-store.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _beside(self) -> Path:
        """The folder of the SQLite file, which all who deliver to it agree on."""
        path = self.uri.partition("sqlite:///")[2].partition("?")[0]
        return Path(path).resolve().parent if path else self._folder.parent

    def open_run(
        self, run_id: str, experiment: str, key: str, start_ms: int, tags: dict[str, str],
        group: Sequence[str] = (),
    ) -> bool:  # fmt: skip
        """Continue the run of this journal, or create it under its group; True when it was created."""
        known = self._usable(run_id) or self._find(experiment, key)
        created = known is None
        if known is None:
            place = self._experiment(experiment)
            with self._first_use():
                parent = open_group(self._client, place, group, start_ms)
            above = {PARENT_TAG: parent} if parent else {}
            known = self._client.create_run(
                place, start_time=start_ms, tags={**tags, **above, KEY_TAG: key}
            )
        elif known.info.status != "RUNNING":
            self._client.update_run(known.info.run_id, status="RUNNING")
        self.run_id, self.start_ms = known.info.run_id, known.info.start_time
        self.experiment_id = known.info.experiment_id
        if group:
            reopen_groups(self._client, self.run_id)
        return created

    def open_group(self, experiment: str, names: Sequence[str], start_ms: int) -> Store:
        """The same store with the run of this group in it, found or made."""
        group = copy.copy(self)
        group.experiment_id = self._experiment(experiment)
        with self._first_use():
            group.run_id = open_group(self._client, group.experiment_id, names, start_ms)
        group.start_ms = 0  # a group's points bear their own times
        return group

    def set_status(self, status: str) -> None:
        """`RUNNING` again, for a run that had ended."""
        self._client.update_run(self.run_id, status=status)

    def _usable(self, run_id: str) -> Any:
        """The run by its id, unless somebody deleted it."""
        from mlflow.exceptions import MlflowException

        if not run_id:
            return None
        try:
            run = self._client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def open_marked(
        self, experiment: str, tag: str, key: str, start_ms: int, tags: Mapping[str, str]
    ) -> None:
        """Continue the newest run with this tag, or create it with all `tags`."""
        known = self._find(experiment, key, tag)
        if known is None:
            place = self._experiment(experiment)
            known = self._client.create_run(place, start_time=start_ms, tags=dict(tags))
        self.run_id, self.start_ms = known.info.run_id, known.info.start_time
        self.experiment_id = known.info.experiment_id

    def _find(self, experiment: str, key: str, tag: str = KEY_TAG) -> Any:
        found = self._client.get_experiment_by_name(experiment)
        if found is None or found.lifecycle_stage != "active":
            return None
        where = f"tags.`{tag}` = '{key}'"
        runs = self._client.search_runs([found.experiment_id], where, max_results=1)
        return runs[0] if runs else None

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            if found.lifecycle_stage != "active":
                self._client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)
        place = None
        if self.uri.startswith("sqlite:"):
            place = (self._beside() / ARTIFACTS / name).as_uri()
        kind = {"mlflow.experimentKind": "custom_model_development"}  # pages for training, not for prompts
        return str(self._client.create_experiment(name, artifact_location=place, tags=kind))

    def log_params(self, params: dict[str, str]) -> None:
        """Params are written once; the ones that the run already has are left as they are."""
        from mlflow.entities import Param

        there = self._client.get_run(self.run_id).data.params
        new = [Param(k, v) for k, v in params.items() if k not in there]
        for some in chunks(new, PARAMS_PER_CALL):
            self._client.log_batch(self.run_id, params=list(some))

    def log_points(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(p.name, p.value, self.start_ms + round(p.after * 1000), p.step) for p in points]
        for some in chunks(metrics, METRICS_PER_CALL):
            self._client.log_batch(self.run_id, metrics=list(some))

    def log_table(self, table: dict[str, Any], name: str) -> None:
        """A table in the format of `mlflow.log_table`, replaced as a whole (that call appends)."""
        self._client.log_text(self.run_id, json.dumps(table), name)
        index = json.dumps([{"path": name, "type": "table"}])
        self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", index)

    def log_text(self, text: str, name: str) -> None:
        self._client.log_text(self.run_id, text, name)

    def log_bytes(self, data: bytes, name: str) -> None:
        """A binary artifact, replaced as a whole."""
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / Path(name).name
            path.write_bytes(data)
            self._client.log_artifact(self.run_id, str(path), str(Path(name).parent))

    def remove_twins(self, key: str) -> None:
        """Delete empty runs of this delivery that a slow server made after its answer was given up on."""
        where = f"tags.`{KEY_TAG}` = '{key}'"
        for run in self._client.search_runs([self.experiment_id], where, max_results=50):
            if run.info.run_id != self.run_id:
                self._client.delete_run(run.info.run_id)

    def log_file(self, path: Path) -> None:
        self._client.log_artifact(self.run_id, str(path))

    def set_tag(self, name: str, value: str) -> None:
        self._client.set_tag(self.run_id, name, value)

    def terminate(self, status: str, end_ms: int) -> None:
        self._client.set_terminated(self.run_id, status=status, end_time=end_ms)

    def end_groups(self, status: str, end_ms: int) -> None:
        """See `groups.end_groups`."""
        end_groups(self._client, self.run_id, status, end_ms)
