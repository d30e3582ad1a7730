"""What MLflow is told of a study, as lines of the book that is delivered."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("optuna")

from autotune.sweep import result, state
from autotune.sweep.told import Told, telling
from autotune.tracking.book import Book
from tests.sweep.test_result import RECIPE, concluded

__all__ = ["concluded"]


@pytest.fixture
def told(concluded: Callable[..., Any]) -> tuple[list[dict[str, Any]], result.Outcome]:
    """Everything that a leader tells of a finished study."""
    outcome, recipe, folder = concluded()
    teller = Told(recipe, folder, Book(folder / "groups.jsonl", recipe.tracking.mlflow))
    teller.plan()
    for entry in json.loads((folder / state.FILE).read_text())["trials"]:
        teller.trial(entry)
    teller.outcome(outcome)
    lines = [json.loads(line) for line in (folder / "groups.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == "group"], outcome


def test_every_trial_has_its_values_its_score_and_an_end(told: Any) -> None:
    lines, _ = told
    trials = {line["names"][-1]: line for line in lines if len(line["names"]) == 2}
    assert set(trials) == {f"trial {slot}" for slot in range(8)}
    for line in trials.values():
        assert set(line["params"]) == {"trainer.actor_learning_rate", "trainer.kl_coef"}
        if line["tags"]["state"] == "complete":
            assert line["status"] == "done" and line["metrics"]["score"] > 0
            assert {"score/seed-0", "score/seed-1", "tokens"} <= set(line["metrics"])
        else:
            assert line["status"] == "interrupted" and line["note"]


def test_names_are_those_under_which_the_runs_are_nested(told: Any) -> None:
    lines, outcome = told
    assert {line["names"][0] for line in lines} == {outcome.folder.name}
    run = json.loads((outcome.folder / "trial-0003" / "seed-1" / "recipe.resolved.json").read_text())
    assert run["tracking"]["mlflow"]["group"] == [outcome.folder.name, "trial 3"]


def test_the_study_tells_its_plan_and_its_conclusion(told: Any) -> None:
    lines, outcome = told
    own = [line for line in lines if len(line["names"]) == 1]
    assert own[0]["params"]["trials"] == 8 and "log" in own[0]["params"]["space/trainer.actor_learning_rate"]
    end = own[-1]
    assert end["metrics"]["confirmed/best"] == pytest.approx(outcome.arms[0].interval.mean)
    assert end["note"].startswith("# ")
    assert [Path(f).name for f in end["files"]] == ["summary.md", "best.yaml"]
    curve = {line["step"]: line["metrics"]["score"] for line in own if "score" in line["metrics"]}
    assert len(curve) == outcome.states["complete"]


def test_a_full_disk_is_not_the_studys_trouble(concluded: Callable[..., Any]) -> None:
    outcome, recipe, folder = concluded()

    class Full:
        def tell(self, *names: str, **what: Any) -> None:
            raise OSError(28, "No space left on device")

    Told(recipe, folder, Full()).outcome(outcome)  # type: ignore[arg-type]


def test_nothing_is_written_where_mlflow_is_off(tmp_path: Path) -> None:
    from autotune.recipe import load_recipe

    file = tmp_path / "small.yaml"
    file.write_text(RECIPE.format(folder=tmp_path))
    recipe = load_recipe(file, ["tracking.mlflow.enabled=false"])
    with telling(recipe, tmp_path / "study") as teller:
        teller.plan()
    assert not (tmp_path / "study").exists()
