"""Sampler against trainer: weights, the subset that decides, and the way back when they disagree."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from autotune.trainer.losses import Counts, LossKnobs, policy_loss
from autotune.trainer.mismatch import OldLogProbs, Trust, importance_weights, mean_mismatch, old_log_probs
from autotune.trainer.ranks import Rows
from autotune.trainer.rollout.base import Draw, pad_prompts
from autotune.trainer.rollout.vllm import group_requests
from autotune.trainer.rollout.vllm_engine import _collected

SHAPE = (12, 5)
SUBSET = np.arange(0, 12, 3)


class Scored:
    """A trainer whose log-probs are given, and which remembers what it was asked to score."""

    def __init__(self) -> None:
        g = torch.Generator().manual_seed(3)
        self.log_probs = -torch.rand(SHAPE, generator=g) - 0.1
        self.asked: list[Rows | None] = []

    def __call__(self, rows: Rows | None) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(rows)
        known = torch.zeros(SHAPE[0], 1)
        known[slice(None) if rows is None else torch.from_numpy(rows)] = 1
        return self.log_probs * known, known.expand(SHAPE)


MASK = torch.arange(5)[None, :] < torch.arange(12)[:, None] % 5 + 1


def settle(trainer: Scored, sampler: torch.Tensor | None, trust: Trust) -> OldLogProbs:
    return old_log_probs(trainer, sampler, MASK, SUBSET, trust)


def test_by_default_everything_is_recomputed_and_weighted() -> None:
    trainer = Scored()
    sampler = trainer.log_probs - 0.3
    old = settle(trainer, sampler, Trust(spare=False, bound=1.0, cap=2.0))
    assert trainer.asked == [None]
    assert old.log_probs is old.trainer and old.mismatch is None and old.seen is None
    assert torch.allclose(old.importance, torch.full(SHAPE, math.exp(0.3)))


def test_a_close_sampler_spares_the_pass_and_needs_no_weights() -> None:
    trainer = Scored()
    sampler = trainer.log_probs + 0.01
    old = settle(trainer, sampler, Trust(spare=True, bound=1e-3, cap=2.0))
    assert len(trainer.asked) == 1 and trainer.asked[0] is SUBSET
    assert old.log_probs is sampler and old.importance is None and old.seen is SUBSET
    assert old.mismatch == pytest.approx(0.01**2 / 2, rel=0.02)


@pytest.mark.parametrize("off", [0.5, math.nan])
def test_a_distant_sampler_is_recomputed_in_the_same_rollout(off: float) -> None:
    trainer = Scored()
    sampler = trainer.log_probs.clone()
    sampler[SUBSET[1]] += off
    old = settle(trainer, sampler, Trust(spare=True, bound=1e-3, cap=2.0))
    assert trainer.asked[0] is SUBSET and trainer.asked[1] is None
    assert old.log_probs is old.trainer and old.seen is None
    assert not old.mismatch <= 1e-3
    assert old.importance is not None


def test_padding_does_not_count() -> None:
    trainer = Scored()
    sampler = torch.where(MASK, trainer.log_probs, 7.0)
    assert float(mean_mismatch(trainer.log_probs, sampler, MASK)) == 0.0


def test_weights_are_capped_from_above_only() -> None:
    trainer = torch.tensor([[0.0, -1.0, -3.0, -100.0]])
    sampler = torch.tensor([[-1.0, -1.0, -1.0, -0.1]])
    weights = importance_weights(trainer, sampler, 2.0)
    assert weights is not None
    expected = [2.0, 1.0, math.exp(-2.0), math.exp(-20.0)]
    assert weights[0].tolist() == pytest.approx(expected)
    assert importance_weights(trainer, None, 2.0) is None
    assert importance_weights(trainer, sampler, None) is None


def test_weights_scale_the_objective_and_leave_the_kl_alone() -> None:
    knobs = LossKnobs(clip_low=0.2, clip_high=0.2, kl_coef=0.5, kl_estimator="k3", entropy_coef=0.0)
    g = torch.Generator().manual_seed(4)
    new, ref = -torch.rand(SHAPE, generator=g), -torch.rand(SHAPE, generator=g)
    advantages, counts = torch.randn(12, generator=g), Counts(float(MASK.sum()), 12.0)

    def loss(advantages: torch.Tensor, weights: torch.Tensor | None) -> float:
        return float(policy_loss(new, new, ref, None, advantages, MASK, counts, knobs, weights))

    kl_alone = loss(torch.zeros(12), None)
    plain = loss(advantages, None)
    assert loss(advantages, torch.full(SHAPE, 1.5)) == pytest.approx(kl_alone + 1.5 * (plain - kl_alone))
    assert loss(advantages, torch.ones(SHAPE)) == plain


# -- vLLM that tells the log-probs of some -----------------------------------------------------------


def test_every_so_many_th_prompt_of_a_rollout_is_asked_for_log_probs() -> None:
    prompts = pad_prompts([[5, 6], [7], [8, 9, 10]], 8, 0)
    of, sample = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 0, 1, 0, 1])
    draw = Draw(seed=1, rollout=2, temperature=1.0, max_response_length=4, first_prompt=1)
    asked = [r.log_probs for r in group_requests(prompts, of, sample, draw, False, log_probs_of=3)]
    assert asked == [False, False, True]  # prompts 1, 2 and 3 of the rollout
    assert all(r.log_probs for r in group_requests(prompts, of, sample, draw, False))


def test_log_probs_that_were_not_told_are_nan() -> None:
    told = SimpleNamespace(token_ids=[3, 4], logprobs=[{3: _log_prob(-1.0)}, {4: _log_prob(-2.0)}])
    silent = SimpleNamespace(token_ids=[5], logprobs=None)
    log_probs = _collected([told, silent], with_log_probs=True).log_probs
    assert log_probs is not None
    torch.testing.assert_close(log_probs, torch.tensor([[-1.0, -2.0], [math.nan, 0.0]]), equal_nan=True)


def _log_prob(value: float) -> SimpleNamespace:
    return SimpleNamespace(logprob=value)
