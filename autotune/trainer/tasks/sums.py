"""Short sums in words: `What is 3 + 8 + 5? Reply with only the number.`

A small instruction model gets some of them right by chance of sampling, which is what
reinforcement needs to begin with. With few terms there are few different sums (729 of three digits
1 to 9), so fewer prompts than asked for may exist; none is ever in both parts.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from autotune.errors import InputError
from autotune.trainer.tasks.base import Example, TaskData, is_held_out
from autotune.trainer.tasks.chat import chat_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import SumsTask

HELD_OUT_PROMPTS = 1024
PROMPT_SEED = 0
"""Fixes which sums exist; the order in which a run visits them follows the run's own seed."""


def load(section: SumsTask, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Builds distinct sums, split by the hash of the prompt."""
    space = section.largest**section.terms
    wanted = 2 * (section.prompts + 8 * HELD_OUT_PROMPTS)  # enough for both parts, with room
    numbers = random.Random(PROMPT_SEED).sample(range(space), min(space, wanted))
    examples = [_example(_terms(number, section)) for number in numbers]
    train = [e for e in examples if not is_held_out(e.prompt)][: section.prompts]
    heldout = [e for e in examples if is_held_out(e.prompt)][:HELD_OUT_PROMPTS]
    if not train or not heldout:
        raise InputError(
            f"task: {section.terms} terms up to {section.largest} give only {space} sums, too few"
            " to hold some out; raise task.largest or task.terms"
        )
    return TaskData(train, heldout, None, chat_ids(tokenizer, section.system_prompt))


def _terms(number: int, section: SumsTask) -> list[int]:
    """The number-th tuple of terms: its digits in base `largest`, counted from 1."""
    terms = []
    for _ in range(section.terms):
        number, digit = divmod(number, section.largest)
        terms.append(digit + 1)
    return terms


def _example(terms: list[int]) -> Example:
    question = f"What is {' + '.join(map(str, terms))}? Reply with only the number."
    return Example(question, str(sum(terms)))
