"""Weights that can come back: those from before a rollout's updates, and a few older ones.

    undo         the trainable weights and the optimizer's moments, kept beside them on the same device
    checkpoint   older weights alone, in the host's memory: the first ones and the newest three of every
                 tenth rollout; the moments start again from nothing

Kept only where they fit into `budget` bytes, and never where the weights are cut over ranks (DeepSpeed,
FSDP): a veto then lowers the learning rate and the weights stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autotune.errors import AdapterError, CheckpointError

EVERY, NEWEST = 10, 3


class KeptWeights:
    """Copies of one trainer's weights."""

    def __init__(self, trainer: Any, budget: int) -> None:
        self.trainer = trainer
        self.parameters: list[Any] = [p for p in trainer.model.parameters() if p.requires_grad]
        self.reason = self._reason(budget)
        """Why nothing is kept, or empty."""
        self._undo: tuple[list[Tensor], dict[Any, dict[str, Any]]] | None = None
        self._old: dict[int, list[Tensor]] = {}

    def _reason(self, budget: int) -> str:
        if self.trainer.is_deepspeed_enabled or self.trainer.is_fsdp_enabled:
            return "the weights are cut over ranks (DeepSpeed or FSDP): none are kept"
        size = sum(p.numel() * p.element_size() for p in self.parameters)
        if 3 * size > budget:  # the weights and two moments
            need, have = 3 * size / 2**30, budget / 2**30
            return f"weights and moments take {need:.2f} GiB, keep_bytes allows {have:.2f}"
        return ""

    @property
    def optimizer(self) -> Any:
        found = self.trainer.optimizer
        return getattr(found, "optimizer", found)

    @torch.no_grad()
    def keep(self, rollout: int) -> None:
        """Before the first update of `rollout`."""
        if self.reason:
            return
        self._undo = None  # its memory first
        weights = [p.detach().clone() for p in self.parameters]
        self._undo = (weights, {p: _copy(s) for p, s in self.optimizer.state.items()})
        if rollout % EVERY == 0 or not self._old:
            self._old[rollout] = [w.cpu() if w.device.type != "cpu" else w.clone() for w in weights]
            for old in sorted(self._old)[1:-NEWEST]:
                del self._old[old]

    @torch.no_grad()
    def undo(self) -> None:
        """Weights and moments from before the last rollout's updates.

        Raises:
            AdapterError: none are kept.
        """
        if self._undo is None:
            raise AdapterError(self.reason or "nothing to undo: the last rollout was already undone")
        weights, state = self._undo
        self._put(weights)
        self.optimizer.state.clear()
        self.optimizer.state.update({p: _copy(s) for p, s in state.items()})
        self._undo = None

    @torch.no_grad()
    def restore(self, before_rollout: int) -> int:
        """The newest kept weights that are not newer than `before_rollout`; their rollout.

        Raises:
            CheckpointError: there are none.
        """
        fitting = [rollout for rollout in self._old if rollout <= before_rollout]
        if not fitting:
            have = ", ".join(map(str, sorted(self._old))) or self.reason or "none"
            raise CheckpointError(f"no weights are kept from rollout {before_rollout} or before; have {have}")
        self._put(self._old[max(fitting)])
        self.optimizer.state.clear()
        self._undo = None
        return max(fitting)

    def _put(self, weights: list[Tensor]) -> None:
        for parameter, old in zip(self.parameters, weights, strict=True):
            parameter.copy_(old)


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}
