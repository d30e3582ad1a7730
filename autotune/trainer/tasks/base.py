"""What a task is to the trainer: prompts with answers, a held-out part, a way to token ids.

A task never scores by itself during training; `autotune.trainer.rewards` does, and may ask for
the task's own scorer (`TaskData.score`). The held-out part is chosen by a hash of the prompt, so
it does not depend on seeds, on order or on how many prompts are asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HELD_OUT_BYTES = 32
"""First md5 bytes below this are held out: 32 of 256, an eighth of all prompts."""


@dataclass(frozen=True, slots=True)
class Example:
    """One prompt as text and the answer that is right for it."""

    prompt: str
    answer: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the task's own scorer needs beyond the answer."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The prompt as chat messages, where it was given so; `prompt` is then their text."""


@dataclass(frozen=True, slots=True)
class TaskData:
    """Everything that the training loop asks of a task."""

    train: Sequence[Example]
    heldout: Sequence[Example]
    """Never trained on; an evaluation takes the first `eval.prompts` of them."""
    score: Callable[[str, Example], float] | None
    """The task's own scorer of a response, where it has one."""
    prompt_ids: Callable[[Example], list[int]]
    """Token ids of the prompt as the model sees it, chat template included."""
    notes: tuple[str, ...] = ()
    """What the run's record should say about the data, such as repeated prompts."""


def is_held_out(prompt: str) -> bool:
    """Whether this prompt belongs to the held-out eighth, by the first byte of its md5."""
    return hashlib.md5(prompt.encode(), usedforsecurity=False).digest()[0] < HELD_OUT_BYTES
