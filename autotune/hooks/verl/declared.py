"""What the adapter of verl declares; plain data, printed into docs/integrations.md."""

from __future__ import annotations

from autotune.hooks.declared import Declaration, KnobRow, MetricRow
from autotune.knobs import Liveness

NEXT = Liveness.NEXT_ROLLOUT

MISSING = {
    "ratio_low": "verl logs no shares of the policy ratio",
    "ratio_in": "verl logs no shares of the policy ratio",
    "ratio_high": "verl logs no shares of the policy ratio",
    "gpu_memory_fraction": "verl logs GiB of the update phase, not the sampler's share",
    "gpu_utilization": "verl logs none",
    "prompts_cut": "verl drops long prompts when it reads the data",
    "prompts_dropped": "verl drops long prompts when it reads the data, before the first step",
    "data_age": "in the synchronous mode data is always fresh",
    "updates_skipped": "verl prints a line for a step that it skips and logs no count",
}

_METRICS = (
    MetricRow("reward_mean", "`rm_scores` of the batch", "raw score, before a KL penalty"),
    MetricRow("reward_std", "`rm_scores` of the batch", "verl logs none"),
    MetricRow("zero_std_fraction", "`rm_scores` by prompt", "verl logs none"),
    MetricRow("clip_ratio", "`actor/pg_clipfrac`", "both sides; `pg_clipfrac_lower` is the dual clip"),
    MetricRow(
        "kl_ref",
        "`actor/kl_loss` or `actor/reward_kl_penalty`",
        "k3 by default in the loss, k1 in the reward",
    ),
    MetricRow("kl_mismatch", "`rollout_corr/k3_kl`", "with `rollout_correction`"),
    MetricRow(
        "kl_step",
        "one `compute_log_prob` of 64 responses after the updates",
        "`actor/ppo_kl` is averaged over the updates, the first of which is 0",
    ),
    MetricRow("entropy", "`actor/entropy`", "of the sampling weights, before the update"),
    MetricRow("grad_norm", "`actor/grad_norm`", "mean over the updates, before clipping"),
    MetricRow("loss", "`actor/pg_loss`"),
    MetricRow("value_loss", "`critic/vf_loss`", "with a critic"),
    MetricRow("learning_rate", "the workers' optimizer", "`actor/lr` is already the coming step's"),
    MetricRow("response_length_mean", "tags of the batch"),
    MetricRow("response_length_p50", "tags of the batch"),
    MetricRow("response_length_p95", "tags of the batch"),
    MetricRow("response_length_p995", "tags of the batch"),
    MetricRow("response_length_max", "tags of the batch"),
    MetricRow("truncated_fraction", "tags of the batch", "`response_length/clip_ratio` of V1 is never 0"),
    MetricRow("prompt_length_mean", "`prompt_length/mean`"),
    MetricRow("prompt_length_max", "`prompt_length/max`"),
    MetricRow("rollout_success_rate", "1 - `response/aborted_ratio`"),
    MetricRow("tokens_per_second", "`perf/total_num_tokens` / `perf/time_per_step`", "all GPUs"),
    MetricRow("eval_score", "`val-core/…/mean@N`", "where it was evaluated"),
    MetricRow("time/…", "`timing_s/…`"),
)

_RESTART = "captured at the start"

_KNOBS = (
    KnobRow(
        "train_batch_size",
        "`data.train_batch_size`",
        NEXT,
        "with `data.gen_batch_size=1`; else a restart",
        otherwise="data.train_batch_size={value}",
    ),
    KnobRow(
        "rollout_n",
        "`actor_rollout_ref.rollout.n`",
        Liveness.RESTART,
        _RESTART,
        "actor_rollout_ref.rollout.n={value}",
    ),
    KnobRow(
        "ppo_mini_batch_size", "`actor.ppo_mini_batch_size`", NEXT, "prompts; the critic's along with it"
    ),
    KnobRow("ppo_epochs", "`actor.ppo_epochs`", NEXT, "the critic's along with it"),
    KnobRow(
        "micro_batch_size",
        "`actor.ppo_micro_batch_size_per_gpu`",
        Liveness.RESTART,
        "with a token budget (`use_dynamic_bsz`) it reads 1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={value}",
    ),
    KnobRow(
        "rollout_micro_batch_size", "", Liveness.UNAVAILABLE, "the sampling engine schedules its batches"
    ),
    KnobRow("num_rollout_batches", "", Liveness.UNAVAILABLE, "the sampling engine schedules its batches"),
    KnobRow("kl_coef", "`set_loss_fn`, or `kl_ctrl_in_reward.value`", NEXT, "where KL is configured once"),
    KnobRow("clip_range_low", "`set_loss_fn`", NEXT, "`clip_ratio_low`; `clip_ratio` alone is read nowhere"),
    KnobRow("clip_range_high", "`set_loss_fn`", NEXT, "`clip_ratio_high`"),
    KnobRow("entropy_coef", "`set_loss_fn` and `actor.entropy_coeff`", NEXT),
    KnobRow(
        "actor_learning_rate",
        "every worker's schedule and optimizer",
        NEXT,
        "FSDP; a schedule that cannot be rescaled needs a restart",
        otherwise="actor_rollout_ref.actor.optim.lr={value}",
    ),
    KnobRow(
        "critic_learning_rate",
        "every worker's schedule and optimizer",
        NEXT,
        "with a critic",
        otherwise="critic.optim.lr={value}",
    ),
    KnobRow(
        "max_prompt_length",
        "`data.max_prompt_length`",
        Liveness.RESTART,
        _RESTART,
        "data.max_prompt_length={value}",
    ),
    KnobRow(
        "max_response_length",
        "`data.max_response_length`",
        Liveness.RESTART,
        _RESTART,
        "data.max_response_length={value}",
    ),
    KnobRow(
        "temperature",
        "samplers' and driver's `rollout.temperature`",
        NEXT,
        "both, or log-probs are scaled wrongly",
    ),
)

DECLARED = Declaration(
    trainer="verl",
    title="verl",
    package="verl",
    versions=("0.9.1",),
    lines="""\
pip install autotune-rl                                    # where verl is installed, on every node
python -m verl.trainer.main_ppo … +autotune.control=/path/to/control.yaml""",
    metrics=_METRICS,
    knobs=_KNOBS,
    sensor=(
        "more than one update per rollout, so `actor.ppo_mini_batch_size` below `data.train_batch_size`,"
        " or `actor.ppo_epochs` above 1."
    ),
    words=(
        "For the V1 trainer in its synchronous mode (`trainer.use_v1=true`,"
        " `trainer.v1.trainer_mode=sync`, both are the"
        " defaults). verl finds autotune through the entry point `verl.plugins`; without a key"
        " `autotune` in the"
        " configuration nothing is changed. `+autotune.control` may also hold the section itself,"
        " such as `+autotune.control.mode=shadow`, and `+autotune.accept_version=X` acts on an"
        " untested version X.",
        "The journal is `trainer.default_local_dir/journal.jsonl`, and each checkpoint gets the"
        " controller's state beside"
        " verl's own files, `global_step_N/autotune.json`; a resumed run goes on from it.",
        "How far it was run: against the installed wheel's own configuration, trainer, registry,"
        " transfer queue,"
        " worker groups with two CPU workers, loss and metric functions; a model of eight logits"
        " stood in for FSDP"
        " and vLLM. And by `experiments/verl_smollm2` through verl's own entry point with FSDP2 and a"
        " vLLM server on a CPU: ten rollouts of a tiny model, every live knob set and read back; the sampler"
        " received the weights and did not load them there. And on one H200 with FSDP and vLLM: 25"
        " rollouts of SmolLM2-135M, seven knobs set and read back from the workers, every decision"
        " recomputed from the journal (`experiments/verl_smollm2/results`).",
        "Weights cannot be brought back in a running verl, so an emergency lowers the learning rate"
        " and says from which"
        " checkpoint to start again.",
    ),
    missing=MISSING,
)
