"""A book of groups in a real MLflow: a sweep above its trials, their ends, and what a kill leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from autotune.recipe.schema import MlflowSection
from autotune.tracking import sync
from autotune.tracking.book import Book, open_book
from autotune.tracking.receipt import read_receipt
from autotune.tracking.store import local_uri
from tests import journal_lines as j

mlflow = pytest.importorskip("mlflow")
SETTINGS = MlflowSection(experiment="sweeps")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of sweeps, with the one SQLite store that they share."""
    return tmp_path_factory.mktemp("runs")


def client(place: Path) -> Any:
    return mlflow.MlflowClient(local_uri(place / "any"))


def by_name(place: Path) -> dict[str, Any]:
    store = client(place)
    experiment = store.get_experiment_by_name("sweeps").experiment_id
    return {run.info.run_name: run for run in store.search_runs([experiment])}


def scores(place: Path, run: Any, name: str) -> list[tuple[int, float]]:
    points = client(place).get_metric_history(run.info.run_id, name)
    return [(p.step, p.value) for p in sorted(points, key=lambda p: p.timestamp)]


def told(book: Book, name: str) -> None:
    """What a sweep tells: itself, a finished trial, and one that is not finished."""
    book.tell(name, params={"space": {"kl_coef": [0.001, 0.1]}}, tags={"sampler": "tpe"})
    for trial, score in enumerate((0.5, 0.7)):
        names = (name, f"{name} trial {trial}")
        book.tell(*names, params={"kl_coef": 0.01 * trial})
        if trial == 0:
            book.tell(*names, metrics={"score": score}, step=trial, status="done")
        book.tell(name, metrics={"best": score}, step=trial, note=f"**{score}** is best")


def test_trials_lie_below_their_sweep_and_end_with_it(place: Path) -> None:
    with open_book(place / "a", SETTINGS) as book:
        told(book, "a")
        below = book.below("a", "a trial 0")
    assert book.delivery is not None
    assert book.delivery.complete, book.delivery.message
    assert below.group == ("a", "a trial 0")
    assert below.uri == local_uri(place / "a")
    found = by_name(place)
    sweep, first, second = found["a"], found["a trial 0"], found["a trial 1"]
    assert {run.info.status for run in (sweep, first, second)} == {"FINISHED"}
    assert first.data.tags["mlflow.parentRunId"] == sweep.info.run_id
    assert second.data.params == {"kl_coef": "0.01"}
    assert sweep.data.params["space.kl_coef"] == "[0.001, 0.1]"
    assert sweep.data.tags["sampler"] == "tpe"
    assert sweep.data.tags["mlflow.note.content"] == "**0.7** is best"
    assert scores(place, sweep, "best") == [(0, 0.5), (1, 0.7)]


def test_book_kept_while_the_store_is_away_is_delivered_once_by_sync(place: Path) -> None:
    book = Book(place / "b" / "groups.jsonl", SETTINGS)
    told(book, "b")
    below = {"mlflow": book.below("b", "b trial 1").model_dump(mode="json")}
    run = j.header(name="seed", tracking=below)
    seed = j.write(place / "b" / "seed", [run, j.rollout(0), j.end()])
    (seed / "recipe.resolved.json").write_text(json.dumps(run["recipe"]))
    book.end("failed")
    assert sync(place / "b") == 0
    before = book.path.with_name("groups.mlflow.json").read_text()
    book.path.with_name("groups.mlflow.json").unlink()  # as a crash before the receipt would
    assert sync(place / "b") == 0
    assert json.loads(before)["run_id"] == by_name(place)["b"].info.run_id
    found = by_name(place)
    assert scores(place, found["b"], "best") == [(0, 0.5), (1, 0.7)]
    assert found["b trial 0"].info.status == "FINISHED"
    assert found["b trial 1"].info.status == found["b"].info.status == "FAILED"
    assert found["seed-7"].data.tags["mlflow.parentRunId"] == found["b trial 1"].info.run_id


KILLED = """
import os, sys
from pathlib import Path
from autotune.tracking.book import open_book
from tests.tracking.test_book import SETTINGS, told
with open_book(Path(sys.argv[1]), SETTINGS) as book:
    told(book, "c")
    os.kill(os.getpid(), 9)
"""


def test_groups_of_a_killed_sweep_are_marked_killed(place: Path) -> None:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(place / "c")], env={**os.environ, "PYTHONPATH": root}, cwd=root
    )
    assert done.returncode == -signal.SIGKILL
    until = time.monotonic() + 60
    while not ((known := read_receipt(place / "c", "groups.mlflow.json")) and known.finished):
        assert time.monotonic() < until, (place / "c" / "mlflow.log").read_text()
        time.sleep(0.2)
    found = by_name(place)
    assert found["c trial 0"].info.status == "FINISHED"
    assert found["c trial 1"].info.status == found["c"].info.status == "KILLED"
    assert scores(place, found["c"], "best") == [(0, 0.5), (1, 0.7)]


def test_folder_without_anything_to_deliver_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sync(tmp_path) == 2
    assert "give the folder of a run" in capsys.readouterr().err
