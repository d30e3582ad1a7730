"""Per trainer: their key -> our metric, the unit conversion, and which estimator it is.

    "actor/lr(1e-4)": Column("learning_rate", scale=1e-4, coarse=True)

A row of `SKIP` is a key that we know and do not use, with the reason where somebody might expect it to
be a sensor. A key in neither is unknown: it is listed for the user, who may map it (`--map ours=theirs`).

Adding a trainer: one `Table`. The table with the most keys of a log is the one it is read with.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.metrics import METRICS


@dataclass(frozen=True, slots=True)
class Column:
    """Where one of their keys goes."""

    ours: str
    """A canonical metric, `knob:<name>` for a knob that the log repeats, or `step`."""
    scale: float = 1.0
    """Their unit times this is ours."""
    estimator: str = ""
    """What the number is, where the same word means several things."""
    coarse: bool = False
    """Printed with so few decimals that 0 means "too small to print", not zero."""
    rank: int = 0
    """When several keys give one metric the highest rank wins."""


@dataclass(frozen=True, slots=True)
class Table:
    """One trainer."""

    trainer: str
    columns: Mapping[str, Column]
    patterns: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Open families: regex with one group -> our family name with `{}`."""
    skip: tuple[tuple[re.Pattern[str], str], ...] = ()
    """Known keys that are not used, and why (empty: nobody would expect it)."""
    prefix: str = ""
    """Stripped from their keys: TensorBoard tags of HF trainers start with `train/`."""
    averages: bool = False
    """Whether a row every k steps is the mean over these k steps."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """Our metric -> why this trainer's logs never hold it."""
    marks: frozenset[str] = frozenset()
    """Keys that only this trainer writes: one of them settles whose log it is."""
    joins: bool = False
    """Whether one step is written as several rows, each with a part of the keys."""
    update_keys: str = ""
    """Prefix of keys whose step counts optimizer updates, where all others count rollouts."""


def _skips(*rows: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), why) for pattern, why in rows)


def _patterns(*rows: tuple[str, str]) -> tuple[tuple[re.Pattern[str], str], ...]:
    return tuple((re.compile(pattern), name) for pattern, name in rows)


_C = Column
_NO_DRIFT = "this trainer does not measure the drift of one rollout's updates"
_K1 = "a k1 estimate, averaged over the updates and rounded: no sensor for kl_step"

TRL = Table(
    trainer="trl",
    prefix="train/",
    averages=True,
    columns={
        "step": _C("step"),
        "Step": _C("step"),
        "global_step": _C("step", rank=-1),
        "global_step/max_steps": _C("step", rank=-1),
        "iteration": _C("step"),
        "reward": _C("reward_mean"),
        "reward_std": _C("reward_std"),
        "kl": _C("kl_ref", estimator="k3"),
        "entropy": _C("entropy"),
        "entropy/mean": _C("entropy"),
        "grad_norm": _C("grad_norm", estimator="last update of the row"),
        "grad norm": _C("grad_norm", estimator="last update of the row"),
        "loss": _C("loss", estimator="cosmetic for GRPO: near 0 by construction"),
        "Training Loss": _C("loss", estimator="cosmetic for GRPO: near 0 by construction"),
        "learning_rate": _C("learning_rate", estimator="scheduled"),
        "learning rate": _C("learning_rate", estimator="scheduled"),
        "completions/mean_length": _C("response_length_mean", rank=1),
        "completion_length": _C("response_length_mean"),
        "completions/max_length": _C("response_length_max"),
        "completions/clipped_ratio": _C("truncated_fraction"),
        "frac_reward_zero_std": _C("zero_std_fraction"),
        "clip_ratio/region_mean": _C("clip_ratio", estimator="sign-aware token mean", rank=1),
        "clip_ratio": _C("clip_ratio", estimator="token mean"),
        "step_time": _C("time/step"),
        "eval_reward": _C("eval_score"),
        "eval/reward": _C("eval_score"),
    },
    patterns=_patterns((r"rewards/([^/]+)/mean", "reward/{}"), (r"rewards/([^/]+)", "reward/{}")),
    skip=_skips(
        (r"rewards/.+/std", ""),
        (r"clip_ratio/(low|high)_.*", "one side only; clip_ratio/region_mean is both"),
        (r"completions/(min|max|mean)_(length|terminated_length)", ""),
        (
            r"sampling/sampling_logp_difference/.*",
            "absolute differences, not a k3: no sensor for kl_mismatch",
        ),
        (r"sampling/importance_sampling_ratio/.*", "a mean of ratios, not a k3: no sensor for kl_mismatch"),
        (r"epoch|num_tokens|episode|eps|profiling/.*|total_flos|eval[_/].*|global_step", ""),
        (r"train_(runtime|samples_per_second|steps_per_second|loss|tokens.*)", ""),
        (r"cispo_clip_ratio|vespo/.*", "another loss: its thresholds are not those of a clipped ratio"),
        (r"memory\(GiB\)|train_speed.*|elapsed.*|remaining.*|consumed samples|percentage", ""),
        (r"global batch size|loss scale|number of .*|load_balancing_loss|tools/.*|aux_loss", ""),
        (r"policy_loss|entropy_coef|log_history", ""),
    ),
    missing={"kl_step": _NO_DRIFT},
)

TRL_PPO = Table(
    trainer="trl-ppo",
    prefix="train/",
    averages=True,
    columns={
        "step": _C("step"),
        "episode": _C("step", rank=-1),
        "objective/scores": _C("reward_mean", estimator="raw score"),
        "objective/kl": _C("kl_sum", estimator="k1, summed over the answer"),
        "objective/entropy": _C("entropy_sum", estimator="summed over the answer"),
        "policy/entropy_avg": _C("entropy"),
        "policy/clipfrac_avg": _C("clip_ratio", estimator="token mean"),
        "loss/policy_avg": _C("loss"),
        "loss/value_avg": _C("value_loss"),
        "lr": _C("learning_rate", estimator="scheduled"),
        "eval/objective/scores": _C("eval_score"),
    },
    skip=_skips(
        (r"objective/(rlhf_reward|non_score_reward)", "the score minus the KL penalty"),
        (r"policy/approxkl_avg", "a k2 estimate averaged over the updates: no sensor for kl_step"),
        (r"val/.*|eps|epoch|num_eos_tokens|train_.*", ""),
    ),
    missing={"kl_step": "policy/approxkl_avg is a k2 estimate averaged over the updates: not the drift"},
)

VERL = Table(
    trainer="verl",
    columns={
        "step": _C("step"),
        "training/global_step": _C("step", rank=-1),
        "critic/score/mean": _C("reward_mean", estimator="raw score"),
        "critic/score/max": _C("reward_top"),
        "critic/score/min": _C("reward_bottom"),
        "actor/kl_loss": _C("kl_ref", estimator="k3 (low_var_kl)", rank=2),
        "actor/reward_kl_penalty": _C("kl_ref", estimator="k1", rank=1),
        "critic/kl": _C("kl_ref", estimator="k1"),
        "rollout_corr/k3_kl": _C("kl_mismatch", estimator="k3"),
        "actor/entropy": _C("entropy", rank=1),
        "actor/entropy_loss": _C("entropy"),
        "actor/pg_clipfrac": _C("clip_ratio", estimator="sign-aware token mean"),
        "actor/grad_norm": _C("grad_norm"),
        "actor/pg_loss": _C("loss"),
        "actor/lr": _C("learning_rate", coarse=True),
        "actor/lr(1e-4)": _C("learning_rate", scale=1e-4, coarse=True),
        "critic/vf_loss": _C("value_loss"),
        "response_length/mean": _C("response_length_mean"),
        "response_length/max": _C("response_length_max"),
        "response_length/clip_ratio": _C("truncated_fraction", estimator="as long as the padded width"),
        "prompt_length/mean": _C("prompt_length_mean"),
        "prompt_length/max": _C("prompt_length_max"),
        "perf/throughput": _C("tokens_per_second", estimator="per GPU"),
        "timing_s/gen": _C("time/rollout"),
        "timing/gen": _C("time/rollout"),
        "timing_s/update_actor": _C("time/update"),
        "timing/update_actor": _C("time/update"),
        "timing_s/step": _C("time/total"),
        "actor/kl_coef": _C("knob:kl_coef", rank=1),
        "critic/kl_coeff": _C("knob:kl_coef"),
        "actor/reward_kl_penalty_coeff": _C("knob:kl_coef"),
        "critic/lr": _C("knob:critic_learning_rate", coarse=True),
        "critic/lr(1e-4)": _C("knob:critic_learning_rate", scale=1e-4, coarse=True),
    },
    patterns=_patterns(
        (r"val-core/.+/(?:acc|reward)/mean@\d+", "eval_score"), (r"val/test_score/.+", "eval_score")
    ),
    skip=_skips(
        (r"actor/ppo_kl", _K1),
        (r"actor/pg_clipfrac_lower", "dual clip, not the low side"),
        (r"critic/rewards/mean", "the score minus the KL penalty"),
        (r"critic/(score|rewards|advantages|returns|values)/.*", ""),
        (r"critic/(loss|grad_norm|vf_.*|vpred_mean|kl.*|perf/.*)|actor/(loss|kl_coef|perf/.*)", ""),
        (r"(response|prompt)_length(_non_aborted)?/.*|response/aborted_ratio|global_seqlen/.*", ""),
        (r"(variance_proxy|moe|rollout)/.*", ""),
        (r"(perf|mfu|timing|timing_s|timing_per_token|timing_per_token_ms)/.*", ""),
        (r"(training|rollout_corr|num_turns|turns|state_tokens|val-aux|val-core|val|reward)/.*", ""),
    ),
    missing={"kl_step": f"actor/ppo_kl is {_K1}"},
)

OPENRLHF = Table(
    trainer="openrlhf",
    prefix="train/",
    columns={
        "step": _C("step", rank=-1),
        "global_step": _C("step"),
        "rollout/reward_mean": _C("reward_mean"),
        "reward": _C("reward_mean", rank=-1),
        "rollout/reward_std": _C("reward_std"),
        "kl": _C("kl_ref"),
        "ppo_clip_ratio": _C("clip_ratio"),
        "entropy_loss": _C("entropy"),
        "actor_grad_norm": _C("grad_norm"),
        "policy_loss": _C("loss"),
        "critic_loss": _C("value_loss"),
        "actor_lr": _C("learning_rate"),
        "critic_lr": _C("knob:critic_learning_rate"),
        "rollout/response_length_mean": _C("response_length_mean"),
        "response_length": _C("response_length_mean", rank=-1),
        "rollout/truncated_rate": _C("truncated_fraction"),
        "timing/generation": _C("time/rollout"),
        "timing/ppo_train": _C("time/update"),
        "timing/step_total": _C("time/total"),
    },
    skip=_skips(
        (r"ppo_kl|vllm_kl", _K1),
        (r"timing/.*|return|total_length|group_reward_std|kl_coef|status.*|rollout/num_samples", ""),
        (r"logprobs_diff|is_filter_ratio|values|score|truncated|response_clip_ratio|generated_samples", ""),
        (r"critic_grad_norm|dynamic_filtering_pass_rate|num_actions|eval_.*|aux_loss", ""),
    ),
    missing={"kl_step": f"ppo_kl is {_K1}"},
)

SKYRL = Table(
    trainer="skyrl",
    columns={
        "trainer/global_step": _C("step"),
        "step": _C("step", rank=-1),
        "reward/avg_raw_reward": _C("reward_mean"),
        "policy/loss_metrics/clip_ratio": _C("clip_ratio"),
        "policy/policy_kl": _C("kl_ref"),
        "loss/avg_kl": _C("kl_ref", rank=-1),
        "policy/policy_entropy": _C("entropy"),
        "policy/grad_norm": _C("grad_norm"),
        "policy/policy_loss": _C("loss"),
        "policy/policy_lr": _C("learning_rate"),
        "generate/avg_num_tokens": _C("response_length_mean"),
        "trainer/tokens_per_second_per_gpu": _C("tokens_per_second", estimator="per GPU"),
    },
    skip=_skips((r"(timing|trainer|generate|reward|loss|policy|critic|async|environment)/.*", "")),
    missing={"kl_step": _NO_DRIFT},
)

SLIME = Table(
    trainer="slime",
    columns={
        "rollout/step": _C("step"),
        "step": _C("step", rank=-1),
        "rollout/raw_reward": _C("reward_mean"),
        "train/pg_clipfrac": _C("clip_ratio"),
        "train/kl_loss": _C("kl_ref"),
        "train/entropy_loss": _C("entropy"),
        "train/grad_norm": _C("grad_norm"),
        "train/loss": _C("loss"),
        "train/lr-pg_0": _C("learning_rate"),
        "rollout/response_len/mean": _C("response_length_mean"),
        "rollout/response_len/max": _C("response_length_max"),
        "rollout/truncated_ratio": _C("truncated_fraction"),
    },
    skip=_skips((r"train/ppo_kl", _K1), (r"(train|rollout|perf|eval)/.*", "")),
    missing={"kl_step": f"train/ppo_kl is {_K1}"},
    update_keys="train/",
)

NEMO = Table(
    trainer="nemo-rl",
    prefix="train/",
    columns={
        "step": _C("step"),
        "reward": _C("reward_mean", rank=-1),
        "kl_penalty": _C("kl_ref"),
        "approx_entropy": _C("entropy", estimator="of the sampled tokens"),
        "grad_norm": _C("grad_norm"),
        "loss": _C("loss"),
        "lr": _C("learning_rate"),
        "mean_gen_tokens_per_sample": _C("response_length_mean"),
        "truncation_rate": _C("truncated_fraction"),
        "baseline_reward/pct_mixed": _C("mixed_fraction"),
    },
    skip=_skips(
        (r"probs_ratio.*", "no share of clipped tokens"), (r"(timing|performance|validation)/.*", "")
    ),
    missing={"kl_step": _NO_DRIFT, "clip_ratio": "this trainer logs ratio means, not a clipped share"},
)

OPEN_INSTRUCT = Table(
    trainer="open-instruct",
    columns={
        "training_step": _C("step"),
        "scores": _C("reward_mean"),
        "policy/clipfrac_avg": _C("clip_ratio"),
        "objective/kl2_avg": _C("kl_ref", estimator="k3"),
        "objective/kl_avg": _C("kl_ref", rank=-1),
        "policy/entropy_avg": _C("entropy"),
        "optim/grad_norm": _C("grad_norm"),
        "loss/policy_avg": _C("loss"),
        "lr": _C("learning_rate"),
        "val/sequence_lengths": _C("response_length_mean"),
        "val/stop_rate": _C("stopped_fraction"),
        "learner_tokens_per_second_step": _C("tokens_per_second"),
    },
    skip=_skips((r"(val|time|objective|policy|loss|actor|learner|debug|batch)[/_].*|epoch|episode", "")),
    missing={"kl_step": _NO_DRIFT},
)

PRIME = Table(
    trainer="prime-rl",
    columns={
        "step": _C("step"),
        "reward/mean": _C("reward_mean"),
        "train/agg/all/reward/mean": _C("reward_mean"),
        "ref_kl/mean": _C("kl_ref"),
        "mismatch_kl/all/mean": _C("kl_mismatch", estimator="k3"),
        "entropy/all/mean": _C("entropy"),
        "optim/grad_norm": _C("grad_norm"),
        "optim/lr": _C("learning_rate"),
        "loss/mean": _C("loss"),
        "perf/throughput": _C("tokens_per_second"),
        "is_truncated/mean": _C("truncated_fraction"),
    },
    patterns=_patterns(
        (r"train/agg/(?:all|effective)/[^/]+/reward/mean", "reward_mean"),
        (r"train/agg/(?:all|effective)/[^/]+/num_output_tokens/mean", "response_length_mean"),
        (r"train/agg/(?:all|effective)/[^/]+/is_truncated/mean", "truncated_fraction"),
    ),
    skip=_skips(
        (r"is_masked.*", "tokens masked by the loss, which is not a clipped ratio"),
        (r"(time|perf|progress|off_policy|loss|entropy|train|optim|masked_.*|unmasked_.*)(/.*)?", ""),
    ),
    missing={"kl_step": _NO_DRIFT, "clip_ratio": "this loss masks tokens; it has no clipped ratio"},
    joins=True,
)

EASYR1 = Table(
    trainer="easyr1",
    columns={
        **{
            k: c
            for k, c in VERL.columns.items()
            if k not in ("actor/entropy", "actor/entropy_loss", "actor/pg_clipfrac")
        },
        "actor/pg_clipfrac_higher": _C("clip_ratio", estimator="both sides, in spite of its name"),
        "reward/overall": _C("reward_mean", rank=-1),
    },
    patterns=VERL.patterns,
    skip=_skips((r"actor/entropy_loss", "mean of -log p of the samples, not the entropy")) + VERL.skip,
    missing=VERL.missing,
    marks=frozenset({"actor/pg_clipfrac_higher"}),
)

AREAL = Table(
    trainer="areal",
    columns={
        "step": _C("step"),
        "ppo_actor/task_reward/avg": _C("reward_mean", rank=1),
        "ppo_actor/task_reward": _C("reward_mean"),
        "ppo_actor/kl_rewards/avg": _C("kl_ref"),
        "ppo_actor/update/clip_ratio": _C("clip_ratio"),
        "ppo_actor/update/clip_ratio/avg": _C("clip_ratio", rank=1),
        "ppo_actor/update/entropy/avg": _C("entropy"),
        "ppo_actor/update/grad_norm": _C("grad_norm"),
        "ppo_actor/update/lr": _C("learning_rate"),
        "ppo_actor/seq_len/avg": _C("response_length_mean", estimator="with the prompt"),
        "ppo_actor/no_eos_ratios/avg": _C("truncated_fraction"),
    },
    skip=_skips((r"ppo_actor/.*|timeperf/.*|rollout/.*", "")),
    missing={"kl_step": _NO_DRIFT},
)

OURS = Table(
    trainer="autotune",
    columns={name: _C(name) for name in METRICS} | {"rollout": _C("step"), "step": _C("step", rank=-1)},
    patterns=_patterns((r"reward/(.+)", "reward/{}"), (r"time/(.+)", "time/{}")),
    skip=_skips((r"knob/.*|state/.*|control/.*|system/.*|action/.*|epoch|decision.*", "")),
)

TABLES: dict[str, Table] = {
    t.trainer: t
    for t in (TRL, TRL_PPO, VERL, OPENRLHF, SKYRL, SLIME, NEMO, OPEN_INSTRUCT, PRIME, EASYR1, AREAL, OURS)
}


def normal_key(key: str) -> str:
    """Notebook tables write `rewards / x` for `rewards/x`; MLflow writes `_at_` for `@`."""
    return key.strip().replace(" / ", "/").replace("_at_", "@")


def percent_key(key: str) -> tuple[str, float]:
    """`clip_ratio_pct`, `clip_ratio (%)` -> (`clip_ratio`, 0.01): the name itself says percent."""
    bare = re.sub(r"[ _]*(\(%\)|%|_pct|_percent|\(percent\))$", "", key)
    return (bare, 0.01) if bare != key else (key, 1.0)


def best_table(keys: set[str]) -> Table | None:
    """The trainer that most of these keys belong to; None when no table knows a reward or two keys."""
    marked = next((t for t in TABLES.values() if t.marks & keys), None)
    if marked is not None:
        return marked
    scored = [(sum(find(t, k) is not None for k in keys), t) for t in TABLES.values()]
    score, table = max(scored, key=lambda pair: pair[0])
    return table if score >= 2 else None


def find(table: Table, key: str) -> Column | None:
    """The column of one of their keys, or None."""
    name = normal_key(key)
    for candidate in (name, name.removeprefix(table.prefix)):
        bare, scale = percent_key(candidate)
        for spelling, factor in ((candidate, 1.0), (bare, scale)):
            if spelling in table.columns:
                column = table.columns[spelling]
                return column if factor == 1.0 else _scaled(column, factor)
    return _family(table, name.removeprefix(table.prefix))


def _family(table: Table, key: str) -> Column | None:
    for pattern, ours in table.patterns:
        found = pattern.fullmatch(key)
        if found:
            return Column(ours.format(*found.groups()))
    return None


def _scaled(column: Column, factor: float) -> Column:
    return Column(column.ours, column.scale * factor, "percent", column.coarse, column.rank)


def skipped(table: Table, key: str) -> str | None:
    """Why a known key is not used ("" where nobody would ask), or None when it is not known."""
    name = normal_key(key)
    for pattern, why in table.skip:
        if pattern.fullmatch(name) or pattern.fullmatch(name.removeprefix(table.prefix)):
            return why
    return None
