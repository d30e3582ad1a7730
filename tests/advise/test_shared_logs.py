"""Advice on real public logs, where they are at hand: their index says what happened in each.

The logs are not part of this project; without them (`../shared/logs`, or `AUTOTUNE_LOGS`) these tests skip,
and the twins of `test_twins.py` hold the same promises.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from statistics import median

import pytest

from autotune.advise import Kind, advise, verdict

LOGS = Path(os.environ.get("AUTOTUNE_LOGS", Path(__file__).resolve().parents[3] / "shared" / "logs"))

pytestmark = pytest.mark.skipif(not LOGS.is_dir(), reason=f"no real logs at {LOGS}")

EXPECTED: dict[str, Kind] = {
    "issue_swift_megatron_line.log": Kind.CANNOT_TELL,
    "issue_trl_num_iterations_rows_without_reward.log": Kind.CANNOT_TELL,
    "issue_trl_ppo_objective_kl_is_a_sum_4rows.log": Kind.CANNOT_TELL,
    "issue_trl_zero_std_and_cosmetic_zero_loss.log": Kind.CANNOT_TELL,
    "issue_unsloth_notebook_table_11rows.md": Kind.CANNOT_TELL,
    "issue_verl_nan_rows.log": Kind.COLLAPSING,
    "trl_gsm8k_collapse_entropy_to_zero_200.log": Kind.COLLAPSING,
    "trl_gsm8k_collapse_entropy_up_200.log": Kind.COLLAPSING,
    "trl_gsm8k_collapse_short_len_200.log": Kind.COLLAPSING,
    "trl_gsm8k_healthy_200.log": Kind.HEALTHY,
    "trl_gsm8k_healthy_recover_200.log": Kind.HEALTHY,
    "trl_gsm8k_length_saturates_512_200.log": Kind.HEALTHY,
    "trl_gsm8k_sawtooth_200.log": Kind.AGGRESSIVE,
    "trl_quoted_values_kl_in_band_200.log": Kind.HEALTHY,
    "trl_steplogs_all_truncated_512.json": Kind.HEALTHY,
    "trl_tiny_cap64_steps1-7_12.json": Kind.CANNOT_TELL,
    "trl_unsloth_gsm8k_cap200_250.json": Kind.HEALTHY,
    "trl_wordle_too_timid_250of400.json": Kind.TIMID,
    "verl_config_only_no_metrics.log": Kind.CANNOT_TELL,
    "verl_grpo_logic_9_lr_prints_as_zero.log": Kind.CANNOT_TELL,
    "verl_ppo_gsm8k_getting_started_61.log": Kind.HEALTHY,
    "verl_ppo_gsm8k_qwen05b_resp256_first220.log": Kind.HEALTHY,
    "verl_ppo_gsm8k_qwen05b_resp512_435_every2nd.log": Kind.HEALTHY,
}
CALM = (
    "trl_gsm8k_healthy_200.log",
    "trl_gsm8k_length_saturates_512_200.log",
    "trl_quoted_values_kl_in_band_200.log",
    "trl_steplogs_all_truncated_512.json",
    "trl_tiny_cap64_steps1-7_12.json",
    "trl_unsloth_gsm8k_cap200_250.json",
    "verl_ppo_gsm8k_getting_started_61.log",
    "verl_ppo_gsm8k_qwen05b_resp256_first220.log",
    "verl_ppo_gsm8k_qwen05b_resp512_435_every2nd.log",
)
"""Logs that count as healthy: nothing in them was caused by a knob that a tuner should have moved."""
COLLAPSING = (
    "trl_gsm8k_collapse_entropy_to_zero_200.log",
    "trl_gsm8k_collapse_entropy_up_200.log",
    "trl_gsm8k_collapse_short_len_200.log",
    "trl_gsm8k_healthy_recover_200.log",
    "trl_gsm8k_sawtooth_200.log",
)


def test_every_log_is_expected_something_of() -> None:
    assert {p.name for p in LOGS.iterdir()} - {"INDEX.md"} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_verdict_agrees_with_the_index_in_two_seconds(name: str) -> None:
    start = time.process_time()
    shadow = advise(LOGS / name)
    assert verdict(shadow).kind is EXPECTED[name]
    assert shadow.survey.unknown == []
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("name", CALM)
def test_healthy_logs_are_left_alone(name: str) -> None:
    shadow = advise(LOGS / name)
    steps = len(shadow.steps) * shadow.survey.steps_per_row
    assert len(shadow.of("action")) <= steps / 500 and shadow.of("emergency") == []


@pytest.mark.parametrize("name", COLLAPSING)
def test_a_fall_below_half_is_an_alarm_at_once_and_an_emergency_next(name: str) -> None:
    shadow = advise(LOGS / name)
    rewards = list(shadow.columns["reward_mean"])
    fall = next(i for i in range(2, len(rewards)) if rewards[i] < 0.5 * median(rewards[:i]))
    signs = [s.index for s in shadow.said if s.kind in ("alarm", "emergency")]
    assert signs[0] <= fall and shadow.of("emergency")[0].index <= fall + 1


def test_the_sum_over_the_answer_is_read_per_token() -> None:
    shadow = advise(LOGS / "issue_trl_ppo_objective_kl_is_a_sum_4rows.log")
    assert all(0.03 < value < 0.15 for value in shadow.columns["kl_ref"])


def test_rows_without_reward_belong_to_the_rollout_before_them() -> None:
    shadow = advise(LOGS / "issue_trl_num_iterations_rows_without_reward.log")
    assert len(shadow.steps) == 2 and shadow.reader.orphans == 1
    assert 0.0 < shadow.columns["clip_ratio"][0] < 0.01


def test_a_learning_rate_that_prints_as_zero_is_no_sensor() -> None:
    shadow = advise(LOGS / "verl_grpo_logic_9_lr_prints_as_zero.log")
    capability = shadow.known.facts.metric_capability["learning_rate"]
    assert capability.state == "not_logged" and "0.000" in capability.reason
    assert "actor_learning_rate" in shadow.known.unknown


def test_a_log_without_metrics_says_so_and_what_its_configuration_shows() -> None:
    shadow = advise(LOGS / "verl_config_only_no_metrics.log")
    found = verdict(shadow)
    assert "no metric line" in found.headline
    assert any("ppo_mini_batch_size 256" in line for line in found.evidence)


def test_one_wild_sample_is_told_and_nothing_is_done_about_it() -> None:
    shadow = advise(LOGS / "trl_quoted_values_kl_in_band_200.log")
    assert any("17.8" in line and "once" in line for line in verdict(shadow).evidence)
    assert shadow.of("action") == []
