"""What is said before a run, at the edges of what the documents say."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from autotune import preflight
from autotune.preflight import Advice
from autotune.testing.plant import HEALTHY


def words(advice: Iterable[Advice]) -> list[str]:
    return [item.text for item in advice]


@pytest.mark.parametrize(
    ("count", "word"),
    [
        (1, "no clip rule has a sensor"),
        (2, "goes unused"),
        (3, "below the usual 4 to 8"),
        (4, ""),
        (8, ""),
        (9, "above the usual 4 to 8"),
        (64, "late updates drift"),
    ],
)
def test_a1_updates_per_rollout(count: int, word: str) -> None:
    said = words(preflight.updates(count))
    assert (len(said) == 1 and word in said[0]) if word else said == []


@pytest.mark.parametrize(("prompts", "said"), [(1, 1), (255, 1), (256, 0), (10_240, 0)])
def test_a2_a_small_batch_jitters(prompts: int, said: int) -> None:
    assert len(words(preflight.batch(prompts))) == said


@pytest.mark.parametrize(
    ("critic", "word"),
    [
        (None, ""),
        (1e-6, "below the actor's (0.5 x)"),
        (2e-6, "equals the actor's"),
        (2.1e-6, ""),
        (4e-6, ""),
        (6e-6, ""),
        (6.1e-6, "3.05 x the actor's, above 3 x"),
        (1e-5, "5 x the actor's"),  # the documents' own starting values
    ],
)
def test_b5b_the_critic_against_the_actor(critic: float | None, word: str) -> None:
    said = words(preflight.critic(2e-6, critic))
    assert (len(said) == 1 and word in said[0]) if word else said == []


@pytest.mark.parametrize(
    ("cap", "longest", "word"),
    [
        (1023, None, "below 1024 tokens"),
        (1024, None, ""),
        (7, 8, "prompts have 8 tokens"),
        (8, 8, ""),
        (2048, 4000, "prompts have 4000 tokens"),
    ],
)
def test_b6p_prompts_that_would_be_cut(cap: int, longest: int | None, word: str) -> None:
    said = words(preflight.prompts(cap, longest))
    assert (len(said) == 1 and word in said[0]) if word else said == []


@pytest.mark.parametrize(("value", "said"), [(0.59, 1), (0.6, 0), (1.0, 0), (1.2, 0), (1.21, 1)])
def test_xt_a_temperature_far_from_one(value: float, said: int) -> None:
    assert len(words(preflight.temperature(value))) == said


def test_b8_names_every_part_that_differs_and_no_other() -> None:
    carried = {"model": "a", "data": "d", "reward": "r", "hardware": "cpu"}
    assert words(preflight.transfer(carried, carried)) == []
    said = words(preflight.transfer(carried, {**carried, "model": "b", "hardware": "gpu"}))
    assert len(said) == 2 and "another model: a, here b" in said[0] and "hardware: cpu, here gpu" in said[1]
    assert words(preflight.transfer({}, carried)) == words(preflight.transfer(carried, {})) == []
    assert words(preflight.transfer({"model": "a"}, {"data": "d"})) == []


def test_a_good_start_is_left_in_peace_and_a_bad_one_hears_everything_at_once() -> None:
    good = HEALTHY | {"train_batch_size": 256, "ppo_mini_batch_size": 64, "max_prompt_length": 1024}
    assert list(preflight.advise(good)) == []
    bad = HEALTHY | {
        "ppo_mini_batch_size": 64,
        "critic_learning_rate": 1.0,
        "temperature": 2.0,
        "max_prompt_length": 16,
    }
    said = preflight.advise(bad, carried={"model": "a"}, here={"model": "b"})
    assert [item.rule for item in said] == ["A1", "A2", "B5b", "B6p", "XT", "B8"]
