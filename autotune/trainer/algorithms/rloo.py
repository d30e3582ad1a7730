"""RLOO: REINFORCE with the mean of the *other* responses to the prompt as its baseline.

    A_i = r_i - mean over j != i of r_j

Leaving the response itself out keeps the baseline independent of it, so the estimate is unbiased;
it is n / (n - 1) times the centred reward. Nothing is divided by a standard deviation.

A rollout here feeds several updates, so the log-prob's gradient is weighed by the clipped token
ratio, as verl and OpenRLHF do it; at a rollout's first update that is plain REINFORCE, divided by
the mini-batch's number of tokens. (TRL clips the ratio of the whole response, a product over its
tokens.) The paper puts the KL into the reward: `kl: {placement: reward}`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.trainer.advantages import zero_std_groups
from autotune.trainer.algorithms.base import Algorithm


def leave_one_out_advantages(rewards: Tensor, scored: Tensor) -> Tensor:
    """r - mean of the other scored responses of the group, [G, n].

    Args:
        rewards: task units, [G, n]; entries that were not scored may hold anything.
        scored: whether the response could be scored, bool [G, n].
    """
    known = torch.where(scored, rewards, 0.0)  # [G, n]
    others = scored.sum(dim=1, keepdim=True) - 1  # [G, 1]
    baseline = (known.sum(dim=1, keepdim=True) - known) / others.clamp(min=1)  # [G, n]
    advantages = torch.where(scored, known - baseline, 0.0)  # [G, n]
    return advantages.masked_fill(zero_std_groups(rewards, scored)[:, None], 0.0)


RLOO = Algorithm("rloo", leave_one_out_advantages, "Back to Basics, arXiv 2402.14740, section 3.3")
