"""`ControlLoop.on_rollout`: the order of things, and what happens when one of them fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from autotune.decisions import Applied, Change, Decision, Kind, Restore, State
from autotune.errors import ControlStop, JournalError
from autotune.hooks.loop import ControlLoop
from autotune.metrics import Snapshot
from autotune.testing import FakeTrainer
from autotune.testing.faults import RefusedKnob

LR = "actor_learning_rate"


class Log(list[str]):
    """What was called, in order."""


class Journal:
    def __init__(self, log: Log) -> None:
        self.log, self.lines = log, []

    def append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        self.log.append("journal")
        self.lines.append({"type": type, "rollout": rollout, **payload})
        return self.lines[-1]


class Script:
    """A controller that says what it was told to say."""

    def __init__(self, log: Log, decisions: Mapping[int, Decision], act: bool) -> None:
        self.log, self.decisions, self.act = log, decisions, act
        self.confirmed: list[tuple[list[Applied], int | None]] = []

    def step(self, snapshot: Snapshot) -> Decision:
        self.log.append("step")
        idle = Decision(snapshot.rollout, State.OBSERVE, epoch=0, act=self.act)
        return self.decisions.get(snapshot.rollout, idle)

    def confirm(self, applied: Sequence[Applied], restored: int | None) -> None:
        self.log.append("confirm")
        self.confirmed.append((list(applied), restored))


class Logged(FakeTrainer):
    """A fake trainer that notes what the loop asks of it."""

    log: Log

    def read(self, raw: Any, rollout: int) -> Snapshot:
        self.log.append("read")
        return super().read(raw, rollout)

    def apply(self, values: Mapping[str, float], epoch: int) -> list[Applied]:
        self.log.append("apply")
        return super().apply(values, epoch)

    def restore(self, restore: Restore) -> int:
        self.log.append("restore")
        return super().restore(restore)


def decide(rollout: int, value: float = 1e-4, **more: Any) -> Decision:
    """A decision to set the learning rate after `rollout`."""
    values = {LR: value}
    change = Change("X1", LR, 3e-4, value, "test", Kind.INTERVENTION, values)
    return Decision(rollout, State.SETTLE, epoch=1, changes=(change,), **more)


class Setup:
    """Trainer, scripted controller, journal and loop, sharing one log."""

    def __init__(self, *decisions: Decision, faults: Sequence[Any] = (), control: bool = True) -> None:
        self.log = Log()
        self.trainer = Logged({}, 1, 3, faults)
        self.trainer.log = self.log
        act = all(d.act for d in decisions)
        self.script = Script(self.log, {d.rollout: d for d in decisions}, act)
        self.journal = Journal(self.log)
        self.loop = ControlLoop(
            self.trainer,
            self.script if control else None,
            self.journal,
            [lambda line: self.log.append("observer")],
        )

    def go(self) -> None:
        self.trainer.run(self.loop.on_rollout)


UNDO = Restore("undo", 1, "test")


def test_the_order_is_read_decide_restore_apply_confirm_journal_observe() -> None:
    setup = Setup(decide(0, restore=Restore("undo", 0, "test")))
    setup.loop.on_rollout(setup.trainer.advance())
    expected = ["read", "step", "restore", "apply", "confirm", "journal", "observer"]
    assert setup.log == expected


def test_a_change_is_in_force_from_the_next_rollout_and_in_the_journal() -> None:
    setup = Setup(decide(0))
    setup.go()
    rates = [line["snapshot"]["knobs"][LR] for line in setup.journal.lines]
    assert rates == [3e-4, 1e-4, 1e-4]
    assert [line["snapshot"]["epoch"] for line in setup.journal.lines][:2] == [0, 1]
    (applied,) = setup.journal.lines[0]["applied"]
    assert applied["read_back"] == 1e-4 and applied["effective_from"] == 1
    assert setup.journal.lines[0]["decision"]["changes"][0]["rule"] == "X1"


def test_shadow_decides_and_journals_but_touches_nothing() -> None:
    setup = Setup(decide(0, act=False, restore=UNDO, stop="would stop"))
    setup.go()
    assert {"apply", "restore", "confirm"}.isdisjoint(setup.log)
    assert setup.trainer.knobs()[LR] == 3e-4
    assert setup.journal.lines[0]["decision"]["changes"][0]["after"] == 1e-4
    assert setup.journal.lines[0]["applied"] == []


def test_off_and_shadow_leave_the_same_weights() -> None:
    shadow, off = Setup(decide(0, act=False)), Setup(control=False)
    shadow.go()
    off.go()
    assert shadow.trainer.state == off.trainer.state


def test_off_still_reads_and_journals() -> None:
    setup = Setup(control=False)
    setup.go()
    assert [line["decision"] for line in setup.journal.lines] == [None] * 3
    assert setup.journal.lines[0]["snapshot"]["metrics"]["kl_step"] > 0


def test_a_restore_is_confirmed_and_journalled() -> None:
    setup = Setup(decide(1, restore=UNDO))
    setup.go()
    assert setup.journal.lines[1]["restored"] == 1
    assert setup.script.confirmed[1][1] == 1


def test_a_failed_restore_is_told_and_the_rate_still_falls() -> None:
    setup = Setup(decide(0, restore=Restore("checkpoint", -5, "test")))
    setup.go()
    assert "CheckpointError" in setup.journal.lines[0]["restore_error"]
    assert setup.script.confirmed[0][1] is None
    assert setup.trainer.knobs()[LR] == 1e-4


def test_a_refused_knob_reaches_the_controller_as_an_error() -> None:
    setup = Setup(decide(0), faults=[RefusedKnob(LR)])
    setup.go()
    ((item,), _) = setup.script.confirmed[0]
    assert not item.ok and item.read_back == 3e-4


def test_a_stop_is_journalled_before_it_is_raised() -> None:
    setup = Setup(decide(1, stop="the third collapse"))
    with pytest.raises(ControlStop, match="the third collapse"):
        setup.go()
    assert setup.journal.lines[-1]["decision"]["stop"] == "the third collapse"
    assert setup.log[-1] == "observer"


def test_a_broken_observer_is_counted_and_the_run_goes_on() -> None:
    setup, seen = Setup(), []

    def broken(line: dict[str, Any]) -> None:
        raise OSError("the terminal is gone")

    setup.loop.observers = (broken, seen.append)
    setup.go()
    assert setup.loop.observer_failures == 3
    assert setup.loop.last_observer_error == "OSError: the terminal is gone"
    assert [line["rollout"] for line in seen] == [0, 1, 2]


def test_a_journal_that_cannot_be_written_ends_the_run() -> None:
    setup = Setup()

    def full(*args: Any) -> dict[str, Any]:
        raise JournalError("no space left")

    setup.journal.append = full  # type: ignore[method-assign]
    with pytest.raises(JournalError):
        setup.go()


def test_time_is_measured_inside() -> None:
    setup = Setup()
    setup.go()
    assert len(setup.loop.hook_seconds) == 3
    for line, total in zip(setup.journal.lines, setup.loop.hook_seconds, strict=True):
        assert 0 < line["times"]["hook"] < total < 1
        assert line["times"]["rollout"] > 0, "the trainer's own phases are there too"


def test_ranks_that_disagree_get_the_previous_vector_back() -> None:
    setup = Setup(decide(0))
    setup.trainer.agree = lambda digest: False  # type: ignore[method-assign]
    setup.go()
    assert setup.trainer.knobs()[LR] == 3e-4
    ((item,), _) = setup.script.confirmed[0]
    assert not item.ok and item.read_back == 3e-4 and "ranks" in item.error


def test_another_ranks_decision_is_acted_on_without_a_controller() -> None:
    """Rank 0 decides; every other rank has no controller and receives the decision."""
    setup = Setup(control=False)
    setup.trainer.broadcast = lambda decision: decide(0)  # type: ignore[method-assign]
    setup.loop.on_rollout(setup.trainer.advance())
    assert setup.trainer.knobs()[LR] == 1e-4


def test_an_index_of_its_own_wins_over_the_loops_count() -> None:
    setup = Setup()
    setup.trainer.rollout = 5  # a resumed run
    setup.loop.on_rollout(setup.trainer.advance())
    assert setup.journal.lines[0]["rollout"] == 5
