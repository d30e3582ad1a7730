"""A journal becomes plain series: equal to its lines, whatever state the run was left in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError, JournalError
from autotune.journal import Journal, read_journal
from autotune.report import read_run
from tests import journal_lines as j
from tests.report.made import make_run, write_lines


def test_series_equal_the_journal(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    lines = [ln for ln in read_journal(tmp_path / "run" / "journal.jsonl") if ln["type"] == "rollout"]
    assert run.rollouts == list(range(60))
    for name in ("reward_mean", "kl_ref", "kl_step", "entropy"):
        assert run.metrics[name] == [ln["snapshot"]["metrics"][name] for ln in lines]
    assert run.knobs["actor_learning_rate"] == [
        ln["snapshot"]["knobs"]["actor_learning_rate"] for ln in lines
    ]
    assert run.histograms == [ln["snapshot"]["histograms"].get("policy_ratio") for ln in lines]
    assert any(run.histograms)
    changes = [(ln["rollout"], c) for ln in lines for c in ln["decision"]["changes"] if c["kind"] != "revert"]
    made = [s for s in run.steps if s.what == "change"]
    assert len(made) == len(changes) > 2
    for step, (rollout, change) in zip(made, changes, strict=True):
        assert (step.rollout, step.rule, step.knob) == (rollout, change["rule"], change["knob"])
        assert (step.before, step.after) == (change["before"], change["after"])
        assert dict(step.evidence) == change["evidence"]
    judged = [s for s in made if s.verdict and not s.again]
    verdicts = [v for ln in lines for v in ln["decision"]["verdicts"]]
    assert len(judged) == len(verdicts) > 0
    assert {s.verdict_reason for s in judged} == {v["reason"] for v in verdicts}
    assert all(s.statistics in [v["statistics"] for v in verdicts] for s in judged)
    assert (run.status, run.planned, run.seed, run.mode) == ("done", 60, "1", "act")


def test_a_reading_that_was_no_number_stays_none_with_its_reason(tmp_path: Path) -> None:
    structural = {"clip_ratio": ["structural_zero", "one update"]}
    lines = [
        j.header(), j.rollout(0, invalid=structural), j.rollout(1, {"clip_ratio": 0.02}),
        j.rollout(2, {"clip_ratio": "nan"}, {"kl_coef": 0.005}),
        j.rollout(3, invalid={"kl_ref": ["not_logged", "no reference model"]}),
    ]  # fmt: skip
    run = read_run(write_lines(tmp_path / "run", lines))
    assert run.metrics["clip_ratio"] == [None, 0.02, None, None]
    assert run.faults["clip_ratio"] == (1, "structural zero: one update")
    assert run.absent == {"kl_ref": "not logged: no reference model"}


def test_an_adapter_s_journal_without_a_full_recipe(tmp_path: Path) -> None:
    """Another trainer's adapter knows a control section, few metrics and no histogram."""
    lines = [{**j.header(), "recipe": {"control": {"mode": "act"}}}]
    lines += [j.rollout(t, {"kl_ref": 0.01 * t}) for t in range(5)]
    for line in lines[1:]:
        del line["snapshot"]["histograms"], line["times"]
    run = read_run(write_lines(tmp_path / "grpo-7b", lines))
    assert (run.name, run.seed, run.planned) == ("grpo-7b", "", 0)
    assert run.histograms == [None] * 5
    assert run.times == {}
    assert "clip_ratio" not in run.metrics


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"mode": "off"}, True),
        ({"name": "other"}, False),
        ({"lr": 1e-5}, False),
        ({"loss": "bnpo"}, False),
    ],
)
def test_arms_of_another_trainer_are_the_same_experiment_by_name_and_start(
    tmp_path: Path, change: dict[str, Any], same: bool
) -> None:
    def arm(folder: str, mode: str = "act", name: str = "grpo", lr: float = 1e-6, loss: str = "grpo") -> str:
        recipe = {
            "name": name,
            "trainer": {"rollouts": 9, "kind": "trl", "loss_type": loss},
            "control": {"mode": mode},
        }
        header = {**j.header(), "recipe": recipe, "facts": {"knobs": {"actor_learning_rate": lr}}}
        return read_run(write_lines(tmp_path / folder, [header, j.rollout(0)])).base

    assert (arm("one") == arm("two", **change)) is same


def test_in_progress_only_while_somebody_writes(tmp_path: Path) -> None:
    folder = write_lines(tmp_path / "run", [j.header(), j.rollout(0), j.rollout(1)])
    with Journal(folder / "journal.jsonl", resume=True):
        assert read_run(folder).status == "running"
    left = read_run(folder)
    assert left.status == "broken off"
    assert f"autotune run --resume {folder}" in left.reason


def test_another_trainers_run_is_started_again_by_its_own_script(tmp_path: Path) -> None:
    recipe = {"name": "mine", "seed": 1, "trainer": {"rollouts": 9, "kind": "trl 1.16.0"}}
    folder = write_lines(tmp_path / "run", [{**j.header(), "recipe": recipe}, j.rollout(0)])
    reason = read_run(folder).reason
    assert "start trl 1.16.0 again" in reason and "--resume" not in reason


def test_of_a_resumed_run_the_last_line_per_rollout_wins(tmp_path: Path) -> None:
    lines = [j.header(), *(j.rollout(t, {"reward_mean": 0.1}) for t in range(6))]
    lines += [{"type": "resumed", "rollout": 3, "from": 3}]
    lines += [j.rollout(t, {"reward_mean": 0.9}) for t in range(3, 5)]
    run = read_run(write_lines(tmp_path / "run", lines))
    assert run.rollouts == [0, 1, 2, 3, 4]
    assert run.metrics["reward_mean"] == [0.1, 0.1, 0.1, 0.9, 0.9]
    assert any("resumed from rollout 3" in note for note in run.notes)


@pytest.mark.parametrize(
    ("status", "reason"), [("failed", "out of memory"), ("stopped", "collapse"), ("interrupted", "")]
)
def test_other_ends_are_told(tmp_path: Path, status: str, reason: str) -> None:
    end = {"type": "end", "rollout": 1, "status": status, "reason": reason}
    run = read_run(write_lines(tmp_path / "run", [j.header(), j.rollout(0), end]))
    assert (run.status, run.reason) == (status, reason)


def test_torn_and_altered_journals_are_shown_with_a_word(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "run", [j.header(), *(j.rollout(t) for t in range(4))]) / "journal.jsonl"
    whole = file.read_text()
    file.write_text(whole + '{"v": 1, "type": "roll')
    torn = read_run(file)
    assert len(torn.rollouts) == 4
    assert "torn last line" in " ".join(torn.notes)
    file.write_text(whole.replace('"reward_mean":0.21', '"reward_mean":0.99'))
    altered = read_run(file)
    assert altered.metrics["reward_mean"][1] == 0.99
    assert "cannot be trusted" in " ".join(altered.notes)


def test_broken_folders_name_the_next_move(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no .*expected the folder of a run"):
        read_run(tmp_path / "nothing")
    with pytest.raises(InputError, match=r"holds no journal\.jsonl.*runs/NAME-SEED"):
        read_run(tmp_path)
    header = write_lines(tmp_path / "early", [j.header()])
    with pytest.raises(InputError, match=r"no finished rollout yet.*autotune run --resume"):
        read_run(header)
    with (
        Journal(header / "journal.jsonl", resume=True),
        pytest.raises(InputError, match="wait for its first"),
    ):
        read_run(header)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "journal.jsonl").write_text("no json\n{}\n")
    with pytest.raises(JournalError, match="not a journal line"):
        read_run(tmp_path / "bad")
