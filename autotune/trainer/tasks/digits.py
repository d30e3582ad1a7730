"""The embedded tasks: do to six digits what a letter asks for.

    ops6x2    a724915> -> 124579 (ascending)      d724915> -> 975421 (descending)
    sort6     s724915> -> 124579 (always ascending)
    unique6   u727915> -> 72915 (each digit once, in the order of its first place)

Every prompt is eight characters. Answers are six digits and the end token, so nothing is ever
padded or truncated by accident; those of `unique6` have one to six digits. Exact match is the
whole truth. There are a million digit strings per letter; the held-out eighth is excluded from
the warm start of the built-in models as well as from training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from autotune.trainer.tasks.base import Example, TaskData, is_held_out

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import DigitsTask

DIGITS = 6
LETTERS: dict[str, str] = {"ops6x2": "ad", "sort6": "s", "unique6": "u"}
"""Variant -> the instruction letters that its prompts begin with."""

TRAIN_PROMPTS, HELD_OUT_PROMPTS = 32768, 2048
PROMPT_SEED = 20_000
"""Fixes which prompts exist; the order in which a run visits them follows the run's own seed."""


def solve(prompt: str) -> str:
    """The right answer: `u` keeps each digit once, `d` sorts descending, other letters ascending."""
    given = prompt[1 : 1 + DIGITS]
    if prompt[0] == "u":
        return "".join(dict.fromkeys(given))
    return "".join(sorted(given, reverse=prompt[0] == "d"))


def prompts(variant: str, seed: int, held_out: bool) -> Iterator[str]:
    """Endless distinct prompts of a variant, from the held-out part or from the rest."""
    rng, seen = random.Random(seed), set[str]()
    while True:
        prompt = f"{rng.choice(LETTERS[variant])}{rng.randrange(10**DIGITS):0{DIGITS}d}>"
        if prompt not in seen and is_held_out(prompt) == held_out:
            seen.add(prompt)
            yield prompt


def load(section: DigitsTask, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Builds the training and held-out prompts; the same for every seed of a run."""

    def part(count: int, held_out: bool) -> list[Example]:
        some = islice(prompts(section.variant, PROMPT_SEED, held_out), count)
        return [Example(prompt, solve(prompt)) for prompt in some]

    def prompt_ids(example: Example) -> list[int]:
        return list(tokenizer.encode(example.prompt, add_special_tokens=False))

    return TaskData(part(TRAIN_PROMPTS, False), part(HELD_OUT_PROMPTS, True), None, prompt_ids)
