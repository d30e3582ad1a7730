"""A trial: what it is worth, when it is given up, and what fails it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna

from autotune.children import Ended
from autotune.recipe import Recipe
from autotune.recipe.schema import SweepSection
from autotune.sweep import state, studies, trial
from tests.sweep.fake_trials import FakeChild, carry_out

SPACE = {"trainer.actor_learning_rate": {"low": 1e-5, "high": 1e-2, "log": True}}


def recipe(folder: Path, **sweep: Any) -> Recipe:
    section = SweepSection.model_validate({"space": SPACE, "trials": 6, "pairs": "none", **sweep})
    return Recipe(name="small", run_dir=str(folder / "runs" / "small"), sweep=section)


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, FakeChild]]:
    storage = optuna.storages.InMemoryStorage()

    def carried_out(child: FakeChild | Callable[..., Any], **sweep: Any) -> tuple[Any, Any]:
        monkeypatch.setattr(trial, "carry_out", child)
        own = recipe(tmp_path, **sweep)
        return carry_out(storage, "small", own, studies.study_folder(own)), child

    return carried_out


def rate(recipe: Recipe) -> float:
    return recipe.trainer.actor_learning_rate


def closeness(recipe: Recipe, rollout: int) -> float:
    """Best at 1e-3, the better the longer; a little of it is the seed's luck."""
    return rollout / 60 - 0.2 * abs(math.log10(rate(recipe)) + 3) + 0.01 * recipe.seed


def test_the_recipes_own_values_come_first_and_the_score_is_the_mean_of_the_seeds(study: Any) -> None:
    found, child = study(FakeChild(closeness), pruner="none")
    first = found.trials[0]
    assert first.params == {"trainer.actor_learning_rate": 3e-4}
    expected = 1 - 0.2 * abs(math.log10(3e-4) + 3) + 0.01 * 1.5
    assert first.value == pytest.approx(expected)
    assert [p.name for p in child.runs[:2]] == ["seed-1", "seed-2"]
    assert len(found.trials) == 6 and len(child.runs) == 12
    assert first.user_attrs["tokens"] == 2 * 6 * 1000.0
    assert not list(child.runs[0].glob("checkpoints"))


def test_known_settings_follow(study: Any) -> None:
    found, _ = study(FakeChild(closeness), known_good=[{"trainer.actor_learning_rate": 2e-3}])
    assert found.trials[1].params == {"trainer.actor_learning_rate": 2e-3}


def test_the_lower_bound_does_not_trust_a_lucky_seed(study: Any) -> None:
    lucky = FakeChild(lambda r, t: 0.5 + (0.3 if r.seed == 2 and rate(r) == 3e-4 else 0.0))
    found, _ = study(lucky, objective="lower_bound", pruner="none")
    assert found.trials[0].value < found.trials[1].value == pytest.approx(0.5)


@pytest.mark.parametrize("score", ["nan", "inf", None, "broken"])
def test_what_is_not_a_number_fails_the_trial_with_its_reason(study: Any, score: Any) -> None:
    found, _ = study(FakeChild(lambda r, t: score), trials=1)
    assert found.trials[0].state.name == "FAIL"
    assert repr(score) in found.trials[0].user_attrs[studies.REASON]


@pytest.mark.parametrize(("code", "ends"), [(1, "FAIL"), (2, "FAIL"), (3, "PRUNED")])
def test_a_run_that_ends_badly_says_why(study: Any, tmp_path: Path, code: int, ends: str) -> None:
    log = tmp_path / "log"
    log.write_text("a line\n✗ failed: the loss is not finite\n")
    found, _ = study(lambda *given: Ended(code, False, log), trials=1)
    assert found.trials[0].state.name == ends
    assert "the loss is not finite" in found.trials[0].user_attrs[studies.REASON]


def test_a_run_that_is_behind_is_given_up(study: Any) -> None:
    """Four trials rise; the fifth stays at zero and must end at its first evaluation."""
    order: list[float] = []

    def score(recipe: Recipe, rollout: int) -> float:
        if rate(recipe) not in order:
            order.append(rate(recipe))
        return 0.0 if order.index(rate(recipe)) == 4 else rollout / 60

    found, _ = study(FakeChild(score), trials=5)
    assert [t.state.name for t in found.trials] == ["COMPLETE"] * 4 + ["PRUNED"]
    assert "behind the other trials at rollout 10" in found.trials[4].user_attrs[studies.REASON]
    assert found.trials[4].user_attrs["tokens"] == 1000.0  # one of six parts was paid for


def test_paired_prompts_give_a_trial_up_between_two_seeds(study: Any) -> None:
    """The first trial solves 48 of 64 prompts, all others 24 of the same."""
    child = FakeChild(
        lambda r, t: 48 / 64 if rate(r) == 3e-4 else 24 / 64,
        lambda r: [float(i < (48 if rate(r) == 3e-4 else 24)) for i in range(64)],
    )
    found, _ = study(child, pairs="auto", pruner="none", trials=3)
    assert [t.state.name for t in found.trials] == ["COMPLETE", "PRUNED", "PRUNED"]
    assert "64 paired held-out prompts" in found.trials[1].user_attrs[studies.REASON]
    assert len(child.runs) == 2 + 1 + 1


def test_a_second_objective_is_lowered_beside_the_score(study: Any) -> None:
    found, _ = study(FakeChild(closeness), second="tokens", trials=3, sampler="nsgaii")
    assert [d.name for d in found.directions] == ["MAXIMIZE", "MINIMIZE"]
    assert [t.values[1] for t in found.trials] == [12000.0] * 3


@pytest.mark.parametrize("sampler", ["tpe", "random", "qmc", "nsgaii"])
def test_samplers_by_name_draw_different_points_in_range(study: Any, sampler: str) -> None:
    found, _ = study(FakeChild(closeness), sampler=sampler, pruner="hyperband")
    drawn = [t.params["trainer.actor_learning_rate"] for t in found.trials]
    assert len(set(drawn)) == 6 and all(1e-5 <= value <= 1e-2 for value in drawn)


def test_a_study_goes_on_and_grows_but_never_changes(study: Any, tmp_path: Path) -> None:
    study(FakeChild(closeness), trials=2, pruner="none")
    found, more = study(FakeChild(closeness), trials=3, pruner="none")
    assert len(found.trials) == 3 and len(more.runs) == 2  # the third trial's two seeds
    with pytest.raises(ValueError, match="made from another recipe"):
        study(FakeChild(closeness), trials=3, pruner="none", score="sampled")


def test_what_others_may_read_of_it(study: Any, tmp_path: Path) -> None:
    found, child = study(FakeChild(closeness), trials=2)
    own = recipe(tmp_path, trials=2)
    data = state.write(found, own, studies.study_folder(own), "postgresql://me:secret@db/x")
    assert "secret" not in (studies.study_folder(own) / "study.json").read_text()
    first = data["trials"][0]
    assert (first["slot"], first["state"], first["attempts"]) == (0, "complete", 1)
    assert first["runs"] == {"1": str(child.runs[0]), "2": str(child.runs[1])}
    assert first["used"] == {"trainer.actor_learning_rate": 3e-4}
