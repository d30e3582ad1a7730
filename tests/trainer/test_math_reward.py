"""Mathematical equality: what counts as equal, and that a parser's hang is nobody's wrong answer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autotune.recipe.schema import MathVerifyReward
from autotune.trainer.rewards import Rewards, build_rewards
from autotune.trainer.tasks.base import Example, TaskData

pytest.importorskip("math_verify")

TASK = TaskData([], [], None, lambda e: [])


@pytest.fixture(scope="module")
def rewards() -> Iterator[Rewards]:
    made = build_rewards([MathVerifyReward()], TASK)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("answer", "response", "score"),
    [
        ("15", "so the answer is 15.", 1.0),
        ("15", "16", 0.0),
        ("15", "", 0.0),
        ("1,234", "1234", 1.0),
        ("#### 72", "she pays 72 dollars", 1.0),
        ("The answer is 5", "$5$", 1.0),
        (r"\frac{1}{2}", "$0.5$", 1.0),
        (r"$\frac{1}{2}$", r"thus \boxed{\frac{2}{4}}", 1.0),
        (r"2\sqrt{2}", r"$\sqrt{8}$", 1.0),
        (r"2\sqrt{2}", "2", 0.0),
        ("2x+3", "$3 + 2x$", 1.0),
        ("2x+3", "2", 0.0),
        ("(1,2)", "$(1, 2)$", 1.0),
        ("1e-3", "0.001", 1.0),
        ("1e-3", "1", 0.0),
        ("Paris", "no numbers here", 0.0),
        ("", "15", None),
    ],
)
def test_equality(rewards: Rewards, answer: str, response: str, score: float | None) -> None:
    assert rewards.score([response], [Example("?", answer)]).total == [score]


def test_what_cannot_be_scored_is_told_once_and_its_neighbours_are_scored() -> None:
    """An answer without mathematics, and an integral that takes longer than anybody has."""
    made = build_rewards([MathVerifyReward(time_limit=2.0)], TASK)
    integral = r"$\int_0^1 \frac{x^5 \sin(x^7) e^{x^3}}{1 + x^{11} + \cos x} dx$"
    answers = [Example("?", answer) for answer in ("5", "0.3", "", "6", "")]
    assert made.score(["5", integral, "1", "7", "2"], answers).total == [1.0, None, None, 0.0, None]
    assert [(news.component, news.text) for news in made.news()] == [
        ("math_verify", "it took longer than 2 s and was stopped"),
        ("math_verify", "the answer has no mathematical expression"),
    ]
    made.close()
