"""A real run killed with SIGKILL again and again must end like one that was left alone.

One chain: killed in a rollout, in an update, in the middle of saving, between the rename and the
pointer, and between rollouts, each time resumed, at last to the end. The final weights must be equal to
the last bit, the winning journal lines equal, and all decisions replayable.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  marks this file as one that needs the trainer

from autotune.journal import comparable, inspect_journal, read_journal
from autotune.replay import replay

ROOT = Path(__file__).resolve().parent.parent

RECIPE = """\
name: small
run_dir: {folder}
trainer: {{rollouts: 6, train_batch_size: 16, rollout_n: 4, ppo_mini_batch_size: 4,
          actor_learning_rate: 1.0e-3}}
eval: {{every: 3, prompts: 16}}
checkpoint: {{every: 2, keep: 2}}
tracking: {{mlflow: {{enabled: false}}}}
"""

PROGRAM = """\
import os, signal, sys
from autotune.recipe import load_recipe
from autotune.run import run

def on_phase(phase, rollout):
    if f"{phase}@{rollout}" == sys.argv[3]:
        os.kill(os.getpid(), signal.SIGKILL)

run(load_recipe(sys.argv[1]), resume=sys.argv[2] == "resume", on_phase=on_phase)
"""

KILLS = ("rollout@1", "update@2", "save:files@4", "save:renamed@4", "between@5")


def start(recipe: Path, how: str, kill_at: str = "never") -> int:
    command = [sys.executable, "-c", PROGRAM, str(recipe), how, kill_at]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CI": "1"}
    done = subprocess.run(
        command, cwd=recipe.parent, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode in (0, -9), done.stdout + done.stderr
    return done.returncode


def recipe(folder: Path, run: str) -> Path:
    path = folder / f"{run}.yaml"
    path.write_text(RECIPE.format(folder=run))
    return path


def weights(run: Path) -> dict[str, str]:
    """Hash of every tensor file of the last checkpoint."""
    last = run / "checkpoints" / "rollout-00006"
    files = sorted(last.glob("*.safetensors"))
    assert {"model.safetensors", "optimizer.safetensors"} <= {f.name for f in files}
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def told(run: Path) -> list[dict[str, object]]:
    lines = comparable(read_journal(run / "journal.jsonl"))
    for line in lines:
        line.get("recipe", {}).pop("run_dir", None)
    return lines


@pytest.mark.slow
def test_killed_five_times_it_ends_like_an_undisturbed_run(tmp_path: Path) -> None:
    assert start(recipe(tmp_path, "straight"), "start") == 0
    broken = recipe(tmp_path, "broken")
    for number, kill_at in enumerate(KILLS):
        assert start(broken, "resume" if number else "start", kill_at) == -9, kill_at
    assert start(broken, "resume") == 0
    straight, killed = tmp_path / "straight", tmp_path / "broken"
    assert weights(killed) == weights(straight)
    assert told(killed) == told(straight)
    lines = inspect_journal(killed / "journal.jsonl").lines
    assert sum(line["type"] == "resumed" for line in lines) == len(KILLS)
    assert replay(killed).equal and len(replay(killed).pairs) == 6
    state = json.loads((killed / "checkpoints/rollout-00006/state.json").read_text())
    assert state["rollout"] == 6
