"""The clipped objective with a KL to the reference and an entropy bonus.

Per token, with r = exp(log-prob - old log-prob):

    objective = min(r A, clip(r, 1 - low, 1 + high) A) - kl_coef KL + entropy_coef H

The loss is minus the token mean over the *whole mini-batch*: the normaliser is handed in, the sum
is taken here. So the micro batches of one mini-batch add up to the same gradient however it is cut.

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

LOG_RATIO_LIMIT = 20.0
"""nats; exp(20) is 5e8, still finite in every dtype used here."""


def k1(difference: Tensor) -> Tensor:
    return -difference


def k2(difference: Tensor) -> Tensor:
    return 0.5 * difference.square()


def k3(difference: Tensor) -> Tensor:
    """exp(d) - 1 - d: never negative and unbiased when d = log q - log p at samples of p."""
    return difference.expm1() - difference


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


@dataclass(frozen=True, slots=True)
class LossKnobs:
    """What the loss obeys during one rollout."""

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: str
    entropy_coef: float


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log r, held within +-LOG_RATIO_LIMIT; same shape as its inputs."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """The clipped objective per token, [B, R]."""
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)  # [B, R]
    return torch.minimum(ratio * advantages, clipped * advantages)


def clipped_branch_active(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Tokens whose gradient the clip cuts to zero: too high and praised, or too low and blamed."""
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
    tokens: float,
    knobs: LossKnobs,
) -> Tensor:
    """Sum over this micro batch of the token losses, divided by the mini-batch's token count.

    Args:
        log_probs: of the model in training, with gradient, [B, R].
        old_log_probs: of the sampling weights, fixed for the whole rollout, [B, R].
        ref_log_probs: of the frozen reference, [B, R]; None without a reference.
        entropy: nats with gradient, [B, R]; None when its coefficient is 0.
        advantages: one per response, [B].
        mask: response tokens up to and including the end token, bool [B, R].
        tokens: response tokens of the whole mini-batch over all ranks.
        knobs: coefficients in force during this rollout.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()  # [B, R]
    objective = surrogate(ratio, advantages[:, None], knobs.clip_low, knobs.clip_high)  # [B, R]
    if ref_log_probs is not None and knobs.kl_coef > 0.0:
        kl = KL_ESTIMATORS[knobs.kl_estimator](log_ratio(ref_log_probs, log_probs))  # [B, R]
        objective = objective - knobs.kl_coef * kl
    if entropy is not None and knobs.entropy_coef > 0.0:
        objective = objective + knobs.entropy_coef * entropy
    return -objective.masked_fill(~mask, 0.0).sum() / tokens
