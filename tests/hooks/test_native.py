"""The native adapter on hand-made records: what it believes, and what it does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from autotune.decisions import Restore
from autotune.errors import AdapterError
from autotune.hooks.native import NativeAdapter
from autotune.metrics import Snapshot, Validity
from autotune.testing import FakeTrainer, RolloutRecord


def one(**knobs: float) -> tuple[FakeTrainer, RolloutRecord]:
    trainer = FakeTrainer(knobs, seed=2)
    return trainer, trainer.advance()


def read(record: RolloutRecord, trainer: FakeTrainer, **changes: Any) -> Snapshot:
    return NativeAdapter(trainer).read(dataclasses.replace(record, **changes), 0)


def test_a_record_becomes_a_snapshot() -> None:
    trainer, record = one()
    snapshot = read(record, trainer, epoch=3)
    assert (snapshot.rollout, snapshot.epoch) == (0, 3)
    assert snapshot.knobs == record.knobs
    assert snapshot.value("kl_step") == record.scalars["kl_step"]
    assert snapshot.per_update["clip_ratio"] == tuple(record.per_update["clip_ratio"])
    assert len(snapshot.histograms["policy_ratio"]) == 66


def test_with_one_update_everything_of_the_ratio_is_gone_and_the_drift_stays() -> None:
    trainer, record = one(ppo_mini_batch_size=64)
    assert record.scalars["clip_ratio"] == 0.0, "the trainer logs a number"
    snapshot = read(record, trainer)
    for metric in ("clip_ratio", "ratio_low", "ratio_in", "ratio_high", "policy_ratio"):
        reading = snapshot.reading(metric)
        assert reading.validity is Validity.STRUCTURAL_ZERO
        assert reading.reason == "one update per rollout: the policy ratio is 1 by construction"
    assert set(snapshot.per_update) == {"kl_step", "grad_norm"}
    assert snapshot.histograms == {}
    assert snapshot.value("kl_step") == record.scalars["kl_step"]


def test_structure_follows_the_records_knobs_and_not_the_present_ones() -> None:
    """A record made with one update is blind even when the next rollout will have four."""
    trainer, record = one(ppo_mini_batch_size=64)
    trainer.live.set("ppo_mini_batch_size", 16)
    assert read(record, trainer).value("clip_ratio") is None
    assert read(trainer.advance(), trainer).value("clip_ratio") is not None


def test_without_a_reference_its_kl_is_not_logged() -> None:
    trainer, record = one(kl_coef=0.0)
    reading = read(record, trainer).reading("kl_ref")
    assert reading.validity is Validity.NOT_LOGGED and "kl_coef is 0" in reading.reason


def test_none_in_a_record_is_missing() -> None:
    trainer, record = one()
    scalars = {**record.scalars, "reward_mean": None}
    assert read(record, trainer, scalars=scalars).reading("reward_mean").validity is Validity.MISSING


def test_knobs_come_from_the_running_trainer() -> None:
    trainer, _ = one()
    trainer.live.force("kl_coef", 0.7)
    assert NativeAdapter(trainer).knobs()["kl_coef"] == 0.7


def test_several_batch_sizes_are_one_transaction() -> None:
    """Neither step is legal alone: 64 prompts in mini-batches of 64 become 32 of 32."""
    trainer, record = one(ppo_mini_batch_size=64)
    adapter = NativeAdapter(trainer)
    adapter.read(record, 0)
    values = {"train_batch_size": 32.0, "ppo_mini_batch_size": 32.0}
    assert all(item.ok for item in adapter.apply(values, epoch=1))
    assert adapter.knobs()["num_rollout_batches"] * adapter.knobs()["rollout_micro_batch_size"] == 256


def test_a_change_is_effective_from_the_rollout_after_the_one_read() -> None:
    trainer, record = one()
    adapter = NativeAdapter(trainer)
    adapter.read(dataclasses.replace(record, rollout=41), 0)
    (item,) = adapter.apply({"kl_coef": 0.01}, epoch=1)
    assert item.effective_from == 42


def test_an_unknown_kind_of_restore_is_refused() -> None:
    trainer, _ = one()
    with pytest.raises(AdapterError, match="expected undo or checkpoint"):
        NativeAdapter(trainer).restore(Restore("rewind", 0, "test"))
