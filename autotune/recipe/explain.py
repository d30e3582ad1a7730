"""A validation error in the words of this project: received, expected, nearest valid name."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from autotune.recipe.schema import Recipe
from autotune.recipe.source import Document, Key, dotted

FOREIGN: dict[str, str] = {
    "lr": "trainer.actor_learning_rate",
    "learning_rate": "trainer.actor_learning_rate",
    "beta": "trainer.kl_coef",
    "kl_loss_coef": "trainer.kl_coef",
    "clip_ratio": "trainer.clip_range",
    "epsilon": "trainer.clip_range",
    "epsilon_high": "trainer.clip_range_high",
    "num_generations": "trainer.rollout_n",
    "group_size": "trainer.rollout_n",
    "rollout_batch_size": "trainer.rollout_micro_batch_size",
    "num_iterations": "trainer.ppo_epochs",
    "max_completion_length": "trainer.max_response_length",
    "max_new_tokens": "trainer.max_response_length",
    "total_epochs": "trainer.rollouts",
    "max_steps": "trainer.rollouts",
}
"""Names of other trainers and older versions -> ours, where the spelling alone gives no hint."""

NO_FIELD: dict[str, str] = {
    "num_rollout_batches": "it follows from rollout_micro_batch_size and the batch",
    "trust_remote_code": "code that comes with a model is never run",
}
"""Names that are understood but have no field, with the reason."""

EXPECTED: dict[str, str] = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "model_type": "a section of `field: value` lines",
    "model_attributes_type": "a section of `field: value` lines",
    "dict_type": "a section of `name: value` lines",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "union_tag_invalid": "type: one of {expected_tags}",
    "too_short": "at least {min_length} item(s)",
    "too_long": "at most {max_length} item(s)",
    "string_pattern_mismatch": "letters, digits, `.`, `_`, `-`, starting with a letter or digit",
}
"""pydantic's error type -> what was expected, formatted with the error's context."""


def shown(value: Any) -> str:
    """A received value as the user would write it, cut to a line."""
    if isinstance(value, float) and (value != value or value in (float("inf"), -float("inf"))):
        return f".{value}".replace(".-", "-.")
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that `name` was probably meant to be, whatever its capitals."""
    by_lower = {n.lower(): n for n in names}
    found = difflib.get_close_matches(name.lower(), by_lower, 1, 0.6)
    return by_lower[found[0]] if found else None


def add_validation_problems(document: Document, error: ValidationError) -> set[Key]:
    """Write one problem per wrong field into the document and return the wrong keys."""
    grouped: dict[Key, list[Mapping[str, Any]]] = {}
    for item in error.errors(include_url=False):
        grouped.setdefault(real_key(document.data, item["loc"], item["type"]), []).append(item)
    for key, items in grouped.items():
        if _covered(key, document.unreadable):
            continue
        if items[0]["type"] == "too_short" and _has_child(key, grouped):
            continue  # every item of the list was wrong and is reported by itself
        document.add(key, _message(document, key, items))
    return set(grouped)


def _covered(key: Key, unreadable: Iterable[Key]) -> bool:
    """Whether the value or a part of it is reported already: its text could not be read."""
    return any(key and (key[: len(u)] == u or u[: len(key)] == key) for u in unreadable)


def _has_child(key: Key, keys: Iterable[Key]) -> bool:
    return any(other[: len(key)] == key and len(other) > len(key) for other in keys)


def real_key(data: Any, loc: tuple[str | int, ...], kind: str) -> Key:
    """The part of pydantic's location that exists in the file: union tags are not keys.

    A missing field is the exception: its last part is what is missing.
    """
    key: Key = ()
    for part in loc:
        if isinstance(data, dict) and part in data:
            data, key = data[str(part)], (*key, part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data, key = data[part], (*key, part)
    return (*key, loc[-1]) if kind == "missing" else key


def _message(document: Document, key: Key, items: list[Mapping[str, Any]]) -> str:
    first = items[0]
    if first["type"] == "extra_forbidden":
        return unknown_field(document.data, key, first["input"])
    if first["type"] == "missing":
        return "is missing; expected a value"
    if first["type"] == "union_tag_not_found":
        kinds = ", ".join(filter(None, map(_type_of, section_kinds(document.data, key))))
        return f"received {shown(first['input'])}; expected a `type:` line, one of {kinds}"
    expected = " or ".join(dict.fromkeys(_expected(item) for item in items))
    return f"received {shown(first['input'])}; expected {expected}{_hint(first)}"


def _expected(item: Mapping[str, Any]) -> str:
    template = EXPECTED.get(item["type"])
    if template is None:
        return str(item["msg"])[:1].lower() + str(item["msg"])[1:]
    context = {name: _limit(value) for name, value in item.get("ctx", {}).items()}
    return template.format(**context).replace("'", "")


def _limit(value: Any) -> str:
    return (
        f"{value:g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else value
    )


def _hint(item: Mapping[str, Any]) -> str:
    value, context = item["input"], item.get("ctx", {})
    if item["type"] == "union_tag_invalid":
        return _did_you_mean(str(context["tag"]), _quoted(str(context["expected_tags"])))
    if item["type"] == "literal_error":
        return _did_you_mean(str(value), _quoted(str(context["expected"])))
    if item["type"] in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return "; remove the quotes"
    return ""


def _quoted(text: str) -> list[str]:
    return text.split("'")[1::2]


def _did_you_mean(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def unknown_field(data: Any, key: Key, value: Any) -> str:
    """What to write instead of a field that does not exist."""
    name = str(key[-1])
    section, siblings = section_fields(data, key[:-1])
    found = f"unknown field; received {shown(value)}"
    if name in NO_FIELD:
        return f"{found}; there is no such field: {NO_FIELD[name]}"
    near = FOREIGN.get(name) or nearest(name, siblings)
    if near:
        return f"{found}; did you mean {near}?"
    elsewhere = _elsewhere(name)
    if elsewhere:
        return f"{found}; did you mean {elsewhere}?"
    return f"{found}; fields of {section}: {', '.join(siblings)}"


def _elsewhere(name: str) -> str | None:
    """The dotted path of a field of that name in another section."""
    by_name = {path.rpartition(".")[2]: path for path in reversed(field_paths())}
    near = nearest(name, by_name)
    return by_name[near] if near else None


def section_fields(data: Any, key: Key) -> tuple[str, tuple[str, ...]]:
    """(name of a section, names of its fields), following `type:` where there are several kinds."""
    kinds = section_kinds(data, key)
    for part in key:
        data = data[part]
    return dotted(key) or "a recipe", tuple(_kind(kinds, data).model_fields)


def section_kinds(data: Any, key: Key) -> list[type[BaseModel]]:
    """The section classes that may stand at a key."""
    kinds: list[type[BaseModel]] = [Recipe]
    for part in key:
        fields = _kind(kinds, data).model_fields
        if part in fields:  # a place in a list, or a name that the user chose, leads to the same kinds
            kinds = section_models(fields[str(part)].annotation)
        data = data[part]
    return kinds


def _kind(kinds: list[type[BaseModel]], data: Any) -> type[BaseModel]:
    chosen = data.get("type") if isinstance(data, dict) else None
    return next((kind for kind in kinds if _type_of(kind) == chosen), kinds[0])


def _type_of(model: type[BaseModel]) -> str | None:
    found = model.model_fields.get("type")
    return str(found.default) if found else None


def section_models(annotation: Any) -> list[type[BaseModel]]:
    """The section classes inside an annotation: none for a plain value, several for a union.

    Those of a mapping are its values', under whatever names.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Annotated, Union, types.UnionType, tuple, list, dict):
        return [m for part in get_args(annotation) for m in section_models(part)]
    return []


@cache
def field_paths() -> tuple[str, ...]:
    """Dotted path of every field of a recipe."""
    return tuple(_paths(Recipe, ""))


def _paths(model: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, info in model.model_fields.items():
        path = f"{prefix}{name}"
        yield path
        for section in section_models(info.annotation):
            yield from _paths(section, f"{path}.")
