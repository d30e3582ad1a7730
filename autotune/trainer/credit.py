"""From rewards to advantages, once per rollout: the only place where algorithms differ in data.

Without a critic a response is compared with its siblings and all of its tokens get the same
advantage, [N]. With one, every token gets its own, [N, R], and the critic gets its targets.

A KL in the reward (`kl: {placement: reward}`) is `kl_coef` x k1 of the *sampling* weights, so it is a
number and no gradient flows through it: per token with a critic, summed over the response without.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from autotune.recipe.schema import CriticSection
from autotune.trainer.algorithms import Algorithm
from autotune.trainer.algorithms.ppo import gae, token_rewards, whiten
from autotune.trainer.losses import k1
from autotune.trainer.update import ValueTargets


@dataclass(frozen=True, slots=True)
class Credit:
    """What each response, or each token, is told."""

    advantages: Tensor
    """float32 [N] on the CPU, or [N, R] on the device."""
    targets: ValueTargets | None = None


def kl_penalty(old_log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """What the KL takes off the reward per token, [N, R]; padding is 0."""
    return kl_coef * k1(ref_log_probs - old_log_probs).masked_fill(~mask, 0.0)


def group_credit(algorithm: Algorithm, rewards: Tensor, penalty: Tensor | None, group: int) -> Credit:
    """One advantage per response, from its siblings.

    Args:
        algorithm: one without a critic.
        rewards: task units, NaN where one could not be scored, float64 [N] on the CPU.
        penalty: off the reward of every token, [N, R]; None when there is none.
        group: responses per prompt.
    """
    assert algorithm.advantages is not None, f"{algorithm.name} needs a critic"
    total = rewards if penalty is None else rewards - penalty.sum(dim=1).double().cpu()  # [N]
    grouped = total.view(-1, group)  # [P, n]
    return Credit(algorithm.advantages(grouped, grouped.isfinite()).flatten().float())


def critic_credit(
    rewards: Tensor, penalty: Tensor | None, values: Tensor, mask: Tensor, section: CriticSection
) -> Credit:
    """One advantage per token, from the critic's values; a response without a score gets 0.

    Args:
        rewards: task units, NaN where one could not be scored, float64 [N] on the CPU.
        penalty: off the reward of every token, [N, R]; None when there is none.
        values: the critic's before this rollout's updates, [N, R].
        mask: response tokens, bool [N, R].
        section: discount, lambda and whitening.
    """
    worth = rewards.to(values.device, values.dtype)  # [N]
    known = mask & worth.isfinite()[:, None]  # [N, R]
    paid = token_rewards(worth, penalty, known)  # [N, R]
    advantages, returns = gae(paid, values, known, section.gamma, section.gae_lambda)
    if section.whiten:
        advantages = whiten(advantages, known)
    return Credit(advantages, ValueTargets(values, returns, known))
