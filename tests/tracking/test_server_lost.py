"""A real run while its MLflow server hangs, is killed and comes back: the training does not notice.

Afterwards MLflow holds every point once and in order, whatever the server missed meanwhile.
"""

from __future__ import annotations

import io
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from autotune.journal import read_journal
from autotune.recipe import load_recipe
from autotune.tracking import sync
from autotune.tracking.receipt import read_receipt
from tests.tracking.mlflow_server import Server

mlflow = pytest.importorskip("mlflow")
pytest.importorskip("deepspeed")
pytestmark = pytest.mark.slow

HANGS, GOES_ON, DIES, RETURNS, ROLLOUTS = 13, 24, 30, 41, 46
STATES = {"answers": range(3, HANGS), "hangs": range(HANGS, GOES_ON), "is dead": range(DIES, RETURNS)}
"""What the server does during which rollouts; the first ones warm up, and a start takes CPU time itself."""
PACE_WORK = 400_000
RECIPE = """
name: lost
run_dir: {folder}
trainer: {{rollouts: {rollouts}, train_batch_size: 32, rollout_n: 4, ppo_mini_batch_size: 8}}
eval: {{every: 20, prompts: 32}}
control: {{mode: shadow}}
tracking: {{mlflow: {{uri: "{uri}", system_metrics: 2}}}}
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.kill()


def train(folder: Path, uri: str, rollouts: int, on_phase: Callable[[str, int], None]) -> Any:
    from autotune.run import run

    path = folder.with_suffix(".yaml")
    path.write_text(RECIPE.format(folder=folder, uri=uri, rollouts=rollouts))
    return run(load_recipe(path, []), on_phase=on_phase, console=Console(file=io.StringIO()))


def delivered(uri: str, run_id: str, metric: str) -> list[tuple[int, float]]:
    """(step, value) in order of the points' times."""
    points = mlflow.MlflowClient(uri).get_metric_history(run_id, metric)
    return [(p.step, p.value) for p in sorted(points, key=lambda p: p.timestamp)]


def expected(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Every valid metric and every knob of the journal, by name."""
    series: dict[str, list[tuple[int, float]]] = {}
    for line in read_journal(folder / "journal.jsonl"):
        if line["type"] == "rollout":
            snapshot = line["snapshot"]
            knobs = {f"knob/{name}": value for name, value in snapshot["knobs"].items()}
            for name, value in {**snapshot["metrics"], **knobs}.items():
                series.setdefault(name, []).append((line["rollout"], value))
    return series


def medians(seconds: dict[int, float]) -> dict[str, float]:
    """Of the values by rollout, by what the server was doing."""
    return {state: statistics.median(seconds[t] for t in during) for state, during in STATES.items()}


def pace() -> float:
    """Seconds of a fixed piece of work: how much of a core the neighbours leave at the moment."""
    began = time.perf_counter()
    sum(range(PACE_WORK))
    return time.perf_counter() - began


def test_training_does_not_notice_and_mlflow_misses_nothing(tmp_path: Path, server: Server) -> None:
    acts: dict[int, Callable[[], None]] = {
        HANGS: lambda: server.send(signal.SIGSTOP), GOES_ON: lambda: server.send(signal.SIGCONT),
        DIES: server.kill, RETURNS: server.start,
    }  # fmt: skip
    server.start()
    server.wait()
    folder, paces = tmp_path / "lost", dict[int, float]()

    def on_phase(phase: str, rollout: int) -> None:
        if phase == "rollout":
            acts.pop(rollout, lambda: None)()
            paces[rollout] = pace()

    result = train(folder, server.uri, ROLLOUTS, on_phase)
    assert not acts
    server.wait()
    if not result.delivery.complete:  # on a busy machine the new server took longer than the patience
        assert sync(folder) == 0
    lines = [line for line in read_journal(folder / "journal.jsonl") if line["type"] == "rollout"]
    times, paced = medians({t["rollout"]: t["times"]["total"] for t in lines}), medians(paces)
    for state in ("hangs", "is dead"):
        ratio, slower = times[state] / times["answers"], paced[state] / paced["answers"]
        print(f"median rollout while the server {state}: {ratio:.3f} of that while it answers; ", end="")
        print(f"the machine itself took {slower:.3f} of the time for a fixed piece of work")
        assert ratio < 1.5 * max(slower, 1.0), times  # one call on the path would wait for seconds
    known = read_receipt(folder)
    assert known is not None
    for metric, points in expected(folder).items():
        assert delivered(server.uri, known.run_id, metric) == points, metric
    system = delivered(server.uri, known.run_id, "system/cpu_utilization_percentage")
    assert [step for step, _ in system] == list(range(known.system))
    assert known.system >= 3
    runs = mlflow.MlflowClient(server.uri).search_runs([known.experiment_id])
    assert [(run.info.run_id, run.info.status) for run in runs] == [(known.run_id, "FINISHED")]


@pytest.mark.filterwarnings("ignore:subprocess .* is still running")  # its feeder, for its patience
def test_server_that_never_comes_costs_the_run_nothing_but_a_word(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.run.FEEDER_SECONDS", {"done": 3.0})
    result = train(tmp_path / "never", server.uri, 4, lambda phase, rollout: None)
    assert result.status == "done"
    assert not result.delivery.complete
    assert f"autotune sync {tmp_path / 'never'}" in result.delivery.message
    assert read_receipt(tmp_path / "never") is None
