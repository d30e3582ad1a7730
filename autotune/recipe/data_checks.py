"""Whether a recipe's prompts and rewards can work: files, columns, functions, permissions.

Data files are looked into, because a misspelt column is better found now than after the model has
been loaded. Code that a reward names is never run here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from autotune.recipe import explain, gym
from autotune.recipe.facts import component_names
from autotune.recipe.model_checks import is_hub_id, model_folder, near_folder, unreachable
from autotune.recipe.schema import (
    FileTask,
    ImportReward,
    ModelReward,
    ParquetTask,
    ReasoningGymTask,
    Recipe,
    RegexReward,
    TaskReward,
)
from autotune.recipe.source import Key

Found = Iterator[tuple[Key, str]]

NO_SCORER = ("digits", "sums", "jsonl", "parquet")
"""Task types that cannot score a response by themselves."""

COMPARING = ("exact_match", "regex", "math_verify")
"""Reward types that compare the response with the answer."""

MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
NOTHING = object()
"""Stands for a column that is not there; null is a value."""

JSONL_LINES = 20_000
"""Lines of a data file that are looked at before a run; the trainer reads them all."""


def check_task(recipe: Recipe) -> Found:
    """The section `task`, with a look into its files."""
    task = recipe.task
    if isinstance(task, FileTask):
        yield from _file_task(recipe, task)
    elif isinstance(task, ReasoningGymTask):
        yield from ((("task", field), message) for field, message in gym.problems(task))


def _file_task(recipe: Recipe, task: FileTask) -> Found:
    if task.system_prompt is not None and not task.chat_template:
        yield ("task", "system_prompt"), "is only used with a chat template; set chat_template: true"
    comparing = [reward.type for reward in recipe.rewards if reward.type in COMPARING]
    if task.answer_column is None and comparing:
        yield ("task", "answer_column"), f"received null, but the reward {comparing[0]} compares with it"
    columns = {"prompt_column": task.prompt_column}
    if task.answer_column is not None:
        columns["answer_column"] = task.answer_column
    look = _parquet_file if isinstance(task, ParquetTask) else _jsonl_file
    for name in ("path", "eval_path"):
        file = getattr(task, name)
        if file is not None:
            yield from look(("task", name), file, columns, task.chat_template)


def _parquet_file(key: Key, file: str, columns: dict[str, str], chat: bool) -> Found:
    """Its first row. Needs pyarrow: where that is missing, the doctor says so."""
    if not Path(file).expanduser().is_file():
        yield key, f"the data file {file!r} cannot be read: there is no such file"
        return
    try:
        import pyarrow
    except ImportError:
        return
    try:
        row = _first_row(Path(file).expanduser())
    except (pyarrow.ArrowException, OSError) as error:
        yield key, f"{file} cannot be read as Parquet: {error}"
        return
    if row is None:
        yield key, f"{file} has no rows; expected at least two different prompts"
    elif problem := _row_problem(row, columns, chat):
        yield (key[0], problem[0]), f"{file}: row 1: {problem[1]}"


def _first_row(file: Path) -> dict[str, Any] | None:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as stored:
        if not stored.metadata.num_rows:
            return None
        rows: list[dict[str, Any]] = next(stored.iter_batches(batch_size=1)).to_pylist()
        return rows[0]


def _jsonl_file(key: Key, file: str, columns: dict[str, str], chat: bool) -> Found:
    try:
        stream = open(file, encoding="utf-8-sig")  # noqa: SIM115  closed by the with below
    except (OSError, ValueError) as error:
        yield key, f"the data file {file!r} cannot be read: {getattr(error, 'strerror', error)}"
        return
    with stream:
        try:
            yield from _jsonl_lines(key, file, stream, columns, chat)
        except UnicodeDecodeError as error:
            yield key, f"{file} is not UTF-8 text: {error.reason}"


def _jsonl_lines(
    key: Key, file: str, stream: Iterable[str], columns: dict[str, str], chat: bool
) -> Found:
    """The first fault of the file: one is enough to know that it needs a look."""
    count = 0
    for number, line in enumerate(stream, 1):
        if not line.strip() or count >= JSONL_LINES:
            continue
        count += 1
        problem = _line_problem(line, columns, chat)
        if problem:
            field, message = problem
            yield (key[0], field) if field else key, f"{file}:{number}: {message}"
            return
    if count == 0:
        yield key, f"{file} has no rows; expected one JSON object a line"


def _line_problem(line: str, columns: dict[str, str], chat: bool) -> tuple[str, str] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"is not JSON: {error}"
    if not isinstance(row, dict):
        return "", f"received {explain.shown(row)}; expected a JSON object with columns"
    return _row_problem(row, columns, chat)


def _row_problem(row: dict[str, Any], columns: dict[str, str], chat: bool) -> tuple[str, str] | None:
    """(field, what is wrong) of the first column that this row does not have as it should."""
    for field, column in columns.items():
        value = _value(row, column)
        if value is NOTHING:
            return field, _missing_column(field, column, row)
        if field == "prompt_column" and isinstance(value, list) and value and isinstance(value[0], dict):
            if not chat:
                return field, f"column {column!r} holds chat messages; set task.chat_template: true"
        elif not isinstance(value, (str, int, float)) or isinstance(value, bool):
            return field, f"column {column!r} is {explain.shown(value)}; expected text"
    return None


def _value(row: dict[str, Any], column: str) -> Any:
    """A column's value, or the one at the end of a path into nested data."""
    value: Any = row
    for part in [column] if column in row else column.split("."):
        if not isinstance(value, dict) or part not in value:
            return NOTHING
        value = value[part]
    return value


def _missing_column(field: str, column: str, row: dict[str, Any]) -> str:
    answer = field == "answer_column"
    needed = "rewards compare with it; null where none does" if answer else "it is the prompt"
    near = explain.nearest(column, row)
    hint = (
        f"did you mean {near}?" if near else f"columns there: {', '.join(map(str, row)) or 'none'}"
    )
    what = "reward column" if answer else "prompt column"
    return f"missing {what} {column!r} ({needed}); {hint}"


def check_rewards(recipe: Recipe) -> Found:
    """The section `rewards`."""
    scorer = recipe.task.type not in NO_SCORER
    for index, reward in enumerate(recipe.rewards):
        if isinstance(reward, RegexReward):
            yield from _pattern(("rewards", index, "pattern"), reward.pattern)
        if isinstance(reward, TaskReward) and not scorer:
            message = f"a {recipe.task.type} task has no scorer of its own"
            yield ("rewards", index, "type"), f"{message}; use exact_match or regex"
        if isinstance(reward, ModelReward):
            yield from ((("rewards", index, "path"), message) for message in _reward_model(reward.path))
        if isinstance(reward, ImportReward):
            yield from _import_reward(index, reward)
    yield from _reward_names(recipe)
    if all(reward.weight == 0 for reward in recipe.rewards):
        yield ("rewards",), "every weight is 0, so every reward would be 0; give one a weight"


def _reward_model(path: str) -> Iterator[str]:
    if Path(path).expanduser().is_dir():
        yield from model_folder(Path(path).expanduser())
    elif not is_hub_id(path):
        yield f"there is no folder {path!r}; {near_folder(path)}"
    else:
        yield from unreachable(path)


def _import_reward(index: int, reward: ImportReward) -> Found:
    """Form, file and permission; the code itself is looked at by its own process only."""
    key: Key = ("rewards", index, "function")
    place, _, name = reward.function.rpartition(":")
    file = place.endswith(".py")
    if not name.isidentifier() or not (file or MODULE.fullmatch(place)):
        shown = explain.shown(reward.function)
        yield key, f"received {shown}; expected package.module:function or path/to/file.py:function"
    elif file and not Path(place).is_file():
        yield key, f"there is no file {place!r}; expected path/to/file.py:function"
    if not reward.allow_code:
        message = f"this reward runs the Python code of {reward.function}, which the recipe does not permit"
        line = f"if you trust that code, add the line `allow_code: true` to rewards.{index}"
        yield ("rewards", index, "allow_code"), f"{message}; {line}"


def _reward_names(recipe: Recipe) -> Found:
    names = component_names(recipe.rewards)
    given = [n for n, reward in zip(names, recipe.rewards, strict=True) if reward.name is None]
    for index, (name, reward) in enumerate(zip(names, recipe.rewards, strict=True)):
        if reward.name is not None and name in {*names[:index], *given}:
            yield ("rewards", index, "name"), f"{name!r} is the name of another reward too"


def _pattern(key: Key, pattern: str) -> Found:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield key, f"received {pattern!r}, which is not a regular expression: {error}"
