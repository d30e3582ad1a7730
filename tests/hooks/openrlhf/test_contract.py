"""The adapter's contract, against the installed OpenRLHF's own classes with two actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from autotune.hooks.openrlhf.declared import DECLARED
from autotune.testing.adapters import GuestContract

pytestmark = pytest.mark.openrlhf
pytest.importorskip("openrlhf")


class TestOpenRLHF(GuestContract):
    """Everything that any adapter must keep."""

    declared = DECLARED
    restores = frozenset()
    sparse_metrics = frozenset({"eval_score", "value_loss"})

    @pytest.fixture(autouse=True)
    def _start(self, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.start, self.patch = start, monkeypatch

    def make(self, rollouts: int, knobs: Mapping[str, float]) -> Any:
        from autotune.hooks.openrlhf.adapter import OpenRLHFAdapter

        return OpenRLHFAdapter(self.start(rollouts, knobs, control={}))

    def run(self, adapter: Any, on_rollout: Callable[[Any], object]) -> None:
        adapter.trainer.autotune = Listener(adapter, on_rollout)
        adapter.trainer.fit()

    def weights(self, adapter: Any) -> Any:
        return adapter.trainer.actor_model_group._actor_handlers[0].actor.model.logits.tolist()

    def host(
        self, rollouts: int, knobs: Mapping[str, float], control: Mapping[str, Any], version: str = ""
    ) -> Any:
        from autotune.hooks.openrlhf import trainer as hook

        if version:
            self.patch.setattr(hook, "_version", lambda: version)
        trainer = self.start(rollouts, knobs, control=dict(control))
        trainer.autotune = hook.attach(trainer, dict(control))
        return trainer.autotune.guest, trainer.fit


class Listener:
    """In the attachment's place: hands the records to the contract instead of to a guest."""

    def __init__(self, adapter: Any, on_rollout: Callable[[Any], object]) -> None:
        from types import SimpleNamespace

        self.adapter, self.on_rollout, self.count = adapter, on_rollout, 0
        self.seen: dict[str, float] = {}
        self.guest = SimpleNamespace(end=lambda status, reason: None)

    def begin(self, states: Any) -> None:
        """Nothing to open."""

    def look(self, experiences: Any) -> None:
        from autotune.hooks.openrlhf.adapter import rollout_view
        from autotune.hooks.openrlhf.trainer import columns

        found = columns(experiences)
        self.seen, self.tokens = rollout_view(*found), sum(found[3])
        self.experiences = experiences

    def measure(self, status: Mapping[str, Any]) -> None:
        from autotune.hooks.openrlhf.drift import kl_step

        self.seen["kl_step"] = kl_step(self.adapter.trainer, self.experiences)

    def on_step(self, status: Mapping[str, Any], step: int, client_states: Any) -> None:
        self.on_rollout(self.adapter.record(status, self.count, self.seen, self.tokens))
        self.adapter.settle()
        self.count += 1

    def after_step(self) -> None:
        """No rule stops."""
