"""The controller's memory: bounded, and never mixing what must not be mixed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.history import DEPTH, HEAD, History, Sample
from autotune.metrics import Reading, Validity
from tests.series import QUICK, snapshot


def sample(rollout: int, epoch: int = 0, rate: float = 3e-4, reward: float | None = 0.5) -> Sample:
    values = {} if reward is None else {"reward_mean": reward}
    return Sample(rollout, epoch, {"actor_learning_rate": rate}, values)


def history(*samples: Sample) -> History:
    made = History()
    for item in samples:
        made.add(item)
    return made


def rollouts(samples: list[Sample]) -> list[int]:
    return [s.rollout for s in samples]


def test_the_newest_come_oldest_first() -> None:
    seen = history(*(sample(t) for t in range(6)))
    assert rollouts(seen.samples(3)) == [3, 4, 5]
    assert rollouts(seen.samples(99)) == [0, 1, 2, 3, 4, 5]
    assert seen.samples(0) == [] and history().samples(3) == []
    assert seen.last == sample(5) and history().last is None


def test_windows_never_mix_config_epochs() -> None:
    seen = history(sample(0, 0), sample(1, 1), sample(2, 0), sample(3, 0))
    assert rollouts(seen.samples(9, epoch=0)) == [2, 3], "cut at the first that does not belong"
    assert seen.samples(9, epoch=1) == [], "the newest sample is not of this epoch"


def test_samples_made_under_other_knobs_end_the_run() -> None:
    seen = history(sample(0), sample(1, rate=1e-4), sample(2), sample(3))
    assert rollouts(seen.samples(9, under={"actor_learning_rate": 3e-4})) == [2, 3]
    assert seen.samples(9, under={"actor_learning_rate": 9.0}) == []
    assert rollouts(seen.samples(9, under={})) == [0, 1, 2, 3]


def test_since_cuts_what_is_older() -> None:
    seen = history(*(sample(t) for t in range(6)))
    assert rollouts(seen.samples(9, since=4)) == [4, 5]


def test_values_skip_rollouts_where_the_metric_was_not_valid() -> None:
    seen = history(sample(0, reward=0.1), sample(1, reward=None), sample(2, reward=0.3))
    assert seen.values("reward_mean", seen.samples(3)) == [0.1, 0.3]
    assert seen.values("kl_ref", seen.samples(3)) == []


@pytest.mark.parametrize("state", [s for s in Validity if s is not Validity.VALID])
def test_only_valid_readings_are_remembered(state: Validity) -> None:
    kept = Sample.of(snapshot(3, epoch=2, readings={"kl_step": Reading(0.0, state, "why")}))
    assert "kl_step" not in kept.values and kept.values["reward_mean"] == 0.5
    assert (kept.rollout, kept.epoch) == (3, 2)


def test_wall_times_are_not_remembered() -> None:
    readings = {"time/rollout": Reading(1.5)}
    assert "time/rollout" not in Sample.of(snapshot(0, readings=readings)).values


def test_the_history_is_bounded_and_keeps_the_runs_start() -> None:
    seen = history(*(sample(t) for t in range(3 * DEPTH)))
    assert len(seen) == DEPTH and rollouts(seen.samples(10**9))[0] == 2 * DEPTH
    assert rollouts(list(seen.head)) == list(range(HEAD))


@QUICK
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([1e-4, 3e-4]), st.none() | st.floats(-9, 9)),
        max_size=150,
    ),
    st.integers(0, 20),
)
def test_a_history_survives_json(made: list[tuple[int, float, float | None]], n: int) -> None:
    seen = history(*(sample(t, epoch, rate, reward) for t, (epoch, rate, reward) in enumerate(made)))
    again = History.from_json(json.loads(json.dumps(seen.to_json())))
    again.add(sample(999))
    seen.add(sample(999))
    assert again.samples(n) == seen.samples(n) and list(again.head) == list(seen.head)
    assert len(again) == len(seen)


@QUICK
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 40), st.integers(0, 2), st.integers(0, 30))
def test_a_window_is_a_run_of_one_epoch_up_to_now(epochs: list[int], n: int, epoch: int, since: int) -> None:
    seen = history(*(sample(t, e) for t, e in enumerate(epochs)))
    window = rollouts(seen.samples(n, epoch=epoch, since=since))
    assert len(window) <= n and window == list(range(len(epochs) - len(window), len(epochs)))
    assert all(epochs[t] == epoch and t >= since for t in window)
