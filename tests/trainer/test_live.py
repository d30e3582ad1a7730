"""Live knobs: legal afterwards or unchanged, derived sizes follow, the optimizer is asked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune.errors import AdapterError
from autotune.knobs import KNOBS, batch_problems
from autotune.recipe import Recipe, knob_vector
from autotune.trainer.live import LiveKnobs


@pytest.fixture
def live() -> LiveKnobs:
    return LiveKnobs(knob_vector(Recipe()), context=64)


def test_vector_is_the_recipe_s(live: LiveKnobs) -> None:
    vector = live.vector()
    assert vector == knob_vector(Recipe())
    assert set(KNOBS) - set(vector) == {"critic_learning_rate"}
    vector["kl_coef"] = 9.0
    assert live["kl_coef"] == 0.005  # a copy was handed out


@pytest.mark.parametrize(
    ("mini", "micro"), [(64, 128), (8, 64), (4, 32), (1, 8), (2, 16), (32, 128), (16, 128)]
)
def test_mini_batch_re_derives_the_micro_batch_from_the_recipe_s(
    live: LiveKnobs, mini: int, micro: int
) -> None:
    assert live.set("ppo_mini_batch_size", 1) == 1
    assert live.set("ppo_mini_batch_size", mini) == mini
    assert live["micro_batch_size"] == micro
    assert batch_problems(live.vector(), 1) == []


def test_an_explicit_micro_batch_becomes_the_wanted_one(live: LiveKnobs) -> None:
    live.set("micro_batch_size", 32)
    live.set("ppo_mini_batch_size", 2)
    assert live["micro_batch_size"] == 16
    live.set("ppo_mini_batch_size", 16)
    assert live["micro_batch_size"] == 32


def test_a_derived_micro_batch_named_beside_its_cause_is_not_explicit(live: LiveKnobs) -> None:
    """A change lists what it re-derives; taking it back must bring the recipe's value back."""
    live.set("ppo_mini_batch_size", 2)
    live.set("micro_batch_size", 16)
    live.set("ppo_mini_batch_size", 16)
    assert live["micro_batch_size"] == 128


def test_amount_of_data_re_derives_the_sampling_batches(live: LiveKnobs) -> None:
    live.set("train_batch_size", 48)
    assert live["rollout_micro_batch_size"] == 384
    live.set("rollout_n", 4)
    assert live["rollout_micro_batch_size"] == 192
    live.set_many({"train_batch_size": 128, "rollout_n": 8})
    assert live["rollout_micro_batch_size"] == 512
    assert live["num_rollout_batches"] == 2
    live.set("num_rollout_batches", 8)
    assert live["rollout_micro_batch_size"] == 128
    live.set("rollout_micro_batch_size", 64)
    assert live["num_rollout_batches"] == 16
    assert batch_problems(live.vector(), 1) == []


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ppo_mini_batch_size", 24, "does not divide"),
        ("ppo_mini_batch_size", 128, "more than"),
        ("ppo_mini_batch_size", 2.5, "whole number"),
        ("train_batch_size", 20, "does not divide"),
        ("rollout_micro_batch_size", 100, "does not divide"),
        ("num_rollout_batches", 3, "does not divide"),
        ("micro_batch_size", 100, "does not divide"),
        ("rollout_n", 1, "from 2 up"),
        ("ppo_epochs", 0, "from 1 up"),
        ("actor_learning_rate", 0.0, "above 0"),
        ("actor_learning_rate", float("nan"), "finite"),
        ("kl_coef", -0.1, "not below 0"),
        ("clip_range_low", 1.0, "below 1"),
        ("max_response_length", 60, "context is 64"),
        ("critic_learning_rate", 1e-5, "not a knob"),
    ],
)
def test_illegal_values_change_nothing(live: LiveKnobs, name: str, value: float, says: str) -> None:
    before = live.state_dict()
    with pytest.raises(AdapterError, match=says):
        live.set(name, value)
    assert live.state_dict() == before


def test_several_knobs_are_all_or_none(live: LiveKnobs) -> None:
    before = live.vector()
    with pytest.raises(AdapterError):
        live.set_many({"kl_coef": 0.01, "ppo_mini_batch_size": 24})
    assert live.vector() == before
    assert live.set_many({"kl_coef": 0.01, "ppo_mini_batch_size": 32})["kl_coef"] == 0.01


def test_without_a_reference_the_kl_weight_stays_zero() -> None:
    live = LiveKnobs({**knob_vector(Recipe()), "kl_coef": 0.0}, has_reference=False)
    with pytest.raises(AdapterError, match="no reference model"):
        live.set("kl_coef", 0.01)
    assert live.set("kl_coef", 0.0) == 0.0


def test_the_optimizer_has_the_last_word() -> None:
    def optimizer(found: Callable[[float], float]) -> LiveKnobs:
        return LiveKnobs(knob_vector(Recipe()), use_learning_rate=found)

    assert optimizer(lambda peak: peak).set("actor_learning_rate", 1e-4) == 1e-4
    stubborn = optimizer(lambda peak: 3e-4)
    with pytest.raises(AdapterError, match=r"optimizer has 0\.0003"):
        stubborn.set("actor_learning_rate", 1e-4)
    assert stubborn["actor_learning_rate"] == 3e-4


def test_state_survives(live: LiveKnobs) -> None:
    live.set("micro_batch_size", 32)
    live.set("kl_coef", 0.02)
    live.epoch = 4
    other = LiveKnobs(knob_vector(Recipe()))
    other.load_state_dict(live.state_dict())
    assert (other.vector(), other.epoch) == (live.vector(), 4)
    other.set("ppo_mini_batch_size", 8)
    assert other["micro_batch_size"] == 32
    with pytest.raises(AdapterError, match="saved knobs"):
        other.load_state_dict({"values": {"kl_coef": 1.0}, "wanted": {}, "epoch": 0})


def test_a_saved_vector_is_cut_anew_for_another_number_of_ranks() -> None:
    alone = LiveKnobs(knob_vector(Recipe()), context=64)
    alone.set("kl_coef", 0.01)
    vector = alone.vector()
    assert (vector["micro_batch_size"], vector["num_rollout_batches"]) == (128, 1)
    two = LiveKnobs(knob_vector(Recipe()), world_size=2, context=64)
    two.load_state_dict(alone.state_dict())
    fitted = {"micro_batch_size": 64, "rollout_micro_batch_size": 256, "num_rollout_batches": 1}
    assert two.vector() == {**vector, **fitted}
    back = LiveKnobs(knob_vector(Recipe()), context=64)
    back.load_state_dict(two.state_dict())
    assert back.vector() == vector, "the recipe's own sizes come back where they fit again"
