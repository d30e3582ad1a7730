"""The verl experiment's own parts that need no verl: its log, its summary, its end."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")  # the folder of experiments is run in environments that have it

from autotune.journal import Journal
from experiments.verl_smollm2 import run as experiment
from tests.processes import ends


def options(**named: object) -> argparse.Namespace:
    given = {"mode": "act", "start": "timid", "rollouts": 2, "minutes": 0.0, "seed": 1, "extra": []}
    return argparse.Namespace(**{**given, **named})


def test_the_log_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    lines = [f"line {k:05d} {'x' * 80}\n".encode() for k in range(2000)]
    experiment.keep_log(lines, tmp_path / "output.txt", half=10_000, alike=2000)
    text = (tmp_path / "output.txt").read_text()
    assert len(text) <= 20_000
    assert "line 00000" in text and "line 01999" in text and "line 01000" not in text
    assert all(line.split()[1] == "line" for line in text.splitlines() if line)


def test_a_short_log_is_kept_whole(tmp_path: Path) -> None:
    experiment.keep_log([b"one\n", b"two"], tmp_path / "output.txt")
    assert [line.split()[1] for line in (tmp_path / "output.txt").read_text().splitlines()] == ["one", "two"]


def test_a_warning_for_every_sample_is_not_kept_for_every_sample(tmp_path: Path) -> None:
    lines = [f"sample {k}: no builder\n".encode() for k in range(500)] + [b"the reason\n"]
    experiment.keep_log(lines, tmp_path / "output.txt", alike=3)
    kept = (tmp_path / "output.txt").read_text().splitlines()
    assert len(kept) == 4 and kept[-1].endswith("the reason")


def test_verl_is_ended_at_the_limit_with_all_that_it_started(tmp_path: Path) -> None:
    child = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'input()'],"
        " stdin=subprocess.PIPE); print(p.pid, flush=True); time.sleep(60)"
    )
    code = experiment.run([sys.executable, "-c", child], tmp_path, options(minutes=0.05))
    grandchild = int((tmp_path / "output.txt").read_text().split()[1])
    assert code == 124
    assert ends(grandchild)


def test_a_person_s_commands_are_left_after_their_rollout(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.jsonl") as journal:
        for rollout in range(3):
            journal.append("rollout", rollout, {})
    with journal.path.open("a") as file:
        file.write('{"half')
    experiment.run([sys.executable, "-c", "import time; time.sleep(2)"], tmp_path, options())
    (left,) = (tmp_path / "commands").glob("*.json")
    assert json.loads(left.read_text())["values"] == experiment.BY_HAND[0][1]


def test_what_was_read_back_is_in_the_summary_and_in_the_pack(tmp_path: Path) -> None:
    applied = [{"knob": "kl_coef", "read_back": 0.006, "error": ""}]
    metrics = {"reward_mean": 0.25}
    with Journal(tmp_path / "journal.jsonl") as journal:
        journal.append("rollout", 3, {"snapshot": {"metrics": metrics}, "applied": applied})
    told = experiment.summary(tmp_path, 124)
    assert (told["rollouts"], told["rewards"]) == (1, [0.25])
    assert told["read_back"] == [{"rollout": 3, **applied[0]}]
    experiment.pack(tmp_path)
    assert (tmp_path / "evidence.tar.gz").stat().st_size > 0
