"""What the TRL adapter declares; loads nothing of TRL."""

from __future__ import annotations

from autotune.hooks.declared import Declaration, KnobRow, MetricRow
from autotune.knobs import Liveness

HOOK = "hook on the loss"

METRICS = (
    MetricRow("reward_mean", "`reward`", "mean over the generations of the rollout"),
    MetricRow("reward_std", "`reward_std`", "over the whole generation batch"),
    MetricRow("reward/…", "`rewards/NAME/mean`", "one reward function"),
    MetricRow("clip_ratio", HOOK, "without the hook `clip_ratio/region_mean`"),
    MetricRow("ratio_low", HOOK, "without the hook not logged: TRL's `low_mean` counts clipped tokens only"),
    MetricRow("ratio_in", HOOK),
    MetricRow("ratio_high", HOOK),
    MetricRow("kl_ref", "`kl`", "k3, mean over the updates; absent means beta is 0, not that KL is 0"),
    MetricRow("kl_step", HOOK, "one forward pass without gradient after the last update"),
    MetricRow("kl_mismatch", HOOK, "with vLLM and its importance-sampling correction"),
    MetricRow("entropy", "`entropy`", "mean over the micro batches of all updates"),
    MetricRow("grad_norm", "`grad_norm`", "before clipping, mean over the updates"),
    MetricRow("loss", HOOK, "`loss` in the log hides NaN (logging_nan_inf_filter), so it is not used"),
    MetricRow("learning_rate", "`learning_rate`", "that the last update used"),
    MetricRow("response_length_mean", "`completions/mean_length`"),
    MetricRow("response_length_p50", "the rollout's completions", "of all ranks"),
    MetricRow("response_length_p95", "the rollout's completions", "of all ranks"),
    MetricRow("response_length_p995", "the rollout's completions", "of all ranks"),
    MetricRow("response_length_max", "`completions/max_length`"),
    MetricRow("truncated_fraction", "`completions/clipped_ratio`"),
    MetricRow("zero_std_fraction", "`frac_reward_zero_std`"),
    MetricRow("tokens_per_second", "`num_tokens` over wall time", "prompt and completion tokens, all ranks"),
    MetricRow("time/…", "wall time", "whole rollouts: `time/rollout`"),
    MetricRow("eval_score", "`eval_reward`", "when the trainer evaluates"),
)

KNOBS = (
    KnobRow(
        "actor_learning_rate", "`lr_scheduler.base_lrs`, each `param_groups`, `_last_lr`", Liveness.LIVE,
        "writing the groups alone would last one update; all groups keep their proportions",
    ),
    KnobRow(
        "kl_coef", "`trainer.beta`", Liveness.NEXT_ROLLOUT,
        "never 0: a generation made at 0 has no reference log-probs. Not movable when the run started at"
        " `beta=0`"
        " (TRL's default): there is no reference model",
    ),
    KnobRow("clip_range_low", "`trainer.epsilon_low`", Liveness.LIVE, "`args.epsilon` is not read again"),
    KnobRow("clip_range_high", "`trainer.epsilon_high`", Liveness.LIVE),
    KnobRow(
        "ppo_mini_batch_size", "`args.gradient_accumulation_steps`", Liveness.NEXT_ROLLOUT,
        "only where micro-step and rollout boundaries meet, and with `lr_scheduler_type` constant or"
        " constant_with_warmup: the others count updates to a horizon that is fixed at the start. The"
        " number of"
        " rollouts is kept by moving `state.max_steps`; refused where the epochs, counted at the start,"
        " hold too few updates",
    ),
    KnobRow(
        "ppo_epochs", "`trainer.num_iterations`, `RepeatSampler.repeat_count`", Liveness.NEXT_ROLLOUT,
        "as above; the one chunk of prompts that was drawn ahead is still repeated as before",
    ),
    KnobRow(
        "max_response_length", "`trainer.max_completion_length`, `generation_config.max_new_tokens`,"
        " `generation_kwargs`, `vllm_generation.max_completion_length`", Liveness.NEXT_ROLLOUT,
        "never above what vLLM was built for; not with `loss_type='dr_grpo'`, whose loss divides by it",
    ),
    KnobRow(
        "temperature", "the sampler and the log-probs' scaling (`add_fused_lm_head` again), both or neither",
        Liveness.NEXT_ROLLOUT,
    ),
    KnobRow("entropy_coef", "`trainer.entropy_coef`", Liveness.LIVE, "when it started above 0, not adaptive"),
    KnobRow(
        "train_batch_size", "", Liveness.RESTART, "sampler and data loader keep it",
        config="GRPOConfig(generation_batch_size={samples})",
    ),
    KnobRow(
        "rollout_n", "", Liveness.RESTART, "the sampler keeps it",
        config="GRPOConfig(num_generations={value})",
    ),
    KnobRow(
        "micro_batch_size", "", Liveness.RESTART, "the data loader keeps it",
        config="GRPOConfig(per_device_train_batch_size={value})",
    ),
    KnobRow("rollout_micro_batch_size", "", Liveness.UNAVAILABLE, "one call samples all of a rank's share"),
    KnobRow("num_rollout_batches", "", Liveness.UNAVAILABLE, "one call samples all of a rank's share"),
    KnobRow("max_prompt_length", "", Liveness.UNAVAILABLE, "TRL does not cut prompts"),
)  # fmt: skip

DECLARED = Declaration(
    trainer="trl",
    title="TRL",
    package="trl",
    versions=("1.16.",),
    lines="""
from autotune.hooks.trl import AutotuneCallback
trainer.add_callback(AutotuneCallback(trainer, "control.yaml"))
""",
    metrics=METRICS,
    knobs=KNOBS,
    sensor=(
        "make more than one update per rollout: `steps_per_generation` above"
        " `gradient_accumulation_steps`, or"
        " `num_iterations` above 1. By TRL's defaults the two are equal, the policy ratio is 1 by"
        " construction and"
        " every `clip_ratio/*` is 0."
    ),
    words=(
        "For `GRPOTrainer`, on one process or several (DDP). The callback asks for a log after every"
        " update, as"
        " `logging_steps=1` does, and regroups them into rollouts of `steps_per_generation x num_iterations /"
        " gradient_accumulation_steps` updates. Where that is no whole number there is nothing to decide"
        " on, and"
        " the controller stands down.",
        "**The hook on the loss** reads log-probs that the loss computes anyway, and makes one forward"
        " pass without"
        " gradient per rollout. Loss, gradients, weights and random numbers stay bit for bit the same,"
        " which a test"
        " holds. `AutotuneCallback(..., hook=False)` leaves it out; B4a, B4b and X1 then have no sensor"
        " and say so.",
        "**Weights that come back.** A veto brings back the weights from before a rollout's updates. They and"
        " the optimizer's moments are kept on the same device when they take less than `keep_bytes` (4"
        " GiB), and"
        " a few older copies of the weights in the host's memory. With `keep_bytes=0`, under DeepSpeed"
        " or FSDP"
        " nothing is kept, and a veto only lowers the learning rate.",
        "**Resuming.** The controller's state lies in each checkpoint (`stateful_callbacks`), and"
        " changed knobs are set"
        " again. Let `save_steps` be a multiple of the updates per rollout: TRL drops an unfinished"
        " rollout when it"
        " resumes. `shadow` and `off` leave a run bit for bit as it is without the callback.",
    ),
    missing={
        "value_loss": "there is no critic",
        "prompt_length_mean": "TRL logs none",
        "prompt_length_max": "TRL logs none",
        "prompts_cut": "TRL does not cut prompts",
        "prompts_dropped": "TRL does not drop prompts",
        "rollout_success_rate": "TRL logs none",
        "gpu_memory_fraction": "TRL logs none",
        "gpu_utilization": "TRL logs none",
        "data_age": "sampling and updating alternate, so data is always fresh",
        "updates_skipped": "TRL skips none",
    },
)
