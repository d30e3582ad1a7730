"""A real `GRPOTrainer` on a tiny model, in seconds on one CPU thread; what the tests of TRL share."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPTS, GROUP, LENGTH = 8, 4, 6
"""Prompts of a rollout, completions of a prompt, tokens of a completion."""


def few_fours(completions: Sequence[str], **kwargs: Any) -> list[float]:
    """Share of digits below 5, however long the text: what the tiny model can raise in a few updates."""
    return [sum(c in "01234" for c in text) / max(len(text), 1) for text in completions]


def make_trainer(
    folder: Path,
    out: Path,
    rollouts: int,
    reward: Callable[..., list[float]] = few_fours,
    prompts: Sequence[Mapping[str, str]] | None = None,
    **config: Any,
) -> Any:
    """A trainer of `rollouts` rollouts, two updates each unless `config` says otherwise."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings: dict[str, Any] = {
        "output_dir": str(out),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "logging_steps": 10,
        "disable_tqdm": True,
        "seed": 3,
        "lr_scheduler_type": "constant",
        "learning_rate": 2e-3,
        "beta": 0.02,
        "num_generations": GROUP,
        "per_device_train_batch_size": GROUP * PROMPTS // 4,
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": LENGTH,
        **config,
    }
    per = settings["steps_per_generation"] * settings.get("num_iterations", 1)
    updates = max(per // settings["gradient_accumulation_steps"], 1)
    settings.setdefault("max_steps", rollouts * updates)
    rng = random.Random(1)
    rows = prompts or [{"prompt": f"{rng.randrange(100)}>"} for _ in range(PROMPTS * (rollouts + 8))]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list([dict(row) for row in rows]),
        processing_class=tokenizer,
    )


def weights(trainer: Any) -> str:
    """A hash of all weights."""
    total = hashlib.sha256()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        total.update(name.encode() + tensor.detach().cpu().numpy().tobytes())
    return total.hexdigest()
