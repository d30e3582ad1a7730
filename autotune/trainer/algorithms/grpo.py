"""Groups and token ratios: GRPO and its two revisions.

    GRPO      A = (r - mean) / (std + 1e-6)    clip 0.2 / 0.2    mean over the mini-batch's tokens
    Dr. GRPO  A =  r - mean                    clip 0.2 / 0.2    sum / (responses x max_response_length)
    DAPO      A = (r - mean) / (std + 1e-6)    clip 0.2 / 0.28   mean over the mini-batch's tokens

The GRPO paper averages over each response first (`loss_average: responses`); a long wrong answer then
pays less per token than a short one, which is what the two revisions set out to mend. The default
here is the token mean, as in verl and OpenRLHF. Dr. GRPO also drops the division by the standard
deviation, which makes a prompt that is nearly always (or never) solved count more than one at the
edge. DAPO lets rare tokens grow further (clip-higher) and, as an option, draws new prompts for groups
without signal (`dynamic_sampling`). It was published without a KL: set `kl_coef: 0` for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.trainer.advantages import group_advantages, zero_std_groups
from autotune.trainer.algorithms.base import Algorithm


def centred_advantages(rewards: Tensor, scored: Tensor) -> Tensor:
    """r - mean over the scored responses of its group, [G, n].

    Args:
        rewards: task units, [G, n]; entries that were not scored may hold anything.
        scored: whether the response could be scored, bool [G, n].
    """
    known = torch.where(scored, rewards, 0.0)  # [G, n]
    mean = known.sum(dim=1, keepdim=True) / scored.sum(dim=1, keepdim=True).clamp(min=1)  # [G, 1]
    centred = torch.where(scored, known - mean, 0.0)  # [G, n]
    return centred.masked_fill(zero_std_groups(rewards, scored)[:, None], 0.0)


GRPO = Algorithm("grpo", group_advantages, "DeepSeekMath, arXiv 2402.03300, section 4.1")
DR_GRPO = Algorithm("dr_grpo", centred_advantages, "Understanding R1-Zero-Like Training, arXiv 2503.20783")
DAPO = Algorithm("dapo", group_advantages, "DAPO, arXiv 2503.14476, equations 8 to 12")
