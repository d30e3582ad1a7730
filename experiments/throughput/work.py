"""What is measured on: model shapes, workloads, and rollouts made once that every trainer is fed.

Shapes other than SmolLM2's have random weights: their speed is that of the real ones, their text is
noise. A fed rollout has prompts of 30 to 40 tokens, log-normal response lengths with a mean of 40 % of
the longest, and rewards from a success rate that differs by prompt (so that about 2 groups in 9 have
equal rewards): seed and number of the rollout fix all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MATRIX_RATE = 790e12
"""bf16 FLOP/s of one H200, measured with large products of random matrices."""
MEMORY_RATE = 4.3e12
"""bytes/s of one H200, device-to-device copies, read and written."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one decoder, tied embeddings."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    kind: str = "qwen2"

    @property
    def body(self) -> int:
        """Parameters of all layers without embeddings."""
        head = self.hidden // self.heads
        attention = self.hidden * head * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)


SHAPES = {
    "least": Shape(64, 1, 2, 2, 128, 512),
    "tiny": Shape(64, 2, 4, 2, 128, 512),
    "135m": Shape(576, 30, 9, 3, 1536, 49152, "llama"),
    "0.5b": Shape(896, 24, 14, 2, 4864, 151936),
    "1.5b": Shape(1536, 28, 12, 2, 8960, 151936),
}


@dataclass(frozen=True)
class Work:
    """One rollout's size."""

    prompts: int = 32
    group: int = 8
    longest: int = 256
    """Response tokens."""
    updates: int = 4
    prompt_limit: int = 64

    @property
    def samples(self) -> int:
        return self.prompts * self.group


@dataclass(frozen=True)
class Fed:
    """One made rollout, prompt by prompt."""

    prompts: list[list[int]]
    """[P]."""
    responses: list[list[int]]
    """[P n]."""
    rewards: list[float]
    """[P n]."""

    @property
    def tokens(self) -> int:
        """Prompt and response tokens, each response with its prompt, as verl counts."""
        group = len(self.responses) // len(self.prompts)
        return group * sum(map(len, self.prompts)) + sum(map(len, self.responses))


def fed_rollout(number: int, work: Work, vocabulary: int) -> Fed:
    """The `number`-th made rollout; ids 0 and 1 (padding and end) are not in it."""
    rng = np.random.default_rng([7, number])
    low, high = min(30, work.prompt_limit // 2), min(40, work.prompt_limit)
    prompts = [rng.integers(2, vocabulary, rng.integers(low, high + 1)).tolist() for _ in range(work.prompts)]
    spread = 0.6
    center = np.log(0.4 * work.longest) - spread**2 / 2
    lengths = np.clip(np.exp(rng.normal(center, spread, work.samples)).astype(int), 1, work.longest)
    responses = [rng.integers(2, vocabulary, n).tolist() for n in lengths]
    chances = np.repeat(rng.random(work.prompts), work.group)
    rewards = (rng.random(work.samples) < chances).astype(float).tolist()
    return Fed(prompts, responses, rewards)


def training_floor(shape: Shape, fed_tokens: float, response_tokens: float, mean_length: float) -> float:
    """Seconds of forward and backward at the matrix rate, for tokens actually trained on.

    6 x (body x tokens + vocabulary x hidden x response tokens) + attention over the causal half.
    """
    products = 6 * (shape.body * fed_tokens + shape.vocabulary * shape.hidden * response_tokens)
    attention = 6 * shape.layers * shape.hidden * mean_length * fed_tokens
    return (products + attention) / MATRIX_RATE


def decoding_floor(shape: Shape, work: Work, steps: float, mean_length: float) -> float:
    """Seconds of `steps` decoding steps that read weights and keys and values once each."""
    parameters = shape.body + shape.vocabulary * shape.hidden
    kv = 4 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads)  # bytes a token, bf16
    read = 2 * parameters + work.samples * mean_length * kv
    return steps * max(read / MEMORY_RATE, 2 * parameters * work.samples / MATRIX_RATE)


def make_model(name: str, folder: Path, gguf: str | None) -> Path:
    """A bfloat16 model folder of this shape: SmolLM2's weights from the file, or random ones."""
    place = folder / f"{name}{'-real' if gguf else ''}"
    if (place / "config.json").exists():
        return place
    import torch

    if gguf:
        from autotune.recipe.schema import ModelSection
        from autotune.trainer.models import load_model

        model, tokenizer = load_model(ModelSection(path=f"gguf:{gguf}"), folder / "cache")
    else:
        from autotune.trainer.builtin import character_tokenizer

        torch.manual_seed(0)
        model, tokenizer = _random(SHAPES[name]), character_tokenizer()
    model.to(torch.bfloat16).save_pretrained(place)
    tokenizer.save_pretrained(place)
    return place


def _random(shape: Shape) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

    make = LlamaConfig if shape.kind == "llama" else Qwen2Config
    config = make(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.inner,
        vocab_size=shape.vocabulary,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
