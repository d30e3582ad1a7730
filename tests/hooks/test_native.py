"""The native adapter on hand-made records: what it believes, and what it does not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from autotune.decisions import (
    Change,
    Decision,
    Kind,
    Outcome,
    Proposal,
    Restore,
    State,
    Verdict,
    Veto,
    decision_from_json,
    to_json,
)
from autotune.errors import AdapterError
from autotune.hooks import native
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


# -- several ranks ---------------------------------------------------------------------------------


class Peers:
    """The other rank's side of a talk."""

    def __init__(self, first: Any = None, other: str = "") -> None:
        self.first, self.other, self.heard = first, other, []

    def from_first(self, value: Any) -> Any:
        self.heard.append(value)
        return value if self.first is None else json.loads(json.dumps(self.first))

    def from_all(self, value: str) -> list[str]:
        return [value, self.other or value]


def of_two(monkeypatch: pytest.MonkeyPatch, peers: Peers, **knobs: float) -> NativeAdapter:
    adapter = NativeAdapter(FakeTrainer(knobs, seed=2))
    adapter._facts = dataclasses.replace(adapter.facts(), world_size=2)
    monkeypatch.setattr(native, "_group", lambda: peers)
    return adapter


def decision() -> Decision:
    proposal = Proposal("B3", "kl_coef", 0.02, "why", Kind.REGULATOR, {"kl": 0.1})
    return Decision(
        rollout=7,
        state=State.EVALUATE,
        epoch=3,
        proposals=(proposal,),
        vetoes=(Veto(proposal, "bounds", "too far"),),
        changes=(Change("A1", "kl_coef", 0.01, 0.02, "why", Kind.REVERT, {"kl_coef": 0.02}, {"p": 1.0}),),
        verdicts=(Verdict("A1", "kl_coef", Outcome.KEPT, "better", 4, {"gain": 0.5}),),
        restore=Restore("undo", 7, "drift"),
        alarms=("hold: x",),
        stop="dead",
        silent={"B1": "no meter"},
    )


def test_a_decision_reaches_the_other_ranks_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    told = to_json(decision())
    assert of_two(monkeypatch, Peers(first=told)).broadcast(None) == decision()
    assert decision_from_json(to_json(Decision(0, State.WARMUP, 0))) == Decision(0, State.WARMUP, 0)
    mine = decision()
    assert of_two(monkeypatch, Peers()).broadcast(mine) is mine
    assert of_two(monkeypatch, Peers()).broadcast(None) is None


def test_ranks_agree_when_all_hashes_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_two(monkeypatch, Peers()).agree("abc")
    assert not of_two(monkeypatch, Peers(other="abd")).agree("abc")


def test_a_rank_starts_with_rank_0s_knobs(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = of_two(monkeypatch, Peers())
    wanted = {**mine.knobs(), "kl_coef": 0.02}
    adapter = of_two(monkeypatch, Peers(first={"values": wanted, "epoch": 4}))
    adapter.share_knobs()
    assert adapter.knobs() == wanted and adapter.trainer.live.epoch == 4
    with pytest.raises(AdapterError, match="do not start with the same knobs"):
        of_two(monkeypatch, Peers(other="another hash")).share_knobs()


def test_alone_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_group", None)
    adapter = NativeAdapter(FakeTrainer({}, seed=2))
    assert adapter.agree("x") and adapter.broadcast(None) is None
    adapter.share_knobs()
