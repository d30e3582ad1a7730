"""Rule B8's fingerprint: what a run's settings were tuned on, in four readable parts.

    model     its path, and for files their content: two folders of one name may differ
    data      the task and its parameters; for a data file its content, not its place
    reward    every component with its weight and parameters
    hardware  the kind and number of GPUs, or cpu

A run writes its own into its `recipe.resolved.json` and its journal's header. Settings that are carried
elsewhere in such a file bring it along, and a part that differs is a warning: optima do not transfer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from autotune.recipe.schema import FingerprintSection, ModelSection, Recipe, Section

HEAD = 1 << 20
"""Bytes of a large file that are hashed, beside its size."""


def fingerprint(recipe: Recipe, hardware: str) -> FingerprintSection:
    """The fingerprint of a run of this recipe on that hardware."""
    return FingerprintSection(
        model=_model(recipe.model),
        data=_data(recipe.task),
        reward=_rewards(recipe.rewards),
        hardware=hardware,
    )


def known(section: FingerprintSection | None) -> dict[str, str]:
    """The parts that are written down."""
    parts = section.model_dump() if section is not None else {}
    return {name: value for name, value in parts.items() if value is not None}


def _model(section: ModelSection) -> str:
    kind, _, name = section.path.rpartition(":")
    lora = f", lora rank {section.lora.rank}" if section.lora is not None else ""
    path = Path(name).expanduser()
    if path.is_dir():
        weights = sorted((p.name, p.stat().st_size) for p in path.glob("*.safetensors"))
        config = path / "config.json"
        return f"{path.name} {_digest([_head(config), repr(weights).encode()])}{lora}"
    if kind == "gguf" and path.is_file():
        return f"{path.name} {_digest([_head(path)])}{lora}"
    return f"{section.path}{lora}"


def _data(task: Section) -> str:
    fields = task.model_dump(mode="json")
    words = [str(fields[name]) for name in ("type", "variant", "name") if fields.get(name)]
    files = [Path(fields.pop(name)) for name in ("path", "eval_path") if fields.get(name)]
    content = [_head(file) for file in files]
    return f"{' '.join(words)} {_digest([_json(fields), *content])}"


def _rewards(rewards: Sequence[Any]) -> str:
    parts = [reward.model_dump(mode="json") for reward in rewards]
    words = [p["type"] if p["weight"] == 1 else f"{p['weight']:g} {p['type']}" for p in parts]
    return f"{' + '.join(words)} {_digest([_json(parts)])}"


def _json(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True).encode()


def _head(file: Path) -> bytes:
    """Size and beginning of a file; empty where it cannot be read."""
    try:
        with file.open("rb") as stream:
            return f"{file.stat().st_size}:".encode() + stream.read(HEAD)
    except OSError:
        return b""


def _digest(parts: Iterable[bytes]) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:8]
