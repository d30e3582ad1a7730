"""Checkpoints that are whole or not there: safetensors and JSON, hashed, renamed into place.

    root/rollout-00010/
        config.json, model.safetensors, tokenizer…   what `from_pretrained` loads
        optimizer.safetensors   float32 weights and Adam's moments by parameter name; step count
        state.json              what the loop needs to go on: cursor, knobs, controller, …
        manifest.json           size and SHA-256 of every file above
        critic/                 the same of PPO's critic: config, weights, optimizer.safetensors
    root/latest                 name of the newest one, for people and scripts

*Writing.* Everything goes into a hidden folder beside its final place; files and folder are flushed
to the disk; one rename makes it visible; the pointer comes last. A kill at any point leaves either
the old set or the new one. *Reading.* The pointer is never trusted: the folders themselves are
looked at, newest first, and one counts only if every hash is right. A truncated or altered one is
named in a warning and the one before it is used. *Keeping.* The newest `keep` and always the first,
so that an emergency can go back behind the onset of a collapse.

At more than one rank every rank calls `save_checkpoint` (gathering the state is collective) and
rank 0 alone writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from autotune.trainer.critic import Critic
    from autotune.trainer.engine import Engine

FORMAT = 1
"""Version of the folder's layout; another one is refused."""

MANIFEST, STATE, OPTIMIZER, LATEST = (
    "manifest.json",
    "state.json",
    "optimizer.safetensors",
    "latest",
)
CRITIC = "critic"

_FOLDER = re.compile(r"rollout-(\d{5,})")
_HIDDEN = ".unfinished-"
"""Prefix of a folder being written or removed; what a kill leaves is swept by the next save."""

_log = logging.getLogger(__name__)


def save_checkpoint(
    root: Path,
    rollout: int,
    *,
    engine: Engine,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    keep: int,
    critic: Critic | None = None,
    on_phase: Callable[[str], None] | None = None,
) -> Path:
    """Write `root/rollout-NNNNN` and return its path.

    Args:
        root: The run's `checkpoints` folder, made if missing.
        rollout: Number of finished rollouts; names the folder.
        engine: Whose weights, moments and step count are saved.
        model: The model inside the engine, saved for `from_pretrained`.
        tokenizer: Saved beside it.
        state: JSON-able facts that `load_checkpoint` gives back unchanged.
        critic: PPO's value model and its engine, saved in a folder of their own.
        keep: How many of the newest stay, besides the first.
        on_phase: Called with `save:files` and `save:renamed` as these are reached.

    Raises:
        CheckpointError: Weights, moments or `state` are not finite, or `state` is not JSON.
    """
    root = Path(root)
    target = root / f"rollout-{rollout:05d}"
    text = _state_text(state)
    tensors, steps = engine.state_tensors(), engine.steps()  # collective: before rank 0 goes alone
    _refuse_non_finite(tensors, target)
    values, value_steps = (critic.engine.state_tensors(), critic.engine.steps()) if critic else ({}, 0)
    _refuse_non_finite(values, target)
    if engine.rank != 0:
        return target
    root.mkdir(parents=True, exist_ok=True)
    _sweep(root)
    unfinished = root / f"{_HIDDEN}{target.name}"
    unfinished.mkdir()
    _write_model(unfinished, model, tokenizer)
    _write_optimizer(unfinished / OPTIMIZER, tensors, steps)
    if critic is not None:
        (unfinished / CRITIC).mkdir()
        _write_model(unfinished / CRITIC, critic.model)
        _write_optimizer(unfinished / CRITIC / OPTIMIZER, values, value_steps)
    (unfinished / STATE).write_text(text, encoding="utf-8")
    _seal(unfinished, rollout)
    _report(on_phase, "save:files")
    _put_in_place(unfinished, target)
    _report(on_phase, "save:renamed")
    _point_to(root, target)
    _prune(root, keep)
    return target


def find_checkpoints(root: Path) -> list[Path]:
    """Every complete checkpoint whose hashes are right, newest first; others are warned about."""
    good = []
    for folder in reversed(_folders(Path(root))):
        try:
            _verify(folder)
        except CheckpointError as problem:
            _log.warning("%s", problem)
        else:
            good.append(folder)
    return good


def load_checkpoint(path: Path, engine: Engine, critic: Engine | None = None) -> dict[str, Any]:
    """Put a checkpoint's weights, moments and step counts into the engines; return its `state`.

    Raises:
        CheckpointError: A file is missing or altered, or the model is another one.
    """
    path = Path(path)
    _verify(path)
    if critic is not None and not (path / CRITIC / OPTIMIZER).is_file():
        raise CheckpointError(f"{path} holds no critic: it is of a run with another algorithm than ppo")
    _read_optimizer(path / OPTIMIZER, engine)
    if critic is not None:
        _read_optimizer(path / CRITIC / OPTIMIZER, critic)
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


# -- content -----------------------------------------------------------------------------------


def _state_text(state: Mapping[str, Any]) -> str:
    try:
        return json.dumps(state, allow_nan=False, sort_keys=True, indent=1)
    except (TypeError, ValueError) as problem:
        raise CheckpointError(
            f"state cannot be saved: {problem}; expected JSON with finite numbers only"
        ) from problem


def _refuse_non_finite(tensors: Mapping[str, Tensor], target: Path) -> None:
    bad = sorted(name for name, tensor in tensors.items() if not tensor.isfinite().all())
    if bad:
        raise CheckpointError(
            f"{target.name} not written: {len(bad)} tensors have values that are not finite, "
            f"first {bad[0]!r}; go back to an earlier checkpoint with a lower learning rate"
        )


def _write_model(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    from transformers.utils import logging as hf_logging

    bars = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()  # the run's screen is the place for progress
    try:
        # Asked about embeddings, peft would look for the base model on the hub.
        adapters = {"save_embedding_layers": False} if hasattr(model, "peft_config") else {}
        model.save_pretrained(folder, **adapters)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    finally:
        if bars:
            hf_logging.enable_progress_bar()


def _write_optimizer(path: Path, tensors: dict[str, Tensor], steps: int) -> None:
    from safetensors.torch import save_file

    # A single key: safetensors writes several in an order that changes from run to run, and equal
    # states must be equal files.
    save_file(tensors, path, metadata={"steps": str(steps)})


def _read_optimizer(path: Path, engine: Engine) -> None:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        steps = int(file.metadata()["steps"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    engine.load_state(tensors, steps)


# -- whole or not there ------------------------------------------------------------------------


def _seal(folder: Path, rollout: int) -> None:
    """Hash every file into the manifest and flush all of it to the disk."""
    files = {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }
    manifest = {"format": FORMAT, "rollout": rollout, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for entry in [*folder.rglob("*"), folder]:
        _flush(entry)


def _verify(folder: Path) -> None:
    """Raise `CheckpointError` with the reason unless every file is as it was written."""
    for name, expected in _manifest_files(folder).items():
        file = folder / name
        if not file.is_file():
            raise _damaged(folder, f"{name} is missing")
        size = file.stat().st_size
        if size != expected["bytes"]:
            raise _damaged(folder, f"{name} has {size} bytes, expected {expected['bytes']}")
        if _sha256(file) != expected["sha256"]:
            raise _damaged(folder, f"{name} does not have the SHA-256 of its manifest")


def _manifest_files(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        version, listed = manifest["format"], manifest["files"].items()
        files = {name: {key: entry[key] for key in ("bytes", "sha256")} for name, entry in listed}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as problem:
        raise _damaged(folder, f"{MANIFEST} cannot be read ({problem})") from problem
    if version != FORMAT:
        raise _damaged(folder, f"its format is {version!r}, this version reads {FORMAT}")
    if missing := {STATE, OPTIMIZER} - files.keys():
        raise _damaged(folder, f"{MANIFEST} does not list {sorted(missing)}")
    return files


def _damaged(folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {folder} is not usable: {reason}; use an earlier one or remove the folder"
    )


def _put_in_place(unfinished: Path, target: Path) -> None:
    """One rename; a run that was resumed may write a rollout anew, then the old one steps aside."""
    if target.exists():
        aside = target.with_name(f"{_HIDDEN}old-{target.name}")
        target.rename(aside)
        unfinished.rename(target)
        shutil.rmtree(aside)
    else:
        unfinished.rename(target)
    _flush(target.parent)


def _point_to(root: Path, target: Path) -> None:
    draft = root / f"{_HIDDEN}{LATEST}"
    draft.write_text(target.name + "\n", encoding="utf-8")
    _flush(draft)
    draft.replace(root / LATEST)
    _flush(root)


def _prune(root: Path, keep: int) -> None:
    """Drop what is neither the first nor among the newest `keep`; hidden first, so never half."""
    folders = _folders(root)
    for folder in folders[1 : max(len(folders) - keep, 1)]:
        hidden = folder.with_name(f"{_HIDDEN}old-{folder.name}")
        folder.rename(hidden)
        shutil.rmtree(hidden)


def _sweep(root: Path) -> None:
    """Remove what an earlier process left when it was killed while writing or removing."""
    for leftover in root.glob(f"{_HIDDEN}*"):
        if leftover.is_dir():
            shutil.rmtree(leftover)
        else:
            leftover.unlink()


def _folders(root: Path) -> list[Path]:
    """Checkpoint folders, oldest first, unverified."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if _FOLDER.fullmatch(path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("rollout-")))


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """fsync a file's content, or a folder's list of names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _report(on_phase: Callable[[str], None] | None, phase: str) -> None:
    if on_phase is not None:
        on_phase(phase)
