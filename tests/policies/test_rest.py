"""The rest of the catalogue at its edges: data, memory, lengths, critic, stalls, optional watchers."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.policies.base import Advice, Alarm
from autotune.policies.critic import CriticTooSlow
from autotune.policies.data import BatchTooSmall, DataFreshness
from autotune.policies.length import AnswersCut, CapTooHigh, LengthSurge, PromptsCut
from autotune.policies.memory import RolloutMemory
from autotune.policies.stall import PinnedToReference, Saturated
from autotune.policies.watch import EntropyCollapse, NoSignal, ResetReference, SamplerMismatch, TemperatureOff
from tests.series import (
    FALLING,
    FLAT,
    RISING,
    SAW,
    TREND,
    UNCLEAR,
    WINDOW,
    Series,
    ask,
    facts,
    run,
    wants,
)

SAMPLED, CAP = "rollout_micro_batch_size", "max_response_length"


# ------------------------------------------------------------------------------------ B1 memory


@pytest.mark.parametrize(
    ("now", "memory", "after"),
    [
        (32, 0.849, 64),
        (32, 0.850, None),
        (32, 0.90, None),
        (32, 0.920, None),
        (32, [0.90] * 3 + [0.921], 16),  # above the ceiling: at once
        (64, 0.5, None),  # 128 risks an out-of-memory
        (8, 0.99, None),
        (16, 0.99, 8),
    ],
)
def test_b1_keeps_memory_between_85_and_92_percent(now: int, memory: Series, after: int | None) -> None:
    knobs = {SAMPLED: now, "num_rollout_batches": 512 // now}
    snapshots = run(WINDOW, knobs=knobs, gpu_memory_fraction=memory)
    assert wants(ask(RolloutMemory(), snapshots, of=facts(knobs=knobs))) == (
        None if after is None else (SAMPLED, after)
    )


@pytest.mark.parametrize(("speed", "goes_on"), [(1.01, False), (1.03, True)])
def test_b1_follows_a_notch_up_only_when_it_paid(speed: float, goes_on: bool) -> None:
    before = run(WINDOW, knobs={SAMPLED: 16}, gpu_memory_fraction=0.5, tokens_per_second=1000.0)
    after = run(
        WINDOW, knobs={SAMPLED: 32}, start=7, gpu_memory_fraction=0.6, tokens_per_second=1000.0 * speed
    )
    answer = ask(RolloutMemory(), [*before, *after], of=facts(knobs={SAMPLED: 16}))
    assert wants(answer) == ((SAMPLED, 64) if goes_on else None)


# ------------------------------------------------------------------------------------- A2, B2


def test_a2_doubles_a_batch_that_can_decide_nothing() -> None:
    small = {"train_batch_size": 4, "ppo_mini_batch_size": 1, "micro_batch_size": 8}
    snapshots = run(TREND, knobs=small, reward_mean=SAW)
    assert wants(ask(BatchTooSmall(), snapshots)) == ("train_batch_size", 8)
    fixed = facts(immovable={"train_batch_size": "fixed at start"})
    assert isinstance(ask(BatchTooSmall(), snapshots, of=fixed), Advice)
    for decided in (FLAT, RISING, FALLING):
        assert ask(BatchTooSmall(), run(TREND, reward_mean=decided)) is None


def test_a2_does_not_enlarge_the_batch_of_a_dead_model() -> None:
    dying = run(TREND, reward_mean=[0.5] * 6 + [0.0] * 2, reward_std=[0.5] * 6 + [0.0] * 2)
    assert ask(BatchTooSmall(), dying) is None


@pytest.mark.parametrize(
    ("age", "mismatch", "speaks"),
    [(1.0, 0.05, False), (1.01, 0.0, True), (0.0, 0.0501, True), (0.0, 0.0, False)],
)
def test_b2_halves_stale_data(age: float, mismatch: float, speaks: bool) -> None:
    knobs = {"num_rollout_batches": 16, SAMPLED: 32}
    answer = ask(DataFreshness(), run(WINDOW, knobs=knobs, data_age=age, kl_mismatch=mismatch))
    assert wants(answer) == (("num_rollout_batches", 8) if speaks else None)


# ---------------------------------------------------------------------------------------- B5b


@pytest.mark.parametrize(
    ("critic", "reward", "after"),
    [
        (6e-4, FLAT, 7.2e-4),
        (8e-4, FLAT, 9e-4),  # never above three times the actor's 3e-4
        (9e-4, FLAT, None),
        (15e-4, FLAT, None),  # a recipe above the cap is left alone, not pulled down
        (6e-4, RISING, None),
        (6e-4, UNCLEAR, None),
    ],
)
def test_b5b_lifts_the_critic_up_to_three_times_the_actor(
    critic: float, reward: list[float], after: float | None
) -> None:
    snapshots = run(TREND, knobs={"critic_learning_rate": critic}, reward_mean=reward)
    answer = wants(ask(CriticTooSlow(), snapshots))
    assert answer == (None if after is None else ("critic_learning_rate", pytest.approx(after)))
    assert CriticTooSlow().blocked(facts(), {}) == "there is no critic"


# --------------------------------------------------------------------------------------- B6, X3


def cap(limit: int, mean: float, p995: float, cut: float = 0.0) -> list[Any]:
    return run(
        TREND,
        knobs={CAP: limit},
        response_length_mean=mean,
        response_length_p995=p995,
        truncated_fraction=cut,
    )


@pytest.mark.parametrize(
    ("snapshots", "after"),
    [
        (cap(500, 299, 300), 450),  # at most a tenth at once
        (cap(500, 300, 300), None),  # 60 % is not below 60 %
        (cap(500, 200, 400), 460),  # 1.15 x the tail
        (cap(500, 200, 428), None),  # less than eight tokens
        (cap(500, 200, 500), None),  # trim refused
        (cap(500, 200, 300, cut=0.0049), 450),
        (cap(500, 200, 300, cut=0.0050), None),
    ],
)
def test_b6_trims_the_cap_only_where_the_tail_is_clear(snapshots: list[Any], after: int | None) -> None:
    assert wants(ask(CapTooHigh(), snapshots)) == (None if after is None else (CAP, after))


@pytest.mark.parametrize(
    ("cut", "after"), [(0.049, None), (0.050, None), (0.051, 500), (0.899, 500), (0.901, 800)]
)
def test_x3_raises_the_cap_when_answers_are_cut(cut: float, after: int | None) -> None:
    """By a quarter; twice where nearly all of them are cut."""
    snapshots = run(WINDOW, knobs={CAP: 400}, truncated_fraction=cut)
    answer = wants(ask(AnswersCut(), snapshots, of=facts(knobs={CAP: 400})))
    assert answer == (None if after is None else (CAP, after))


def test_x3_stays_within_four_times_the_recipe() -> None:
    snapshots = run(WINDOW, knobs={CAP: 1500}, truncated_fraction=0.5)
    assert wants(ask(AnswersCut(), snapshots, of=facts(knobs={CAP: 400}))) == (CAP, 1600)


def test_b6p_counts_the_prompts_that_were_cut() -> None:
    answer = ask(PromptsCut(), run(1, knobs={"max_prompt_length": 512}, prompts_cut=3))
    assert isinstance(answer, Advice) and "3 prompts were cut to max_prompt_length 512" in answer.reason
    assert ask(PromptsCut(), run(1, prompts_cut=0)) is None


@pytest.mark.parametrize(("surge", "alarms"), [(20.9, False), (21.0, True)])
def test_xl_alarms_at_three_times_the_runs_own_start(surge: float, alarms: bool) -> None:
    answer = ask(LengthSurge(), run(TREND, response_length_mean=[7.0] * 4 + [surge] * 4))
    assert isinstance(answer, Alarm) == alarms


# -------------------------------------------------------------------------------------- X4, X5


@pytest.mark.parametrize(("reward", "speaks"), [(0.949, False), (0.95, True), (1.0, True)])
def test_x4_says_that_there_is_nothing_left_to_learn(reward: float, speaks: bool) -> None:
    assert isinstance(ask(Saturated(), run(TREND, reward_mean=reward)), Advice) == speaks


@pytest.mark.parametrize(("last", "speaks"), [(0.65, False), (0.64, True)])
def test_x4_hears_a_held_out_score_that_falls(last: float, speaks: bool) -> None:
    scores: list[float | None] = [None] * TREND
    scores[2], scores[-1] = 0.7, last
    answer = ask(Saturated(), run(TREND, eval_score=scores, reward_mean=RISING))
    assert isinstance(answer, Advice) == speaks


@pytest.mark.parametrize(
    ("coef", "kl_ref", "reward", "speaks"),
    [
        (1.0, 0.04, FLAT, True),
        (0.05, 0.04, FLAT, True),
        (0.049, 0.04, FLAT, False),
        (1.0, 0.080, FLAT, True),
        (1.0, 0.081, FLAT, False),
        (1.0, 0.04, RISING, False),
    ],
)
def test_x5_lets_go_of_a_model_that_is_pinned(
    coef: float, kl_ref: float, reward: list[float], speaks: bool
) -> None:
    answer = wants(
        ask(PinnedToReference(), run(TREND, knobs={"kl_coef": coef}, kl_ref=kl_ref, reward_mean=reward))
    )
    assert answer == (("kl_coef", pytest.approx(min(coef / 4, 0.05))) if speaks else None)


@pytest.mark.parametrize(
    ("rollouts", "kl_ref", "kl_step", "reward", "speaks"),
    [
        (8, 0.024, 0.01, RISING, True),  # eight steps, and not three of them away
        (7, 0.024, 0.01, RISING[:7], False),
        (8, 0.025, 0.01, RISING, False),
        (8, 0.024, 0.01, RISING[::-1], False),
    ],
)
def test_x5_sees_a_walk_that_is_pulled_back_before_the_reward_stalls(
    rollouts: int, kl_ref: float, kl_step: float, reward: list[float], speaks: bool
) -> None:
    told = run(rollouts, knobs={"kl_coef": 1.0}, kl_ref=kl_ref, kl_step=kl_step, reward_mean=reward)
    assert wants(ask(PinnedToReference(), told)) == (("kl_coef", 0.05) if speaks else None)


# ---------------------------------------------------------------------------- optional watchers


@pytest.mark.parametrize(("level", "speaks"), [(0.050, False), (0.051, True)])
def test_xm_alarms_on_mismatch(level: float, speaks: bool) -> None:
    assert isinstance(ask(SamplerMismatch(), run(WINDOW, kl_mismatch=level)), Alarm) == speaks


@pytest.mark.parametrize(("share", "speaks"), [(0.80, False), (0.81, True)])
def test_xz_points_at_the_prompts(share: float, speaks: bool) -> None:
    assert isinstance(ask(NoSignal(), run(WINDOW, zero_std_fraction=share)), Advice) == speaks


def test_xr_suggests_a_new_reference_when_kl_is_spent_for_nothing() -> None:
    climbing = [0.10 + 0.01 * k for k in range(TREND)]
    assert isinstance(ask(ResetReference(), run(TREND, kl_ref=climbing)), Advice)
    assert ask(ResetReference(), run(TREND, kl_ref=climbing, reward_mean=RISING)) is None
    assert ask(ResetReference(), run(TREND, kl_ref=0.2)) is None


@pytest.mark.parametrize(
    ("now", "reward", "after"),
    [(0.2, FLAT, 0.24), (0.26, FLAT, 0.28), (0.28, FLAT, None), (0.2, RISING, None)],
)
def test_xe_lifts_the_upper_clip_when_entropy_falls_for_nothing(
    now: float, reward: list[float], after: float | None
) -> None:
    entropy = [0.5 - 0.04 * k for k in range(TREND)]
    snapshots = run(TREND, knobs={"clip_range_high": now}, entropy=entropy, reward_mean=reward)
    answer = wants(ask(EntropyCollapse(), snapshots))
    assert answer == (None if after is None else ("clip_range_high", pytest.approx(after)))


@pytest.mark.parametrize(("loss_kind", "silent"), [("token", False), ("sequence", True)])
def test_xe_leaves_the_range_of_a_sequence_ratio_alone(loss_kind: str, silent: bool) -> None:
    assert ("per sequence" in EntropyCollapse().blocked(facts(loss_kind=loss_kind), {})) == silent


@pytest.mark.parametrize(
    ("now", "entropy", "after"),
    [(1.2, 0.9, None), (1.4, 0.9, 1.2), (1.4, 0.3, None), (0.6, 0.001, None), (0.4, 0.001, 0.7)],
)
def test_xt_moves_the_temperature_toward_one_when_entropy_left_its_band(
    now: float, entropy: float, after: float | None
) -> None:
    snapshots = run(TREND, knobs={"temperature": now}, entropy=[0.3] * 4 + [entropy] * 4)
    answer = wants(ask(TemperatureOff(), snapshots))
    assert answer == (None if after is None else ("temperature", pytest.approx(after)))
