"""Any task of the package reasoning-gym, by its name there, with its generator's settings.

Its generators make prompt number i from (seed, i), so prompts are drawn in order until both parts
are full, repeated ones are skipped, and the hash of the prompt decides the part. The task's own
scorer comes along for `rewards: [{type: task}]`; it may give partial credit.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

from autotune.errors import EnvironmentProblem, InputError
from autotune.recipe import gym
from autotune.trainer.tasks.base import Example, TaskData, is_held_out
from autotune.trainer.tasks.chat import chat_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import ReasoningGymTask

HELD_OUT_PROMPTS = 512
PROMPT_SEED = 0
"""Fixes which prompts exist; the order in which a run visits them follows the run's own seed."""


def load(section: ReasoningGymTask, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Draws `size` training prompts and up to 512 held-out ones.

    Raises:
        EnvironmentProblem: reasoning-gym is not installed.
        InputError: it has no task of that name, or the task refuses its settings.
    """
    wanted = 2 * (section.size + 8 * HELD_OUT_PROMPTS)  # enough for both parts, with room
    source = _generator(section, wanted)
    train, heldout = _split(source, section.size)
    if not train or not heldout:
        raise InputError(
            f"task: {section.name} with these settings has too few different prompts to hold some"
            " out; widen task.config"
        )

    def score(response: str, example: Example) -> float:
        return float(source.score_answer(response.strip(), example.meta["entry"]))

    return TaskData(train, heldout, score, chat_ids(tokenizer, section.system_prompt))


def _split(source: Any, size: int) -> tuple[list[Example], list[Example]]:
    train: list[Example] = []
    heldout: list[Example] = []
    for example in _distinct(source):
        part, limit = (heldout, HELD_OUT_PROMPTS) if is_held_out(example.prompt) else (train, size)
        if len(part) < limit:
            part.append(example)
        if len(train) >= size and len(heldout) >= HELD_OUT_PROMPTS:
            break
    return train, heldout


def _distinct(source: Any) -> Iterator[Example]:
    seen = set[str]()
    for entry in islice(source, len(source)):
        prompt = str(entry["question"])
        if prompt not in seen:
            seen.add(prompt)
            yield Example(prompt, str(entry["answer"]), {"entry": entry})


def _generator(section: ReasoningGymTask, size: int) -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise EnvironmentProblem(
            "task: reasoning_gym is not installed; run: pip install reasoning-gym"
        ) from error
    for field, message in gym.problems(section):
        raise InputError(f"task.{field}: {message}")
    settings = {"seed": PROMPT_SEED, **gym.settings(section), "size": size}
    try:
        return reasoning_gym.create_dataset(section.name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise InputError(
            f"task.config: {section.name} refuses {section.config}: {error}; its settings are"
            " described in reasoning-gym's documentation of that task"
        ) from error
