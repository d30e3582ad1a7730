"""OpenRLHF with stand-ins for what needs a GPU, and trainers that begin afresh."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("autotune.testing.adapters")
collect_ignore = [] if importlib.util.find_spec("openrlhf") else ["toy.py"]

Start = Callable[..., Any]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("openrlhf")
    from tests.hooks.openrlhf import stubs

    stubs.put_in()
    import ray
    import torch
    from openrlhf.trainer.ppo_utils.experience import Experience
    from openrlhf.trainer.ray import ppo_actor

    from tests.hooks.openrlhf import toy

    monkeypatch.setattr(ray, "get", toy.get)
    monkeypatch.setattr(ray, "put", lambda value: value)
    monkeypatch.setattr(ppo_actor, "torch_dist_barrier_and_cuda_sync", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Experience, "to_device", lambda self, device: self)
    return toy


@pytest.fixture
def start(toy: Any, tmp_path: Path) -> Start:
    from openrlhf.trainer import ppo_trainer

    from autotune.hooks.openrlhf.trainer import plain, with_autotune

    count = [0]

    def begin(rollouts: int = 2, knobs: Mapping[str, float] | None = None, control: Any = None) -> Any:
        count[0] += 1
        kind = plain(ppo_trainer.PPOTrainer)
        kind = with_autotune(kind, control) if control is not None else kind
        return toy.make(kind, tmp_path / f"run{count[0]}", rollouts, knobs or {})

    return begin
