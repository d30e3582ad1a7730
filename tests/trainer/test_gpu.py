"""What only a CUDA device can show: flash attention in packs, and how little the sensing costs.

The controller's hooks may not make the host wait for the device: no synchronisation inside them, none
more in a rollout with them than without, one copy to the host a rollout (the meters').
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from autotune.controller import Controller, ControlSettings
from autotune.hooks.loop import ControlLoop
from autotune.hooks.native import NativeAdapter
from autotune.journal import Journal
from autotune.trainer import attention
from autotune.trainer.loop import Trainer
from autotune.trainer.meters import Meters
from autotune.trainer.ranks import Ranks

pytestmark = pytest.mark.gpu
ROLLOUTS = 12


def test_flash_attention_sees_its_own_sequence_only() -> None:
    """Both operators against plain attention in float32, one sequence at a time."""
    g, lengths = torch.Generator().manual_seed(1), [40, 1, 55]
    q, k, v = (torch.randn(96, h, 64, generator=g).cuda().bfloat16() for h in (4, 2, 2))
    starts = torch.tensor([0, 40, 41, 96], dtype=torch.int32, device="cuda")
    k_all, v_all = attention._repeated(k, v, 4)
    wanted = attention._one_by_one(q.float(), k_all.float(), v_all.float(), starts, None, 0.0)
    torch.testing.assert_close(
        attention._public(q, k_all, v_all, starts, max(lengths), None).float(), wanted, rtol=2e-2, atol=2e-2
    )
    if attention.native_proven(q.device):
        native = attention._native(q, k, v, starts, max(lengths), None)
        torch.testing.assert_close(native.float(), wanted, rtol=2e-2, atol=2e-2)


@pytest.fixture
def no_waiting() -> Any:
    """Any wait for the device is an error while the function it yields is running."""

    def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    return guarded


def test_meters_wait_once_a_rollout(no_waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("add_sampled", "add_micro_batch", "add_left_out", "add_step", "add_after_updates"):
        monkeypatch.setattr(Meters, name, no_waiting(getattr(Meters, name)))
    g, device = torch.Generator().manual_seed(3), torch.device("cuda")
    new, old, ref = (torch.randn(8, 5, generator=g).to(device) for _ in range(3))
    mask = torch.ones(8, 5, dtype=torch.bool, device=device)
    meters, advantages = Meters(2, 0.2, 0.2, True, device), torch.ones(8, device=device)
    meters.add_sampled(old, old.abs(), ref, old, mask)
    for update in range(2):
        meters.add_micro_batch(update, new, old, ref, advantages, mask, new.sum())
        meters.add_left_out(update, mask)
        meters.add_step(update, new.norm(), 1)
    meters.add_after_updates(new, old, mask)
    with pytest.raises(RuntimeError):
        no_waiting(meters.finish)(Ranks())  # the one copy: the guard would see any other
    assert meters.finish(Ranks()).scalars["entropy"] > 0


def waits_of(run: Callable[[], None]) -> int:
    """Synchronisations that torch notices while `run` goes."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in seen)


def test_hooks_add_no_wait_and_little_time(
    make_recipe: Callable[..., Any], tmp_path: Path, no_waiting: Any
) -> None:
    """Same recipe and seed with and without the controller in shadow: equal trajectories."""

    def trainer(name: str) -> Trainer:
        return Trainer(make_recipe(rollouts=ROLLOUTS), tmp_path / name)

    bare, seen = trainer("bare"), []  # type: ignore[var-annotated]
    without = waits_of(lambda: bare.run(seen.append))
    bare.close()
    hooked = trainer("hooked")
    adapter = NativeAdapter(hooked)
    with closing(Journal(tmp_path / "journal.jsonl")) as journal:
        loop = ControlLoop(adapter, Controller(ControlSettings(mode="shadow"), adapter.facts()), journal)
        with_hooks = waits_of(lambda: hooked.run(no_waiting_hook(loop.on_rollout)))
    hooked.close()
    assert with_hooks - without == 0
    rollout = median(record.times["total"] for record in seen)
    cost = median(loop.hook_seconds)
    assert cost <= 1e-3, f"{1000 * cost:.2f} ms a rollout of {rollout:.3f} s"


def no_waiting_hook(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(record: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return hook(record)
        finally:
            torch.cuda.set_sync_debug_mode("warn")

    return call
