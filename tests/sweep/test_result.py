"""The end of a study: the best recipe, confirmed on fresh seeds, and its cost."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

import optuna

from autotune import children
from autotune.children import Ended
from autotune.errors import InputError, RunError
from autotune.recipe import Recipe, load_recipe
from autotune.sweep import result, studies, trial
from autotune.sweep.lead import device_of
from tests.sweep.fake_trials import FakeChild, carry_out

RECIPE = """\
name: small  # a comment of mine
run_dir: {folder}/runs/small
trainer: {{rollouts: 60, actor_learning_rate: 1.0e-4}}
sweep:
  trials: 8
  seeds: 2
  pairs: none
  confirm: 3
  space: {{trainer.actor_learning_rate: {{low: 1.0e-5, high: 1.0e-2}}, trainer.kl_coef: {{}}}}
"""


def closeness(recipe: Recipe, rollout: int) -> float:
    """The learning rate is all that matters."""
    return rollout / 60 - 0.2 * abs(math.log10(recipe.trainer.actor_learning_rate) + 3) + 0.001 * recipe.seed


@pytest.fixture
def concluded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Recipe, Path]]:
    def conclude(score: Any = closeness, *more: str) -> tuple[Any, Recipe, Path]:
        file = tmp_path / "small.yaml"
        file.write_text(RECIPE.format(folder=tmp_path))
        recipe, child = load_recipe(file, ["trainer.temperature=0.9", *more]), FakeChild(score)
        monkeypatch.setattr(trial, "carry_out", child)

        def together(
            runs: Sequence[tuple[Mapping[str, Any], Path]], jobs: int, done: Callable[[Path], None]
        ) -> list[Ended]:
            return [child(data, folder, 1, lambda lines: False) for data, folder in runs]

        monkeypatch.setattr(children, "together", together)
        folder = studies.study_folder(recipe)
        study = carry_out(optuna.storages.InMemoryStorage(), "small", recipe, folder)
        source = result.Source(file, ("trainer.temperature=0.9",))
        return result.conclude(study, recipe, folder, "sqlite:///x", source, 1, print), recipe, folder

    return conclude


def test_the_best_is_confirmed_on_seeds_that_no_trial_had(concluded: Any) -> None:
    outcome, _, folder = concluded()
    best, own = outcome.arms
    assert list(best.scores) == list(own.scores) == [3, 4, 5]
    expected = closeness(Recipe.model_validate({"seed": 4, "trainer": {
        "actor_learning_rate": outcome.params["trainer.actor_learning_rate"]}}), 60)  # fmt: skip
    assert best.interval.mean == pytest.approx(expected)
    assert outcome.gain.mean == pytest.approx(best.interval.mean - own.interval.mean)
    assert outcome.gain.n == 3 and outcome.gain.low > 0
    assert (folder / "confirm/best/seed-3/checkpoints").is_dir()


def test_every_token_is_on_the_bill(concluded: Any) -> None:
    outcome, _, folder = concluded()
    study = json.loads((folder / "study.json").read_text())
    assert outcome.tokens == sum(t["tokens"] for t in study["trials"]) + 2 * 3 * 6000.0
    assert sum(outcome.states.values()) == 8
    assert f"{outcome.tokens / 1e6:.2f} million tokens" in (folder / "summary.md").read_text()


def test_the_best_recipe_is_a_file_that_runs(concluded: Any) -> None:
    outcome, _, folder = concluded()
    text = (folder / "best.yaml").read_text()
    assert "a comment of mine" in text and str(outcome.arms[0].interval) in text
    best = load_recipe(folder / "best.yaml").trainer
    assert best.actor_learning_rate == outcome.params["trainer.actor_learning_rate"]
    assert best.temperature == 0.9  # of the command line


def test_what_mattered_is_named(concluded: Any) -> None:
    outcome, _, _ = concluded()
    shares = outcome.importance
    assert shares["trainer.actor_learning_rate"] > shares["trainer.kl_coef"]


@pytest.mark.parametrize(
    ("visible", "place", "device"), [("2,5", 0, "2"), ("2,5", 3, "5"), ("2", 1, None), ("", 0, None)]
)
def test_workers_share_the_gpus_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch, visible: str, place: int, device: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_of(place).get("CUDA_VISIBLE_DEVICES") == device


def test_a_second_objective_tells_of_what_is_not_beaten(concluded: Any) -> None:
    outcome, _, folder = concluded(closeness, "sweep.second=tokens", "sweep.confirm=0", "sweep.pairs=none")
    assert outcome.front == (outcome.slot,)  # all cost the same, so the best score beats the others
    text = (folder / "summary.md").read_text()
    assert f"It took tokens 1.2e+04; not beaten in both: trials {outcome.slot}." in text
    assert "fresh seeds" not in text.split("##")[0]


def test_a_study_without_any_score_fails_with_the_reasons(concluded: Any) -> None:
    with pytest.raises(RunError, match="no trial of small is complete: the held-out score is not a number"):
        concluded(lambda recipe, rollout: "nan")


def test_a_sampler_whose_package_is_missing_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "small.yaml"
    file.write_text(RECIPE.format(folder=tmp_path))
    recipe = load_recipe(file, ["sweep.sampler=cmaes"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match="pip install cmaes"):
        studies.make(optuna.storages.InMemoryStorage(), "small", recipe, tmp_path)
