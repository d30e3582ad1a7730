"""Adapter for the project's own trainer.

The trainer already speaks canonical names and owns its knobs in one place (`trainer.live`), so
this file only judges the record, sets and reads back `trainer.live`, and brings weights back.
It asks for the trainer's shape (`NativeTrainer`), not for its class, so that importing it loads
neither torch nor DeepSpeed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from autotune.decisions import Applied, Decision, Restore, RunFacts, decision_from_json, to_json
from autotune.errors import AdapterError
from autotune.hooks.base import FrozenDetector, set_all_or_none, snapshot_of, vector_digest
from autotune.metrics import Snapshot
from autotune.trainer.records import RolloutRecord


class Live(Protocol):
    """The running trainer's knobs: the single place that it reads them from."""

    epoch: int

    def vector(self) -> dict[str, float]: ...
    def set_many(self, values: Mapping[str, float]) -> dict[str, float]: ...


class NativeTrainer(Protocol):
    """The part of the trainer that the adapter needs."""

    @property
    def live(self) -> Live: ...
    def facts(self) -> RunFacts: ...
    def undo_rollout(self) -> None: ...
    def restore_checkpoint(self, before_rollout: int) -> int: ...


class NativeAdapter:
    """`Adapter` of anything with the native trainer's shape, on one rank or several."""

    def __init__(self, trainer: NativeTrainer) -> None:
        self.trainer = trainer
        self._facts = trainer.facts()
        self._frozen = FrozenDetector()
        self._rollout = -1  # the last rollout that was read

    def facts(self) -> RunFacts:
        return self._facts

    def read(self, raw: RolloutRecord, rollout: int) -> Snapshot:
        """The record carries its own index, which is believed: the controller checks its order."""
        self._rollout = raw.rollout
        return snapshot_of(raw, self._facts, self._frozen)

    def state_dict(self) -> dict[str, Any]:
        """JSON state for a checkpoint: how long each metric has stood still."""
        return {"frozen": self._frozen.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`."""
        self._frozen.load(state["frozen"])

    def knobs(self) -> dict[str, float]:
        return self.trainer.live.vector()

    def apply(self, values: Mapping[str, float], epoch: int) -> list[Applied]:
        """Set all or none. The epoch is stamped either way: its owner is the controller."""
        live = self.trainer.live
        applied = set_all_or_none(values, live.vector, live.set_many, self._rollout + 1)
        live.epoch = epoch
        return applied

    def restore(self, restore: Restore) -> int:
        if restore.kind == "undo":
            self.trainer.undo_rollout()
            return restore.before_rollout
        if restore.kind == "checkpoint":
            return self.trainer.restore_checkpoint(restore.before_rollout)
        raise AdapterError(f"restore kind {restore.kind!r} is unknown; expected undo or checkpoint")


    # -- several ranks ---------------------------------------------------------------------------

    def broadcast(self, decision: Decision | None) -> Decision | None:
        """Rank 0's decision, rebuilt from its JSON on the other ranks."""
        if self._facts.world_size == 1:
            return decision
        told = _group().from_first(None if decision is None else to_json(decision))
        return decision if decision is not None or told is None else decision_from_json(told)

    def agree(self, digest: str) -> bool:
        if self._facts.world_size == 1:
            return True
        return len(set(_group().from_all(digest))) == 1

    def share_knobs(self) -> None:
        """Rank 0's vector on every rank before the first rollout: a schedule may begin elsewhere.

        Raises:
            AdapterError: a rank could not take it.
        """
        if self._facts.world_size == 1:
            return
        live, mine = self.trainer.live, self.knobs()
        wanted = _group().from_first({"values": mine, "epoch": live.epoch})
        moved = {name: value for name, value in wanted["values"].items() if value != mine[name]}
        if moved:
            live.set_many(moved)
        live.epoch = wanted["epoch"]
        if not self.agree(vector_digest(self.knobs())):
            raise AdapterError("the ranks do not start with the same knobs; run one recipe on all of them")


def _group() -> Any:
    """The ranks' way to talk. By name, since it needs torch and a run on one rank never asks for it."""
    return importlib.import_module("autotune.trainer.group")
