"""PPO with a critic: generalised advantage estimation, and the clipped value loss.

    delta_t = r_t + gamma V_{t+1} - V_t        V behind the last token is 0, cut off or not
    A_t     = delta_t + gamma lambda A_{t+1}   return_t = A_t + V_t
    loss    = 1/2 max((V - return)^2, (clip(V, V_old - c, V_old + c) - return)^2)

V_t is the critic's value of the text before token t. The task's reward comes with a response's last
token; a KL in the reward is taken off token by token. Returns are made from advantages as they are;
whitening (mean 0, standard deviation 1 over the rollout's response tokens) is for the actor only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.trainer.algorithms.base import Algorithm

EPSILON = 1e-8


def token_rewards(rewards: Tensor, penalty: Tensor | None, mask: Tensor) -> Tensor:
    """The task's reward on each response's last token, less the penalty on every token, [N, R].

    Args:
        rewards: task units, [N].
        penalty: kl_coef x KL per token, [N, R]; None when there is none.
        mask: response tokens, a run from the left, bool [N, R].
    """
    last = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))  # [N, R]
    spread = torch.where(last, rewards[:, None], 0.0)  # [N, R]
    return spread if penalty is None else spread - penalty.masked_fill(~mask, 0.0)


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every response token, both [N, R]; padding is 0.

    Schulman et al., arXiv 1506.02438, equation 16.

    Args:
        rewards: per token, [N, R].
        values: the critic's, before each token, [N, R].
        mask: response tokens, a run from the left, bool [N, R].
        gamma: discount per token.
        lam: lambda.
    """
    values, rewards = values.masked_fill(~mask, 0.0), rewards.masked_fill(~mask, 0.0)  # [N, R]
    advantages = torch.zeros_like(values)  # [N, R]
    following = carried = torch.zeros_like(values[:, 0])  # [N]
    for t in reversed(range(values.shape[1])):
        carried = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * carried
        carried = carried.masked_fill(~mask[:, t], 0.0)
        following = values[:, t]
        advantages[:, t] = carried
    return advantages, (advantages + values).masked_fill(~mask, 0.0)


def whiten(advantages: Tensor, mask: Tensor) -> Tensor:
    """Mean 0 and standard deviation 1 (n - 1) over the tokens of `mask`; 0 elsewhere, [N, R]."""
    chosen = advantages[mask].double()  # [tokens]
    if chosen.numel() < 2:
        return advantages.masked_fill(~mask, 0.0)
    white = (advantages.double() - chosen.mean()) / (chosen.std() + EPSILON)  # [N, R]
    return white.masked_fill(~mask, 0.0).to(advantages.dtype)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, tokens: float, clip: float | None
) -> Tensor:
    """Sum over this micro batch of the clipped squared errors / 2, over the mini-batch's token count.

    Schulman et al.'s PPO2 code, as verl and OpenRLHF have it: the larger of the two errors counts, so
    a value that has moved further than `clip` toward its return stops there.

    Args:
        values: of the critic in training, with gradient, [B, R].
        old_values: of the critic before this rollout's updates, [B, R].
        returns: targets, [B, R].
        mask: response tokens of scored responses, bool [B, R].
        tokens: response tokens of the whole mini-batch over all ranks.
        clip: reward units; None does not clip.
    """
    error = (values - returns).square()  # [B, R]
    if clip is not None:
        held = torch.clamp(values, old_values - clip, old_values + clip)  # [B, R]
        error = torch.maximum(error, (held - returns).square())
    return 0.5 * error.masked_fill(~mask, 0.0).sum() / tokens


PPO = Algorithm("ppo", None, "PPO, arXiv 1707.06347; GAE, arXiv 1506.02438")
