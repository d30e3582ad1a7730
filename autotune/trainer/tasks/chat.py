"""From a question to the token ids that an instruction model expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune.trainer.tasks.base import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_ids(tokenizer: PreTrainedTokenizerBase) -> Callable[[Example], list[int]]:
    """The prompt as one user message, with the assistant's turn opened behind it.

    A tokenizer without a chat template belongs to a plain model; its prompt stays as it is.
    """
    if not tokenizer.chat_template:
        return plain_ids(tokenizer)

    def ids(example: Example) -> list[int]:
        message = [{"role": "user", "content": example.prompt}]
        return list(
            tokenizer.apply_chat_template(
                message, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    return ids


def plain_ids(tokenizer: PreTrainedTokenizerBase) -> Callable[[Example], list[int]]:
    """The prompt as it is, with the special tokens that the tokenizer itself puts around a text."""
    return lambda example: list(tokenizer.encode(example.prompt))
