"""A recipe file with other values: the user's own text, comments and order kept."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from autotune.recipe.axes import with_values
from autotune.recipe.schema import Recipe


def rewritten(path: Path, values: Mapping[str, Any], header: str = "") -> str:
    """The file's text with fields set; a remark behind a changed value begins with what it was about.

    Args:
        path: a recipe that has been read without problems.
        values: dotted field -> value.
        header: lines for its top, without `#`.
    """
    yaml = YAML()  # round trip: comments stay; plain types only, since the file has been checked
    yaml.width = 110
    data = yaml.load(path.read_text("utf-8-sig")) or {}
    before = {name: _at(data, name) for name in values}
    wanted = {name: v for name, v in values.items() if v is not None or before[name] is not None}
    changed = with_values(data, wanted)
    for name in wanted:
        if before[name] is not None and before[name] != _at(changed, name):
            _say_what_it_was(changed, name, before[name])
    stream = io.StringIO()
    yaml.dump(changed, stream)
    return _comment(header) + stream.getvalue()


def _at(data: Any, name: str) -> Any:
    """The value at a dotted field; None where there is none."""
    for part in name.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data


def _say_what_it_was(data: Any, name: str, old: Any) -> None:
    """`# 1 update a rollout` behind 64 becomes `# was 64; 1 update a rollout` behind 16."""
    *parents, key = name.split(".")
    for part in parents:
        data = data[part]
    tokens = data.ca.items.get(key) if hasattr(data, "ca") else None
    if tokens and tokens[2] is not None:
        remark = tokens[2].value.lstrip("# ")
        tokens[2].value = f"# was {old}; {remark}"


def written(recipe: Recipe, header: str = "") -> str:
    """A whole recipe as YAML, every field with its value."""
    yaml, stream = YAML(), io.StringIO()
    yaml.default_flow_style = None
    yaml.width = 110
    yaml.dump(recipe.model_dump(mode="json", exclude_none=True), stream)
    return _comment(header) + stream.getvalue()


def _comment(header: str) -> str:
    return "".join(f"# {line}\n" for line in header.splitlines())
