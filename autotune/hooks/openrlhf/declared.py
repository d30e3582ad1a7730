"""What the adapter of OpenRLHF declares; plain data, printed into docs/integrations.md."""

from __future__ import annotations

from autotune.hooks.declared import Declaration, KnobRow, MetricRow
from autotune.knobs import Liveness

NEXT = Liveness.NEXT_ROLLOUT

MISSING = {
    "kl_mismatch": "`vllm_kl` is a k1 estimate, and only there with a correction",
    "ratio_low": "OpenRLHF logs no shares of the policy ratio",
    "ratio_in": "OpenRLHF logs no shares of the policy ratio",
    "ratio_high": "OpenRLHF logs no shares of the policy ratio",
    "gpu_memory_fraction": "not logged",
    "gpu_utilization": "not logged",
    "prompts_cut": "not logged",
    "prompts_dropped": "not logged",
    "rollout_success_rate": "not logged",
    "data_age": "in the synchronous trainer data is always fresh",
    "updates_skipped": "not logged",
}

_METRICS = (
    MetricRow("reward_mean", "`rollout/reward_mean`", "over the rollout, before it is split"),
    MetricRow("reward_std", "`rollout/reward_std`"),
    MetricRow("zero_std_fraction", "rewards of the rollout by prompt", "OpenRLHF logs none"),
    MetricRow("clip_ratio", "`ppo_clip_ratio`", "both sides"),
    MetricRow("kl_ref", "`kl`", "of the estimator `algo.kl.estimator`; k1 may be negative"),
    MetricRow(
        "kl_step",
        "one `forward` of 64 responses after the updates",
        "`ppo_kl` is averaged over the updates, the first of which is 0",
    ),
    MetricRow("entropy", "`entropy_loss`", "with `--actor.entropy_coef` (0 logs it alone)"),
    MetricRow("grad_norm", "`actor_grad_norm`", "of the last update"),
    MetricRow("loss", "`policy_loss`"),
    MetricRow("value_loss", "`critic_loss`", "with a critic"),
    MetricRow("learning_rate", "the workers' optimizer", "before the rollout's updates"),
    MetricRow("response_length_mean", "`rollout/response_length_mean`"),
    MetricRow("response_length_p50", "lengths of the rollout"),
    MetricRow("response_length_p95", "lengths of the rollout"),
    MetricRow("response_length_p995", "lengths of the rollout"),
    MetricRow("response_length_max", "lengths of the rollout"),
    MetricRow("truncated_fraction", "`rollout/truncated_rate`"),
    MetricRow("prompt_length_mean", "lengths of the rollout", "whole sequence without the answer"),
    MetricRow("prompt_length_max", "lengths of the rollout"),
    MetricRow("tokens_per_second", "lengths of the rollout / `timing/step_total`", "all GPUs"),
    MetricRow("eval_score", "`eval_…_pass1`", "of the evaluation after the rollout before"),
    MetricRow("time/…", "`timing/…`"),
)

_KNOBS = (
    KnobRow(
        "train_batch_size",
        "`args.rollout.batch_size`",
        NEXT,
        "prompts; where one generation is one rollout",
        otherwise="--rollout.batch_size {value}",
    ),
    KnobRow(
        "rollout_n",
        "`args.rollout.n_samples_per_prompt`",
        Liveness.RESTART,
        "the schedule's length counts on it",
        "--rollout.n_samples_per_prompt {value}",
    ),
    KnobRow(
        "ppo_mini_batch_size",
        "every worker's DeepSpeed engine and strategy",
        NEXT,
        "`train.batch_size` in samples, whole prompts; with dynamic batches every worker's arguments",
        otherwise="--train.batch_size {samples}",
    ),
    KnobRow("ppo_epochs", "every worker's `trainer.max_epochs`", NEXT, "actor and critic"),
    KnobRow(
        "micro_batch_size",
        "`train.micro_batch_size`",
        Liveness.RESTART,
        "with dynamic batches it reads 1",
        "--train.micro_batch_size {value}",
    ),
    KnobRow(
        "rollout_micro_batch_size", "", Liveness.UNAVAILABLE, "the sampling engine schedules its batches"
    ),
    KnobRow("num_rollout_batches", "", Liveness.UNAVAILABLE, "the sampling engine schedules its batches"),
    KnobRow("kl_coef", "`kl_ctl.value`", NEXT, "started above 0 and without `--algo.kl.target`"),
    KnobRow("clip_range_low", "every worker's `actor_loss_fn.clip_eps_low`", NEXT),
    KnobRow("clip_range_high", "every worker's `actor_loss_fn.clip_eps_high`", NEXT),
    KnobRow(
        "entropy_coef", "every worker's `args.actor.entropy_coef`", NEXT, "started with a number, such as 0"
    ),
    KnobRow(
        "actor_learning_rate",
        "every worker's schedule and optimizer",
        NEXT,
        "",
        otherwise="--actor.adam.lr {value}",
    ),
    KnobRow(
        "critic_learning_rate",
        "every worker's schedule and optimizer",
        NEXT,
        "with a critic",
        otherwise="--critic.adam.lr {value}",
    ),
    KnobRow(
        "max_prompt_length", "", Liveness.UNAVAILABLE, "`data.max_len` limits prompt and answer together"
    ),
    KnobRow(
        "max_response_length",
        "`generate_kwargs`",
        NEXT,
        "where `--rollout.max_new_tokens` is set; up to max_len",
    ),
    KnobRow(
        "temperature",
        "`generate_kwargs`, policy and reference actors",
        NEXT,
        "all of them, or log-probs are scaled wrongly",
    ),
)

DECLARED = Declaration(
    trainer="openrlhf",
    title="OpenRLHF",
    package="openrlhf",
    versions=("0.11.2",),
    lines="""\
python -m autotune.hooks.openrlhf control.yaml --actor.model_name_or_path …
# in the place of: python -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path …""",
    metrics=_METRICS,
    knobs=_KNOBS,
    sensor=(
        "more than one update per rollout, so `--train.batch_size` below `--rollout.batch_size` x"
        " `--rollout.n_samples_per_prompt`, or `--train.max_epochs` above 1."
    ),
    words=(
        "For the synchronous PPO trainer; with `--train.async_enable` the launcher runs OpenRLHF as"
        " it is and says so."
        " autotune must be installed on every node. The journal is `ckpt.path/journal.jsonl`, and"
        " the controller's state"
        " travels in OpenRLHF's own checkpoints.",
        "How far it was run: against the installed wheel's own trainer, loss, replay buffer and"
        " worker groups on a CPU,"
        " with DeepSpeed, vLLM and flash-attention replaced by stand-ins in the test. A run on GPUs"
        " was not made.",
        "Weights cannot be brought back in a running OpenRLHF, so an emergency lowers the learning"
        " rate and says from which"
        " checkpoint to start again.",
    ),
    missing=MISSING,
)
