"""Each fault breaks what it says, and nothing else; and the adapter sees it for what it is."""

from __future__ import annotations

import math
from typing import Any

import pytest

from autotune.metrics import Snapshot, Validity
from autotune.testing import FakeTrainer, RolloutRecord
from autotune.testing.faults import (
    Collapse,
    DeadKnob,
    Duplicate,
    Fault,
    Frozen,
    Late,
    LengthSurge,
    Missing,
    NonFinite,
    OutOfOrder,
    Overwrite,
    RefusedKnob,
    negative_kl,
    outlier,
    percent,
)

LR = "actor_learning_rate"


def watch(fault: Fault | None, rollouts: int = 12, **knobs: float) -> list[Snapshot]:
    trainer, seen = FakeTrainer(knobs, 2, rollouts, [fault] if fault else []), []
    trainer.run(lambda raw: seen.append(trainer.read(raw, len(seen))))
    return seen


def validities(snapshots: list[Snapshot], metric: str) -> list[Validity]:
    return [s.reading(metric).validity for s in snapshots]


OK = Validity.VALID


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite(value: float) -> None:
    seen = watch(NonFinite("kl_step", at=3, count=2, value=value))
    expected = [OK] * 3 + [Validity.NON_FINITE] * 2 + [OK] * 7
    assert validities(seen, "kl_step") == expected
    assert seen[3].value("kl_step") is None
    assert validities(seen, "entropy") == [OK] * 12


def test_missing() -> None:
    seen = watch(Missing("reward_mean", at=3, count=1))
    assert validities(seen, "reward_mean")[2:5] == [OK, Validity.MISSING, OK]


def test_frozen_is_noticed_at_the_fifth_equal_number() -> None:
    seen = watch(Frozen("entropy", at=3))
    assert validities(seen, "entropy") == [OK] * 7 + [Validity.FROZEN] * 5
    assert "exactly" in seen[7].reading("entropy").reason


def test_negative_kl_is_out_of_range_and_never_low() -> None:
    seen = watch(negative_kl(at=3))
    assert validities(seen, "kl_ref")[2:5] == [OK, Validity.OUT_OF_RANGE, Validity.OUT_OF_RANGE]
    assert seen[3].value("kl_ref") is None


def test_percent_instead_of_share_is_out_of_range() -> None:
    seen = watch(percent("clip_ratio", at=3))
    assert validities(seen, "clip_ratio")[2:4] == [OK, Validity.OUT_OF_RANGE]


def test_an_outlier_is_one_wild_number() -> None:
    honest, seen = watch(None), watch(outlier("grad_norm", at=3, factor=1e3))
    pairs = zip(seen, honest, strict=True)
    wild = [(s.value("grad_norm") or 0) / (h.value("grad_norm") or 1) for s, h in pairs]
    assert wild == pytest.approx([1] * 3 + [1e3] + [1] * 8)


def test_late_records_carry_their_old_index_and_knobs() -> None:
    trainer = FakeTrainer({}, 2, 8, [Late(at=4, lag=2)])
    seen = []

    def on_rollout(raw: RolloutRecord) -> None:
        seen.append(trainer.read(raw, len(seen)))
        if len(seen) == 5:
            trainer.live.set(LR, 1e-4)

    trainer.run(on_rollout)
    assert [s.rollout for s in seen] == [0, 1, 2, 3, 2, 3, 4, 5]
    assert seen[6].knobs[LR] == 3e-4, "rollout 4 was made before the change"
    assert seen[7].knobs[LR] == 1e-4


def test_a_duplicate_index_comes_twice() -> None:
    assert [s.rollout for s in watch(Duplicate(at=3), 6)] == [0, 1, 2, 2, 4, 5]


def test_out_of_order_swaps_two() -> None:
    assert [s.rollout for s in watch(OutOfOrder(at=3), 6)] == [0, 1, 2, 4, 3, 5]


def applied(fault: Fault, values: dict[str, float]) -> tuple[FakeTrainer, list[Any]]:
    trainer = FakeTrainer({}, 2, 12, [fault])
    trainer.read(trainer.advance(), 0)
    return trainer, trainer.apply(values, epoch=1)


def test_a_dead_knob_is_found_by_reading_back() -> None:
    trainer, (item,) = applied(DeadKnob("kl_coef"), {"kl_coef": 0.01})
    assert not item.ok and item.read_back == 0.005 and "reads back" in item.error
    assert trainer.knobs()["kl_coef"] == 0.005


def test_a_dead_knob_takes_its_companions_back() -> None:
    trainer, items = applied(DeadKnob("kl_coef"), {LR: 1e-4, "kl_coef": 0.01})
    assert not any(item.ok for item in items)
    assert trainer.knobs()[LR] == 3e-4


def test_a_partial_apply_is_put_back() -> None:
    values = {LR: 1e-4, "ppo_mini_batch_size": 8, "kl_coef": 0.01}
    trainer, items = applied(RefusedKnob("kl_coef", "rank 1 did not answer"), values)
    assert trainer.knobs() == dict(trainer.facts().knobs)
    assert all("rank 1 did not answer" in item.error for item in items)


def test_an_overwriting_scheduler_shows_in_the_next_record() -> None:
    trainer, (item,) = applied(Overwrite(LR, lambda t: 3e-4, at=1), {LR: 1e-4})
    assert item.ok and trainer.knobs()[LR] == 1e-4, "at once, the read-back is right"
    assert trainer.advance().knobs[LR] == 3e-4


def test_collapse_is_final_but_checkpoints_from_before_live() -> None:
    trainer = FakeTrainer({}, 2, 20, [Collapse(at=12)])
    seen: list[RolloutRecord] = []
    trainer.run(seen.append)
    rewards = [record.scalars["reward_mean"] or 0.0 for record in seen]
    assert min(rewards[:12]) > 0 and rewards[12:] == [0.0] * 8
    assert trainer.restore_checkpoint(11) == 10
    assert (trainer.advance().scalars["reward_mean"] or 0) > 0


def test_a_length_surge_fills_the_cap_and_ends() -> None:
    seen = watch(LengthSurge(at=3, factor=3.0, count=2), max_response_length=64)
    lengths = [s.value("response_length_mean") or 0.0 for s in seen]
    assert lengths[3] == pytest.approx(3 * lengths[2], rel=0.02)
    assert lengths[5] == pytest.approx(lengths[2], rel=0.02)


def test_faults_leave_the_rest_of_the_record_alone() -> None:
    honest, seen = watch(None), watch(NonFinite("kl_step", at=3))
    for a, b in zip(honest, seen, strict=True):
        assert {n: r for n, r in a.readings.items() if n != "kl_step"} == {
            n: r for n, r in b.readings.items() if n != "kl_step"
        }
