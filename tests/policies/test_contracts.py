"""Every rule keeps the public contract of rules on unusual runs too, not only on the healthy one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from autotune.policies import POLICIES
from autotune.policies.base import Context, Policy
from autotune.testing.contracts import PolicyContract
from autotune.testing.faults import Fault

STARTS: dict[str, dict[str, float]] = {
    "one update": {"ppo_mini_batch_size": 64},
    "no reference": {"kl_coef": 0.0},
    "timid": {"ppo_mini_batch_size": 64, "actor_learning_rate": 3e-5},
    "aggressive": {"ppo_mini_batch_size": 2, "micro_batch_size": 16, "actor_learning_rate": 1e-3},
    "deadly": {"actor_learning_rate": 9e-3},
    "held to its reference": {"kl_coef": 1.0},
    "one prompt": {"train_batch_size": 1, "ppo_mini_batch_size": 1, "micro_batch_size": 8},
    "lopsided clip": {"clip_range_low": 0.02, "clip_range_high": 0.28},
}


class OnAnUnusualRun(PolicyContract):
    """The contract without its sensor faults, on a run that starts somewhere else."""

    def __init__(self, rule: str, start: Mapping[str, float]) -> None:
        self.rule, self.start = rule, start

    def make(self) -> Policy:
        return POLICIES[self.rule]()

    def knobs(self) -> Mapping[str, float]:
        return self.start

    def contexts(self, fault: Fault | None = None) -> Iterator[Context]:
        if fault is None:
            yield from super().contexts()


@pytest.mark.parametrize("start", STARTS)
def test_answers_are_well_formed_wherever_a_run_starts(start: str) -> None:
    for rule in POLICIES:
        contract = OnAnUnusualRun(rule, STARTS[start])
        contract.rollouts = 20
        contract.test_its_answers_are_well_formed()
