"""A6 and B7: the rules that never tune and only hold."""

from __future__ import annotations

import pytest

from autotune.policies.base import Hold
from autotune.policies.integrity import AnchorHolds, RolloutsSucceed
from tests.series import ask, snapshot


@pytest.mark.parametrize(
    ("first", "holds"), [(0.0, False), (0.0049, False), (0.0050, False), (0.0051, True), (1.0, True)]
)
def test_a6_holds_when_the_first_update_already_drifts(first: float, holds: bool) -> None:
    answer = ask(AnchorHolds(), [snapshot(0, per_update={"kl_step": [first, 0.5, 0.9]})])
    assert isinstance(answer, Hold) == holds
    if isinstance(answer, Hold):
        assert "old log-probs" in answer.reason and f"{first:.2g}" in answer.reason


def test_a6_is_quiet_without_values_per_update() -> None:
    assert ask(AnchorHolds(), [snapshot(0)]) is None
    assert ask(AnchorHolds(), [snapshot(0, per_update={"kl_step": []})]) is None


@pytest.mark.parametrize(
    ("rate", "holds"), [(1.0, False), (0.951, False), (0.950, True), (0.949, True), (0.0, True)]
)
def test_b7_holds_at_95_percent_and_below(rate: float, holds: bool) -> None:
    answer = ask(RolloutsSucceed(), [snapshot(0, rollout_success_rate=rate)])
    assert isinstance(answer, Hold) == holds
    if isinstance(answer, Hold):
        assert "rollout_success_rate" in answer.reason


def test_a6_holds_when_the_first_drift_is_not_a_number() -> None:
    answer = ask(AnchorHolds(), [snapshot(0, per_update={"kl_step": [float("nan"), 0.01]})])
    assert isinstance(answer, Hold)
