"""A run that follows another run's schedule trains the very same model, without a controller."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  marks this file as one that needs the trainer
from rich.console import Console

from autotune.journal import read_journal
from autotune.recipe import Recipe, dump_schedule
from autotune.replay import export, replay
from autotune.run import run

CONTROL = {"policies": {"X2": "off"}, "pace": 0.1}


@pytest.fixture
def train(make_recipe: Callable[..., Recipe], tmp_path: Path) -> Callable[..., Path]:
    def train(name: str, control: dict[str, Any], **trainer: Any) -> Path:
        sections = {
            "run_dir": str(tmp_path / name), "control": control, "eval": {"every": 0, "prompts": 4},
            "checkpoint": {"every": 4, "keep": 2}, "tracking": {"mlflow": {"enabled": False}},
        }  # fmt: skip
        recipe = make_recipe(sections, rollouts=8, **trainer)
        return run(recipe, console=Console(file=io.StringIO())).folder

    return train


def rollouts(folder: Path) -> list[dict[str, Any]]:
    return [line for line in read_journal(folder / "journal.jsonl") if line["type"] == "rollout"]


def weights(folder: Path) -> dict[str, str]:
    files = sorted((folder / "checkpoints" / "rollout-00008").glob("*.safetensors"))
    assert {"model.safetensors", "optimizer.safetensors"} <= {f.name for f in files}
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_weights_are_equal_to_the_last_bit(train: Callable[..., Path], tmp_path: Path) -> None:
    controlled = train("controlled", CONTROL)
    schedule = export(controlled)
    assert schedule.changes and not schedule.restores, "the controller did something, and took nothing back"
    file = tmp_path / "schedule.yaml"
    file.write_text(dump_schedule(schedule))
    followed = train("followed", {"schedule": str(file)}, actor_learning_rate=1e-3)  # the start is set too
    assert [r["snapshot"]["knobs"] for r in rollouts(followed)] == [
        r["snapshot"]["knobs"] for r in rollouts(controlled)
    ]
    assert weights(followed) == weights(controlled)
    start = next(line for line in read_journal(followed / "journal.jsonl") if line["type"] == "schedule")
    assert {a["knob"]: a["read_back"] for a in start["applied"]} == {"actor_learning_rate": 0.01}
    assert replay(followed).equal
    plain = train("plain", {"mode": "off"})
    assert weights(plain) != weights(controlled), "without the schedule it is another model"
