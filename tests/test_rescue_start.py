"""A benchmark run that is a fork of a warm process is the run that a fresh interpreter makes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import autotune.trainer  # noqa: F401  # what is started here needs the extra `train`
from experiments.rescue import runs, start, suite

CLOCKED = {"at", "prev", "times", "tokens_per_second", "run_dir", "path"}
"""What two runs of one recipe may differ in: time, place, and the chain of hashes over both."""


def without_clock(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_clock(part) for name, part in value.items() if name not in CLOCKED}
    return [without_clock(part) for part in value] if isinstance(value, list) else value


@pytest.mark.slow
def test_a_forked_run_writes_the_journal_of_a_fresh_one(tmp_path: Path) -> None:
    small = {"trainer.rollouts": 4, "trainer.token_budget": None, "eval.prompts": 64}
    fields = suite.Job("ops6x2", "lr_x30", "recommended", 101).fields() | small
    fresh = runs.launch(fields, tmp_path / "fresh", tmp_path / "fresh.log", fresh=True)
    forked = [runs.launch(fields, tmp_path / n, tmp_path / f"{n}.log", fresh=False) for n in ("a", "b")]
    assert [ended.exit_code for ended in (fresh, *forked)] == [0, 0, 0]
    assert forked[1].core_seconds < fresh.core_seconds - 3  # torch, transformers, DeepSpeed

    texts = [(tmp_path / name / "journal.jsonl").read_text("utf-8") for name in ("fresh", "a", "b")]
    journals = [[without_clock(json.loads(line)) for line in text.splitlines()] for text in texts]
    assert journals[0] == journals[1] == journals[2]
    scores = [runs.numbers(tmp_path / name / "journal.jsonl") for name in ("fresh", "a")]
    assert without_tokens(scores[0]) == without_tokens(scores[1])
    assert scores[0]["restores"] > 0  # the controller acted, in all of them alike
    assert "mlflow" in (tmp_path / "a.log").read_text() and "mlflow" in (tmp_path / "fresh.log").read_text()


def without_tokens(found: dict[str, Any]) -> dict[str, Any]:
    """Tokens are rounded from a rate and a time."""
    return {name: value for name, value in found.items() if name not in ("tokens", "score", "curve")}


@pytest.mark.slow
def test_a_forked_run_ends_with_the_command_lines_exit_code(tmp_path: Path) -> None:
    ended = start.start(["run", str(tmp_path / "none.yaml")], tmp_path / "log", fresh=False)
    assert ended.exit_code == 2
    assert "none.yaml" in (tmp_path / "log").read_text()


def test_what_a_killed_run_has_used_is_known() -> None:
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    code, cores = start._wait(pid)
    assert code == -signal.SIGKILL and cores >= 0


def test_on_a_gpu_no_run_starts_before_the_engine_of_the_last_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "has_gpu", lambda: True)
    held: list[bool] = []

    def up() -> bool:
        held.append(start._STARTING.locked())
        return False  # it never stands: the run's end frees the place too

    ended = start.start(["--version"], tmp_path / "log", up=up)
    assert ended.exit_code == 0 and ended.core_seconds > 0
    assert held and all(held) and not start._STARTING.locked()
    assert "autotune" in (tmp_path / "log").read_text()


def test_a_run_that_never_began_has_a_row_and_stops_no_other(tmp_path: Path) -> None:
    """Its recipe is refused before there is a journal."""
    jobs = [suite.Job("sort6", "well_set", "fixed", seed, "tuning") for seed in (1, 2)]
    assert runs.run_all(jobs, tmp_path, 1, ["trainer.train_batch_size=7"]) == 2
    for row in runs.load(tmp_path / "results.jsonl"):
        assert row.exit_code == 2 and row.score is None and row.seconds > 0
        assert "train_batch_size" in row.error
