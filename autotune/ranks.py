"""A run on several ranks: who this process is, what rank 0 decides for all, and what the others do.

    rank 0    folder, journal, controller, screen, MLflow: the session of `autotune.run`
    others    the same trainer and the same control loop, without a controller and without a word

Both make the same collective calls in the same order; that is all that keeps them together. What goes
wrong on rank 0 before the trainer stands is told to the others, who end with its exit code. Later a rank
that fails ends its process: the others' next call fails with it, or the launcher ends them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import AutotuneError, ElsewhereError
from autotune.hooks.loop import ControlLoop
from autotune.hooks.native import NativeAdapter
from autotune.recipe import Recipe


def rank() -> int:
    """This process's place; 0 when it is alone."""
    return int(os.environ.get("RANK") or 0)


def count() -> int:
    """Number of ranks, as the launcher said it."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def first_decides(action: Callable[[], Any]) -> Any:
    """Rank 0's answer (JSON) on every rank.

    Raises:
        AutotuneError: rank 0's own, there.
        ElsewhereError: on the other ranks when rank 0's action failed.
    """
    if count() == 1:
        return action()
    from autotune.trainer.group import from_first, start_group

    start_group()
    if rank() > 0:
        told = from_first(None)
        if told["failed"]:
            raise ElsewhereError(told["failed"], told["exit_code"])
        return told["answer"]
    try:
        answer = action()
    except AutotuneError as error:
        from_first({"failed": str(error), "exit_code": error.exit_code})
        raise
    from_first({"failed": "", "answer": answer})
    return answer


def follow(
    recipe: Recipe, folder: Path, resume: bool, on_phase: Callable[[str, int], None] | None = None
) -> None:
    """What ranks other than 0 do from the trainer's start to its end."""
    from autotune.trainer.loop import Trainer

    trainer = Trainer(recipe, folder, resume=resume, on_phase=on_phase)
    with contextlib.closing(trainer):
        adapter = NativeAdapter(trainer)
        adapter.share_knobs()
        trainer.run(ControlLoop(adapter, None, Unwritten()).on_rollout)  # type: ignore[arg-type]


class Unwritten:
    """The journal of a rank that keeps none."""

    def append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        return {"type": type, "rollout": rollout, **payload}
