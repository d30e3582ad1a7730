"""Real workers on real storages, one of them killed in the middle of a trial.

Whatever happens, every planned trial must be finished exactly once, and the one whose worker died must
have gone on from its own checkpoint. `scripts/postgres.sh` gives PostgreSQL; without it that half is skipped,
but not in CI.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  marks this file as one that needs the trainer

from autotune.children import JOURNAL
from autotune.journal import inspect_journal
from autotune.recipe import load_recipe

pytest.importorskip("optuna")
from autotune.sweep import life, studies
from autotune.sweep.storages import VARIABLE, open_storage

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE = 500.0

RECIPE = """\
name: small
run_dir: {folder}/small
trainer: {{rollouts: 30, train_batch_size: 8, rollout_n: 4, ppo_mini_batch_size: 4}}
eval: {{every: 0, prompts: 16}}
checkpoint: {{every: 1, keep: 2}}
control: {{mode: off}}
tracking: {{mlflow: {{enabled: false}}}}
sweep:
  trials: {trials}
  seeds: 1
  heartbeat: 0.5
  grace: 4
  pairs: none
  space: {{trainer.actor_learning_rate: {{low: 1.0e-5, high: 1.0e-3}}, trainer.clip_range: {{}}}}
"""


def url_of(kind: str, folder: Path) -> str:
    if kind == "sqlite":
        return f"sqlite:///{folder / 'study.db'}"
    url = os.environ.get("AUTOTUNE_TEST_POSTGRES", "")
    if not url and os.environ.get("CI"):
        pytest.fail("no PostgreSQL in CI: run this through scripts/postgres.sh")
    return url or pytest.skip("no PostgreSQL: scripts/postgres.sh pytest tests/sweep/test_workers.py")


class Team:
    """Workers as the command starts them, each with its runs in a process group of its own."""

    def __init__(self, url: str, name: str, count: int, log: Path) -> None:
        command = [sys.executable, "-m", "autotune", "sweep", "--worker", "--study", name]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), VARIABLE: url, "OMP_NUM_THREADS": "1"}
        self.log = log
        with log.open("wb") as out:
            self.workers = [
                subprocess.Popen(command, env=environment, stdout=out, stderr=out, start_new_session=True)
                for _ in range(count)
            ]

    def owner(self, folder: Path) -> subprocess.Popen[bytes]:
        """The worker whose child writes this run."""
        for worker in self.workers:
            children = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
            if any(str(folder) in Path(f"/proc/{c}/cmdline").read_text() for c in children):
                return worker
        raise AssertionError(f"nobody runs {folder}")

    def wait(self) -> list[int]:
        return [worker.wait(PATIENCE) for worker in self.workers]

    def end(self) -> None:
        for worker in self.workers:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def a_run_in_the_middle(study: Path, log: Path) -> Path:
    """The folder of a run that has saved a few rollouts and is not near its end."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        for journal in study.glob(f"trial-*/seed-1/{JOURNAL}"):
            saved = [x["rollout"] for x in inspect_journal(journal).lines if x["type"] == "checkpoint"]
            if saved and 3 <= max(saved) <= 15:
                return journal.parent
        time.sleep(0.02)
    raise AssertionError(f"no run came that far: {log.read_text()}")


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in inspect_journal(folder / JOURNAL).lines if line["type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "workers", "trials"), [("postgresql", 3, 5), ("sqlite", 2, 3)])
def test_a_killed_workers_trial_is_resumed_and_none_runs_twice(
    tmp_path: Path, kind: str, workers: int, trials: int
) -> None:
    url = url_of(kind, tmp_path)
    file = tmp_path / "small.yaml"
    file.write_text(RECIPE.format(folder=tmp_path, trials=trials))
    recipe, folder = load_recipe(file), tmp_path / "small-sweep"
    name = f"small-{os.getpid()}"
    study = studies.make(open_storage(url), name, recipe, folder)
    team = Team(url, name, workers, tmp_path / "workers.log")
    try:
        killed = a_run_in_the_middle(folder, team.log)
        victim = team.owner(killed)
        os.killpg(victim.pid, signal.SIGKILL)
        codes = team.wait()
    finally:
        team.end()
    assert sorted(codes) == [-9] + [0] * (workers - 1), team.log.read_text()

    told = study.get_trials()
    states = Counter((t.user_attrs[studies.SLOT], t.state.name) for t in told)
    assert {slot: states[slot, "COMPLETE"] for slot in range(trials)} == dict.fromkeys(range(trials), 1)
    lost = [t for t in told if t.state.name == "FAIL"]
    assert [t.user_attrs[studies.REASON] for t in lost] == [life.LOST]
    assert len(told) == trials + 1
    again = next(t for t in told if t.user_attrs.get("after") == lost[0].number)
    assert again.params == lost[0].params and again.user_attrs[studies.ATTEMPT] == 1
    assert folder / f"trial-{again.user_attrs[studies.SLOT]:04d}" == killed.parent

    for run in folder.glob("trial-*/seed-1"):
        assert len(lines(run, "header")) == 1
        assert [line["from"] >= 3 for line in lines(run, "resumed")] == ([True] if run == killed else [])
        assert [line["status"] for line in lines(run, "end")] == ["done"]
