"""Which knobs each rule computes with: where one of them is not known, the rule must be off.

Of a run of our own all knobs are known; of a log, or of somebody's loop, only what was told.
"""

from __future__ import annotations

BATCH = ("train_batch_size", "rollout_n", "ppo_mini_batch_size", "ppo_epochs")
NOISE = ("train_batch_size", "rollout_n")

READS: dict[str, tuple[str, ...]] = {
    "A1": BATCH,
    "A2": BATCH,
    "A3": BATCH,
    "A4": BATCH,
    "B1": (*NOISE, "rollout_micro_batch_size"),
    "B2": ("num_rollout_batches",),
    "B3a": ("kl_coef", *NOISE),
    "B3b": ("kl_coef", *NOISE),
    "B3c": ("kl_coef", *NOISE),
    "B4a": (*BATCH, "clip_range_low", "clip_range_high"),
    "B4b": (*BATCH, "clip_range_low", "clip_range_high"),
    "B5a": NOISE,
    "B5b": (*NOISE, "critic_learning_rate"),
    "B6": ("max_response_length",),
    "B6p": ("max_prompt_length",),
    "X3": ("max_response_length",),
    "X5": ("kl_coef", *NOISE),
    "XE": (*BATCH, "clip_range_high"),
    "XT": ("temperature",),
}
"""Rule -> knobs it computes with."""
