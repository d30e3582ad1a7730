"""Order of prompts and mini-batches: a function of place, complete in every epoch."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.recipe.schema import LrScheduleSection
from autotune.trainer.order import Stream, mini_batches, permutation, take_prompts, torch_seed
from autotune.trainer.schedule import factor


def test_each_epoch_takes_every_prompt_once_and_in_another_order() -> None:
    taken = take_prompts(10, seed=1, cursor=0, count=30)
    epochs = [taken[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_how_the_stream_is_cut_does_not_matter() -> None:
    whole = take_prompts(7, seed=4, cursor=3, count=20)
    parts = take_prompts(7, 4, 3, 5) + take_prompts(7, 4, 8, 1) + take_prompts(7, 4, 9, 14)
    assert parts == whole
    assert take_prompts(7, seed=5, cursor=3, count=20) != whole


def test_mini_batches_cover_every_prompt_once_per_epoch() -> None:
    plan = mini_batches(12, 3, 2, seed=1, rollout=5)
    assert [len(part) for part in plan] == [3] * 8
    for epoch in (plan[:4], plan[4:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(12))
    assert not np.array_equal(np.concatenate(plan[:4]), np.concatenate(plan[4:]))
    other = mini_batches(12, 3, 1, seed=1, rollout=6)
    assert not np.array_equal(np.concatenate(plan[:4]), np.concatenate(other))


def test_streams_of_equal_keys_are_apart() -> None:
    a, b = (permutation(50, stream, 1, 2) for stream in (Stream.PROMPTS, Stream.MINI_BATCHES))
    assert not np.array_equal(a, b)
    assert torch_seed(Stream.DROPOUT, 1, 2, 0) != torch_seed(Stream.DROPOUT, 1, 2, 1)


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [1 / 3, 2 / 3, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25]),
        ("linear", 2, [1 / 3, 2 / 3, 1, 0.5]),
        ("cosine", 0, [1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedule(kind: str, warmup: int, expected: list[float]) -> None:
    schedule = LrScheduleSection.model_validate({"type": kind, "warmup": warmup})
    assert [factor(schedule, t, 4) for t in range(4)] == pytest.approx(expected)
    assert factor(schedule, 9, 4) == factor(schedule, 3, 4) > 0
