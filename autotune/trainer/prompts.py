"""The endless stream of training prompts, and what happens to those that are too long.

    left     the beginning is cut off when prompts are padded (`rollout.base.pad_prompts`)
    drop     the prompt is passed over; the stream goes on until enough fitting ones were found
    error    the run does not start, and a smaller `max_prompt_length` is refused later

A place in the stream is a number that only grows, so it is all that a checkpoint must keep. With
`drop` or `error` all prompts are encoded once at the start to know their lengths: `max_prompt_length`
may change in mid-run, and a value under which nothing would be left must be refused before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import InputError
from autotune.trainer.order import take_prompts
from autotune.trainer.tasks import Example, TaskData

Encoded = list[list[int]]
"""Token ids per prompt."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Prompts of a rollout."""

    examples: list[Example]
    encoded: Encoded
    dropped: int
    """Prompts that were passed over because they are too long."""


class PromptStream:
    """Training prompts in the order that the seed fixes."""

    def __init__(self, task: TaskData, seed: int, cut: str, limit: int) -> None:
        """Measure the prompts where their lengths decide something.

        Raises:
            InputError: under `limit` no prompt fits, or with `error` not all of them.
        """
        self._task = task
        self._seed = seed
        self._cut = cut
        self._lengths = [] if cut == "left" else [len(task.prompt_ids(e)) for e in task.train]
        if limit < self.shortest_limit:
            raise InputError(f"trainer.max_prompt_length: received {limit}; {self.why_not_shorter}")

    @property
    def shortest_limit(self) -> int:
        """Lowest `max_prompt_length` under which a rollout can be drawn."""
        if self._cut == "left":
            return 1
        return min(self._lengths) if self._cut == "drop" else max(self._lengths)

    @property
    def why_not_shorter(self) -> str:
        floor = self.shortest_limit
        if self._cut == "drop":
            return f"even the shortest prompt, of {floor} tokens, would be dropped; expected at least {floor}"
        return (
            f"the longest prompt has {floor} tokens and trainer.prompt_cut is error;"
            f" expected at least {floor}, or prompt_cut: left or drop"
        )

    def take(self, position: int, count: int, limit: int) -> Taken:
        """The next `count` prompts from a place in the stream; those dropped took places too."""
        chosen: list[int] = []
        seen = 0
        while len(chosen) < count:
            size, wanted = len(self._task.train), count - len(chosen)
            some = take_prompts(size, self._seed, position + seen, wanted)
            seen += wanted
            chosen += [i for i in some if self._cut != "drop" or self._lengths[i] <= limit]
        examples = [self._task.train[i] for i in chosen]
        return Taken(examples, [self._task.prompt_ids(e) for e in examples], seen - count)


def held_out_prompts(task: TaskData, count: int, cut: str, limit: int) -> Taken:
    """The first `count` held-out prompts, for the whole run; too long ones by the same rule.

    Raises:
        InputError: one is too long and that is an error.
    """
    taken, dropped = Taken([], [], 0), 0
    for example in task.heldout:
        if len(taken.examples) == count:
            break
        ids = task.prompt_ids(example)
        if len(ids) > limit and cut == "error":
            raise InputError(
                f"trainer.max_prompt_length: received {limit}; a held-out prompt has {len(ids)} tokens and"
                f" trainer.prompt_cut is error; expected at least {len(ids)}, or prompt_cut: left or drop"
            )
        if len(ids) > limit and cut == "drop":
            dropped += 1
            continue
        taken.examples.append(example)
        taken.encoded.append(ids)
    return Taken(taken.examples, taken.encoded, dropped)
