"""The arithmetic of the quickstart's table, on journals and results made by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from scipy import stats

from autotune.journal import Journal
from experiments import quickstart_table as qt


def snapshot(rollout: int, reward: float | None) -> dict[str, Any]:
    metrics = {} if reward is None else {"reward_mean": reward}
    return {"rollout": rollout, "epoch": 0, "knobs": {}, "metrics": metrics, "invalid": {}}


def change(rule: str, knob: str, *real: str, kind: str = "intervention") -> dict[str, Any]:
    values = dict.fromkeys(real or (knob,), 1.0)
    return {"rule": rule, "knob": knob, "values": values, "before": 2.0, "after": 1.0,
            "reason": "by hand", "kind": kind}  # fmt: skip


def applied(knob: str, error: str = "") -> dict[str, Any]:
    return {"knob": knob, "requested": 1.0, "read_back": 1.0, "effective_from": 1, "error": error}


def decided(*changes: dict[str, Any], act: bool = True) -> dict[str, Any]:
    return {"act": act, "changes": list(changes)}


def rollout_line(
    journal: Journal,
    rollout: int,
    reward: float | None,
    decision: dict[str, Any] | None = None,
    confirmed: Sequence[dict[str, Any]] = (),
    restored: int | None = None,
) -> None:
    payload = {
        "snapshot": snapshot(rollout, reward),
        "decision": decision,
        "applied": list(confirmed),
        "restored": restored,
        "times": {},
    }
    journal.append("rollout", rollout, payload)


def write(path: Path, rewards: Sequence[float | None]) -> Path:
    """A journal without a controller: an evaluation before the first rollout and after the last."""
    journal = Journal(path)
    journal.append("header", 0, {})
    journal.append("eval", 0, {"greedy": 0.1, "sampled": 0.2})
    for rollout, reward in enumerate(rewards):
        rollout_line(journal, rollout, reward)
    journal.append("eval", len(rewards), {"greedy": 0.9, "sampled": 0.8})
    journal.close()
    return path


def result(recipe: str, control: str, seed: int, score: float, **other: Any) -> qt.Result:
    base: dict[str, Any] = {
        "recipe_sha256": "0" * 64, "exit_code": 0, "seconds": 60.0, "rollouts": 60, "start": 0.2,
        "greedy": 0.9, "sampled": score, "reached": 30, "actions": 4,
        "moves": 9, "restores": 0,
    }  # fmt: skip
    return qt.Result(recipe, control, seed, **(base | {"score": score} | other))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.7] * 5, 4),
        ([0.7] * 4, None),
        ([0.0] * 5 + [0.7] * 5, 9),
        ([0.0, 0.5, 1.0, 1.0, 1.0, 0.0], 4),
        ([0.69999] * 30, None),
        ([], None),
    ],
)
def test_goal_is_reached_by_the_running_mean(rewards: list[float], expected: int | None) -> None:
    assert qt.running_goal(rewards) == expected


def test_numbers_of_a_plain_run(tmp_path: Path) -> None:
    rewards = [0.25] + [0.5] * 9 + [0.8] * 9 + [0.9]
    numbers = qt.numbers(write(tmp_path / "journal.jsonl", rewards))
    assert numbers.pop("score") == pytest.approx(0.81)
    assert numbers == {
        "rollouts": 20,
        "start": 0.25,
        "greedy": 0.9,
        "sampled": 0.8,
        "reached": 13,  # (0.5 + 4 x 0.8) / 5 = 0.74 at rollout 13; (2 x 0.5 + 3 x 0.8) / 5 before
        "actions": 0,
        "moves": 0,
        "restores": 0,
    }


def test_actions_are_confirmed_changes_and_an_engagement_is_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    clip = change("B4a", "clip_range", "clip_range_low", "clip_range_high")
    rate = change("X1", "actor_learning_rate", kind="regulator")
    ok = applied("actor_learning_rate")
    both = [applied("clip_range_low"), applied("clip_range_high"), ok]
    rollout_line(journal, 0, 0.1, decided(clip, rate), both)  # two actions, two moves
    rollout_line(journal, 1, 0.1, decided(rate), [ok])  # the engagement goes on: a move
    rollout_line(journal, 2, 0.1, decided(clip), [applied("clip_range_low", "no setter")])
    rollout_line(journal, 3, 0.1, decided(clip, act=False))
    rollout_line(journal, 4, 0.1, decided(), restored=0)
    journal.append("eval", 5, {"greedy": 0.0, "sampled": 0.0})
    journal.close()
    numbers = qt.numbers(tmp_path / "journal.jsonl")
    assert (numbers["actions"], numbers["moves"], numbers["restores"]) == (2, 3, 1)


def test_after_a_resume_the_last_line_of_a_rollout_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for rollout, reward in [(0, 0.1), (1, 0.9)]:
        rollout_line(journal, rollout, reward, decided(change("B3a", "kl_coef")), [applied("kl_coef")])
    journal.append("resumed", 1, {"from": 1})
    rollout_line(journal, 1, 0.3)
    journal.append("eval", 2, {"greedy": 0.0, "sampled": 0.0})
    journal.close()
    numbers = qt.numbers(tmp_path / "journal.jsonl")
    assert numbers["score"] == pytest.approx(0.2)
    assert numbers["actions"] == 1


def test_a_journal_without_its_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rollout 1 has no valid reward_mean"):
        qt.numbers(write(tmp_path / "hole.jsonl", [0.1, None, 0.3]))
    with pytest.raises(ValueError, match="expected rollouts and evaluations, got 0"):
        qt.numbers(write(tmp_path / "empty.jsonl", []))


def test_t_interval_equals_scipy() -> None:
    values = [0.01, -0.03, 0.02, 0.0, -0.01]
    expected = stats.t.interval(0.95, 4, loc=-0.002, scale=stats.sem(values))
    assert qt.t_interval(values) == pytest.approx(expected)
    assert qt.t_interval([0.5]) == (-math.inf, math.inf)


@pytest.mark.parametrize(("score", "passed"), [(0.5, True), (0.49, True), (0.51, False)])
def test_bad_enough_at_half_of_the_way(score: float, passed: bool) -> None:
    """From 0.2 the well-set run comes to 0.8: half of the way is 0.5."""
    pair = [result("timid", "off", 1, score), result("well_set", "off", 1, 0.8)]
    assert qt.bad_enough("timid", pair).passed is passed


def test_bad_enough_judges_the_mean_and_counts_seeds() -> None:
    scores = {1: 0.3, 2: 0.3, 3: 0.65}
    runs = [result("timid", "off", seed, score) for seed, score in scores.items()]
    runs += [result("well_set", "off", seed, 0.8) for seed in scores]
    check = qt.bad_enough("timid", runs)
    assert check.passed is True
    assert "2 of 3 seeds" in check.figures


@pytest.mark.parametrize(
    ("scores", "passed"),
    [
        ([0.72, 0.72, 0.72, 0.72, 0.1], True),
        ([0.72, 0.72, 0.72, 0.71, 0.8], True),
        ([0.72, 0.72, 0.72, 0.71, 0.71], False),
    ],
)
def test_rescued_in_four_of_five_seeds(scores: list[float], passed: bool) -> None:
    """90 % of a well-set 0.8 is 0.72, compared seed by seed."""
    runs = [result("aggressive", "act", seed, score) for seed, score in enumerate(scores)]
    runs += [result("well_set", "off", seed, 0.8) for seed in range(5)]
    assert qt.rescued("aggressive", runs).passed is passed


def test_no_harm_is_paired_by_seed() -> None:
    off = {1: 0.7, 2: 0.8, 3: 0.9}
    runs = [result("well_set", "off", seed, score) for seed, score in off.items()]
    runs += [result("well_set", "act", seed, score - 0.01) for seed, score in off.items()]
    check = qt.no_harm([*runs, result("well_set", "act", 4, 0.0)])
    assert check.passed is True
    assert "-0.010" in check.figures and "3 seeds" in check.figures
    assert qt.no_harm([*runs, result("well_set", "act", 1, 0.5)]).passed is False


def test_without_runs_nothing_is_claimed() -> None:
    checks = qt.acceptance([result("timid", "act", 1, 0.9)])
    assert [check.passed for check in checks] == [None] * 5
    assert all(str(check).startswith("- **open**") for check in checks)


def test_table_has_a_row_per_arm_with_runs() -> None:
    runs = [
        result("timid", "act", 1, 0.7, reached=40, actions=6),
        result("timid", "act", 2, 0.8, reached=None, actions=7, exit_code=qt.STOPPED),
        result("well_set", "off", 1, 0.8),
    ]
    lines = qt.table(runs).splitlines()
    assert len(lines) == 4
    assert lines[3].split(" | ")[3] == "0.750 (0.700 to 0.800)"
    assert lines[3].endswith("| 40 (1 of 2) | 6.5 | 9.0 | 0.0 | 1 |")


def test_finished_runs_are_skipped_and_torn_lines_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    qt.append(path, result("timid", "off", 1, 0.3))
    with path.open("a") as stream:
        stream.write('{"recipe": "timid", "con')
    qt.append(path, result("timid", "off", 1, 0.4))
    assert [r.score for r in qt.load_results(path)] == [0.4]


def test_a_changed_recipe_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "timid.yaml"
    recipe.write_text("seed: 1\n")
    monkeypatch.setattr(qt, "recipe_file", lambda name: recipe)
    arms = [qt.Arm("timid", "off", 1), qt.Arm("timid", "off", 2)]
    done = [result("timid", "off", 1, 0.3, recipe_sha256=qt.sha256(recipe))]
    assert qt.pending(arms, done) == [arms[1]]
    recipe.write_text("seed: 2\n")
    assert qt.pending(arms, done) == arms


def test_a_failed_run_leaves_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command on a recipe that does not exist: exit code 2, and its output in the log."""
    monkeypatch.setattr(qt, "recipe_file", lambda name: tmp_path / "absent.yaml")
    failures = qt.run_all([qt.Arm("timid", "off", 1)], tmp_path, 1, [])
    assert len(failures) == 1 and "exit code 2" in failures[0]
    assert not (tmp_path / "results.jsonl").exists()
    assert "absent.yaml" in (tmp_path / "runs" / "timid-off-1.log").read_text()


def test_results_round_trip_as_json(tmp_path: Path) -> None:
    one = result("well_set", "documented", 5, 0.5, reached=None)
    qt.append(tmp_path / "results.jsonl", one)
    assert json.loads((tmp_path / "results.jsonl").read_text()) == asdict(one)
    assert qt.load_results(tmp_path / "results.jsonl") == [one]
