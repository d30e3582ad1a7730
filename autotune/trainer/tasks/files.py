"""A user's own prompts from a file: what JSONL and Parquet have in common.

    {"prompt": "What is the capital of Norway?", "answer": "Oslo"}

A prompt is text, or a list of chat messages (`[{"role": "user", "content": "..."}]`), which needs
`chat_template: true`. A column may be a path into nested data: `reward_model.ground_truth`.

Held out is either a file of its own (`eval_path`; its prompts are then dropped from training) or
the `eval_fraction` of the distinct prompts whose md5 sorts first: at least one, independent of the
order of the rows. A repeated prompt is kept as often as it is there, always on one side, and told.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError
from autotune.trainer.tasks.base import Example, TaskData
from autotune.trainer.tasks.chat import chat_ids, plain_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import FileTask

Row = Mapping[str, Any]
ReadRows = Callable[[Path], Iterable[tuple[str, Row]]]
"""File -> (`file:line` for messages, row), one by one."""


def load_files(section: FileTask, tokenizer: PreTrainedTokenizerBase, read: ReadRows) -> TaskData:
    """Reads the file or files.

    Raises:
        InputError: a file is missing or empty, a row does not have both columns, or nothing is left
            to train on.
    """
    examples = read_examples(section, section.path, read)
    if section.eval_path is None:
        train, heldout = _split(examples, section.eval_fraction)
    else:
        heldout = read_examples(section, section.eval_path, read)
        apart = {e.prompt for e in heldout}
        train = [e for e in examples if e.prompt not in apart]
    if not train:
        raise InputError(
            f"task.path: {section.path} leaves no prompt to train on beside the held-out ones;"
            " expected at least two different prompts"
        )
    ids = chat_ids(tokenizer, section.system_prompt) if section.chat_template else plain_ids(tokenizer)
    return TaskData(train, heldout, None, ids, tuple(repeated_prompts(train)))


def read_examples(section: FileTask, path: str, read: ReadRows) -> list[Example]:
    """All prompts of a file, each row kept whole in `meta`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"task: there is no file {file}; expected one with a prompt in every row")
    examples = [_example(section, row, where) for where, row in read(file)]
    if not examples:
        raise InputError(f"task: {file} has no rows; expected at least two different prompts")
    return examples


def repeated_prompts(examples: Sequence[Example]) -> Iterator[str]:
    """A note where prompts occur more than once, and another where their answers differ."""
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for example in examples:
        answers[example.prompt].add(example.answer)
    extra = len(examples) - len(answers)
    if extra:
        yield f"{extra} of {len(examples)} training prompts repeat an earlier one; they are kept"
    torn = sum(len(different) > 1 for different in answers.values())
    if torn:
        yield f"{torn} training prompts occur with different answers; at most one of them can be right"


def _example(section: FileTask, row: Row, where: str) -> Example:
    prompt = column(row, section.prompt_column, where)
    if isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt):
        messages = _messages(section, prompt, where)
        prompt = "\n\n".join(message["content"] for message in messages)
    else:
        messages, prompt = (), _text(prompt, section.prompt_column, where)
    answer = ""
    if section.answer_column is not None:
        found = column(row, section.answer_column, where)
        answer = _text(found, section.answer_column, where)
    return Example(prompt, answer, row, messages)


def column(row: Row, name: str, where: str) -> Any:
    """The value of a column, or of a path into one."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = ", ".join(map(str, row)) or "none"
            raise InputError(f"{where}: no column {name!r}; columns there: {there}")
        value = value[part]
    return value


def _messages(section: FileTask, prompt: Sequence[Row], where: str) -> tuple[dict[str, str], ...]:
    if not section.chat_template:
        raise InputError(
            f"{where}: column {section.prompt_column!r} holds chat messages;"
            " expected text, or task.chat_template: true"
        )
    for message in prompt:
        if not all(isinstance(message.get(part), str) for part in ("role", "content")):
            raise InputError(
                f"{where}: column {section.prompt_column!r} has the message {message!r:.60};"
                " expected role and content, both text"
            )
    if not prompt:
        raise InputError(f"{where}: column {section.prompt_column!r} is an empty list; expected messages")
    return tuple({"role": message["role"], "content": message["content"]} for message in prompt)


def _text(value: Any, name: str, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"{where}: column {name!r} is {value!r:.60}; expected text or a number")
    return str(value)


def _split(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """(train, held-out): whole prompts go to one side, so a repeated prompt cannot leak."""
    prompts = sorted({e.prompt for e in examples}, key=_hash)
    apart = set(prompts[: max(1, round(fraction * len(prompts)))])
    train = [e for e in examples if e.prompt not in apart]
    return train, [e for e in examples if e.prompt in apart]


def _hash(prompt: str) -> str:
    return hashlib.md5(prompt.encode(), usedforsecurity=False).hexdigest()
