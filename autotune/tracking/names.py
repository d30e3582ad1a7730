"""Names and values that MLflow accepts, made from names and values that it would refuse.

MLflow takes letters, digits, `_ - . : /` and spaces in keys, no empty or dotted path segments, at
most 250 characters; one refused name fails the whole batch, so every name goes through here. Two
names that become one are told apart by a suffix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

KEY_LIMIT = 250
PARAM_LIMIT = 500
"""Characters of a param's value; newer servers take 6000, older ones 500."""
TAG_LIMIT = 5000
PARAMS_PER_CALL = 100
METRICS_PER_CALL = 1000

_FOREIGN = re.compile(r"[^A-Za-z0-9_\-./]")


def clean_name(name: str) -> str:
    """`val/x@1` -> `val/x_at_1`, `timing(s)/gen` -> `timing_s_/gen`."""
    text = _FOREIGN.sub("_", name.replace("@", "_at_"))
    segments = [part.strip(".") for part in text.split("/")]
    return "/".join(part for part in segments if part)[:KEY_LIMIT].rstrip("/.") or "_"


def clean_names(values: Mapping[str, T]) -> dict[str, T]:
    """The same values under accepted names, none lost to a collision."""
    out: dict[str, T] = {}
    for name, value in values.items():
        clean = stem = clean_name(name)
        count = 2
        while clean in out:
            suffix = f"_{count}"
            clean, count = stem[: KEY_LIMIT - len(suffix)] + suffix, count + 1
        out[clean] = value
    return out


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings and of lists of mappings by dotted path."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from flatten(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, (list, tuple)) and any(isinstance(item, Mapping) for item in tree):
        for index, value in enumerate(tree):
            yield from flatten(value, f"{prefix}.{index}")
    else:
        yield prefix, tree


def params_of(recipe: Mapping[str, Any]) -> dict[str, str]:
    """A resolved recipe as MLflow params."""
    leaves = {path: _text(value) for path, value in flatten(recipe)}
    return {name: cut(text, PARAM_LIMIT) for name, text in clean_names(leaves).items()}


def tags_in_limits(tags: Mapping[str, Any]) -> dict[str, str]:
    """Tags as MLflow takes them: accepted names, no empty values, cut to the limit."""
    known = {name: str(value) for name, value in tags.items() if value not in (None, "")}
    return {name: cut(value, TAG_LIMIT) for name, value in clean_names(known).items()}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def cut(text: str, limit: int) -> str:
    """At most `limit` characters; a cut is visible."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
