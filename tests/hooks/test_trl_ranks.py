"""TRL on two ranks: the first one decides, both act alike, and one journal is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.hooks.guest import JOURNAL
from autotune.journal import read_journal
from autotune.launch import free_port
from autotune.replay import replay
from tests.tiny_model import tiny_folder

ROOT = Path(__file__).parent.parent.parent
pytestmark = pytest.mark.slow


def test_two_ranks_act_alike(tmp_path: Path) -> None:
    """From an aggressive start: rates are cut and weights come back on both ranks."""
    tiny_folder(tmp_path / "model")
    out, port, rollouts = tmp_path / "run", free_port(), 8
    script = str(ROOT / "tests" / "hooks" / "trl_two_ranks.py")
    children = []
    for rank in range(2):
        env = os.environ | {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "ACCELERATE_USE_CPU": "true",
        }  # fmt: skip
        command = [sys.executable, script, str(tmp_path / "model"), str(out), str(rollouts)]
        children.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    printed = [child.communicate(timeout=300)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0], "\n\n".join(p[-3000:] for p in printed)
    first, second = (json.loads((out / f"rank-{rank}.json").read_text("utf-8")) for rank in range(2))
    assert first == second and not first["broken"], (first, second)
    assert (first["ranks"], first["facts"], first["rollout"]) == (2, 2, rollouts)
    lines = read_journal(out / JOURNAL)
    assert sum(line["type"] == "header" for line in lines) == 1
    rows = [line for line in lines if line["type"] == "rollout"]
    assert len(rows) == rollouts and any(line["restored"] is not None for line in rows)
    assert first["knobs"]["actor_learning_rate"] < 6e-2
    assert replay(out).equal
