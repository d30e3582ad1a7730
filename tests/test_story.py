"""The story of a journal: rows, events, acts with their verdicts."""

from __future__ import annotations

import pytest

from autotune.story import Story, What, acts_of
from tests import journal_lines as j


def told(*lines: j.Line) -> Story:
    story = Story()
    for line in lines:
        story.add(line)
    return story


def test_read_back_values_are_the_knobs_of_the_next_rollout() -> None:
    line = j.rollout(0, changes=[j.change("X1", "actor_learning_rate", 3e-5, 1.2e-4)])
    line["applied"][0]["read_back"] = 1.1e-4
    story = told(line)
    assert story.start_knobs["actor_learning_rate"] == 3e-5
    assert story.knobs["actor_learning_rate"] == 1.1e-4
    (event,) = story.events()
    assert event.what is What.REFUSED
    assert "asked 0.00012" in event.reason


def test_last_line_of_a_rollout_wins_with_its_events() -> None:
    first = j.rollout(1, {"reward_mean": 0.1}, changes=[j.change("A4", "ppo_mini_batch_size", 16, 32)])
    story = told(j.rollout(0), first, {"type": "resumed", "rollout": 1, "from": 1}, j.rollout(1))
    assert story.series("reward_mean") == [0.2, pytest.approx(0.21)]
    assert story.events() == []
    assert story.resumed == [1]


def test_invalid_readings_leave_a_gap_and_keep_their_reason() -> None:
    state = ["structural_zero", "one update per rollout"]
    story = told(j.rollout(0, {"clip_ratio": 0.02}), j.rollout(1, invalid={"clip_ratio": state}))
    assert story.series("clip_ratio") == [0.02, None]
    assert story.last is not None
    assert story.last.invalid["clip_ratio"] == tuple(state)


def test_moves_of_a_regulator_are_one_act_until_it_is_judged() -> None:
    lr = "actor_learning_rate"
    story = told(
        j.rollout(3, changes=[j.change("X1", lr, 1.0, 2.0, "regulator")]),
        j.rollout(5, changes=[j.change("X1", lr, 2.0, 4.0, "regulator")]),
        j.rollout(6, verdicts=[j.verdict("X1", lr, "kept", 3)]),
        j.rollout(9, changes=[j.change("X1", lr, 4.0, 3.0, "regulator")]),
    )
    first, second = acts_of(story.events())
    assert (first.first, first.last, first.moves, first.event.before, first.after) == (3, 5, 2, 1.0, 4.0)
    assert first.verdict == "kept"
    assert (second.first, second.moves, second.verdict) == (9, 1, "")


def test_interventions_stay_apart_and_each_gets_its_own_verdict() -> None:
    knob = "ppo_mini_batch_size"
    story = told(
        j.rollout(1, changes=[j.change("A4", knob, 16, 32)]),
        j.rollout(4, verdicts=[j.verdict("A4", knob, "reverted", 1)], changes=[j.change("A4", knob, 32, 16)]),
        j.rollout(8, changes=[j.change("A4", knob, 16, 32)]),
    )
    assert [(a.first, a.verdict) for a in acts_of(story.events())] == [(1, "reverted"), (8, "")]
    (judged,) = (e for e in story.events() if e.outcome)
    assert (judged.before, judged.after) == (32, 16)


def test_shadow_changes_are_told_as_would_be() -> None:
    story = told(j.rollout(0, act=False, changes=[j.change("X1", "kl_coef", 0.1, 0.2)]))
    assert [e.what for e in story.events()] == [What.WOULD]
    assert story.knobs["kl_coef"] == j.KNOBS["kl_coef"]


def test_restore_says_whose_weights_are_back() -> None:
    line = j.rollout(4, restore={"kind": "undo", "before_rollout": 4, "reason": "kl_step 0.9 above 0.3"})
    line["restored"] = 4
    (event,) = told(line).events()
    assert event.what is What.RESTORE
    assert event.reason == "weights of rollout 4 are back: kl_step 0.9 above 0.3"


def test_unknown_lines_are_passed_over_and_a_run_without_controller_has_no_state() -> None:
    story = told({"type": "from-the-future"}, j.rollout(0, controlled=False))
    assert story.last is not None
    assert story.last.state == ""
    assert story.counts() == {}


def test_silence_ends_with_an_empty_reason_or_with_speaking() -> None:
    story = told(
        j.rollout(0, silent={"A3": "no ratio", "B4a": "no ratio", "B5b": "no critic"}),
        j.rollout(1, silent={"B4a": ""}, changes=[j.change("A3", "ppo_epochs", 1, 2)]),
    )
    assert story.silent() == {"B5b": "no critic"}
