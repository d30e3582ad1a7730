"""A decision costs little, and as little late in a long run as early in a short one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.controller import Controller
from autotune.policies import BASELINES, POLICIES
from experiments import controller_cost as cost


@pytest.fixture(scope="module")
def costs() -> Iterator[list[cost.Cost]]:
    facts, snapshots = cost.healthy_run(1000)
    yield [cost.measure(rollouts, facts, snapshots) for rollouts in (400, 4000)]


def test_all_rules_are_asked() -> None:
    facts, _ = cost.healthy_run(1)
    asked = {policy.id for policy in Controller(cost.every_rule(), facts).policies}
    assert asked == set(POLICIES) - set(BASELINES)


def test_a_step_costs_half_a_millisecond(costs: list[cost.Cost]) -> None:
    """The limit is 0.5 ms on an idle core; CI machines share theirs, so CPU time and twice as much."""
    assert all(c.cpu <= 1.0 for c in costs), costs


def test_the_cost_does_not_grow_with_the_run(costs: list[cost.Cost]) -> None:
    short, long = costs
    assert long.cpu <= 1.5 * short.cpu + 0.1
    assert long.state_bytes <= 1.1 * short.state_bytes
