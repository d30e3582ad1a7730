"""Group-standardised advantages: how much better a response is than its own siblings.

    A[g, i] = (r[g, i] - mean_g) / (std_g + 1e-6)

Mean and standard deviation (n - 1 in the denominator) run over the scored responses of a group
only; a response that could not be scored gets advantage 0 and moves nobody's mean. A group whose
rewards are all equal has no signal and gets exactly 0, not a rounding error divided by 1e-6.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6


def zero_std_groups(rewards: Tensor, scored: Tensor) -> Tensor:
    """True for every group without signal: all scored rewards equal, or fewer than two of them.

    Args:
        rewards: task units, [G, n]; entries that were not scored may hold anything.
        scored: whether the response could be scored, bool [G, n].
    """
    highest = rewards.masked_fill(~scored, -torch.inf).amax(dim=1)  # [G]
    lowest = rewards.masked_fill(~scored, torch.inf).amin(dim=1)  # [G]
    return highest <= lowest  # [G]; an empty group compares -inf with inf


def group_advantages(rewards: Tensor, scored: Tensor) -> Tensor:
    """Advantages of every response, float [G, n]; see the module's formula.

    Args:
        rewards: task units, [G, n]; entries that were not scored may hold anything.
        scored: whether the response could be scored, bool [G, n].
    """
    known = torch.where(scored, rewards, 0.0)  # [G, n]
    count = scored.sum(dim=1, keepdim=True)  # [G, 1]
    mean = known.sum(dim=1, keepdim=True) / count.clamp(min=1)  # [G, 1]
    centred = torch.where(scored, known - mean, 0.0)  # [G, n]
    variance = centred.square().sum(dim=1, keepdim=True) / (count - 1).clamp(min=1)  # [G, 1]
    advantages = centred / (variance.sqrt() + EPSILON)  # [G, n]
    return advantages.masked_fill(zero_std_groups(rewards, scored)[:, None], 0.0)
