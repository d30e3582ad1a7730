"""What the fields of a recipe say together, and about this machine's files.

Each check is a generator of (key, message); `check_recipe` runs those whose fields are right.
Relative paths are looked for beside the recipe first, then where the command runs.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from autotune.errors import RecipeError
from autotune.knobs import ALIASES, KNOBS, batch_problems, divisors, fit_micro_batch
from autotune.recipe import explain
from autotune.recipe.data_checks import check_rewards, check_task
from autotune.recipe.deepspeed import plan
from autotune.recipe.deepspeed_checks import check_deepspeed
from autotune.recipe.facts import knob_vector
from autotune.recipe.model_checks import check_model, check_offline
from autotune.recipe.rollout_checks import check_rollout
from autotune.recipe.schedule import KnobSchedule, load_schedule
from autotune.recipe.schema import (
    PackingSection,
    Recipe,
    RolloutSection,
    TrainerSection,
)
from autotune.recipe.source import Document, Key
from autotune.recipe.sweep_checks import check_sweep

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
    ("trainer", "packing", "tokens"): (1 << 24, "tokens"),
    ("trainer", "packing", "head_tokens"): (1 << 20, "positions"),
    ("trainer", "temperature"): (100.0, ""),
    ("trainer", "clip_range_high"): (100.0, ""),
    ("eval", "prompts"): (1 << 20, "prompts"),
    ("task", "prompts"): (1 << 22, "prompts"),
}
"""Field -> largest value that can be meant; anything above is a slip of the keyboard."""

def check_recipe(document: Document, recipe: Recipe, wrong: set[Key], ranks: int) -> None:
    """Note the problems of every check whose own fields are right."""
    for check in CHECKS:
        for key, message in check(recipe):
            if not _touches(key, wrong):
                document.add(key, message)
    if not _batches_wrong(recipe, wrong):
        for knob, message in batch_problems(knob_vector(recipe, ranks), ranks):
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
    if isinstance(data.get("checkpoint"), dict):
        _fields_beside(data["checkpoint"], ("start",), folder)
    if isinstance(task, dict) and task.get("type") in ("jsonl", "parquet"):
        _fields_beside(task, ("path", "eval_path"), folder)
    rewards = data.get("rewards")
    for reward in rewards if isinstance(rewards, list) else ():
        _reward_beside(reward, folder)
    if isinstance(model, dict) and isinstance(model.get("path"), str):
        prefix = "gguf:" if model["path"].startswith("gguf:") else ""
        model["path"] = prefix + _beside(model["path"].removeprefix("gguf:"), folder)
    if isinstance(data.get("deepspeed"), dict):
        _fields_beside(data["deepspeed"], ("config",), folder)


def _reward_beside(reward: Any, folder: Path) -> None:
    if not isinstance(reward, dict):
        return
    if reward.get("type") == "model":
        _fields_beside(reward, ("path",), folder)
    elif reward.get("type") == "import" and isinstance(reward.get("function"), str):
        file, colon, name = reward["function"].rpartition(":")
        if file.endswith(".py"):
            reward["function"] = _beside(file, folder) + colon + name


def _fields_beside(section: dict[str, Any], names: Iterable[str], folder: Path) -> None:
    for name in names:
        if isinstance(section.get(name), str):
            section[name] = _beside(section[name], folder)


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
        default = TrainerSection.model_fields[name].default  # a resolved recipe names every field
        if not t.has_critic and getattr(t, name) != default:
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


def _sampler_log_probs(recipe: Recipe) -> Found:
    rollout = recipe.rollout
    unread = rollout.mismatch_bound != RolloutSection.model_fields["mismatch_bound"].default
    if unread and rollout.old_log_probs == "recompute":
        yield (
            ("rollout", "mismatch_bound"),
            f"received {rollout.mismatch_bound:g} with old_log_probs: recompute, which asks nobody's; set"
            " old_log_probs: sampler, or remove the line",
        )
    if rollout.log_probs == "all":
        return
    if rollout.engine == "hf":
        yield (
            ("rollout", "log_probs"),
            "received some with engine: hf, whose log-probs cost nothing and all come; remove the line",
        )
    if rollout.old_log_probs == "sampler":
        yield (
            ("rollout", "old_log_probs"),
            "received sampler with log_probs: some, so most responses have none; set recompute, or"
            " log_probs: all",
        )
    if rollout.importance_cap not in ("auto", None):
        yield (
            ("rollout", "importance_cap"),
            f"received {rollout.importance_cap} with log_probs: some, so most tokens could not be weighted;"
            " set null, or log_probs: all",
        )


OF_PACKED = {
    "head_tokens": "only packed logits are chunked",
    "compile": "only packed layers are compiled",
    "compile_head": "only packed logits are chunked",
    "graphs": "only packed passes are recorded",
}
"""Field of `packing` -> why padded passes do not read it."""


def _padded(packing: PackingSection) -> Found:
    """Fields that mean nothing without packing; a resolved recipe names every field."""
    for name, why in OF_PACKED.items():
        value, default = getattr(packing, name), PackingSection.model_fields[name].default
        if value != default:
            shown, back = explain.shown(value), explain.shown(default)
            yield (
                ("trainer", "packing", name),
                f"received {shown} with enabled: off; {why}; set enabled: on, or {back}",
            )


def _packing(recipe: Recipe) -> Found:
    packing, t = recipe.trainer.packing, recipe.trainer
    if packing.enabled == "off" and packing.tokens is not None:
        yield (
            ("trainer", "packing", "tokens"),
            f"received {packing.tokens} with enabled: off; padded micro batches are cut by"
            " micro_batch_size; remove the line, or set enabled: on",
        )
    if packing.enabled == "off":
        yield from _padded(packing)
    elif packing.graphs:
        yield from _graphs(recipe)
    if packing.compile and _stage(recipe) == 3:
        yield (
            ("trainer", "packing", "compile"),
            "received true with zero_stage 3, which gathers weights by hooks on the layers; set it to false",
        )
    if packing.leave_out_quiet == "on" and (t.has_critic or t.kl.placement == "reward"):
        why = "a critic learns from every response" if t.has_critic else "a KL in the reward is signal"
        yield ("trainer", "packing", "leave_out_quiet"), f"received on, but {why}; set it to auto or off"
    elif packing.leave_out_quiet == "on" and (t.kl_coef > 0 or t.entropy_coef > 0):
        yield (
            ("trainer", "packing", "leave_out_quiet"),
            f"received on with kl_coef {t.kl_coef:g} and entropy_coef {t.entropy_coef:g}, whose terms act"
            " on every token; set it to auto or off, or both coefficients to 0",
        )


def _graphs(recipe: Recipe) -> Found:
    """What keeps passes from being recorded wherever the run takes place."""
    key: Key = ("trainer", "packing", "graphs")
    if stage := _stage(recipe):
        yield (
            key,
            f"received true with zero_stage {stage}; passes are recorded at zero_stage 0 alone; set that, or"
            " false",
        )
    if recipe.model.dtype == "float32":
        yield (
            key,
            "received true with model.dtype: float32; passes are recorded in bfloat16 alone; set dtype to"
            " auto or bfloat16, or this to false",
        )


def _stage(recipe: Recipe) -> int | None:
    """ZeRO's stage, from the recipe or its DeepSpeed file; None where that file cannot be used."""
    try:
        return plan(recipe.deepspeed).stage
    except ValueError:
        return None


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


def _start(recipe: Recipe) -> Found:
    """The checkpoint that the run goes on from, as far as its folder's name and manifest tell."""
    if recipe.checkpoint.start is None:
        return
    folder, key = Path(recipe.checkpoint.start), ("checkpoint", "start")
    place = re.fullmatch(r"rollout-(\d{5,})", folder.name)
    if place is None or not (folder / "manifest.json").is_file():
        yield key, f"{str(folder)!r} is no checkpoint; expected RUN/checkpoints/rollout-NNNNN"
    elif int(place[1]) > recipe.trainer.rollouts:
        least = f"expected at least {int(place[1])}, the checkpoint's"
        yield ("trainer", "rollouts"), f"received {recipe.trainer.rollouts}; {least}"


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


CHECKS: tuple[Callable[[Recipe], Found], ...] = (
    _limits,
    _clip_range,
    _adam,
    _lora,
    _group,
    _critic,
    _kl,
    _packing,
    _sampler_log_probs,
    _run_dir,
    _pins,
    _schedule,
    _start,
    _policies,
    check_model,
    check_offline,
    check_task,
    check_rewards,
    check_rollout,
    check_deepspeed,
    check_sweep,
)
