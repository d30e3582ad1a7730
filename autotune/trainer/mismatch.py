"""Sampler against trainer: which log-probs a rollout is trained against, and with which weights.

Two programs compute the same weights: the engine that sampled, with log-probs q, and the trainer, p.
They differ by rounding, and by a bug when there is one. So every rollout measures how much

    kl_mismatch = mean over response tokens of k3(log p - log q)

and either trains against the trainer's own log-probs, a forward pass over all samples, with each
token's objective weighted for having been drawn by the other program,

    importance = min(p / q, cap)          truncated importance sampling, token by token

or, where the recipe allows it, measures on a fixed subset only and trains against q itself: its ratio
new / q then holds the correction, so no weight is due. When the subset's mismatch is above the bound,
or not a number, the whole rollout is recomputed before anything is learnt from it.

The cap bounds the variance that one unlucky token can bring; weights below 1 are never raised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autotune.trainer.losses import LOG_RATIO_LIMIT, k3
from autotune.trainer.ranks import Rows

Score = Callable[[Rows | None], tuple[Tensor, Tensor]]
"""The trainer's log-probs and entropies of some samples, or of all for None: both [N, R], 0 elsewhere."""


@dataclass(frozen=True, slots=True)
class Trust:
    """How far the sampler's log-probs are believed."""

    spare: bool
    """Train against them while the mismatch is within the bound."""
    bound: float
    """Nats per token, k3."""
    cap: float | None
    """Of the importance weights; None weights nothing."""


@dataclass(frozen=True, slots=True)
class OldLogProbs:
    """What the ratios of a rollout are against."""

    log_probs: Tensor
    """Float32 [N, R]: the trainer's, or the sampler's where `seen` is a subset."""
    importance: Tensor | None
    """Weights of the tokens' objectives, [N, R]; None where none are due."""
    trainer: Tensor
    """The trainer's own, [N, R], known for the samples of `seen`."""
    entropy: Tensor
    """Of the trainer's distribution, [N, R], known for the samples of `seen`."""
    seen: Rows | None
    """The samples that the trainer has scored; None is all of them."""
    mismatch: float | None
    """Of the subset that decided; None where nothing was to be decided."""


def old_log_probs(
    score: Score, sampler: Tensor | None, mask: Tensor, subset: Rows, trust: Trust
) -> OldLogProbs:
    """Settle it for one rollout.

    Args:
        score: computes the trainer's log-probs.
        sampler: the sampler's own, [N, R]; None when it gave none, so that all is recomputed.
        mask: response tokens, bool [N, R].
        subset: the samples on which the mismatch is measured first.
        trust: what the recipe says.
    """
    measured = None
    if trust.spare and sampler is not None:
        trainer, entropy = score(subset)
        rows = torch.from_numpy(subset).to(mask.device)
        measured = float(mean_mismatch(trainer[rows], sampler[rows], mask[rows]))
        if measured <= trust.bound:  # false for NaN too
            return OldLogProbs(sampler, None, trainer, entropy, subset, measured)
    trainer, entropy = score(None)
    weights = importance_weights(trainer, sampler, trust.cap)
    return OldLogProbs(trainer, weights, trainer, entropy, None, measured)


def mean_mismatch(trainer: Tensor, sampler: Tensor, mask: Tensor) -> Tensor:
    """k3 of KL(sampler || trainer) per response token, nats, a scalar; everything [B, R]."""
    difference = (trainer - sampler).double().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # [B, R]
    return torch.where(mask, k3(difference), 0.0).sum() / mask.sum()


def importance_weights(trainer: Tensor, sampler: Tensor | None, cap: float | None) -> Tensor | None:
    """min(exp(trainer - sampler), cap), [N, R]; None without a sampler's log-probs or a cap."""
    if sampler is None or cap is None:
        return None
    difference = (trainer - sampler).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)  # [N, R]
    return difference.exp().clamp(max=cap)
