"""The drift sensor that verl's and OpenRLHF's adapters share: the number, the time, and failures."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.hooks.drift import PATIENCE, DriftSensor, mean_k3


def guest(mode: str = "act", broken: bool = False) -> Any:
    return SimpleNamespace(broken=broken, control=SimpleNamespace(mode=mode))


@pytest.mark.parametrize(
    ("whose", "passes"),
    [(guest("act"), 1), (guest("shadow"), 1), (guest("off"), 0), (guest(broken=True), 0)],
)
def test_a_pass_is_made_where_somebody_decides(whose: Any, passes: int) -> None:
    made: list[int] = []
    found = DriftSensor(whose).measure(lambda: made.append(1) or 0.25)  # type: ignore[func-returns-value]
    assert len(made) == passes
    assert found.get("kl_step") == (0.25 if passes else None)
    assert set(found) == ({"kl_step", "time/kl_step_forward"} if passes else set())


def test_a_rollout_too_small_for_a_pass_has_no_number() -> None:
    assert DriftSensor(guest()).measure(lambda: None) == {}


def test_failures_are_told_and_after_some_in_a_row_it_is_not_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sensor, tried = DriftSensor(guest()), 0

    def measured(fails: bool) -> dict[str, float]:
        def drift() -> float:
            nonlocal tried
            tried += 1
            if fails:
                raise MemoryError("no room")
            return 0.5

        return sensor.measure(drift)

    with caplog.at_level(logging.WARNING, logger="autotune"):
        for fails in [True] * (PATIENCE - 1) + [False] + [True] * PATIENCE:  # a success between counts anew
            assert bool(measured(fails)) is not fails
    assert len(caplog.records) == 2 * PATIENCE - 1 and "MemoryError: no room" in caplog.text
    assert [("not tried again" in record.message) for record in caplog.records].count(True) == 1
    before = tried
    assert measured(fails=False) == {} and tried == before


def test_the_mean_is_over_tokens_and_is_the_own_trainers_k3() -> None:
    torch = pytest.importorskip("torch")
    mask = torch.tensor([[True, True, False]])
    old = torch.tensor([[-1.0, -2.0, math.nan]])
    new = torch.tensor([[-1.5, -1.0, 0.0]])
    more = (torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2))  # two tokens that did not move
    expected = (math.exp(-0.5) - 1 + 0.5 + math.exp(1.0) - 1 - 1.0) / 4
    assert mean_k3([(new, old, mask), more]) == pytest.approx(expected, rel=1e-12)
    lost = (torch.tensor([[500.0]]), torch.tensor([[0.0]]), torch.ones(1, 1))
    assert math.isfinite(mean_k3([lost]))  # held within the trainer's own limit
