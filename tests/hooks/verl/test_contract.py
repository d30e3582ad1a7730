"""The adapter's contract, against verl's real trainer on two CPU workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autotune.hooks.verl.declared import DECLARED
from autotune.testing.adapters import GuestContract

pytestmark = pytest.mark.verl
pytest.importorskip("verl")


class TestVerl(GuestContract):
    """Everything that any adapter must keep."""

    declared = DECLARED
    restores = frozenset()
    sparse_metrics = frozenset({"eval_score", "value_loss"})

    @pytest.fixture(autouse=True)
    def _start(self, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.start, self.patch = start, monkeypatch

    def make(self, rollouts: int, knobs: Mapping[str, float]) -> Any:
        from autotune.hooks.verl.adapter import VerlAdapter

        return VerlAdapter(self.start(rollouts, knobs))

    def run(self, adapter: Any, on_rollout: Callable[[Any], object]) -> None:
        trainer, count = adapter.trainer, [0]
        trainer.autotune = Listener(adapter, on_rollout, count)
        trainer.fit(trainer.agent_loop_manager)

    def weights(self, adapter: Any) -> Any:
        return adapter.trainer.actor_rollout_wg.weights()[0]

    def host(
        self, rollouts: int, knobs: Mapping[str, float], control: Mapping[str, Any], version: str = ""
    ) -> Any:
        from autotune.hooks.verl import trainer as hook

        if version:
            self.patch.setattr(hook, "_version", lambda: version)
        trainer = self.start(rollouts, knobs, control=dict(control))
        trainer.autotune = hook.attach(trainer)

        def train() -> None:
            trainer.fit(trainer.agent_loop_manager)
            trainer.logger.finish(exit_code=0)

        return trainer.autotune.guest, train


class Listener:
    """In the attachment's place: hands the records to the contract instead of to a guest."""

    def __init__(self, adapter: Any, on_rollout: Callable[[Any], object], count: list[int]) -> None:
        self.adapter, self.on_rollout, self.count = adapter, on_rollout, count
        self.seen: dict[str, float] = {}
        self.moved: dict[str, float] = {}

    def begin(self) -> None:
        """Nothing to open."""

    def measure(self, batch: Any) -> None:
        from autotune.hooks.verl.drift import kl_step

        drift = kl_step(self.adapter.trainer, batch, self.adapter.world_size)
        assert drift is not None
        self.moved = {"kl_step": drift}

    def look(self, batch: Any) -> None:
        from autotune.hooks.verl.adapter import rollout_view
        from autotune.hooks.verl.trainer import scores_of

        self.seen = rollout_view(list(batch.keys), list(batch.tags), scores_of(batch), 4, None)

    def on_log(self, data: Mapping[str, Any], step: int) -> None:
        self.on_rollout(self.adapter.record(data, self.count[0], self.seen | self.moved))
        self.adapter.settle()
        self.count[0] += 1

    def end(self, exit_code: int) -> None:
        """Nothing is open."""
