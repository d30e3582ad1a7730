"""What two ranks do in `test_ranks.py`: started by torchrun, once for all of its jobs.

Every job is a real run through `autotune.run`, with a few functions watched, and leaves in the folder
what the tests need to know of this rank: `JOB-RANK.json`.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console

from autotune.errors import AdapterError, CheckpointError
from autotune.hooks.native import NativeAdapter
from autotune.recipe import Recipe
from autotune.run import run
from autotune.trainer import checkpoint
from autotune.trainer.engine import Engine
from autotune.trainer.group import leave_now
from autotune.trainer.live import LiveKnobs
from autotune.trainer.loop import Trainer
from autotune.trainer.meters import Meters

RANK = int(os.environ["RANK"])


class Watch:
    """Notes of one run on this rank."""

    def __init__(self) -> None:
        self.digests: list[str] = []
        self.vectors: list[dict[str, float]] = []
        self.undone: list[str] = []
        self.weights: list[str] = []
        self.ratios: list[list[list[float]]] = []  # log-ratio of every response token, by rollout and update
        self.snapshots: list[str] = []

    def __enter__(self) -> Watch:
        self._patches = [
            _around(NativeAdapter, "agree", self._agreed),
            _around(Trainer, "undo_rollout", self._undid),
            _around(Engine, "snapshot", self._snapshot),
            _around(Meters, "add_micro_batch", self._measured),
            _around(Meters, "__init__", lambda meters, *a, **k: self.ratios.append([])),
            _around(Trainer, "_one_rollout", self._finished),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _agreed(self, adapter: NativeAdapter, digest: str) -> None:
        self.digests.append(digest)
        self.vectors.append(adapter.knobs())

    def _snapshot(self, engine: Engine) -> None:
        self.snapshots.append(weights(engine))

    def _undid(self, trainer: Trainer) -> None:
        self.undone.append(weights(trainer.parts.engine))

    def _finished(self, trainer: Trainer, on_rollout: object) -> None:
        self.weights.append(weights(trainer.parts.engine))

    def _measured(self, meters: Meters, update: int, new: Any, old: Any, ref: Any, *rest: Any) -> None:
        mask = next(t for t in rest if isinstance(t, torch.Tensor) and t.dtype == torch.bool)
        if len(self.ratios[-1]) <= update:
            self.ratios[-1].append([])
        self.ratios[-1][update] += (new.detach() - old)[mask].tolist()


def _around(owner: Any, name: str, after: Callable[..., None]) -> Any:
    real = getattr(owner, name)

    def wrapper(self: Any, *args: Any, **more: Any) -> Any:
        answer = real(self, *args, **more)
        after(self, *args, **more)
        return answer

    return mock.patch.object(owner, name, wrapper)


def weights(engine: Engine) -> str:
    """Hash of all weights and moments, gathered."""
    total = hashlib.sha256()
    for name, tensor in engine.state_tensors().items():
        total.update(name.encode() + tensor.numpy().tobytes())
    return total.hexdigest()


def train(folder: Path, job: str, recipe: dict[str, Any], note: Callable[[Watch], Any]) -> None:
    recipe = {**recipe, "run_dir": str(folder / job)}
    with Watch() as watch:
        problem = ""
        try:
            run(Recipe.model_validate(recipe), console=Console(file=io.StringIO()))
        except CheckpointError as error:
            problem = str(error)
    told = {**note(watch), "problem": problem}
    (folder / f"{job}-{RANK}.json").write_text(json.dumps(told))


def notes(watch: Watch) -> dict[str, Any]:
    names = ("digests", "vectors", "undone", "weights", "ratios", "snapshots")
    return {name: getattr(watch, name) for name in names}


def stubborn() -> Any:
    """Rank 1 does not take a new learning rate."""
    real = LiveKnobs.set_many

    def set_many(live: LiveKnobs, values: Any) -> Any:
        if RANK == 1 and "actor_learning_rate" in values:
            raise AdapterError("no")
        return real(live, values)

    return mock.patch.object(LiveKnobs, "set_many", set_many)


def full_disk() -> Any:
    """The disk is full from the second checkpoint on, which only rank 0 sees."""
    real = checkpoint._write_optimizer

    def write(path: Path, tensors: Any, steps: int) -> None:
        if "00000" not in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, tensors, steps)

    return mock.patch.object(checkpoint, "_write_optimizer", write)


def main(folder: Path) -> None:
    recipe = json.loads((folder / "recipe.json").read_text())
    for stage in (1, 3):
        train(folder, f"zero{stage}", {**recipe, "deepspeed": {"zero_stage": stage}}, notes)
    with stubborn():
        train(folder, "stubborn", recipe, notes)
    with full_disk():
        train(folder, "full", recipe, notes)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave_now(0)
