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
    """The file's text with fields set.

    Args:
        path: a recipe that has been read without problems.
        values: dotted field -> value.
        header: lines for its top, without `#`.
    """
    yaml = YAML()  # round trip: comments stay; plain types only, since the file has been checked
    yaml.width = 110
    data = yaml.load(path.read_text("utf-8-sig")) or {}
    stream = io.StringIO()
    yaml.dump(with_values(data, values), stream)
    return _comment(header) + stream.getvalue()


def written(recipe: Recipe, header: str = "") -> str:
    """A whole recipe as YAML, every field with its value."""
    yaml, stream = YAML(), io.StringIO()
    yaml.default_flow_style = None
    yaml.width = 110
    yaml.dump(recipe.model_dump(mode="json", exclude_none=True), stream)
    return _comment(header) + stream.getvalue()


def _comment(header: str) -> str:
    return "".join(f"# {line}\n" for line in header.splitlines())
