"""Rewards: what counts as right, how components add up, and that a broken scorer is not a zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from autotune.errors import InputError
from autotune.recipe.schema import ExactMatchReward, RegexReward, Reward, TaskReward
from autotune.trainer.rewards import Component, Rewards, build_rewards
from autotune.trainer.rewards.base import each
from autotune.trainer.tasks.base import Example, TaskData

NUMBER = r"-?\d+"


def task(score: Callable[[str, Example], float] | None = None) -> TaskData:
    return TaskData([], [], score, lambda example: [])


def one(section: Reward, response: str, answer: str) -> float | None:
    rewards = build_rewards([section], task())
    return rewards.score([response], [Example("?", answer)]).total[0]


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("124579", "124579", 1.0),
        (" 124579\n", "124579", 1.0),
        ("124579", " 124579 ", 1.0),
        ("1245799", "124579", 0.0),
        ("12457", "124579", 0.0),
        ("", "124579", 0.0),
        ("Paris", "paris", 0.0),
    ],
)
def test_exact_match_compares_stripped_texts(response: str, answer: str, score: float) -> None:
    assert one(ExactMatchReward(), response, answer) == score


@pytest.mark.parametrize(
    ("pattern", "response", "answer", "score"),
    [
        (NUMBER, "7 + 7 + 1 = 15", "15", 1.0),
        (NUMBER, "15, or is it 16?", "15", 0.0),
        (NUMBER, "minus four: -4.", "-4", 1.0),
        (NUMBER, "no number", "15", 0.0),
        (NUMBER, "", "15", 0.0),
        (r"answer is (\d+)", "the answer is 15 (not 16)", "15", 1.0),
        (r"(\d+) (apples|pears)", "3 pears and 4 apples", "4", 1.0),
        (r"(\d+)?!", "15!!", "15", 0.0),  # the last match has no digits before it
        (r"<a>(.*?)</a>", "<a> 15 </a>", "15", 1.0),
    ],
)
def test_regex_takes_the_last_match_and_its_first_group(
    pattern: str, response: str, answer: str, score: float
) -> None:
    assert one(RegexReward(pattern=pattern), response, answer) == score


def test_a_pattern_that_does_not_compile_is_refused_with_its_text() -> None:
    with pytest.raises(InputError, match=r"'\(' is not a regular expression"):
        build_rewards([RegexReward(pattern="(")], task())


def test_components_are_weighted_in_the_total_and_plain_in_the_table() -> None:
    sections = [ExactMatchReward(weight=2.0), RegexReward(pattern=NUMBER, weight=0.5)]
    table = build_rewards(sections, task()).score(["15", "is 15", "16"], [Example("?", "15")] * 3)
    assert table.components == {"exact_match": [1.0, 0.0, 0.0], "regex": [1.0, 1.0, 0.0]}
    assert table.total == [2.5, 0.5, 0.0]


def test_components_of_one_type_keep_names_of_their_own() -> None:
    sections = [RegexReward(pattern=NUMBER), RegexReward(pattern="x"), ExactMatchReward()]
    names = [component.name for component in build_rewards(sections, task()).components]
    assert names == ["regex", "regex_2", "exact_match"]
    sections = [RegexReward(pattern="x", name="form"), RegexReward(pattern="y"), RegexReward(pattern="z")]
    assert [c.name for c in build_rewards(sections, task()).components] == ["form", "regex", "regex_2"]


def test_the_tasks_own_scorer_sees_the_response_and_its_example() -> None:
    rewards = build_rewards([TaskReward()], task(lambda r, e: float(r == e.meta["key"])))
    examples = [Example("?", "", {"key": "a"}), Example("?", "", {"key": "b"})]
    assert rewards.score(["a", "a"], examples).total == [1.0, 0.0]


def test_a_task_without_a_scorer_cannot_be_scored_by_it() -> None:
    with pytest.raises(InputError, match="exact_match or regex"):
        build_rewards([TaskReward()], task())


def broken(response: str, example: Example) -> float:
    if response == "raise":
        raise RuntimeError("the scorer fell over")
    return {"nan": float("nan"), "inf": float("inf")}.get(response, 1.0)


def test_what_cannot_be_scored_is_none_and_its_neighbours_are_scored() -> None:
    fine = Component("exact", 1.0, each(lambda r, e: 1.0))
    rewards = Rewards((fine, Component("broken", 1.0, each(broken))))
    table = rewards.score(["fine", "raise", "nan", "inf"], [Example("?", "")] * 4)
    assert table.components["broken"] == [1.0, None, None, None]
    assert table.components["exact"] == [1.0, 1.0, 1.0, 1.0]
    assert table.total == [2.0, None, None, None]


def test_an_interrupt_is_not_taken_for_a_broken_scorer() -> None:
    def interrupted(response: str, example: Example) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Rewards((Component("x", 1.0, each(interrupted)),)).score(["a"], [Example("?", "")])


def test_responses_and_examples_must_pair_up() -> None:
    with pytest.raises(ValueError, match="do not pair up"):
        build_rewards([ExactMatchReward()], task()).score(["a", "b"], [Example("?", "a")])
