"""Advantages, returns and losses of every algorithm against code written another way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from autotune.recipe.schema import CLIP_RANGES, LOSS_AVERAGES, CriticSection, TrainerSection
from autotune.trainer.algorithms import ALGORITHMS
from autotune.trainer.algorithms.gspo import sequence_log_ratio
from autotune.trainer.algorithms.ppo import gae, token_rewards, value_loss, whiten
from autotune.trainer.credit import critic_credit, group_credit, kl_penalty
from autotune.trainer.losses import Counts, LossKnobs, policy_loss

GROUPED = ("grpo", "dr_grpo", "dapo", "gspo", "rloo")
REWARDS = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0, math.nan]), min_size=5, max_size=5),
    min_size=1,
    max_size=4,
)


def test_the_tables_name_the_same_algorithms() -> None:
    names = TrainerSection.model_fields["algorithm"].annotation.__args__  # type: ignore[union-attr]
    assert set(names) == set(ALGORITHMS) == set(CLIP_RANGES) == set(LOSS_AVERAGES)
    assert all(row.name == name for name, row in ALGORITHMS.items())
    assert [n for n, row in ALGORITHMS.items() if row.advantages is None] == ["ppo"]
    critics = [n for n in names if TrainerSection(algorithm=n).has_critic]
    assert critics == ["ppo"]


# -- advantages of a group -------------------------------------------------------------------------


def one_by_one(name: str, group: list[float]) -> list[float]:
    """Each response's advantage from the list of its siblings' rewards."""
    known = np.array([r for r in group if not math.isnan(r)])
    if len(known) < 2 or np.ptp(known) == 0:
        return [0.0] * len(group)
    out = []
    for place, reward in enumerate(group):
        if math.isnan(reward):
            out.append(0.0)
        elif name == "rloo":
            others = [r for j, r in enumerate(group) if j != place and not math.isnan(r)]
            out.append(reward - float(np.mean(others)))
        elif name == "dr_grpo":
            out.append(reward - float(np.mean(known)))
        else:
            out.append((reward - float(np.mean(known))) / (float(np.std(known, ddof=1)) + 1e-6))
    return out


@pytest.mark.parametrize("name", GROUPED)
@given(rewards=REWARDS)
def test_group_advantages(name: str, rewards: list[list[float]]) -> None:
    flat = torch.tensor(rewards, dtype=torch.float64).flatten()
    got = group_credit(ALGORITHMS[name], flat, None, 5).advantages.numpy()
    expected = [a for group in rewards for a in one_by_one(name, group)]
    np.testing.assert_allclose(got, expected, rtol=2e-6, atol=1e-9)


def test_leave_one_out_is_the_centred_reward_stretched() -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.5], dtype=torch.float64)
    rloo = group_credit(ALGORITHMS["rloo"], rewards, None, 4).advantages
    centred = group_credit(ALGORITHMS["dr_grpo"], rewards, None, 4).advantages
    torch.testing.assert_close(rloo, centred * 4 / 3)


# -- the KL in the reward --------------------------------------------------------------------------


def test_a_penalty_in_the_reward_is_the_summed_k1_of_the_sampling_weights() -> None:
    old = torch.tensor([[-1.0, -2.0, 9.0], [-0.5, -0.5, -0.5]])
    ref = torch.tensor([[-1.5, -1.0, 7.0], [-0.5, -1.5, -0.25]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    penalty = kl_penalty(old, ref, mask, 0.1)
    expected = torch.tensor([[0.05, -0.1, 0.0], [0.0, 0.1, -0.025]])
    torch.testing.assert_close(penalty, expected)
    got = group_credit(ALGORITHMS["dr_grpo"], torch.tensor([1.0, 0.0]).double(), penalty, 2)
    worth = np.array([1.0 + 0.05, 0.0 - 0.075])
    np.testing.assert_allclose(got.advantages, worth - worth.mean(), rtol=1e-6)


# -- generalised advantage estimation --------------------------------------------------------------


def gae_by_definition(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """The double sum: A_t = sum over l of (gamma lambda)^l delta_{t+l}; no recursion."""
    after = [*values[1:], 0.0]
    delta = [r + gamma * nxt - v for r, nxt, v in zip(rewards, after, values, strict=True)]
    n = len(delta)
    advantages = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    gamma=st.sampled_from([1.0, 0.9, 0.3]),
    lam=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_gae_against_the_double_sum(lengths: list[int], gamma: float, lam: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = (len(lengths), max(lengths) + 1)  # one column that is padding for everybody
    rewards, values = rng.normal(size=shape), rng.normal(size=shape)
    mask = np.arange(shape[1])[None, :] < np.array(lengths)[:, None]
    rewards[~mask], values[~mask] = np.nan, np.inf  # padding may hold anything
    advantages, returns = gae(*map(torch.from_numpy, (rewards, values, mask)), gamma, lam)
    for row, length in enumerate(lengths):
        kept = (x[row, :length].tolist() for x in (rewards, values))
        expected = gae_by_definition(*kept, gamma, lam)
        np.testing.assert_allclose(advantages[row, :length], expected[0], atol=1e-12)
        np.testing.assert_allclose(returns[row, :length], expected[1], atol=1e-12)
        assert not advantages[row, length:].any()
        assert not returns[row, length:].any()


def test_at_lambda_one_the_return_is_what_is_still_to_come() -> None:
    rewards = torch.tensor([[0.0, -0.5, 1.0]])
    values = torch.tensor([[3.0, -2.0, 0.7]])
    _, returns = gae(rewards, values, torch.ones(1, 3, dtype=torch.bool), 1.0, 1.0)
    torch.testing.assert_close(returns, torch.tensor([[0.5, 0.5, 1.0]]))


def test_rewards_come_with_the_last_token_and_penalties_with_every_one() -> None:
    mask = torch.tensor([[True, True, False], [True, True, True], [False, False, False]])
    penalty = torch.full((3, 3), 0.25)
    got = token_rewards(torch.tensor([1.0, 2.0, 5.0]), penalty, mask)
    expected = [[-0.25, 0.75, 0.0], [-0.25, -0.25, 1.75], [0.0, 0.0, 0.0]]
    assert got.tolist() == expected
    assert token_rewards(torch.tensor([1.0, 2.0, 5.0]), None, mask)[1].tolist() == [0.0, 0.0, 2.0]


def whole(tensor: torch.Tensor) -> NDArray[np.float64]:
    return tensor.double().numpy()


def test_a_critic_gives_every_token_its_own_advantage() -> None:
    """Whitened over the scored tokens; an unscored response moves nobody and teaches nothing."""
    rng = np.random.default_rng(4)
    values = torch.from_numpy(rng.normal(size=(4, 3))).float()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]]).bool()
    rewards = torch.tensor([1.0, 0.0, 0.5, math.nan], dtype=torch.float64)
    section = CriticSection(gamma=0.9, gae_lambda=0.8)
    credit = critic_credit(rewards, None, values, mask, section)
    raw, targets = [], []
    for row, reward in enumerate([1.0, 0.0, 0.5]):
        length = int(mask[row].sum())
        paid = [0.0] * (length - 1) + [reward]
        advantages, returns = gae_by_definition(paid, whole(values)[row, :length].tolist(), 0.9, 0.8)
        raw += advantages
        targets += returns
    white = (np.array(raw) - np.mean(raw)) / np.std(raw, ddof=1)
    known = mask & torch.tensor([[True], [True], [True], [False]])
    np.testing.assert_allclose(credit.advantages[known], white, rtol=1e-5, atol=1e-6)
    assert not credit.advantages[~known].any()
    assert credit.targets is not None
    np.testing.assert_allclose(credit.targets.returns[known], targets, rtol=1e-5, atol=1e-6)
    assert torch.equal(credit.targets.mask, known)
    plain = critic_credit(rewards, None, values, mask, section.model_copy(update={"whiten": False}))
    np.testing.assert_allclose(plain.advantages[known], raw, rtol=1e-5, atol=1e-6)


def test_whitening_one_token_leaves_it() -> None:
    got = whiten(torch.tensor([[3.0, 4.0]]), torch.tensor([[True, False]]))
    assert got.tolist() == [[3.0, 0.0]]


# -- the value loss --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "slope"),
    [
        (0.5, 0.5, 1.0, 0.125, -0.5),  # unmoved: plain squared error / 2
        (0.6, 0.5, 1.0, 0.08, -0.4),  # inside the clip
        (0.9, 0.5, 1.0, 0.045, 0.0),  # moved past 0.7 toward its target: held at 0.7
        (0.1, 0.5, 1.0, 0.405, -0.9),  # moved away: the larger error is the unclipped one
        (1.4, 0.5, 1.0, 0.08, 0.4),  # past the target: the unclipped one again
    ],
)
def test_value_clipping(value: float, old: float, target: float, loss: float, slope: float) -> None:
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    as_tensor = [torch.tensor([[x]], dtype=torch.float64) for x in (old, target)]
    got = value_loss(v, *as_tensor, torch.tensor([[True]]), 1.0, 0.2)
    got.backward()
    assert got.item() == pytest.approx(loss)
    assert v.grad is not None
    assert v.grad.item() == pytest.approx(slope)


def test_value_loss_without_a_clip_is_half_the_mean_square() -> None:
    values, target = torch.tensor([[1.0, 2.0, 9.0]]), torch.tensor([[0.0, 4.0, 0.0]])
    mask = torch.tensor([[True, True, False]])
    assert value_loss(values, values, target, mask, 2.0, None).item() == pytest.approx(0.5 * (1 + 4) / 2)


# -- ratios and averages ---------------------------------------------------------------------------


def by_hand(ratio: str, average: str, entropy_coef: float) -> float:
    """The loss of `BATCH`, response by response, in plain Python."""
    low, high, longest = 0.1, 0.2, 5
    total, tokens, bonus = 0.0, 0, 0.0
    for new, old, ref, h, advantage in BATCH:
        d = [a - b for a, b in zip(new, old, strict=True)]
        if ratio == "sequence":
            d = [sum(d) / len(d)] * len(d)
        terms = []
        for log_r, n, r in zip(d, new, ref, strict=True):
            x = math.exp(log_r)
            best = min(x * advantage, min(max(x, 1 - low), 1 + high) * advantage)
            terms.append(best - 0.03 * (math.exp(r - n) - 1 - (r - n)))
        total += sum(terms) / len(terms) if average == "responses" else sum(terms)
        tokens += len(terms)
        bonus += sum(h)
    divisor = {"tokens": tokens, "responses": len(BATCH), "length": len(BATCH) * longest}[average]
    return -total / divisor - entropy_coef * bonus / tokens


BATCH = [
    ([-0.5, -1.0, -2.0], [-0.9, -1.0, -1.2], [-0.7, -1.4, -1.0], [0.3, 0.8, 1.1], 1.5),
    ([-0.1, -3.0], [-0.1, -2.2], [-0.3, -2.0], [0.2, 0.9], -0.7),
    ([-1.1], [-1.0], [-1.0], [1.5], 0.4),
]


@pytest.mark.parametrize("average", ["tokens", "responses", "length"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_averages_and_ratios_against_plain_python(ratio: str, average: str) -> None:
    def padded(column: int) -> torch.Tensor:
        rows = [row[column] + [math.nan] * (3 - len(row[column])) for row in BATCH]  # type: ignore[operator]
        return torch.tensor(rows, dtype=torch.float64)

    mask = padded(0).isfinite()
    knobs = LossKnobs(0.1, 0.2, 0.03, "k3", 0.02, ratio=ratio, average=average, longest=5)
    advantages = torch.tensor([row[4] for row in BATCH], dtype=torch.float64)
    columns = [padded(i) for i in range(4)]
    got = policy_loss(*columns, advantages, mask, Counts(6.0, 3.0), knobs)  # type: ignore[call-arg]
    assert got.item() == pytest.approx(by_hand(ratio, average, 0.02), rel=1e-12)


def test_the_sequence_ratio_is_a_geometric_mean_and_blind_to_padding() -> None:
    difference = torch.tensor([[math.log(2.0), math.log(0.5), math.log(4.0)], [0.3, math.nan, math.inf]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    got = sequence_log_ratio(difference, mask).exp()[:, 0].tolist()
    assert got == pytest.approx([4.0 ** (1 / 3), math.exp(0.3)])
