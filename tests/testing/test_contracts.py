"""The contracts hold for what they were written for, and fail where they should."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest

from autotune.decisions import Proposal
from autotune.policies import POLICIES
from autotune.policies.base import Answer, Context, Family, Policy
from autotune.testing import FakeTrainer
from autotune.testing.contracts import AdapterContract, PolicyContract
from autotune.testing.faults import DeadKnob, Fault, Overwrite


class OnTheFake(AdapterContract):
    """How to make, run and look into a fake trainer."""

    faults: tuple[Fault, ...] = ()

    def make(self, rollouts: int, knobs: Mapping[str, float]) -> FakeTrainer:
        return FakeTrainer(knobs, 3, rollouts, self.faults, checkpoint_every=2)

    def run(self, adapter: FakeTrainer, on_rollout: Callable[[Any], object]) -> None:
        adapter.run(on_rollout)

    def weights(self, adapter: FakeTrainer) -> Any:
        return adapter.state


class TestFakeTrainerKeepsTheContract(OnTheFake):
    pass


def names_of_tests(contract: type[AdapterContract]) -> list[str]:
    return [name for name in dir(contract) if name.startswith("test_")]


def failures(contract: AdapterContract) -> set[str]:
    """Names of the contract's tests that fail."""
    failed = set()
    for name in names_of_tests(type(contract)):
        try:
            getattr(contract, name)()
        except AssertionError:
            failed.add(name)
    return failed


def broken(**methods: Any) -> AdapterContract:
    """The fake's contract with some of the adapter's methods replaced."""

    class Broken(OnTheFake):
        def make(self, rollouts: int, knobs: Mapping[str, float]) -> FakeTrainer:
            trainer = super().make(rollouts, knobs)
            for name, method in methods.items():
                setattr(trainer, name, method.__get__(trainer))
            return trainer

    return Broken()


def test_a_dead_knob_breaks_the_contract() -> None:
    contract = OnTheFake()
    contract.faults = (DeadKnob("actor_learning_rate"),)
    assert "test_a_knob_is_read_back_and_used_by_the_next_rollout" in failures(contract)


def test_a_second_writer_breaks_the_contract() -> None:
    contract = OnTheFake()
    contract.faults = (Overwrite("actor_learning_rate", lambda t: 3e-4),)
    assert "test_a_knob_is_read_back_and_used_by_the_next_rollout" in failures(contract)


def test_an_undo_that_does_nothing_breaks_the_contract() -> None:
    contract = broken(undo_rollout=lambda self: None)
    assert failures(contract) == {"test_undo_brings_back_the_weights_from_before_this_rollout"}


def test_a_reader_that_believes_everything_breaks_the_contract() -> None:
    def read(self: FakeTrainer, raw: Any, rollout: int) -> Any:
        knobs = {**raw.knobs, "ppo_mini_batch_size": 16, "train_batch_size": 64}  # never one update
        return FakeTrainer.read(self, replace(raw, knobs=knobs), rollout)

    contract = broken(read=read)
    assert "test_one_update_per_rollout_leaves_the_ratio_without_a_sensor" in failures(contract)


@pytest.mark.parametrize("rule", POLICIES)
class TestEveryRuleKeepsThePolicyContract(PolicyContract):
    @pytest.fixture(autouse=True)
    def _choose(self, rule: str) -> None:
        self.rule = rule

    def make(self) -> Policy:
        return POLICIES[self.rule]()


@dataclass(frozen=True)
class Restless(Policy):
    """Breaks the rules for rules: forgets to declare its knob and proposes what is."""

    id: ClassVar[str] = "T1"
    family: ClassVar[Family] = Family.THROUGHPUT
    source: ClassVar[str] = "test"
    summary: ClassVar[str] = "proposes the present value"
    knob: str = "kl_coef"
    moves: ClassVar[tuple[str, ...]] = ("temperature",)
    seen: ClassVar[list[int]] = []

    def propose(self, ctx: Context) -> Answer:
        self.seen.append(ctx.rollout)
        return Proposal(self.id, self.knob, ctx.knob(self.knob), f"call {len(self.seen)}")


class RestlessContract(PolicyContract):
    def make(self) -> Policy:
        return Restless(self.knob)

    knob = "kl_coef"


def test_an_undeclared_knob_breaks_the_policy_contract() -> None:
    with pytest.raises(AssertionError, match="not declared"):
        RestlessContract().test_its_answers_are_well_formed()


def test_a_move_to_nowhere_breaks_the_policy_contract() -> None:
    contract = RestlessContract()
    contract.knob = "temperature"
    with pytest.raises(AssertionError, match="moves nothing"):
        contract.test_its_answers_are_well_formed()


def test_a_rule_with_a_memory_breaks_the_policy_contract() -> None:
    with pytest.raises(AssertionError):
        RestlessContract().test_the_same_facts_give_the_same_answer()
