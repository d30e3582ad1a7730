"""What a sweep may try: one axis per field, and every point of the space as a legal recipe.

    {low, high, log, step}   a range; what is left out is the row of the knob table
    {choices: [...]}         these values

Batch sizes have an algebra (`autotune.knobs`). A sweep moves them as plain numbers, and `settle` takes
the nearest legal ones: powers of two for the amount of data, divisors for what cuts it into pieces. So
no trial is lost to a batch that does not divide another.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.knobs import (
    ALIASES,
    KNOBS,
    KnobSpec,
    Scale,
    divisors,
    expand,
    fit_micro_batch,
    mini_batch_lattice,
)
from autotune.recipe.schema import AxisSection, Recipe, Scalar

AMOUNT = ("train_batch_size", "rollout_n")
CUTS = ("ppo_mini_batch_size", "micro_batch_size", "rollout_micro_batch_size")
LATTICE = (*AMOUNT, *CUTS)


@dataclass(frozen=True, slots=True)
class Axis:
    """One field and the values that it may take; `choices` instead of a range where there are some."""

    path: str
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    integer: bool = False
    choices: tuple[Scalar, ...] = ()

    def holds(self, value: Any) -> bool:
        """Whether a value lies on this axis."""
        if self.choices:
            return value in self.choices
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return number and self.low <= value <= self.high

    @property
    def ends(self) -> tuple[Scalar, ...]:
        """The outermost values: if these make a recipe, so do those between."""
        if self.choices:
            return self.choices
        return tuple(int(end) if self.integer else end for end in (self.low, self.high))


def axes(recipe: Recipe) -> tuple[Axis, ...]:
    """The recipe's search space.

    Raises:
        ValueError: with the path and what is missing, for an axis that says too little or nonsense.
    """
    space = recipe.sweep.space if recipe.sweep is not None else {}
    return tuple(axis(recipe, path, section) for path, section in space.items())


def axis(recipe: Recipe, path: str, section: AxisSection) -> Axis:
    """One axis, completed from the knob table."""
    if section.choices is not None:
        if any(v is not None for v in (section.low, section.high, section.log, section.step)):
            raise ValueError("has choices and a range; expected one of them")
        return Axis(path, choices=section.choices)
    low, high, log = _range(recipe, path, section)
    if low is None or high is None:
        raise ValueError("is no knob with a range of its own; give low and high, or choices")
    integer = isinstance(default_of(recipe, path), int) or _is_count(path)
    _refuse_nonsense(low, high, log, section.step, integer)
    return Axis(path, low, high, log, section.step, integer)


def _range(recipe: Recipe, path: str, section: AxisSection) -> tuple[float | None, float | None, bool]:
    spec = knob_of(path)
    if spec is None:
        return section.low, section.high, bool(section.log)
    low, high = _bounds(recipe, spec)
    log = spec.scale is not Scale.LINEAR and section.step is None
    return (
        low if section.low is None else section.low,
        high if section.high is None else section.high,
        log if section.log is None else section.log,
    )


def _bounds(recipe: Recipe, spec: KnobSpec) -> tuple[float, float]:
    """The table's row; a piece is no larger than what it is cut from."""
    trainer = recipe.trainer
    whole = trainer.train_batch_size * trainer.rollout_n
    largest = {
        "ppo_mini_batch_size": trainer.train_batch_size,
        "micro_batch_size": whole,
        "rollout_micro_batch_size": whole,
    }
    least = 2 if spec.name == "rollout_n" and not trainer.has_critic else spec.low
    return least, min(spec.high, largest.get(spec.name, math.inf))


def _refuse_nonsense(low: float, high: float, log: bool, step: float | None, integer: bool) -> None:
    if low >= high:
        raise ValueError(f"goes from {low:g} to {high:g}; expected low below high")
    if log and low <= 0:
        raise ValueError(f"is logarithmic from {low:g}; expected low above 0, or log: false")
    if log and step is not None:
        raise ValueError("is logarithmic and has a step; expected one of them")
    if integer and any(v != int(v) for v in (low, high, step or 1)):
        raise ValueError("counts something; expected whole numbers")


def knob_of(path: str) -> KnobSpec | None:
    """The row of the knob table behind a field of `trainer`."""
    section, _, name = path.rpartition(".")
    return KNOBS.get(expand(name)[0]) if section == "trainer" else None


def _is_count(path: str) -> bool:
    spec = knob_of(path)
    return spec is not None and spec.integer


def default_of(recipe: Recipe, path: str) -> Any:
    """The value that the recipe has there, or a rule's own parameter where it says nothing.

    Raises:
        ValueError: there is no such field.
    """
    parts = path.split(".")
    if parts[:2] == ["control", "policies"] and len(parts) == 4:
        return _parameter(recipe, parts[2], parts[3])
    here: Any = recipe.model_dump(mode="json")
    for part in parts:
        if isinstance(here, list) and part.isdigit() and int(part) < len(here):
            here = here[int(part)]
        elif isinstance(here, dict) and part in here:
            here = here[part]
        else:
            raise ValueError(f"is no field of a recipe: there is no {part!r}")
    return here


def _parameter(recipe: Recipe, rule: str, name: str) -> Any:
    from autotune.policies import POLICIES

    fields = {f.name: f.default for f in dataclasses.fields(POLICIES[rule])} if rule in POLICIES else {}
    if name not in fields:
        known = ", ".join(fields) or "no such rule"
        raise ValueError(f"is no parameter of rule {rule}: {known}")
    setting = recipe.control.policies.get(rule)
    return setting.get(name, fields[name]) if isinstance(setting, dict) else fields[name]


def own_values(recipe: Recipe, space: Iterable[Axis]) -> dict[str, Any] | None:
    """The recipe's own place in the space; None where one of its values lies outside."""
    found = {a.path: _own(recipe, a.path) for a in space}
    return found if all(a.holds(found[a.path]) for a in space) else None


def _own(recipe: Recipe, path: str) -> Any:
    trainer = recipe.trainer
    implied = {
        "trainer.clip_range": trainer.clip_low(),
        "trainer.clip_range_low": trainer.clip_low(),
        "trainer.clip_range_high": trainer.clip_high(),
        "trainer.critic_learning_rate": trainer.critic_rate(),
    }
    return implied[path] if path in implied else default_of(recipe, path)


def settle(recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the values of one point amount to: fields to set, batch sizes made legal.

    Args:
        recipe: where everything else comes from.
        values: dotted field -> value.
    """
    settled = dict(values)
    if "trainer.clip_range" in values:  # one-sided values would win over it
        settled |= {f"trainer.{side}": None for side in ALIASES["clip_range"]}
    moved = {name for name in LATTICE if f"trainer.{name}" in values}
    if moved:
        sizes = {n: int(values.get(f"trainer.{n}", getattr(recipe.trainer, n))) for n in LATTICE}
        settled |= {f"trainer.{n}": size for n, size in _legal(sizes, moved).items()}
    return settled


def _legal(sizes: dict[str, int], moved: set[str]) -> dict[str, int]:
    """The nearest legal batch sizes on one rank; the recipe's own amounts are never changed."""
    sizes |= {name: _power_of_two(sizes[name]) for name in AMOUNT if name in moved}
    train, n = sizes["train_batch_size"], sizes["rollout_n"]
    mini = _nearest(mini_batch_lattice(train, n, 1), sizes["ppo_mini_batch_size"])
    micro = fit_micro_batch(mini, n, 1, sizes["micro_batch_size"])
    at_once = max(d for d in divisors(train * n) if d <= max(sizes["rollout_micro_batch_size"], 1))
    cut = {"ppo_mini_batch_size": mini, "micro_batch_size": micro, "rollout_micro_batch_size": at_once}
    return {**sizes, **cut}


def _power_of_two(size: int) -> int:
    return 1 << round(math.log2(size))


def _nearest(lattice: Iterable[int], size: int) -> int:
    """By ratio; the larger of two that are equally near, which is the more careful one."""
    return min(lattice, key=lambda d: (abs(math.log(d / size)), -d))


def with_values(data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a recipe's data with fields set; sections on the way are made, comments in it stay.

    Args:
        data: a recipe as JSON data.
        values: dotted field -> value.
    """
    changed = copy.deepcopy(data)
    for path, value in values.items():
        here: Any = changed
        *parents, last = path.split(".")
        for part in parents:
            here = here[int(part)] if isinstance(here, list) else _section(here, part)
        here[int(last) if isinstance(here, list) else last] = value
    return changed


def _section(holder: dict[str, Any], name: str) -> Any:
    """A part to go into; a rule that was only switched on or off becomes a mapping of parameters."""
    if not isinstance(holder.get(name), (dict, list)):
        holder[name] = {}
    return holder[name]
