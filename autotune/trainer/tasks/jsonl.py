"""A user's own prompts: a UTF-8 file with one JSON object a line.

    {"prompt": "What is the capital of Norway?", "answer": "Oslo"}

Held out is either a file of its own (`eval_path`; its prompts are then dropped from training) or
the `eval_fraction` of the distinct prompts whose md5 sorts first: at least one, independent of the
order of the lines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError
from autotune.trainer.tasks.base import Example, TaskData
from autotune.trainer.tasks.chat import chat_ids, plain_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import JsonlTask


def load(section: JsonlTask, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Reads the file or files.

    Raises:
        InputError: a file is missing or empty, a line is not a JSON object with both columns, or
            nothing is left to train on.
    """
    examples = read_examples(section, section.path)
    if section.eval_path is None:
        train, heldout = _split(examples, section.eval_fraction)
    else:
        heldout = read_examples(section, section.eval_path)
        apart = {e.prompt for e in heldout}
        train = [e for e in examples if e.prompt not in apart]
    if not train:
        raise InputError(
            f"task.path: {section.path} leaves no prompt to train on beside the held-out ones;"
            " expected at least two different prompts"
        )
    ids = chat_ids(tokenizer) if section.chat_template else plain_ids(tokenizer)
    return TaskData(train, heldout, None, ids)


def read_examples(section: JsonlTask, path: str) -> list[Example]:
    """All prompts of a file, each object kept whole in `meta`."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise InputError(f"task: there is no file {file}; expected one JSON object a line")
    examples = [
        Example(_text(row, section.prompt_column, where), _text(row, section.answer_column, where), row)
        for where, row in _rows(file)
    ]
    if not examples:
        raise InputError(f"task: {file} has no lines; expected one JSON object a line")
    return examples


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, object) of every line that is not blank."""
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield f"{file}:{number}", _object(line, f"{file}:{number}")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise InputError(f"{where}: {error}; expected one JSON object a line") from error
    if not isinstance(row, dict):
        raise InputError(f"{where}: received {line.strip()[:60]!r}; expected a JSON object")
    return row


def _text(row: dict[str, Any], column: str, where: str) -> str:
    if column not in row:
        there = ", ".join(row) or "none"
        raise InputError(f"{where}: no column {column!r}; columns there: {there}")
    value = row[column]
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise InputError(f"{where}: column {column!r} is {value!r}; expected text or a number")
    return str(value)


def _split(examples: Sequence[Example], fraction: float) -> tuple[list[Example], list[Example]]:
    """(train, held-out): whole prompts go to one side, so a repeated prompt cannot leak."""
    prompts = sorted({e.prompt for e in examples}, key=_hash)
    apart = set(prompts[: max(1, round(fraction * len(prompts)))])
    train = [e for e in examples if e.prompt not in apart]
    return train, [e for e in examples if e.prompt in apart]


def _hash(prompt: str) -> str:
    return hashlib.md5(prompt.encode(), usedforsecurity=False).hexdigest()
