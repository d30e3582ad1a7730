"""`kl_step` in verl: how far one rollout's updates moved the policy, by one forward pass of our own.

verl logs no such number: `actor/ppo_kl` is averaged over the updates, the first of which is 0. When
`_update_actor` has returned the samplers still sleep and the batch lies in the transfer queue with its old
log-probs, so a fixed number of its responses go through verl's own `compute_log_prob` once more
(`hooks/drift.py`). The pass is in evaluation mode, as verl's old log-probs are. It writes the queue's column
`log_probs`, which nothing reads after the update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.hooks.drift import RESPONSES, mean_k3


def kl_step(trainer: Any, batch: Any, ranks: int) -> float | None:
    """The drift over this step's updates.

    Args:
        trainer: verl's, right after its update.
        batch: the step's samples in the transfer queue.
        ranks: data parallel ranks, which share a pass.

    Returns:
        Nats per token, or None where the batch has not as many real samples as one pass needs.
    """
    import transfer_queue

    rollout = trainer.config.actor_rollout_ref.rollout
    by_tokens = rollout.get("log_prob_use_dynamic_bsz")
    at_once = 1 if by_tokens else int(rollout.get("log_prob_micro_batch_size_per_gpu") or 1)
    keys = chosen(batch.keys, batch.tags, ranks * at_once)
    if not keys:
        return None
    subset = batch.select_keys(keys)
    subset.extra_info = {
        **{name: value for name, value in subset.extra_info.items() if name != "no_lora_adapter"},
        "calculate_entropy": False,
        "compute_loss": False,
        "temperature": rollout.temperature,
    }
    trainer.actor_rollout_wg.compute_log_prob(subset)
    data = transfer_queue.kv_batch_get(
        keys=keys,
        partition_id=batch.partition_id,
        select_fields=["log_probs", "old_log_probs", "response_mask"],
    )
    return mean_k3([trained_on(data)])


def chosen(keys: Sequence[str], tags: Sequence[Mapping[str, Any]], at_once: int) -> list[str]:
    """Samples spread evenly over the batch: `RESPONSES` or a few more, in whole passes of `at_once`."""
    real = [key for key, tag in zip(keys, tags, strict=True) if not tag.get("is_padding", False)]
    passes = min(-(-RESPONSES // at_once), len(real) // at_once)
    count = passes * at_once
    return [real[i * len(real) // count] for i in range(count)]


def trained_on(data: Any) -> tuple[Any, Any, Any]:
    """Log-probs now, log-probs before, and which tokens count, [tokens] each.

    Args:
        data: `log_probs` of prompts and responses, nested [B, prompt + response]; `old_log_probs` and
            `response_mask`, nested [B, response].
    """
    from verl.workers.utils.padding import response_from_nested

    mask = data["response_mask"]
    new = response_from_nested(data["log_probs"], mask)
    return new.values(), data["old_log_probs"].values(), mask.values()
