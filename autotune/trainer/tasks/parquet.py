"""Prompts from a Parquet file; see `files` for what a row means. pyarrow is imported here only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import EnvironmentProblem, InputError
from autotune.trainer.tasks.base import TaskData
from autotune.trainer.tasks.files import load_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from autotune.recipe.schema import ParquetTask

ROWS_AT_ONCE = 1024


def load(section: ParquetTask, tokenizer: PreTrainedTokenizerBase) -> TaskData:
    """Reads the file or files; see `files.load_files`.

    Raises:
        EnvironmentProblem: pyarrow is not installed.
    """
    return load_files(section, tokenizer, _rows)


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file: row N`, row), counted from 1; batches are read one at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        message = "task: a Parquet file needs pyarrow; run: pip install 'autotune-rl[parquet]'"
        raise EnvironmentProblem(message) from error
    number = 0
    try:
        with parquet.ParquetFile(file) as stored:
            for batch in stored.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}: row {number}", row
    except pyarrow.ArrowException as error:
        raise InputError(f"task: {file} cannot be read as Parquet: {error}") from error
