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

*Ranks.* Every rank calls `save_checkpoint` and `load_checkpoint`, with the same folder. Rank 0 alone
gathers and writes, one tensor after the other, unsplit, so another number of ranks or another ZeRO
stage can go on from it. What fails on one rank fails on all, before anything is changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.errors import CheckpointError
from autotune.trainer.group import from_all, from_first

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
        CheckpointError: Weights, moments or `state` are not finite, `state` is not JSON, or the disk
            refuses; on every rank, and what was there before is still there.
    """
    target = Path(root) / f"rollout-{rollout:05d}"
    first = engine.rank == 0
    whole = {"": (model, engine)} | ({CRITIC: (critic.model, critic.engine)} if critic else {})
    states = {name: (e.state_tensors(keep=first), e.steps()) for name, (_, e) in whole.items()}
    problem: CheckpointError | None = None
    with contextlib.ExitStack() as gathered:
        for _, one in whole.values():
            gathered.enter_context(one.whole_weights())
        if first:
            try:
                content = {name: (m, *states[name]) for name, (m, _) in whole.items()}
                _write(target, content, tokenizer, state, keep, on_phase)
            except CheckpointError as refused:
                problem = refused
    reason = from_first(str(problem or ""))
    if reason:
        raise problem or CheckpointError(reason)
    return target


def _write(
    target: Path,
    content: Mapping[str, tuple[PreTrainedModel, dict[str, Tensor], int]],
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    keep: int,
    on_phase: Callable[[str], None] | None,
) -> None:
    """Rank 0's part. `content` is (model, optimizer state, step count) by folder, "" for the actor."""
    root, unfinished = target.parent, target.with_name(f"{_HIDDEN}{target.name}")
    text = _state_text(state)
    for _, tensors, _ in content.values():
        _refuse_non_finite(tensors, target)
    with _told(f"{target.name} not written", target, unfinished):
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root)
        for name, (model, tensors, steps) in content.items():
            (unfinished / name).mkdir()
            _write_model(unfinished / name, model, None if name else tokenizer)
            _write_optimizer(unfinished / name / OPTIMIZER, tensors, steps)
        (unfinished / STATE).write_text(text, encoding="utf-8")
        _seal(unfinished, checkpoint_rollout(target))
        _report(on_phase, "save:files")
        _put_in_place(unfinished, target)
    _report(on_phase, "save:renamed")
    with _told(f"{target.name} is written, but not the pointer to it", target):
        _point_to(root, target)
        _prune(root, keep)


@contextlib.contextmanager
def _told(what: str, target: Path, unfinished: Path | None = None) -> Iterator[None]:
    """Say what a full or broken disk means for the run, and give back the space that was taken."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as fault:
        if unfinished is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
        reason = getattr(fault, "strerror", None) or str(fault)
        last = _folders(target.parent)
        stands = f"{last[-1].name} is the last whole checkpoint" if last else "there is no checkpoint yet"
        raise CheckpointError(
            f"{what}: {reason}; {stands}. Make room or repair the disk under {target.parent}, then resume"
        ) from fault


def checkpoint_rollout(path: Path) -> int:
    """Number of finished rollouts in a checkpoint's folder name."""
    return int(path.name.rsplit("-", 1)[1])


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


def newest_checkpoint(root: Path, not_after: int | None = None) -> Path | None:
    """The newest good checkpoint of at most that rollout, the same on every rank."""
    found = []
    if _first():
        limit = math.inf if not_after is None else not_after
        found = [path.name for path in find_checkpoints(root) if checkpoint_rollout(path) <= limit][:1]
    chosen = from_first(found)
    return Path(root) / chosen[0] if chosen else None


def load_checkpoint(path: Path, engine: Engine, critic: Engine | None = None) -> dict[str, Any]:
    """Put a checkpoint's weights, moments and step counts into the engines; return its `state`.

    Raises:
        CheckpointError: A file is missing or altered, or the model is another one; on every rank, and
            no engine was touched.
    """
    path = Path(path)
    engines = {OPTIMIZER: engine} | ({f"{CRITIC}/{OPTIMIZER}": critic} if critic else {})
    problem: CheckpointError | None = None
    saved: dict[str, Saved] = {}
    with contextlib.ExitStack() as files:
        try:
            saved = {name: files.enter_context(_opened(path, name)) for name in _whole(path, engines)}
            for name, one in engines.items():
                one.check_fit(saved[name].shapes)
        except CheckpointError as refused:
            problem = refused
        _raise_together(problem)
        for name, one in engines.items():
            one.load_state(saved[name], saved[name].steps)
    state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    return state


def _whole(path: Path, wanted: Mapping[str, Any]) -> list[str]:
    """The optimizer files to read, once the checkpoint was verified (by rank 0: they are large)."""
    if _first():
        _verify(path)
    missing = [name for name in wanted if not (path / name).is_file()]
    if f"{CRITIC}/{OPTIMIZER}" in missing:
        raise CheckpointError(f"{path} holds no critic: it is of a run with another algorithm than ppo")
    if missing:
        raise _damaged(path, f"{missing[0]} is missing")
    return list(wanted)


def _raise_together(problem: CheckpointError | None) -> None:
    """Raise on every rank what went wrong on any."""
    told = from_all(str(problem or ""))
    if problem is not None:
        raise problem
    for rank, reason in enumerate(told):
        if reason:
            raise CheckpointError(f"rank {rank}: {reason}")


def _first() -> bool:
    import torch.distributed as dist

    return not dist.is_initialized() or dist.get_rank() == 0


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


class Saved(Mapping[str, "Tensor"]):
    """Tensors of an optimizer file, each read when it is asked for: all at once may not fit."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.steps = int(file.metadata()["steps"])
        self.shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[Saved]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path / name, framework="pt") as file:
            yield Saved(file)
    except (OSError, SafetensorError) as fault:
        raise _damaged(path, f"{name} cannot be read ({fault})") from fault


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
