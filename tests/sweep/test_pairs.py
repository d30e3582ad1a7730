"""When a trial counts as worse than the best one, at the edges."""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest

pytest.importorskip("optuna")

from scipy import stats

from autotune.recipe.schema import SweepSection
from autotune.sweep.pairs import Scores, wants_prompts, worse
from autotune.sweep.score import interval, objective


def section(**given: Any) -> SweepSection:
    return SweepSection.model_validate({"space": {"trainer.kl_coef": {}}, **given})


def solved(count: int, of: int = 64) -> list[float]:
    return [float(i < count) for i in range(of)]


@pytest.mark.parametrize(("seeds", "speaks"), [(4, False), (5, True)])
def test_seeds_speak_from_five_on(seeds: int, speaks: bool) -> None:
    mine, best = Scores([0.5] * seeds), Scores([0.6 + 0.01 * k for k in range(8)])
    assert bool(worse(section(pairs="seeds", seeds=8), mine, best)) is speaks
    assert bool(worse(section(pairs="auto", seeds=8), mine, best)) is speaks


def test_better_and_equal_trials_stay() -> None:
    best = Scores([0.5] * 8, [solved(32)])
    assert not worse(section(pairs="seeds"), Scores([0.6] * 5), best)
    assert not worse(section(pairs="seeds"), Scores([0.5] * 5), best)
    assert not worse(section(pairs="prompts"), Scores([0.5], [solved(32)]), best)
    assert not worse(section(pairs="prompts"), Scores([0.6], [solved(40)]), best)


@pytest.mark.parametrize(("lost", "gives_up"), [(1, False), (8, True)])
def test_prompts_speak_when_the_difference_is_sure(lost: int, gives_up: bool) -> None:
    best = Scores([0.5], [solved(32)])
    mine = Scores([0.5 - lost / 64], [solved(32 - lost)])
    found = worse(section(), mine, best)
    assert bool(found) is gives_up
    assert not gives_up or "64 paired held-out prompts" in found


def test_without_pairs_nobody_can_tell() -> None:
    assert not worse(section(), Scores([0.1], [()]), Scores([0.9], [solved(60)]))
    assert not worse(section(), Scores([0.1], [solved(1, 8)]), Scores([0.9], [solved(8, 8)]))
    assert not worse(section(pairs="none"), Scores([0.1] * 6), Scores([0.9] * 6))
    assert not worse(section(), Scores([0.1, 0.1], [solved(1)] * 2), Scores([0.9], [solved(60)]))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, True), ({"seeds": 1}, False), ({"pairs": "seeds"}, False), ({"second": "tokens"}, False)],
)
def test_scores_of_prompts_are_kept_where_they_are_read(given: dict[str, Any], wanted: bool) -> None:
    assert wants_prompts(section(**given)) is wanted


def test_objectives_and_intervals() -> None:
    scores = [0.5, 0.6, 0.8]
    error = statistics.stdev(scores) / math.sqrt(3)
    assert objective(scores, section()) == pytest.approx(0.6333333)
    bound = objective(scores, section(objective="lower_bound", confidence=0.9))
    assert bound == pytest.approx(0.6333333 - stats.t.ppf(0.9, 2) * error)
    found = interval(scores)
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 2, found.mean, error))
    assert interval([0.5]).high == math.inf and "one seed" in str(interval([0.5]))
