"""Two ranks train what one rank trains: the same prompts, tokens, losses and meters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.recipe import Recipe
from autotune.trainer.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
from autotune.recipe import Recipe
from autotune.trainer.loop import Trainer

folder = Path(sys.argv[1])
trainer = Trainer(Recipe.model_validate_json((folder / "recipe.json").read_text()), folder)
records = []
trainer.run(records.append)
weights = {k: v.tolist() for k, v in trainer.parts.engine.state_tensors().items()}
told = [{"scalars": r.scalars, "histograms": r.histograms} for r in records]
path = folder / f"rank-{trainer.parts.ranks.rank}.json"
path.write_text(json.dumps({"told": told, "weights": weights}))
"""


def train(folder: Path, recipe: Recipe, ranks: int) -> list[dict[str, Any]]:
    """Run the program on so many ranks; what each of them has at the end."""
    folder.mkdir()
    (folder / "recipe.json").write_text(recipe.model_dump_json())
    (folder / "program.py").write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [sys.executable, *launcher, str(folder / "program.py"), str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=300,
    )
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
def test_two_ranks_are_one(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """Groups of one prompt per update are cut between the ranks, which the algebra allows."""
    recipe = make_recipe(
        rollouts=2,
        ppo_mini_batch_size=1,
        micro_batch_size=2,
        rollout_micro_batch_size=16,
        actor_learning_rate=0.003,
    )
    alone = train(tmp_path / "one", recipe, 1)[0]
    first, second = train(tmp_path / "two", recipe, 2)
    assert first["weights"] == second["weights"]
    assert first["told"][0]["histograms"] == second["told"][0]["histograms"]
    for name, value in alone["weights"].items():
        assert np.allclose(value, first["weights"][name], atol=1e-5), name
    for one, two in zip(alone["told"], first["told"], strict=True):
        for name in ("reward_mean", "response_length_mean", "clip_ratio", "zero_std_fraction"):
            assert one["scalars"][name] == two["scalars"][name]
        for name in ("kl_ref", "kl_step", "entropy", "loss", "grad_norm"):
            assert one["scalars"][name] == pytest.approx(two["scalars"][name], rel=1e-3, abs=1e-6)


def test_parts_cover_everything_once() -> None:
    rows = np.arange(10)
    parts = [Ranks(rank, 4).share(rows) for rank in range(4)]
    assert np.concatenate(parts).tolist() == rows.tolist()


def test_whole_puts_rows_in_their_places() -> None:
    part = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    got = Ranks().whole(np.array([2, 0]), part, 3)
    assert got.tolist() == [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0]]
