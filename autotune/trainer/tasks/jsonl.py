"""Prompts from a UTF-8 file with one JSON object a line; see `files` for what a row means."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import InputError
from autotune.trainer.tasks.base import TaskData
from autotune.trainer.tasks.files import load_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import JsonlTask


def load(section: JsonlTask, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Reads the file or files; see `files.load_files`."""
    return load_files(section, tokenizer, _rows)


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
