"""Judging raw metrics and the all-or-none apply, on hand-made trainers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.decisions import RunFacts
from autotune.errors import AdapterError
from autotune.hooks.base import (
    FrozenDetector,
    judge,
    one_by_one,
    set_all_or_none,
    vector_digest,
)
from autotune.knobs import Capability
from autotune.metrics import Reading, Validity
from autotune.testing import HEALTHY


def facts(**metrics: Capability) -> RunFacts:
    return RunFacts(
        rollouts=10,
        world_size=1,
        algorithm="grpo",
        loss_kind="token",
        has_reference=True,
        has_critic=False,
        knobs=HEALTHY,
        metric_capability=metrics,
    )


# ------------------------------------------------------------------------------------ sensing


@pytest.mark.parametrize(
    ("raw", "validity"),
    [
        (0.01, Validity.VALID),
        (0.0, Validity.VALID),
        (None, Validity.MISSING),
        (math.nan, Validity.NON_FINITE),
        (math.inf, Validity.NON_FINITE),
        ("nan", Validity.NON_FINITE),
        (True, Validity.NON_FINITE),
        (-0.001, Validity.OUT_OF_RANGE),
    ],
)
def test_a_number_is_judged_and_never_coerced(raw: Any, validity: Validity) -> None:
    reading = judge({"kl_step": raw}, facts(), HEALTHY)["kl_step"]
    assert reading.validity is validity
    assert (reading.value is None) == (validity is not Validity.VALID)


def test_a_promised_metric_that_is_absent_is_missing() -> None:
    readings = judge({}, facts(entropy=Capability("valid")), HEALTHY)
    assert readings["entropy"].validity is Validity.MISSING


def test_the_configuration_outranks_the_number() -> None:
    blind = facts(clip_ratio=Capability("structural_zero", "this loss has no ratio"))
    reading = judge({"clip_ratio": 0.3}, blind, HEALTHY)["clip_ratio"]
    assert reading == Reading(None, Validity.STRUCTURAL_ZERO, "this loss has no ratio")


@pytest.mark.parametrize(
    ("mini", "epochs", "validity"),
    [(64, 1, Validity.STRUCTURAL_ZERO), (64, 2, Validity.VALID), (32, 1, Validity.VALID)],
)
def test_one_update_blinds_the_ratio(mini: int, epochs: int, validity: Validity) -> None:
    knobs = HEALTHY | {"ppo_mini_batch_size": mini, "ppo_epochs": epochs}
    readings = judge({"clip_ratio": 0.0, "kl_step": 0.01}, facts(), knobs)
    assert readings["clip_ratio"].validity is validity
    assert readings["kl_step"].validity is Validity.VALID


def feed(metric: str, values: list[float | None], std: float = 0.5) -> list[Validity]:
    """Validity of each of `values`, seen one rollout after the other."""
    detector, seen = FrozenDetector(), []
    for value in values:
        reading = Reading(value) if value is not None else Reading(None, Validity.MISSING, "gone")
        judged = detector.check({metric: reading, "reward_std": Reading(std)}, responses=512)
        seen.append(judged[metric].validity)
    return seen


def test_five_equal_floats_are_frozen_and_four_are_not() -> None:
    assert feed("entropy", [0.3] * 6) == [Validity.VALID] * 4 + [Validity.FROZEN] * 2


def test_a_thawed_exporter_is_valid_at_once() -> None:
    assert feed("entropy", [0.3] * 5 + [0.31])[-1] is Validity.VALID


def test_a_gap_ends_the_run_of_equal_numbers() -> None:
    assert Validity.FROZEN not in feed("entropy", [0.3] * 4 + [None] + [0.3] * 4)


def test_the_smallest_difference_is_a_difference() -> None:
    nearly = [0.3 + i * 1e-15 for i in range(8)]
    assert feed("entropy", nearly) == [Validity.VALID] * 8


def test_zeros_and_saturated_rewards_may_repeat() -> None:
    assert feed("grad_norm", [0.0] * 8) == [Validity.VALID] * 8
    assert feed("reward_mean", [1.0] * 8, std=0.0) == [Validity.VALID] * 8
    assert feed("reward_mean", [0.998] * 8, std=0.04) == [Validity.VALID] * 8


def test_a_noisy_reward_may_not() -> None:
    assert feed("reward_mean", [0.5] * 5)[-1] is Validity.FROZEN


def test_counted_metrics_are_never_frozen() -> None:
    assert feed("zero_std_fraction", [0.25] * 8) == [Validity.VALID] * 8


# ------------------------------------------------------------------------------------- acting


class Trainer:
    """Knobs a and b in the table's sense; `refuse` raises, `ignore` does nothing."""

    def __init__(self, refuse: str = "", ignore: str = "", stuck: bool = False) -> None:
        self.knobs = {"kl_coef": 0.1, "temperature": 1.0, "actor_learning_rate": 1e-3}
        self.refuse, self.ignore, self.stuck = refuse, ignore, stuck
        self.calls: list[str] = []

    def set(self, name: str, value: float) -> None:
        self.calls.append(name)
        if name == self.refuse:
            raise AdapterError(f"{name} is refused")
        if name != self.ignore and not (self.stuck and name in self.calls[:-1]):
            self.knobs[name] = value

    def apply(self, **values: float) -> list[Any]:
        return set_all_or_none(values, lambda: self.knobs, one_by_one(self.set), 7)


def test_all_are_set_and_read_back() -> None:
    trainer = Trainer()
    applied = trainer.apply(kl_coef=0.2, temperature=0.9)
    assert [(a.knob, a.read_back, a.effective_from, a.ok) for a in applied] == [
        ("kl_coef", 0.2, 7, True),
        ("temperature", 0.9, 7, True),
    ]


@pytest.mark.parametrize("how", ["refuse", "ignore"])
def test_one_failure_puts_everything_back(how: str) -> None:
    trainer = Trainer(**{how: "temperature"})
    before = dict(trainer.knobs)
    applied = trainer.apply(kl_coef=0.2, temperature=0.9)
    assert trainer.knobs == before
    assert not any(a.ok for a in applied) and all("temperature" in a.error for a in applied)
    assert [a.read_back for a in applied] == [0.1, 1.0]


def test_an_unknown_knob_touches_nothing() -> None:
    trainer = Trainer()
    applied = trainer.apply(kl_coef=0.2, kl_ceof=0.2)
    assert trainer.calls == [] and "kl_ceof does not exist" in applied[0].error


def test_what_cannot_be_put_back_is_said() -> None:
    trainer = Trainer(refuse="temperature", stuck=True)
    applied = trainer.apply(kl_coef=0.2, temperature=0.9)
    assert all("kl_coef could not be put back" in a.error for a in applied)
    assert applied[0].read_back == 0.2, "the truth, not the wish"


def test_batch_sizes_come_before_the_micro_batch_they_derive() -> None:
    order: list[str] = []
    setter = one_by_one(lambda name, value: order.append(name))
    setter({"micro_batch_size": 32, "actor_learning_rate": 1e-4, "ppo_mini_batch_size": 4})
    assert order == ["ppo_mini_batch_size", "micro_batch_size", "actor_learning_rate"]


@given(st.dictionaries(st.sampled_from(["kl_coef", "temperature"]), st.floats(1e-3, 2.0)))
def test_digest_depends_on_values_and_not_on_order(values: dict[str, float]) -> None:
    turned = dict(reversed(values.items()))
    assert vector_digest(values) == vector_digest(turned)
    assert vector_digest(values) != vector_digest({**values, "ppo_epochs": 1})
