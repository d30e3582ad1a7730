"""The clipped objective with a KL to the reference and an entropy bonus.

Per token, with r = exp(log-prob - old log-prob), or one r for a whole response (`ratio: sequence`,
see `algorithms/gspo.py`):

    objective = min(r A, clip(r, 1 - low, 1 + high) A) - kl_coef KL
    loss      = -average of the objective - entropy_coef x token mean of H

Three averages over the *whole mini-batch*, whose counts are handed in while the sum is taken here, so
that the micro batches of one mini-batch add up to the same gradient however it is cut:

    tokens      sum / response tokens                      every token weighs the same
    responses   sum of (sum / length) / responses          every response weighs the same
    length      sum / (responses x max_response_length)    no length is favoured, nor any batch

The entropy is a token mean under all of them: its coefficient means the same everywhere.

KL estimators, from samples of the model, with d = reference log-prob - log-prob:

    k1 = -d        k2 = d^2 / 2        k3 = exp(d) - 1 - d

k1's gradient has expectation zero in a loss; it is here because it is what some runs were made
with, not because it works. Log-ratios are held within +-20 before the exponential: beyond that the
token is lost anyway, and infinity times a branch that is not taken would be NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autotune.trainer.algorithms.gspo import sequence_log_ratio

LOG_RATIO_LIMIT = 20.0
"""nats; exp(20) is 5e8, still finite in every dtype used here."""


def k1(difference: Tensor) -> Tensor:
    return -difference


def k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(d) - 1 - d: never negative and unbiased when d = log q - log p at samples of p."""
    return difference.expm1() - difference


def precise_k3(difference: Tensor) -> Tensor:
    """k3 in float64: in float32 a drift near 0 would round to a negative KL."""
    return k3(difference.double()).clamp(min=0.0)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True)
class LossKnobs:
    """What the loss obeys during one rollout."""

    clip_low: float
    clip_high: float
    kl_coef: float
    """Of the KL in the loss; 0 where it is in the reward."""
    kl_estimator: str
    entropy_coef: float
    ratio: str = "token"
    """`token` or `sequence`."""
    average: str = "tokens"
    """`tokens`, `responses` or `length`."""
    longest: int = 1
    """max_response_length, of the average by length."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Size of the whole mini-batch over all ranks; scalars on the device where a graph reads them."""

    tokens: float | Tensor
    responses: float | Tensor


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log r, held within +-LOG_RATIO_LIMIT; same shape as its inputs."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def ratio_difference(difference: Tensor, mask: Tensor, kind: str) -> Tensor:
    """log r of what is clipped: [B, R] for tokens, [B, 1] for whole responses."""
    return sequence_log_ratio(difference, mask) if kind == "sequence" else difference


def per_token(advantages: Tensor) -> Tensor:
    """Advantages that broadcast over response tokens: [B] -> [B, 1], [B, R] as it is."""
    return advantages if advantages.dim() == 2 else advantages[:, None]


def surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The clipped objective, [B, R] or, with one ratio and advantage per response, [B, 1]."""
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)  # [B, R]
    return torch.minimum(ratio * advantages, clipped * advantages)


def clipped_branch_active(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Where the clip cuts the gradient to zero: too high and praised, or too low and blamed."""
    praised = (advantages > 0) & (ratio > 1.0 + clip_high)  # [B, R]
    blamed = (advantages < 0) & (ratio < 1.0 - clip_low)  # [B, R]
    return praised | blamed


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    entropy: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    counts: Counts,
    knobs: LossKnobs,
    importance: Tensor | None = None,
) -> Tensor:
    """This micro batch's part of the mini-batch's loss; the parts add up.

    Args:
        log_probs: of the model in training, with gradient, [B, R].
        old_log_probs: of the sampling weights, fixed for the whole rollout, [B, R].
        ref_log_probs: of the frozen reference, [B, R]; None without a reference.
        entropy: nats with gradient, [B, R]; None when its coefficient is 0.
        advantages: one per response, [B], or per token, [B, R].
        mask: response tokens up to and including the end token, bool [B, R].
        counts: of the whole mini-batch over all ranks.
        knobs: coefficients in force during this rollout.
        importance: weight of each token's objective, [B, R], see `mismatch.py`; the KL has none.
    """
    difference = ratio_difference(log_ratio(log_probs, old_log_probs), mask, knobs.ratio)
    ratio = difference.exp()  # [B, R] or [B, 1]
    objective = surrogate(ratio, per_token(advantages), knobs.clip_low, knobs.clip_high).expand(mask.shape)
    if importance is not None:
        objective = objective * importance
    if ref_log_probs is not None and knobs.kl_coef > 0.0:
        kl = KL_ESTIMATORS[knobs.kl_estimator](log_ratio(ref_log_probs, log_probs))  # [B, R]
        objective = objective - knobs.kl_coef * kl
    loss = -averaged(objective, mask, counts, knobs)
    if entropy is not None and knobs.entropy_coef > 0.0:
        loss = loss - knobs.entropy_coef * entropy.masked_fill(~mask, 0.0).sum() / counts.tokens
    return loss


def averaged(values: Tensor, mask: Tensor, counts: Counts, knobs: LossKnobs) -> Tensor:
    """This micro batch's part of the average of `values` [B, R] over the mini-batch."""
    kept = values.masked_fill(~mask, 0.0)  # [B, R]
    if knobs.average == "responses":
        lengths = mask.sum(dim=1).clamp(min=1)  # [B]
        return (kept.sum(dim=1) / lengths).sum() / counts.responses
    if knobs.average == "length":
        return kept.sum() / (counts.responses * knobs.longest)
    return kept.sum() / counts.tokens
