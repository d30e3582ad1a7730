"""`kl_step` in OpenRLHF: how far one rollout's updates moved the policy, by one forward pass of our own.

OpenRLHF logs no such number: `ppo_kl` is averaged over the updates, the first of which is 0. When
`ppo_train` has returned, some of the rollout's experiences, which still hold their old log-probs, go through
the policy actors' own `forward` once more (`hooks/drift.py`), in evaluation mode, as for the
old log-probs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from autotune.hooks.drift import RESPONSES, mean_k3


def chosen(sizes: Sequence[int], ranks: int) -> list[int]:
    """Indices of experiences, spread evenly over the rollout.

    Args:
        sizes: samples of each experience.
        ranks: actors that share the pass; each must get as many.

    Returns:
        As few as hold `RESPONSES` samples, a multiple of `ranks`; all that fit where there are fewer.
    """
    if len(sizes) < ranks:
        return []
    share = RESPONSES * len(sizes) / sum(sizes) / ranks  # experiences of each rank
    count = ranks * min(math.ceil(share), len(sizes) // ranks)
    return [i * len(sizes) // count for i in range(count)]


def kl_step(trainer: Any, experiences: Sequence[Any]) -> float:
    """The drift over this rollout's updates, in nats per token.

    Args:
        trainer: OpenRLHF's, right after its updates.
        experiences: those of this rollout that are measured on.
    """
    import ray

    group = trainer.actor_model_group
    given = {
        "sequences": [e.sequences for e in experiences],
        "action_mask": [e.action_mask for e in experiences],
        "attention_mask": [e.attention_mask for e in experiences],
    }
    if any(e.mm_train_inputs for e in experiences):
        given["mm_train_inputs_list"] = [e.mm_train_inputs for e in experiences]
    refs = group.async_run_method_batch(method_name="forward", **given)
    # Actors of one ring or tensor-parallel group all answer for the same experiences.
    new = itertools.chain.from_iterable(ray.get(refs)[:: group.duplicate_actors])
    if trainer.args.train.colocate_all:
        ray.get(group.async_run_method(method_name="empty_cache"))
    return mean_k3(
        (now, experience.action_log_probs, experience.action_mask)
        for now, experience in zip(new, experiences, strict=True)
    )
