"""The feeder against a real MLflow: every point once and in order, whatever happens on the way."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.recipe.schema import MlflowSection, Recipe, TrackingSection
from autotune.tracking import start_feeder, sync
from autotune.tracking.feeder import main
from autotune.tracking.receipt import Receipt, read_receipt, write_receipt
from autotune.tracking.store import local_uri, safe_uri
from tests import journal_lines as j

mlflow = pytest.importorskip("mlflow")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of run folders; its one SQLite store is shared by the tests, as it is by runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def folder(runs: Path, request: pytest.FixtureRequest) -> Path:
    return runs / request.node.name


def client(folder: Path, uri: str = "") -> Any:
    return mlflow.MlflowClient(uri or local_uri(folder))


def receipt(folder: Path) -> Receipt:
    known = read_receipt(folder)
    assert known is not None
    return known


def history(folder: Path, metric: str, uri: str = "") -> list[tuple[int, float]]:
    """(step, value) as stored, in order of time."""
    points = client(folder, uri).get_metric_history(receipt(folder).run_id, metric)
    return [(p.step, p.value) for p in sorted(points, key=lambda p: p.timestamp)]


def rewards(*rollouts: int) -> list[tuple[int, float]]:
    return [(t, pytest.approx(0.2 + 0.01 * t)) for t in rollouts]


def whole_run(count: int = 6) -> list[j.Line]:
    change = j.change("X1", "actor_learning_rate", 3e-5, 1.2e-4, "regulator")
    lines = [j.header(name=f"run{count}"), j.evaluation(0, 0.1, 0.2)]
    lines += [j.rollout(t, changes=[change] if t == 2 else []) for t in range(count)]
    return [*lines, j.evaluation(count, 0.9, 0.8), j.end()]


def feed(folder: Path, *options: str) -> int:
    return main([str(folder), *options])


def test_every_point_once_and_in_order(folder: Path) -> None:
    j.write(folder, whole_run())
    (folder / "recipe.resolved.json").write_text("{}")
    assert feed(folder) == 0
    assert history(folder, "reward_mean") == rewards(*range(6))
    assert history(folder, "knob/kl_coef") == [(t, 0.005) for t in range(6)]
    assert history(folder, "time/update") == [(t, 0.3) for t in range(6)]
    assert history(folder, "control/changes") == [(t, float(t == 2)) for t in range(6)]
    assert history(folder, "decision/X1/actor_learning_rate") == [(2, 1.2e-4)]
    assert history(folder, "eval/greedy") == [(0, 0.1), (6, 0.9)]
    assert history(folder, "eval/sampled") == [(0, 0.2), (6, 0.8)]


def test_run_carries_params_tags_note_table_and_files(folder: Path) -> None:
    lines = whole_run()
    lines[0] = j.header(name="wide", trainer={f"p{i}": "v" * 9000 for i in range(130)})
    j.write(folder, lines)
    (folder / "recipe.resolved.json").write_text(json.dumps(lines[0]["recipe"]))
    assert feed(folder) == 0
    run = client(folder).get_run(receipt(folder).run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "wide-7"
    assert len([p for p in run.data.params if p.startswith("trainer.p")]) == 130
    expected = {"name": "wide", "seed": "7", "mode": "act", "profile": "recommended"}
    assert expected.items() <= run.data.tags.items()
    assert run.data.tags["mlflow.source.git.commit"] == "c0ffee"
    assert "| 2 | X1 | actor_learning_rate | 3e-05 → 0.00012 |" in run.data.tags["mlflow.note.content"]
    artifacts = {a.path: a for a in client(folder).list_artifacts(run.info.run_id)}
    assert set(artifacts) == {"journal.jsonl", "recipe.resolved.json", "decisions.json"}
    assert artifacts["journal.jsonl"].file_size == (folder / "journal.jsonl").stat().st_size


def test_verdicts_and_would_be_changes_are_marks_too(folder: Path) -> None:
    wish = j.change("A1", "ppo_epochs", 1, 2)
    verdict = j.verdict("B4a", "clip_range_high", "reverted", 0)
    j.write(folder, [j.header(), j.rollout(0, changes=[wish], act=False), j.rollout(1, verdicts=[verdict])])
    assert feed(folder) == 0
    assert history(folder, "would/A1/ppo_epochs") == [(0, 2.0)]
    assert history(folder, "verdict/B4a/clip_range_high") == [(1, -1.0)]


def test_histograms_become_a_figure_and_samples_of_the_machine_are_sent_once(folder: Path) -> None:
    lines = whole_run()
    for line in lines:
        if line["type"] == "rollout":
            line["snapshot"]["histograms"]["policy_ratio"] = [1.0] * 66
    j.write(folder, lines[:5])
    samples = [{"at": 1.8e9 + t, "values": {"cpu_utilization_percentage": 10.0 + t}} for t in range(100)]
    (folder / "system.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples[:45]))
    assert feed(folder) == 0
    with (folder / "system.jsonl").open("a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in samples[45:]))
    j.write(folder, lines[5:], "a")
    assert feed(folder) == 0
    expected = [(t, 10.0 + t) for t in range(100)]
    assert history(folder, "system/cpu_utilization_percentage") == expected
    write_receipt(folder, replace(receipt(folder), system=0))  # a crash before the receipt
    assert feed(folder) == 0
    assert history(folder, "system/cpu_utilization_percentage") == expected
    run = receipt(folder).run_id
    assert [a.path for a in client(folder).list_artifacts(run, "figures")] == ["figures/policy_ratio.png"]


def test_twin_that_a_slow_server_made_is_removed(folder: Path) -> None:
    j.write(folder, whole_run()[:3])
    assert feed(folder) == 0
    first = receipt(folder)
    twin = client(folder).create_run(first.experiment_id, tags={"autotune.delivery": first.key})
    j.write(folder, whole_run()[3:], "a")
    assert feed(folder) == 0
    assert client(folder).get_run(twin.info.run_id).info.lifecycle_stage == "deleted"
    assert history(folder, "reward_mean") == rewards(*range(6))


def test_decision_table_is_one_that_mlflow_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    j.write(folder, whole_run())
    assert feed(folder) == 0
    assert feed(folder) == 0  # a second delivery replaces the table
    run = client(folder).get_run(receipt(folder).run_id)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", local_uri(folder))  # load_table asks the global store
    table = client(folder).load_table(run.info.experiment_id, "decisions.json", [run.info.run_id])
    assert len(table) == 1
    row = table.iloc[0]
    assert (row["rollout"], row["what"], row["rule"]) == (2, "change", "X1")
    assert row["after"] == pytest.approx(1.2e-4)
    assert row["reason"] == "X1 had its reason"


def test_resumed_run_continues_its_mlflow_run(folder: Path) -> None:
    lines = whole_run(8)
    j.write(folder, lines[:6])  # killed after rollout 3, whose checkpoint was rollout 2's
    assert feed(folder) == 0
    first = receipt(folder)
    assert history(folder, "reward_mean") == rewards(0, 1, 2, 3)
    assert client(folder).get_run(first.run_id).info.status == "RUNNING"
    repeated = [{"type": "resumed", "rollout": 2, "from": 2}, *lines[4:]]
    j.write(folder, repeated, "a")
    assert feed(folder) == 0
    assert receipt(folder).run_id == first.run_id
    assert history(folder, "reward_mean") == rewards(*range(8))
    assert client(folder).get_run(first.run_id).info.status == "FINISHED"


@pytest.mark.parametrize("known", [{"rollout": 2}, {}, {"run_id": ""}])
def test_crash_before_the_receipt_sends_nothing_twice(folder: Path, known: dict[str, Any]) -> None:
    j.write(folder, whole_run())
    assert feed(folder) == 0
    first = receipt(folder)
    write_receipt(
        folder, Receipt(**{"store": first.store, "key": first.key, "run_id": first.run_id, **known})
    )
    assert feed(folder) == 0
    assert receipt(folder).run_id == first.run_id
    assert history(folder, "reward_mean") == rewards(*range(6))
    assert history(folder, "eval/greedy") == [(0, 0.1), (6, 0.9)]


def test_equal_journals_of_two_folders_are_two_runs(folder: Path) -> None:
    twin = folder.with_name("twin")
    for place in (folder, twin):
        assert feed(j.write(place, whole_run())) == 0
    assert receipt(folder).run_id != receipt(twin).run_id
    assert history(folder, "reward_mean") == history(twin, "reward_mean") == rewards(*range(6))


def test_deleted_run_is_delivered_anew(folder: Path) -> None:
    j.write(folder, whole_run())
    assert feed(folder) == 0
    first = receipt(folder).run_id
    client(folder).delete_run(first)
    assert feed(folder) == 0
    assert receipt(folder).run_id != first
    assert history(folder, "reward_mean") == rewards(*range(6))


def test_torn_last_line_waits_until_it_is_whole(folder: Path) -> None:
    lines = whole_run()
    j.write(folder, lines[:4])
    text = json.dumps(lines[4])
    with (folder / "journal.jsonl").open("a") as file:
        file.write(text[:50])
    assert feed(folder) == 0
    assert history(folder, "reward_mean") == rewards(0, 1)
    with (folder / "journal.jsonl").open("a") as file:
        file.write(text[50:] + "\n")
    assert feed(folder) == 0
    assert history(folder, "reward_mean") == rewards(0, 1, 2)


@pytest.mark.parametrize(
    ("status", "word"), [("failed", "FAILED"), ("stopped", "FAILED"), ("interrupted", "KILLED")]
)
def test_end_of_the_journal_ends_the_run(folder: Path, status: str, word: str) -> None:
    j.write(folder, [*whole_run()[:-1], j.end(status)])
    assert feed(folder) == 0
    assert client(folder).get_run(receipt(folder).run_id).info.status == word


def test_one_feeder_at_a_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    j.write(folder, whole_run())
    with (folder / ".mlflow.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert feed(folder) == 2
    assert "another feeder" in capsys.readouterr().err


def test_folder_without_journal_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert feed(tmp_path) == 2
    assert "no journal.jsonl" in capsys.readouterr().err


def test_password_stays_out_of_files_and_messages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"http://me:secret@127.0.0.1:{free_port()}"
    assert safe_uri(uri).startswith("http://me:***@127.0.0.1:")
    j.write(folder, whole_run())
    assert feed(folder, "--uri", uri, "--patience", "0") == 1
    said = capsys.readouterr()
    assert "autotune sync" in said.err
    assert "secret" not in said.err + said.out
    assert not (folder / "mlflow.json").exists()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[int], str]]:
    """Starts a tracking server on the loopback interface."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> str:
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port),
            "--workers", "1", "--backend-store-uri", f"sqlite:///{tmp_path / 'server.db'}",
            "--artifacts-destination", str(tmp_path / "artifacts"),
        ]  # fmt: skip
        quiet = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
        with (tmp_path / "server.log").open("wb") as log:
            server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, env=quiet)
        servers.append(server)
        wait_for(lambda: listening(port), 90, "server")
        return f"http://127.0.0.1:{port}"

    yield start
    for server in servers:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for(done: Callable[[], bool], seconds: float, what: str) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"{what}: not within {seconds} s"
        time.sleep(0.2)


@pytest.mark.slow
def test_server_down_gives_up_cleanly_and_sync_completes_later(
    folder: Path, serve: Callable[[int], str], capsys: pytest.CaptureFixture[str]
) -> None:
    j.write(folder, whole_run())
    before = (folder / "journal.jsonl").read_bytes()
    port = free_port()
    assert feed(folder, "--uri", f"http://127.0.0.1:{port}", "--patience", "1") == 1
    assert f"autotune sync {folder}" in capsys.readouterr().err
    assert (folder / "journal.jsonl").read_bytes() == before
    uri = serve(port)
    assert sync(folder, uri) == 0
    assert history(folder, "reward_mean", uri) == rewards(*range(6))
    run = client(folder, uri).get_run(receipt(folder).run_id)
    assert run.info.status == "FINISHED"
    names = {a.path for a in client(folder, uri).list_artifacts(run.info.run_id)}
    assert names == {"journal.jsonl", "decisions.json"}


RUN = """
import json, os, sys, time
from pathlib import Path
from autotune.recipe.schema import Recipe
from autotune.tracking import start_feeder
from tests import journal_lines as j
folder, die = Path(sys.argv[1]), sys.argv[2] == "die"
j.write(folder, [j.header()])
feeder = start_feeder(folder, Recipe())
for t in range(5):
    j.write(folder, [j.rollout(t)], "a")
    time.sleep(0.05)
if die:
    os.kill(os.getpid(), 9)
j.write(folder, [j.end()], "a")
began = time.monotonic()
delivery = feeder.finish(60)
assert "mlflow" not in sys.modules
print(json.dumps([delivery.complete, delivery.message]))
"""


def start_run(folder: Path, ending: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": root}
    command = [sys.executable, "-c", RUN, str(folder), ending]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=root, timeout=120)


def test_feeder_follows_a_live_run_outside_of_its_process(folder: Path) -> None:
    done = start_run(folder, "finish")
    assert done.returncode == 0, done.stderr
    complete, message = json.loads(done.stdout)
    assert complete, message
    assert receipt(folder).run_id in message
    assert f"autotune dashboard {folder}" in message
    assert history(folder, "reward_mean") == rewards(*range(5))


def test_killed_run_is_delivered_and_marked_killed(folder: Path) -> None:
    assert start_run(folder, "die").returncode == -9
    wait_for(lambda: (read_receipt(folder) or Receipt("")).finished, 60, "feeder of the killed run")
    assert history(folder, "reward_mean") == rewards(*range(5))
    assert client(folder).get_run(receipt(folder).run_id).info.status == "KILLED"


def test_switched_off_tracking_starts_nothing(tmp_path: Path) -> None:
    recipe = Recipe(tracking=TrackingSection(mlflow=MlflowSection(enabled=False)))
    feeder = start_feeder(tmp_path, recipe)
    assert feeder.process is None
    assert "switched off" in feeder.finish().message


def nested(seed: int, *names: str) -> list[j.Line]:
    settings = {"experiment": "nested", "group": list(names), "tags": {"study": "s1"}}
    return [j.header(seed=seed, tracking={"mlflow": settings}), j.rollout(0), j.end()]


def test_what_is_shared_lies_beside_the_sqlite_file_wherever_the_run_is(tmp_path: Path) -> None:
    folder = j.write(tmp_path / "sweep" / "trial" / "seed", whole_run())
    assert feed(folder, "--uri", f"sqlite:///{tmp_path / 'all.db'}") == 0
    assert (tmp_path / "mlflow-artifacts" / "autotune").is_dir()
    assert not (tmp_path / "sweep" / "trial" / "mlflow-artifacts").exists()


def test_seeds_lie_below_their_trial_and_trials_below_their_sweep(runs: Path) -> None:
    for seed, trial in ((1, "trial 0"), (2, "trial 0"), (1, "trial 1")):
        assert feed(j.write(runs / f"{trial}-{seed}", nested(seed, "it's a sweep", trial))) == 0
    store = client(runs / "trial 0-1")
    place = store.get_experiment_by_name("nested").experiment_id
    found = {run.info.run_id: run for run in store.search_runs([place])}
    assert len(found) == 6
    above = {i: found.get(run.data.tags.get("mlflow.parentRunId")) for i, run in found.items()}
    names = sorted(
        (run.info.run_name, above[i].info.run_name if above[i] else "") for i, run in found.items()
    )
    assert names == [
        ("it's a sweep", ""), ("small-1", "trial 0"), ("small-1", "trial 1"), ("small-2", "trial 0"),
        ("trial 0", "it's a sweep"), ("trial 1", "it's a sweep"),
    ]  # fmt: skip
    assert found[receipt(runs / "trial 0-1").run_id].data.tags["study"] == "s1"
    assert {run.info.status for run in found.values()} == {"FINISHED"}


def test_groups_that_nobody_tells_of_run_and_end_with_their_latest_run(runs: Path) -> None:
    def status() -> set[str]:
        store = client(runs / "any")
        place = store.get_experiment_by_name("nested").experiment_id
        found = [run.info for run in store.search_runs([place])]
        return {info.status for info in found if info.run_name in ("s", "s trial")}

    for seed, end, expected in ((1, "done", "FINISHED"), (2, "interrupted", "KILLED")):
        lines = nested(seed, "s", "s trial")
        folder = j.write(runs / f"s-{seed}", lines[:2])
        assert feed(folder) == 0
        assert status() == {"RUNNING"}
        j.write(folder, [j.end(end)], "a")
        assert feed(folder) == 0
        assert status() == {expected}
