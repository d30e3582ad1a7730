"""Every metric that verl logs is mapped or known to be none; what it gets wrong is measured anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.hooks.verl.adapter import canonical, rollout_view
from autotune.logs import open_log, survey
from autotune.logs.tables import VERL, find, skipped

SHARED = Path(__file__).resolve().parents[4] / "shared" / "logs"

KEYS = (
    "actor/pg_clipfrac",
    "actor/pg_clipfrac_lower",
    "actor/ppo_kl",
    "actor/pg_loss",
    "actor/entropy_loss",
    "actor/entropy",
    "actor/kl_loss",
    "actor/kl_coef",
    "actor/reward_kl_penalty",
    "actor/reward_kl_penalty_coeff",
    "actor/grad_norm",
    "actor/lr",
    "actor/loss",
    "actor/perf/max_memory_allocated_gb",
    "actor/perf/max_memory_reserved_gb",
    "actor/perf/cpu_memory_used_gb",
    "perf/mfu/actor",
    "perf/mfu/critic",
    "critic/lr",
    "critic/loss",
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vpred_mean",
    "critic/grad_norm",
    "critic/perf/max_memory_allocated_gb",
    "critic/score/mean",
    "critic/score/max",
    "critic/score/min",
    "critic/rewards/mean",
    "critic/rewards/max",
    "critic/advantages/mean",
    "critic/returns/min",
    "critic/values/max",
    "critic/vf_explained_var",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "response_length_non_aborted/mean",
    "response_length_non_aborted/clip_ratio",
    "response/aborted_ratio",
    "prompt_length/mean",
    "prompt_length/max",
    "prompt_length/min",
    "prompt_length/clip_ratio",
    "perf/total_num_tokens",
    "perf/time_per_step",
    "perf/throughput",
    "timing_s/gen",
    "timing_s/step",
    "timing_s/update_weights",
    "timing_per_token_ms/gen",
    "training/rollout_probs_diff_mean",
    "training/rollout_actor_probs_pearson_corr",
    "training/global_step",
    "training/epoch",
    "training/num_turns/mean",
    "training/off_policy/trajectory_staleness/mean",
    "num_turns/mean",
    "global_seqlen/min",
    "global_seqlen/balanced_max",
    "rollout_corr/k3_kl",
    "rollout_corr/kl",
    "rollout_corr/rollout_is_mean",
    "rollout_corr/chi2_token",
    "variance_proxy/proxy1_signal_strength",
    "val-core/openai/gsm8k/acc/mean@1",
    "val-aux/openai/gsm8k/reward/mean@1",
    "val-aux/num_turns/mean",
)
"""Keys that verl 0.9.1 logs, from its source; all kinds, one of each where they repeat."""


@pytest.mark.parametrize("key", KEYS)
def test_every_key_is_mapped_or_known(key: str) -> None:
    assert find(VERL, key) is not None or skipped(VERL, key) is not None, f"{key} is unknown"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the recorded logs are not part of the project")
@pytest.mark.parametrize(
    "name", ["verl_ppo_gsm8k_getting_started_61.log", "verl_grpo_logic_9_lr_prints_as_zero.log"]
)
def test_every_key_of_a_real_log_maps(name: str) -> None:
    found = survey(open_log(SHARED / name))
    assert found.trainer == "verl" and found.unknown == []


def test_the_keys_become_ours_by_unit_and_rank() -> None:
    got = canonical(
        {
            "actor/entropy_loss": 0.5,
            "actor/entropy": 0.7,
            "actor/pg_clipfrac": 0.02,
            "actor/pg_clipfrac_lower": 0.5,
            "actor/ppo_kl": -0.1,
            "actor/kl_loss": 0.05,
            "actor/reward_kl_penalty": 0.01,
            "response/aborted_ratio": 0.25,
            "perf/total_num_tokens": 3000,
            "perf/time_per_step": 2.0,
            "perf/throughput": 750.0,
            "timing_s/gen": 1.5,
            "val-core/x/acc/mean@1": 0.4,
            "actor/lr": "text",
        }
    )
    assert got == {
        "entropy": 0.7,
        "clip_ratio": 0.02,
        "kl_ref": 0.05,
        "rollout_success_rate": 0.75,
        "tokens_per_second": 1500.0,
        "time/rollout": 1.5,
        "eval_score": 0.4,
    }


def tag(response: int, prompt: int = 10, padding: bool = False) -> dict[str, int | bool]:
    return {"prompt_len": prompt, "response_len": response, "is_padding": padding}


def test_truncation_is_measured_against_the_cap_and_not_the_longest_answer() -> None:
    """verl pads to the longest answer of the batch, so its share is never below one sample's."""
    keys = ["a_0_0", "a_1_0", "b_0_0", "b_1_0"]
    tags = [tag(100), tag(60), tag(99), tag(5)]
    view = rollout_view(keys, tags, [1.0, 0.0, 1.0, 1.0], cap=512, total_cap=None)
    assert view["truncated_fraction"] == 0.0 and view["response_length_max"] == 100
    assert view["zero_std_fraction"] == 0.5 and view["reward_mean"] == 0.75
    assert rollout_view(keys, tags, [0.0] * 4, cap=99, total_cap=None)["truncated_fraction"] == 0.5


def test_the_effective_cap_is_the_smallest_of_all() -> None:
    """With prompt and answer limited together a long prompt leaves less room."""
    tags = [tag(50, prompt=78), tag(50, prompt=10)]
    assert (
        rollout_view(["a_0_0", "a_1_0"], tags, [0.0, 1.0], cap=512, total_cap=128)["truncated_fraction"]
        == 0.5
    )


def test_dummy_samples_that_fill_a_batch_are_not_counted() -> None:
    tags = [tag(10), tag(10), tag(512, padding=True)]
    view = rollout_view(["a_0_0", "a_1_0", "pad"], tags, [1.0, 1.0, 0.0], cap=512, total_cap=None)
    assert view["reward_mean"] == 1.0 and view["truncated_fraction"] == 0.0
    assert rollout_view(["pad"], [tag(1, padding=True)], [0.0], 8, None) == {}


def test_quantiles_of_the_lengths_are_values_that_occurred() -> None:
    keys = [f"u{k}_0_0" for k in range(200)]
    view = rollout_view(keys, [tag(k + 1) for k in range(200)], [0.0] * 200, 512, None)
    assert [view[f"response_length_p{q}"] for q in ("50", "95", "995")] == [100, 190, 199]
    assert "zero_std_fraction" not in view, "a group of one has no spread to speak of"
