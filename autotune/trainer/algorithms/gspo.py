"""GSPO: one ratio for a whole response, the geometric mean of its tokens' ratios.

    s = exp(mean over the response's tokens of (log-prob - old log-prob))

The reward belongs to a response, so its off-policy correction does too: token ratios, one sample
each, are noise that grows with length. Advantages are GRPO's; a clipped response loses all of its
gradient at once. Every response weighs the same (`loss_average: responses`).

Clip shares and the histogram therefore count responses under this algorithm, not tokens.
"""

from __future__ import annotations

from torch import Tensor

from autotune.trainer.advantages import group_advantages
from autotune.trainer.algorithms.base import Algorithm


def sequence_log_ratio(difference: Tensor, mask: Tensor) -> Tensor:
    """log s of every response, [B, 1].

    Args:
        difference: log-prob - old log-prob, [B, R]; padding may hold anything.
        mask: response tokens, bool [B, R].
    """
    total = difference.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True)  # [B, 1]
    return total / mask.sum(dim=1, keepdim=True).clamp(min=1)


GSPO = Algorithm(
    "gspo", group_advantages, "Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7"
)
