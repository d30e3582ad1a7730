"""Advantages against numbers worked out by hand."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from autotune.trainer.advantages import group_advantages, zero_std_groups


def everything(rewards: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(rewards, dtype=torch.bool)


def test_one_right_answer_of_four() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    # mean 1/4; squares sum to 3/4; over n - 1 = 3 that is variance 1/4, standard deviation 1/2
    expected = [0.75 / 0.500001, *[-0.25 / 0.500001] * 3]
    got = group_advantages(rewards, everything(rewards))[0].tolist()
    assert all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(got, expected, strict=True))


def test_equal_rewards_give_exactly_zero_even_where_their_mean_rounds() -> None:
    rewards = torch.full((1, 7), 0.1)
    assert (rewards - rewards.mean()).abs().max() > 0  # the mean of seven 0.1 is not 0.1
    assert group_advantages(rewards, everything(rewards)).count_nonzero() == 0
    assert zero_std_groups(rewards, everything(rewards)).tolist() == [True]


def test_an_unscored_response_moves_nobody() -> None:
    rewards = torch.tensor([[1.0, 0.0, math.nan, 0.0], [math.nan, math.nan, math.nan, 1.0]])
    scored = rewards.isfinite()
    got = group_advantages(rewards, scored)
    alone = group_advantages(torch.tensor([[1.0, 0.0, 0.0]]), torch.ones(1, 3, dtype=torch.bool))
    assert torch.equal(got[0, [0, 1, 3]], alone[0])
    assert got[0, 2] == 0
    assert got[1].count_nonzero() == 0  # a single score has no sibling to be compared with
    assert zero_std_groups(rewards, scored).tolist() == [False, True]


@given(
    st.lists(st.integers(-5, 5), min_size=3, max_size=8).filter(lambda r: len(set(r)) > 1),
    st.integers(-100, 100),
    st.sampled_from([0.5, 2.0, 16.0]),
)
def test_shift_and_scale_of_the_reward_do_not_matter(rewards: list[int], shift: int, scale: float) -> None:
    raw = torch.tensor([rewards], dtype=torch.float64)
    first = group_advantages(raw, everything(raw))
    second = group_advantages(raw * scale + shift, everything(raw))
    assert torch.allclose(first, second, atol=1e-4)
    assert abs(first.sum().item()) < 1e-9
