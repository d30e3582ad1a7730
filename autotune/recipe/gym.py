"""What a recipe may ask of the package reasoning-gym: task names, their settings, their difficulty.

    config        fields of the task's own settings, by their names there
    difficulty    levels of the task's own curriculum, turned into such fields; `config` wins

The package is imported when a recipe names one of its tasks and never otherwise; where it is not
installed nothing can be said here, and the doctor tells how to get it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from autotune.recipe import explain
from autotune.recipe.schema import ReasoningGymTask

Problems = Iterator[tuple[str, str]]
"""(field of the section, message)."""


def problems(section: ReasoningGymTask) -> Problems:
    """Everything that reasoning-gym would refuse, with the nearest valid name."""
    try:
        from reasoning_gym.factory import CURRICULA, DATASETS
    except ImportError:
        return
    if section.name not in DATASETS:
        yield "name", f"received {section.name!r}; {_did_you_mean(section.name, DATASETS)}"
        return
    yield from _config_problems(section, DATASETS[section.name][1])
    yield from _difficulty_problems(section, CURRICULA)


def _config_problems(section: ReasoningGymTask, config: Any) -> Problems:
    known = [field.name for field in dataclasses.fields(config) if field.name != "size"]
    for name in section.config:
        if name == "size":
            yield "config", "received 'size'; expected task.size"
        elif name not in known:
            yield "config", f"{section.name} has no setting {name!r}; {_did_you_mean(name, known)}"


def _difficulty_problems(section: ReasoningGymTask, curricula: Any) -> Problems:
    if section.difficulty is None:
        return
    if section.name not in curricula:
        yield "difficulty", f"{section.name} has no curriculum; use task.config"
        return
    levels = {name: len(a.levels) for name, a in curricula[section.name]().attributes.items()}
    if isinstance(section.difficulty, int):
        most = max(levels.values()) - 1
        if section.difficulty > most:
            yield "difficulty", f"received {section.difficulty}; {section.name} has the levels 0 to {most}"
        return
    for name, level in section.difficulty.items():
        if name not in levels:
            yield "difficulty", f"{section.name} has no attribute {name!r}; {_did_you_mean(name, levels)}"
        elif level >= levels[name]:
            yield "difficulty", f"received {name}: {level}; expected 0 to {levels[name] - 1}"


def _did_you_mean(name: str, names: Any) -> str:
    near = explain.nearest(name, names)
    some = sorted(names)
    listed = ", ".join(some[:12]) + (f" and {len(some) - 12} more" if len(some) > 12 else "")
    return f"did you mean {near}?" if near else f"expected one of {listed}"


def settings(section: ReasoningGymTask) -> dict[str, Any]:
    """Keyword arguments of the task's generator; an attribute without that many levels takes its last."""
    if section.difficulty is None:
        return dict(section.config)
    from reasoning_gym.factory import create_curriculum

    curriculum = create_curriculum(section.name)
    for name, attribute in curriculum.attributes.items():
        wanted = section.difficulty
        level = wanted if isinstance(wanted, int) else wanted.get(name, attribute.default_level)
        curriculum.set_attr_level(name, min(level, len(attribute.levels) - 1))
    made = curriculum.generate_configuration()
    names = [n for a in curriculum.attributes.values() for n in _field_names(a)]
    return {name: getattr(made, name) for name in names} | section.config


def _field_names(attribute: Any) -> list[str]:
    """The settings that one attribute of a curriculum decides: a range has two."""
    names = ("lower_field_name", "upper_field_name", "field_name")
    return [getattr(attribute, name) for name in names if hasattr(attribute, name)]
