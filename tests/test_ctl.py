"""A human's hand on a live run: files, outcomes, and a controller that goes on without a jump."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autotune.ctl as ctl_module
from autotune.cli import app
from autotune.commands import Inbox, drop, parse, wanted_values
from autotune.controller import Controller, ControlSettings
from autotune.ctl import command, status
from autotune.decisions import Applied, Decision, to_json
from autotune.errors import InputError
from autotune.hooks.loop import ControlLoop
from autotune.journal import Journal, inspect_journal, read_journal
from autotune.ledger import Ledger
from autotune.recipe import load_recipe
from autotune.replay import replay
from autotune.testing import FakeTrainer
from autotune.testing.faults import Collapse, DeadKnob, Fault

RATE, COEF, MINI = "actor_learning_rate", "kl_coef", "ppo_mini_batch_size"
BOLD = {RATE: 2e-3, MINI: 4}
TIMID = {RATE: 3e-5}


class Run:
    """A run of the plant with a journal, an inbox and a controller."""

    def __init__(
        self,
        folder: Path,
        knobs: dict[str, float] | None = None,
        *,
        faults: tuple[Fault, ...] = (),
        rollouts: int = 40,
        **control: Any,
    ) -> None:
        self.folder = folder
        (folder / "r.yaml").write_text(json.dumps({"control": control, "trainer": {"rollouts": rollouts}}))
        recipe = load_recipe(folder / "r.yaml")
        self.trainer = FakeTrainer(knobs or TIMID, seed=4, rollouts=rollouts, faults=faults)
        settings = ControlSettings(**recipe.control.model_dump())
        off = settings.mode == "off"
        self.controller = None if off else Controller(settings, self.trainer.facts())
        self.journal = Journal(folder / "journal.jsonl")
        self.journal.append(
            "header", -1, {"recipe": recipe.model_dump(mode="json"), "facts": to_json(self.trainer.facts())}
        )
        self.loop = ControlLoop(self.trainer, self.controller, self.journal, inbox=Inbox(folder))

    def go(self, rollouts: int) -> list[Decision]:
        decisions = [self.loop.on_rollout(self.trainer.advance()) for _ in range(rollouts)]
        return [d for d in decisions if d is not None]

    @property
    def ledger(self) -> Ledger:
        assert self.controller is not None
        return self.controller.ledger

    def lines(self, type: str) -> list[dict[str, Any]]:
        return [line for line in read_journal(self.journal.path) if line["type"] == type]

    def outcome(self) -> dict[str, Any]:
        return self.lines("command")[-1]


class NoJournal:
    def append(self, type: str, rollout: int, payload: Any) -> dict[str, Any]:
        return {}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*args: Any, **options: Any) -> Run:
        made.append(Run(tmp_path, *args, **options))
        return made[-1]

    yield make
    for run in made:
        run.journal.close()


# ----------------------------------------------------------------------------------------- setting


def test_a_value_set_by_hand_is_in_force_read_back_and_no_other_writer(make: Callable[..., Run]) -> None:
    run = make(policies={"X1": "off", "B3c": "off"})
    run.go(3)
    epoch = run.controller.epoch
    drop(run.folder, "set", values={COEF: 0.02, RATE: 1e-4})
    before = run.go(1)[0]
    line = run.outcome()
    assert (line["outcome"], line["rollout"], line["epoch"]) == ("done", 4, epoch + 1)
    assert {a["knob"]: (a["read_back"], a["effective_from"]) for a in line["applied"]} == {
        COEF: (0.02, 4), RATE: (1e-4, 4),
    }  # fmt: skip
    decisions = run.go(6)
    rollouts = run.lines("rollout")
    assert [r["snapshot"]["knobs"][COEF] for r in rollouts[:6]] == [0.005] * 4 + [0.02] * 2
    assert rollouts[3]["snapshot"]["epoch"] == before.epoch == epoch
    assert rollouts[4]["snapshot"]["epoch"] == epoch + 1
    assert not any("another writer" in alarm for d in decisions for alarm in d.alarms)
    assert not run.ledger.contested and not list((run.folder / "commands").iterdir())


def test_what_was_being_judged_ends_inconclusive(make: Callable[..., Run]) -> None:
    run = make({RATE: 3e-4, MINI: 4}, policies={"X1": "off"})
    while run.ledger.probation is None:
        run.go(1)
    flying = run.ledger.probation
    drop(run.folder, "set", values={flying.knob: flying.before[flying.knob]})
    run.go(1)
    assert run.ledger.probation is None or run.ledger.probation.since > flying.since
    decision = run.go(1)[0]
    verdict = next(v for v in decision.verdicts if v.since_rollout == flying.since)
    assert (verdict.knob, verdict.outcome) == (flying.knob, "inconclusive") and "by hand" in verdict.reason
    assert run.ledger.cooldown_until > decision.rollout, "the controller lets a hand's change settle"


def test_a_regulator_starts_again_from_the_value_that_was_set(make: Callable[..., Run]) -> None:
    run = make(TIMID)
    while "X1" not in run.ledger.engagements:
        run.go(1)
    drop(run.folder, "set", values={RATE: 6e-5})
    run.go(1)
    assert "X1" not in run.ledger.engagements and "X1" not in run.ledger.anchors
    decisions = run.go(12)
    first = next(d for d in decisions if any(c.knob == RATE for c in d.changes))
    assert first.changes[0].before == 6e-5, "from the value in force, not from what it had in mind"
    window = run.controller.pace.window
    assert decisions.index(first) == window, "the hand's value is looked at for a whole window first"
    assert {v.guard for d in decisions[:window] for v in d.vetoes} == {"left_to_the_hand"}


REFUSED = (
    ({COEF: 5.0}, "expected 1e-05 to 2"),
    ({MINI: 17}, "does not divide train_batch_size 64"),
    ({"ppo_epochs": 1.5}, "expected a whole number"),
    ({"critic_learning_rate": 1e-4}, "has no critic"),
    ({"num_rollout_batches": 7}, "does not divide"),
    ({COEF: 0.02, MINI: 65}, "is more than train_batch_size"),
)


@pytest.mark.parametrize(("values", "reason"), REFUSED)
def test_an_illegal_value_is_refused_and_nothing_moves(
    make: Callable[..., Run], values: dict[str, float], reason: str
) -> None:
    run = make(policies={"X1": "off"})
    run.go(1)
    vector, epoch = run.trainer.knobs(), run.trainer.live.epoch
    drop(run.folder, "set", values=values)
    run.go(1)
    assert run.outcome()["outcome"] == "refused" and reason in run.outcome()["reason"]
    assert run.trainer.knobs() == vector and run.trainer.live.epoch == epoch == run.controller.epoch


def test_a_trainer_that_does_not_obey_is_a_refusal_too(make: Callable[..., Run]) -> None:
    run = make(faults=(DeadKnob(COEF),), policies={"X1": "off"})
    run.go(1)
    drop(run.folder, "set", values={COEF: 0.02})
    run.go(1)
    assert run.outcome()["outcome"] == "refused" and "reads back 0.005" in run.outcome()["reason"]
    assert run.trainer.live.epoch == run.controller.epoch == 0


def test_several_batch_sizes_are_one_transaction_with_what_follows(make: Callable[..., Run]) -> None:
    run = make({MINI: 64}, policies={"X1": "off"})
    run.go(1)
    drop(run.folder, "set", values={"train_batch_size": 32, MINI: 32})
    run.go(2)
    assert run.outcome()["outcome"] == "done", run.outcome()["reason"]
    knobs = run.lines("rollout")[-1]["snapshot"]["knobs"]
    assert (knobs["train_batch_size"], knobs[MINI]) == (32, 32)
    assert knobs["rollout_micro_batch_size"] * knobs["num_rollout_batches"] == 32 * knobs["rollout_n"]


def test_the_alias_sets_both_sides(make: Callable[..., Run]) -> None:
    run = make()
    knobs = run.trainer.knobs()
    assert wanted_values({"clip_range": 0.1}, knobs, run.trainer.facts()) == {
        "clip_range_low": 0.1, "clip_range_high": 0.1,
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["shadow", "off"])
def test_a_hand_acts_where_the_controller_does_not(make: Callable[..., Run], mode: str) -> None:
    run = make(TIMID, mode=mode)
    run.go(2)
    drop(run.folder, "set", values={RATE: 2e-4})
    run.go(8)
    line, rollouts = run.outcome(), run.lines("rollout")
    assert line["outcome"] == "done" and rollouts[-1]["snapshot"]["knobs"][RATE] == 2e-4
    assert rollouts[-1]["snapshot"]["epoch"] == 1
    assert not any("another writer" in a for r in rollouts for a in (r["decision"] or {}).get("alarms", ()))


# --------------------------------------------------------------------------- pausing and pinning


def test_a_paused_controller_observes_and_moves_nothing(make: Callable[..., Run]) -> None:
    run = make(BOLD, faults=(Collapse(at=12),))
    drop(run.folder, "pause")
    decisions = run.go(24)
    assert {d.state for d in decisions} == {"paused"}
    assert not any(d.changes or d.restore or d.stop for d in decisions)
    assert any("nothing is done about it" in a for d in decisions for a in d.alarms), "it still sees"
    assert {v.guard for d in decisions for v in d.vetoes} >= {"not_paused"}
    assert run.trainer.knobs()[RATE] == BOLD[RATE]


def test_a_pause_holds_from_the_very_decision_and_a_resume_waits(make: Callable[..., Run]) -> None:
    """A run that is not paused acts at rollout t; this one is paused just before that decision."""
    free = FakeTrainer(BOLD, seed=4, rollouts=40)
    loop = ControlLoop(free, Controller(ControlSettings(), free.facts()), NoJournal())
    t = next(t for t in range(40) if loop.on_rollout(free.advance()).changes)
    run = make(BOLD)
    run.go(t)
    drop(run.folder, "pause")
    assert not run.go(1)[0].changes
    run.go(10)
    drop(run.folder, "resume")
    assert run.go(1)[0].state == "paused", "a resume takes hold after the decision"
    window = run.controller.pace.window
    quiet = run.go(window)
    assert not [c for d in quiet for c in d.changes], "windows fill again first"
    assert run.go(1)[0].changes
    assert run.lines("command")[-1]["epoch"] == run.lines("command")[0]["epoch"] + 1


def test_a_resume_thaws_a_frozen_controller_and_it_stays_thawed(make: Callable[..., Run]) -> None:
    run = make(TIMID)
    run.go(1)
    run.ledger.reverts = [0, 0, 0]
    assert run.go(2)[-1].state == "frozen"
    drop(run.folder, "resume")
    run.go(1)
    assert "no longer frozen: 3 reverts within 200 rollouts" in run.outcome()["reason"]
    later = run.go(run.controller.pace.window + 6)
    assert "frozen" not in {d.state for d in later} and any(d.changes for d in later)


def test_status_says_how_a_frozen_run_is_thawed(make: Callable[..., Run]) -> None:
    run = make(TIMID)
    run.go(3)
    run.ledger.reverts = [0, 1, 2]
    run.go(2)
    told = CliRunner().invoke(app, ["ctl", str(run.folder), "status"]).output
    assert "frozen, emergencies are not; `autotune ctl RUN resume` thaws it" in told


def test_a_pause_lets_go_of_what_is_in_flight(make: Callable[..., Run]) -> None:
    run = make({RATE: 3e-4, MINI: 4}, policies={"X1": "off"})
    while run.ledger.probation is None:
        run.go(1)
    drop(run.folder, "pause")
    decision = run.go(1)[0]
    assert [v.outcome for v in decision.verdicts] == ["inconclusive"] and not decision.changes
    assert run.ledger.probation is None


def test_pins_at_run_time(make: Callable[..., Run]) -> None:
    run = make(TIMID, pin=["kl_coef"])
    drop(run.folder, "pin", knobs=[RATE])
    decisions = run.go(15)
    assert not [c for d in decisions for c in d.changes if RATE in c.values]
    assert any(v.guard == "knob_pinned" and v.proposal.knob == RATE for d in decisions for v in d.vetoes)
    assert run.outcome()["pinned"] == [RATE, COEF]
    drop(run.folder, "unpin", knobs=[RATE, COEF])
    decisions = run.go(10)
    assert run.outcome()["pinned"] == [] and [c for d in decisions for c in d.changes if c.knob == RATE]


def test_a_pinned_knob_that_is_being_judged_stays(make: Callable[..., Run]) -> None:
    run = make({RATE: 3e-4, MINI: 4}, policies={"X1": "off"})
    while run.ledger.probation is None:
        run.go(1)
    knob = run.ledger.probation.knob
    drop(run.folder, "pin", knobs=[knob])
    assert [v.outcome for v in run.go(1)[0].verdicts] == ["inconclusive"] and run.ledger.probation is None


@pytest.mark.parametrize("action", ["pause", "resume", "pin", "unpin"])
def test_without_a_controller_there_is_nothing_to_pause(make: Callable[..., Run], action: str) -> None:
    run = make(mode="off")
    drop(run.folder, action, knobs=[COEF] if "pin" in action else [])
    run.go(1)
    assert run.outcome()["outcome"] == "refused" and "has no controller" in run.outcome()["reason"]


def test_state_survives_a_controllers_own_checkpoint(make: Callable[..., Run]) -> None:
    run = make(pin=["temperature"])
    drop(run.folder, "pause")
    drop(run.folder, "pin", knobs=["clip_range"])
    run.go(2)
    state = json.loads(json.dumps(run.controller.state_dict()))
    again = Controller(run.controller.settings, run.trainer.facts())
    again.load_state_dict(state)
    assert again.hand_state() == run.controller.hand_state() == {
        "paused": True, "pinned": ["clip_range_high", "clip_range_low", "temperature"],
    }  # fmt: skip
    del state["ledger"]["pinned"], state["ledger"]["paused"], state["ledger"]["closed"]
    again.load_state_dict(state)
    assert again.hand_state() == {"paused": False, "pinned": ["temperature"]}, "an older checkpoint"


# ------------------------------------------------------------------------------------------ files


def test_commands_are_obeyed_in_order(make: Callable[..., Run]) -> None:
    run = make()
    for value in (0.01, 0.02, 0.03):
        drop(run.folder, "set", values={COEF: value})
    drop(run.folder, "resume")
    drop(run.folder, "pause")
    run.go(1)
    told = [(ln["command"], *ln["values"].values()) for ln in run.lines("command")]
    assert told == [("set", 0.01), ("set", 0.02), ("set", 0.03), ("resume",), ("pause",)]
    assert run.trainer.knobs()[COEF] == 0.03 and run.ledger.paused


def test_half_a_file_waits_one_boundary_and_is_then_refused(make: Callable[..., Run]) -> None:
    run = make()
    folder = run.folder / "commands"
    folder.mkdir()
    (folder / ".hidden.json").write_text("{")
    (folder / "growing.json").write_text('{"command": "pau')
    (folder / "broken.json").write_text("{")
    (folder / "folder.json").mkdir()
    run.go(1)
    assert run.lines("command") == []
    (folder / "growing.json").write_text('{"command": "pause"}')
    run.go(3)
    outcomes = {line["id"]: (line["outcome"], line["reason"][:19]) for line in run.lines("command")}
    assert outcomes["growing"][0] == "done" and run.ledger.paused
    assert outcomes["broken"] == outcomes["folder"] == ("refused", "the file is no JSON")
    assert len(run.lines("command")) == 3, "each is told once, though a folder cannot be removed"


STRANGE = (
    [], "pause", {"command": "stop"}, {"command": "set"}, {"command": "set", "values": {COEF: "a lot"}},
    {"command": "set", "values": {COEF: True}}, {"command": "set", "values": {"kl": 1}},
    {"command": "pin"}, {"command": "pin", "knobs": [["x"]]}, {"command": "pause", "knobs": [COEF]},
    {"command": "set", "values": {COEF: 1e999}}, {"command": "pin", "knobs": "kl_coef"}, None,
)  # fmt: skip


@pytest.mark.parametrize("data", STRANGE, ids=str)
def test_strange_commands_are_refused_with_what_was_expected(make: Callable[..., Run], data: Any) -> None:
    with pytest.raises(InputError, match="expected"):
        parse("x", data)
    run = make()
    (run.folder / "commands").mkdir()
    (run.folder / "commands" / "x.json").write_text(json.dumps(data))
    run.go(1)
    assert run.outcome()["outcome"] == "refused" and "expected" in run.outcome()["reason"]


def test_a_file_whose_line_is_written_is_not_obeyed_again(tmp_path: Path) -> None:
    """A kill between the line and the removal of the file."""
    file = drop(tmp_path, "pause")
    told = {"type": "command", "id": file.stem, "command": "pause", "rollout": 5}
    inbox = Inbox(tmp_path, [told], start=5)
    assert inbox.take(6) == [] and not file.exists()


def test_a_command_behind_the_checkpoint_is_obeyed_again_in_its_place(tmp_path: Path) -> None:
    file = drop(tmp_path, "pause")
    told = {"type": "command", "id": file.stem, "command": "pause", "rollout": 7}
    inbox = Inbox(tmp_path, [told], start=5)
    assert inbox.take(6) == []
    assert [c.command for c in inbox.take(7)] == ["pause"] and inbox.take(8) == []


def test_without_commands_a_boundary_costs_a_look(tmp_path: Path) -> None:
    inbox = Inbox(tmp_path)
    started = time.perf_counter()
    assert all(inbox.take(t) == [] for t in range(1000))
    assert time.perf_counter() - started < 0.5, "below 0.5 ms each, on a busy machine"
    assert not (tmp_path / "commands").exists()


# ------------------------------------------------------------------------------------- replaying


def test_a_journal_with_commands_replays_bit_for_bit(make: Callable[..., Run]) -> None:
    run = make(BOLD, rollouts=60)
    script: dict[int, tuple[str, list[str], dict[str, float]]] = {
        4: ("set", [], {COEF: 0.03}), 6: ("pause", [], {}), 9: ("set", [], {RATE: 1e-3}),
        12: ("resume", [], {}), 20: ("pin", [RATE], {}), 22: ("set", [], {MINI: 17}),
        30: ("unpin", [RATE], {}), 33: ("set", [], {RATE: 4e-5}),
    }  # fmt: skip
    for t in range(60):
        if t in script:
            name, knobs, values = script[t]
            drop(run.folder, name, knobs, values)
        run.go(1)
    assert [ln["outcome"] for ln in run.lines("command")].count("refused") == 1
    result = replay(run.journal.path)
    assert result.equal and len(result.pairs) == 60, result.first_difference
    assert sum(bool(p.recomputed["changes"]) for p in result.pairs) >= 2


def test_a_set_that_is_not_replayed_would_be_noticed(make: Callable[..., Run], monkeypatch: Any) -> None:
    """The test above is worth something: without the command lines the decisions differ."""
    run = make(TIMID, rollouts=30)
    run.go(8)
    drop(run.folder, "set", values={RATE: 1e-4})
    run.go(22)
    assert replay(run.journal.path).equal
    monkeypatch.setattr(Controller, "obey", lambda *a: "")
    assert not replay(run.journal.path).equal


# ----------------------------------------------------------------------------- several ranks


def test_on_several_ranks_rank_0s_value_goes_through_the_broadcast(make: Callable[..., Run]) -> None:
    run = make(policies={"X1": "off"})
    shared: list[Any] = []

    def broadcast(decision: Decision | None) -> Decision | None:
        shared.append(decision)
        return decision

    hand = run.loop._hand
    hand.facts = dataclasses.replace(hand.facts, world_size=2)
    run.trainer.broadcast = broadcast  # type: ignore[method-assign]
    run.go(1)
    assert shared[-1] is None and len(shared) == 2, "the decision, and that there is no command"
    drop(run.folder, "set", values={COEF: 0.02})
    run.go(1)
    assert shared[-2].values == {COEF: 0.02} and shared[-1] is None


# ------------------------------------------------------------------------------- the command line


def cli(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["ctl", *arguments])


def while_running(run: Run, act: Callable[[], Any]) -> Any:
    """`act` in this thread while the run's loop goes on in another."""
    over = threading.Event()

    def loop() -> None:
        while not over.is_set():
            run.go(1)
            time.sleep(0.01)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        return act()
    finally:
        over.set()
        thread.join()


def test_the_command_waits_for_the_outcome(make: Callable[..., Run], monkeypatch: Any) -> None:
    monkeypatch.setattr(ctl_module, "POLL_SECONDS", 0.01)
    run = make(policies={"X1": "off"}, rollouts=10_000)
    run.go(1)
    folder = str(run.folder)
    done = while_running(run, lambda: cli(folder, "set", f"{COEF}=0.02"))
    assert done.exit_code == 0 and f"set: {COEF} = 0.02" in done.output
    refused = while_running(run, lambda: cli(folder, "set", f"{MINI}=17"))
    assert refused.exit_code == 1 and "refused: 17 prompts does not divide" in refused.output
    as_json = while_running(run, lambda: cli(folder, "pin", COEF, "--json"))
    assert json.loads(as_json.output)["line"]["pinned"] == [COEF]
    shown = cli(folder, "status")
    assert shown.exit_code == 0 and "running" in shown.output and "pinned: kl_coef" in shown.output


def test_a_run_that_does_not_answer(make: Callable[..., Run], monkeypatch: Any) -> None:
    run = make()
    run.go(1)
    late = command(run.folder, "pause", [], timeout=0.05)
    assert late.line is None and "not obeyed within" in late.message
    assert "left for the run" in command(run.folder, "resume", [], timeout=0).message
    assert cli(str(run.folder), "pause", "--timeout", "0.05").exit_code == 1

    real = ctl_module.drop

    def drop_and_end(*arguments: Any) -> Path:
        file = real(*arguments)
        run.journal.append("end", 1, {"status": "done"})
        return file

    monkeypatch.setattr(ctl_module, "drop", drop_and_end)
    before = len(list((run.folder / "commands").iterdir()))
    ended = command(run.folder, "pause", [], timeout=5)
    assert "ended (done) before it obeyed; the command was withdrawn" in ended.message
    assert len(list((run.folder / "commands").iterdir())) == before


def test_a_run_that_nobody_runs(make: Callable[..., Run]) -> None:
    run = make()
    run.go(1)
    run.journal.close()
    told = cli(str(run.folder), "status").output
    assert "broken off" in told and f"autotune run --resume {run.folder}" in " ".join(told.split())
    killed = cli(str(run.folder), "pause")
    assert killed.exit_code == 2 and "is not being run by any process" in killed.output
    with Journal(run.journal.path, resume=True) as journal:
        journal.append("end", 1, {"status": "done"})
    assert "has ended (done)" in cli(str(run.folder), "pause").output
    assert not (run.folder / "commands").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["set", "kl_coef"], "expected KNOB=VALUE"),
        (["set", "kl_coef=much"], "expected a number"),
        (["set", "kl=0.1"], "kl is no knob"),
        (["pin"], "knobs for pin"),
        (["pause", "kl_coef"], "nothing for pause"),
        (["dance"], "dance"),
    ],
)
def test_a_wrong_command_is_said_before_anything_is_written(
    make: Callable[..., Run], arguments: list[str], words: str
) -> None:
    run = make()
    result = cli(str(run.folder), *arguments)
    assert result.exit_code == 2 and words in result.output
    assert not (run.folder / "commands").exists()


def test_status_of_a_finished_run_reads_only_the_journal(make: Callable[..., Run]) -> None:
    run = make(BOLD, pin=["temperature"])
    run.go(10)
    drop(run.folder, "set", values={COEF: 0.02})
    drop(run.folder, "pause")
    run.go(3)
    run.journal.append("end", 13, {"status": "interrupted", "reason": ""})
    for path in run.folder.iterdir():
        if path.name != "journal.jsonl":
            path.unlink() if path.is_file() else path.rmdir()
    found = status(run.folder)
    assert (found.state, found.rollout, found.paused) == ("interrupted", 13, True)
    assert found.pinned == ["temperature"]
    assert (found.knobs[COEF].start, found.knobs[COEF].now) == (0.005, 0.02)
    assert found.knobs["temperature"].pinned and found.controller == "paused"
    assert found.decisions and found.alarms and len(found.commands) == 2
    assert json.loads(cli(str(run.folder), "status", "--json").output)["knobs"][COEF]["now"] == 0.02
    assert "last decisions" in cli(str(run.folder), "status").output


def test_status_forgets_commands_that_a_resume_went_back_behind(make: Callable[..., Run]) -> None:
    run = make()
    run.go(4)
    drop(run.folder, "pause")
    run.go(2)
    assert status(run.folder).state == "paused"
    run.journal.append("resumed", 3, {"from": 3})
    found = status(run.folder)
    assert found.state == "running" and found.commands == []


def test_no_run_there(tmp_path: Path) -> None:
    assert cli(str(tmp_path), "status").exit_code == 1
    assert "cannot be read" in cli(str(tmp_path), "pause").output


def test_the_read_back_is_what_the_controller_expects(make: Callable[..., Run]) -> None:
    run = make()
    run.go(2)
    parsed = parse("x", {"command": "set", "values": {COEF: 0.02}})
    words = run.controller.obey(parsed, [Applied(COEF, 0.02, 0.02, 2)])
    assert run.ledger.expected[COEF] == 0.02 and words == "set: kl_coef = 0.02"
    assert inspect_journal(run.journal.path).altered == ""
