"""Tiny things to train: a random one-layer model, prompts of unequal length, a reward that varies.

A random model never sorts six digits, so the reward asks for one digit: the last digit of the
response must be the prompt's. That is right about once in ten, so groups carry signal.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.tiny_model import tiny_folder as a_tiny_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autotune.recipe import Recipe

MakeRecipe = Callable[..., "Recipe"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model and a character tokenizer, as a user's own folder."""
    return a_tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def tiny_model(tiny_folder: Path) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder).eval()


@pytest.fixture(scope="session")
def tiny_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"{'a' * (i % 3)}{i % 10}{i // 10}>", "answer": str(i % 10)} for i in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def make_recipe(tiny_folder: Path, tiny_prompts: Path) -> MakeRecipe:
    """A recipe of the tiny run; keywords override fields of its `trainer` section."""

    def make(sections: dict[str, Any] | None = None, **trainer: Any) -> Recipe:
        from autotune.recipe import Recipe

        data: dict[str, Any] = {
            "seed": 3,
            "model": {"path": str(tiny_folder)},
            "task": {"type": "jsonl", "path": str(tiny_prompts)},
            "rewards": [{"type": "regex", "pattern": r"(\d)"}],
            "deepspeed": {"zero_stage": 1},
            "eval": {"every": 3, "prompts": 4},
            "checkpoint": {"every": 3, "keep": 2},
            "trainer": {
                "rollouts": 6,
                "train_batch_size": 8,
                "rollout_n": 4,
                "ppo_mini_batch_size": 2,
                "micro_batch_size": 4,
                "rollout_micro_batch_size": 32,
                "actor_learning_rate": 0.01,
                "max_response_length": 6,
                **trainer,
            },
        }
        return Recipe.model_validate({**data, **(sections or {})})

    return make
