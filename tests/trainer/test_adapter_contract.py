"""The real trainer behind the native adapter keeps the adapter contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from autotune.hooks.native import NativeAdapter
from autotune.recipe import Recipe
from autotune.testing.contracts import AdapterContract
from autotune.trainer.loop import Trainer


class TestTheRealTrainerKeepsTheContract(AdapterContract):
    @pytest.fixture(autouse=True)
    def _prepare(self, make_recipe: Callable[..., Recipe], tmp_path: Path) -> Iterator[None]:
        self.recipe, self.folder = make_recipe, tmp_path
        self.trainers: list[Trainer] = []
        yield
        for trainer in self.trainers:
            trainer.close()

    def make(self, rollouts: int, knobs: Mapping[str, float]) -> NativeAdapter:
        sections = {"checkpoint": {"every": 2, "keep": 2}, "eval": {"every": 0, "prompts": 4}}
        recipe = self.recipe(sections, rollouts=rollouts, **knobs)
        trainer = Trainer(recipe, self.folder / f"run-{len(self.trainers)}")
        self.trainers.append(trainer)
        return NativeAdapter(trainer)

    def run(self, adapter: NativeAdapter, on_rollout: Callable[[Any], object]) -> None:
        trainer = adapter.trainer
        assert isinstance(trainer, Trainer)
        trainer.run(on_rollout)

    def weights(self, adapter: NativeAdapter) -> Any:
        assert isinstance(adapter.trainer, Trainer)
        tensors = adapter.trainer.parts.engine.state_tensors()
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
