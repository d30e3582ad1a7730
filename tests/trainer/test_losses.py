"""The loss against a formula of its own, in plain Python floats, on numbers made by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from autotune.trainer.losses import KL_ESTIMATORS, Counts, LossKnobs, clipped_branch_active, policy_loss

PLAIN = LossKnobs(clip_low=0.2, clip_high=0.3, kl_coef=0.0, kl_estimator="k3", entropy_coef=0.0)


def one_token(
    log_ratio: float, advantage: float, knobs: LossKnobs = PLAIN, ref: float | None = None
) -> tuple[float, float]:
    """Loss and its derivative by the log-prob, for one token with old log-prob -1."""
    log_prob = torch.tensor([[-1.0 + log_ratio]], dtype=torch.float64, requires_grad=True)
    reference = None if ref is None else torch.tensor([[ref]], dtype=torch.float64)
    loss = policy_loss(
        log_prob,
        torch.tensor([[-1.0]], dtype=torch.float64),
        reference,
        None,
        torch.tensor([advantage], dtype=torch.float64),
        torch.tensor([[True]]),
        Counts(1.0, 1.0),
        knobs,
    )
    loss.backward()
    assert log_prob.grad is not None
    return loss.item(), log_prob.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.25, 2.0, -2.5, -2.5),  # inside: gradient -r A
        (1.5, 2.0, -2.6, 0.0),  # praised and too high: clipped at 1.3
        (1.5, -2.0, 3.0, 3.0),  # blamed and too high: not clipped, it must come down
        (0.5, -2.0, 1.6, 0.0),  # blamed and too low: clipped at 0.8
        (0.5, 2.0, -1.0, -1.0),  # praised and too low: not clipped, it must come up
        (0.81, -1.0, 0.81, 0.81),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clip_both_signs(ratio: float, advantage: float, loss: float, slope: float) -> None:
    got, gradient = one_token(math.log(ratio), advantage)
    assert got == pytest.approx(loss)
    assert gradient == pytest.approx(slope, abs=1e-12)
    active = clipped_branch_active(torch.tensor([[ratio]]), torch.tensor([[advantage]]), 0.2, 0.3)
    assert active.item() == (slope == 0.0 and advantage != 0.0)


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [  # d = reference - log-prob = -1.5 - (-1) = -0.5; slopes are by the log-prob
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1.0 - math.exp(-0.5)),
    ],
)
def test_kl_estimators(estimator: str, value: float, slope: float) -> None:
    knobs = replace(PLAIN, kl_coef=0.1, kl_estimator=estimator)
    got, gradient = one_token(0.0, 0.0, knobs, ref=-1.5)
    assert got == pytest.approx(0.1 * value)
    assert gradient == pytest.approx(0.1 * slope)


def test_k3_is_the_kl_in_expectation() -> None:
    p, q = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    exact = (p * (p / q).log()).sum()
    difference = (q / p).log()  # at samples of p
    for name in ("k1", "k3"):
        assert (p * KL_ESTIMATORS[name](difference)).sum() == pytest.approx(exact.item())


def plain_loss(
    new: list[list[float]],
    old: list[list[float]],
    ref: list[list[float]],
    entropy: list[list[float]],
    advantages: list[float],
    lengths: list[int],
    knobs: LossKnobs,
) -> float:
    """The same definition, token by token, without tensors."""
    total, tokens = 0.0, 0
    for b, length in enumerate(lengths):
        for t in range(length):
            r, a = math.exp(new[b][t] - old[b][t]), advantages[b]
            low, high = 1 - knobs.clip_low, 1 + knobs.clip_high
            best = min(r * a, min(max(r, low), high) * a)
            d = ref[b][t] - new[b][t]
            kl = {"k1": -d, "k2": d * d / 2, "k3": math.exp(d) - 1 - d}[knobs.kl_estimator]
            total += best - knobs.kl_coef * kl + knobs.entropy_coef * entropy[b][t]
            tokens += 1
    return -total / tokens


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_whole_batch_against_plain_python(estimator: str) -> None:
    new = [[-0.5, -1.0, -2.0], [-0.1, -3.0, 9.9]]
    old = [[-0.9, -1.0, -1.2], [-0.1, -2.2, math.nan]]
    ref = [[-0.7, -1.4, -1.0], [-0.3, -2.0, math.inf]]
    entropy = [[0.3, 0.8, 1.1], [0.2, 0.9, math.nan]]
    advantages, lengths = [1.5, -0.7], [3, 2]
    knobs = LossKnobs(0.2, 0.28, 0.04, estimator, 0.01)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (new, old, ref, entropy, advantages)]
    got = policy_loss(*tensors, mask, Counts(5.0, 2.0), knobs)  # type: ignore[arg-type]
    expected = plain_loss(new, old, ref, entropy, advantages, lengths, knobs)
    assert got.item() == pytest.approx(expected, rel=1e-12)


def test_a_ratio_beyond_every_float_gives_no_nan_gradient() -> None:
    loss, gradient = one_token(2000.0, 1.0)
    assert loss == pytest.approx(-1.3)
    assert gradient == 0.0
