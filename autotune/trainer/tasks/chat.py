"""From a question to the token ids that an instruction model expects."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from autotune.errors import InputError
from autotune.trainer.tasks.base import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def chat_ids(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None = None
) -> Callable[[Example], list[int]]:
    """The prompt as one user message, with the assistant's turn opened behind it.

    A prompt that is a list of messages stays that list; a system message of its own wins over
    `system_prompt`. A tokenizer without a chat template belongs to a plain model; its prompt stays
    as it is.

    Raises:
        InputError: there is a system prompt and no template to put it into.
    """
    if not tokenizer.chat_template:
        return _without_template(tokenizer, system_prompt)

    def ids(example: Example) -> list[int]:
        messages = list(example.messages) or [{"role": "user", "content": example.prompt}]
        if system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system_prompt})
        return list(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        )

    return ids


def _without_template(
    tokenizer: PreTrainedTokenizerBase, system_prompt: str | None
) -> Callable[[Example], list[int]]:
    if system_prompt is not None:
        raise InputError(
            "task.system_prompt: the model's tokenizer has no chat template to put it into;"
            " expected an instruction model, or the words inside the prompts themselves"
        )
    return plain_ids(tokenizer)


def plain_ids(tokenizer: PreTrainedTokenizerBase) -> Callable[[Example], list[int]]:
    """The prompt as it is, with the special tokens that the tokenizer itself puts around a text."""
    return lambda example: list(tokenizer.encode(example.prompt))
