"""Each algorithm trains on two ranks what it trains on one: the same weights, the critic's too."""

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

from autotune.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import json, sys
from pathlib import Path
from autotune.recipe import Recipe
from autotune.trainer.loop import Trainer
from autotune.trainer.rollout import build
from tests.trainer.served import Engine
from transformers import AutoModelForCausalLM

build.ServerEngine = lambda options, *rest: Engine(AutoModelForCausalLM.from_pretrained(options.model))

folder, told = Path(sys.argv[1]), {}
for name, recipe in json.loads((folder / "recipes.json").read_text()).items():
    trainer = Trainer(Recipe.model_validate(recipe), folder / name)
    records = []
    trainer.run(records.append)
    engines = {"actor": trainer.parts.engine}
    if trainer.parts.critic is not None:
        engines["critic"] = trainer.parts.critic.engine
    weights = {
        f"{part}/{key}": value.tolist()
        for part, engine in engines.items()
        for key, value in engine.state_tensors().items()
        if key.startswith("model/")
    }
    told[name] = {"weights": weights, "records": [[r.scalars, r.histograms] for r in records]}
    rank = trainer.parts.ranks.rank
    trainer.close()
(folder / f"rank-{rank}.json").write_text(json.dumps(told))
from autotune.trainer.group import leave_now
leave_now(0)
"""

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dr_grpo": (1, {"algorithm": "dr_grpo"}),
    "dapo": (1, {"algorithm": "dapo", "dynamic_sampling": 3, "entropy_coef": 0.01}),
    "gspo": (1, {"algorithm": "gspo", "clip_range": 0.05}),
    "rloo": (1, {"algorithm": "rloo", "kl": {"placement": "reward"}, "kl_coef": 0.1}),
    "ppo": (1, {"algorithm": "ppo"}),
    "ppo, all split": (3, {"algorithm": "ppo"}),
    "one step off": (2, {"algorithm": "grpo", "rollouts": 3}),
    "adapters": (1, {"algorithm": "grpo"}),
    "adapters, all split": (3, {"algorithm": "grpo"}),
}
"""Name -> ZeRO stage and what the trainer section says."""


def recipes(make_recipe: Callable[..., Recipe], folder: Path) -> dict[str, Any]:
    common = {
        "rollouts": 2,
        "micro_batch_size": 2,
        "rollout_micro_batch_size": 16,
        "actor_learning_rate": 0.003,
    }
    made = {}
    for name, (stage, trainer) in CASES.items():
        lora = {"rank": 4} if name.startswith("adapters") else None
        served = {"engine": "vllm_server", "one_step_off": True}
        sections = {
            "deepspeed": {"zero_stage": stage},
            "model": {"path": str(folder), "lora": lora},
            "eval": {"every": 0, "prompts": 2},
            "rollout": served if name == "one step off" else {},
        }
        made[name] = make_recipe(sections, **{**common, **trainer}).model_dump(mode="json")
    return made


def train(folder: Path, made: dict[str, Any], ranks: int) -> list[dict[str, Any]]:
    folder.mkdir()
    (folder / "recipes.json").write_text(json.dumps(made))
    (folder / "program.py").write_text(PROGRAM)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    subprocess.run(
        [sys.executable, *launcher, str(folder / "program.py"), str(folder)],
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=400,
    )
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
def test_two_ranks_train_what_one_does(
    make_recipe: Callable[..., Recipe], tiny_folder: Path, tmp_path: Path
) -> None:
    made = recipes(make_recipe, tiny_folder)
    alone = train(tmp_path / "one", made, 1)[0]
    first, second = train(tmp_path / "two", made, 2)
    for name in CASES:
        one, two = alone[name], first[name]
        assert two["weights"] == second[name]["weights"], name
        assert two["records"][0][1] == second[name]["records"][0][1], name
        if name == "one step off":
            assert [scalars["data_age"] for scalars, _ in two["records"]] == [0, 1, 1]
        assert any(key.startswith("critic/") for key in one["weights"]) == name.startswith("ppo")
        for key, value in one["weights"].items():
            assert np.allclose(value, two["weights"][key], atol=2e-5), (name, key)
        for (scalars, counts), (other, other_counts) in zip(one["records"], two["records"], strict=True):
            assert sum(counts["policy_ratio"]) == sum(other_counts["policy_ratio"])
            for metric in ("reward_mean", "zero_std_fraction", "response_length_mean"):
                assert scalars[metric] == other[metric], (name, metric)
            for metric in ("kl_step", "entropy", "loss", "grad_norm", "value_loss"):
                if metric in scalars:
                    expected = pytest.approx(other[metric], rel=2e-3, abs=1e-6)
                    assert scalars[metric] == expected, (name, metric)
