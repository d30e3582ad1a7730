"""A killed and resumed run decides what an uninterrupted one decides, at every point of killing.

The plant, the loop, a journal on disk and checkpoints as JSON stand in for a run: everything that
`run.py` puts back after a kill is put back here, and nothing else survives. A kill comes between two
statements of the loop: before the record is read, between decision and journal, between journal and a
human's command, while the file of a command is removed, before or after the checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autotune.commands import Inbox
from autotune.controller import Controller, ControlSettings
from autotune.decisions import Command, to_json
from autotune.errors import ControlStop
from autotune.hooks.loop import ControlLoop
from autotune.journal import Journal, comparable, inspect_journal, read_journal, winning_lines
from autotune.recipe import Recipe
from autotune.replay import replay
from autotune.testing import FakeTrainer
from autotune.testing.faults import Collapse, DeadKnob, Fault, Lying, Missing, NonFinite, outlier
from autotune.testing.plant import State

RATE, COEF, MINI = "actor_learning_rate", "kl_coef", "ppo_mini_batch_size"
ROLLOUTS = 30
PHASES = ("read", "decided", "journalled", "obeyed", "saving", "saved")

FAULTS: dict[str, tuple[Any, ...]] = {
    "none": (),
    "collapse": (lambda: Collapse(at=9),),
    "frozen": (lambda: Lying("entropy", at=5, lie=lambda value: 0.4),),
    "not finite": (lambda: NonFinite("kl_step", at=8, count=2),),
    "gaps": (lambda: Missing("reward_mean", at=6, count=3), lambda: outlier("kl_ref", at=14)),
    "dead knob": (lambda: DeadKnob(RATE),),
}
STARTS = {
    "timid": {RATE: 3e-5, MINI: 64},
    "bold": {RATE: 2e-3, MINI: 4},
    "many updates": {RATE: 3e-4, MINI: 4},
    "no reference": {RATE: 1e-3, COEF: 0.0},
}
SCRIPT: dict[int, tuple[str, list[str], dict[str, float]]] = {
    3: ("pin", [COEF], {}),
    6: ("set", [], {RATE: 2e-4}),
    7: ("set", [], {MINI: 17}),
    10: ("pause", [], {}),
    13: ("resume", [], {}),
    17: ("unpin", [COEF], {}),
    18: ("set", [], {RATE: 5e-5}),
}


class Killed(BaseException):
    """kill -9: nobody cleans up."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One simulated run."""

    start: str = "bold"
    faults: str = "none"
    seed: int = 5
    every: int = 5
    """Rollouts between checkpoints."""
    profile: str = "recommended"
    mode: str = "act"
    script: tuple[int, ...] = ()
    """Rollouts at whose end the human's commands of `SCRIPT` wait."""


class Process:
    """One life of the run's process: built from the disk, killed at a point or at its end."""

    def __init__(self, folder: Path, plan: Plan, kill: tuple[int, str] | None) -> None:
        self.folder, self.plan, self.kill = folder, plan, kill
        faults: tuple[Fault, ...] = tuple(make() for make in FAULTS[plan.faults])
        self.trainer = FakeTrainer(
            STARTS[plan.start], seed=plan.seed, rollouts=ROLLOUTS, faults=faults, checkpoint_every=plan.every
        )
        control = {"mode": plan.mode, "profile": plan.profile}
        self.recipe = Recipe.model_validate({"control": control})
        settings = ControlSettings(**self.recipe.control.model_dump())
        self.controller = Controller(settings, self.trainer.facts())
        path = folder / "journal.jsonl"
        self.journal = Points(path, path.exists(), self)
        self._load()

    # ---- the disk --------------------------------------------------------------------------------

    @property
    def saves(self) -> Path:
        return self.folder / "checkpoint.json"

    def _load(self) -> None:
        """What `run.py` does: trainer, adapter and controller from the checkpoint, then the lines."""
        self._take_back(inspect_journal(self.journal.path).lines)
        before = winning_lines(inspect_journal(self.journal.path).lines)
        if self.saves.exists():
            self._put_back(json.loads(self.saves.read_text()))
        self.inbox = Points.inbox(self, before)
        if before:
            self.journal.append("resumed", self.trainer.rollout, {"from": self.trainer.rollout})
        else:
            header = {
                "recipe": self.recipe.model_dump(mode="json"), "facts": to_json(self.trainer.facts()),
            }  # fmt: skip
            self.journal.append("header", -1, header)

    def _put_back(self, saved: Mapping[str, Any]) -> None:
        trainer = self.trainer
        trainer.rollout, trainer.state = saved["rollout"], State(**saved["state"])
        trainer.checkpoints = {int(t): State(**s) for t, s in saved["ring"].items()}
        trainer.live.load_state_dict(saved["live"])
        trainer.load_state_dict(saved["adapter"])
        self.controller.load_state_dict(saved["controller"])

    def save(self) -> None:
        trainer = self.trainer
        self.journal.sync()
        self.at("saving")
        state = {
            "rollout": trainer.rollout, "state": dataclasses.asdict(trainer.state),
            "ring": {str(t): dataclasses.asdict(s) for t, s in trainer.checkpoints.items()},
            "live": trainer.live.state_dict(), "adapter": trainer.state_dict(),
            "controller": self.controller.state_dict(),
        }  # fmt: skip
        self.saves.write_text(json.dumps(state))
        self.at("saved")

    # ---- the life --------------------------------------------------------------------------------

    def at(self, phase: str) -> None:
        if self.kill == (self.trainer.rollout - 1, phase):
            raise Killed

    def live(self) -> bool:
        """Run to the end; False when it was killed on the way."""
        loop = ControlLoop(self.trainer, self.controller, self.journal, inbox=self.inbox)
        try:
            while self.trainer.rollout < ROLLOUTS:
                if not self._one(loop):
                    break
        except Killed:
            return False
        finally:
            self.journal.close()
        return True

    def _one(self, loop: ControlLoop) -> bool:
        record = self.trainer.advance()
        t = record.rollout
        if t in self.plan.script:
            self._leave(t)
        self.at("read")
        try:
            loop.on_rollout(record)
        except ControlStop:
            return False
        self.at("obeyed")
        if self.trainer.rollout % self.plan.every == 0:
            self.save()
        return True

    def _take_back(self, before: Iterable[Mapping[str, Any]]) -> None:
        """A command that the kill came before is obeyed at the first boundary after the resume. For
        comparing, the human waits with it until the same rollout again."""
        told = {line["id"] for line in before if line["type"] == "command"}
        for file in (self.folder / "commands").glob("*.json"):
            if file.stem not in told:
                file.unlink()
                (self.folder / f"said-{int(file.stem)}").unlink()

    def _leave(self, t: int) -> None:
        """A human's file; the same human does not say it twice because the run was killed."""
        folder, done = self.folder / "commands", self.folder / f"said-{t}"
        if not done.exists():
            done.touch()
            folder.mkdir(exist_ok=True)
            name, knobs, values = SCRIPT[t]
            data = {"command": name, "knobs": knobs, "values": values}
            (folder / f"{t:04d}.json").write_text(json.dumps(data))


class Points(Journal):
    """The journal, with points of killing around its writes."""

    def __init__(self, path: Path, resume: bool, process: Process) -> None:
        super().__init__(path, resume)
        self.process = process

    def append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> dict[str, Any]:
        if type == "rollout":
            self.process.at("decided")
        line = super().append(type, rollout, payload)
        if type in ("rollout", "command"):
            self.process.at("journalled")
        return line

    @staticmethod
    def inbox(process: Process, before: Iterable[Mapping[str, Any]]) -> Inbox:
        return Inbox(process.folder, before, process.trainer.rollout)


def story(plan: Plan, kills: Sequence[tuple[int, str]] = ()) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The winning journal lines of a run with these kills, and what its controller knows at the end."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for kill in kills:
            if Process(folder, plan, kill).live():
                break
        last = Process(folder, plan, None)
        assert last.live()
        lines = read_journal(folder / "journal.jsonl")
        if not kills:
            return comparable(lines), last.controller.state_dict()
        assert replay(folder).equal, "decisions are those of the rules, commands and kills included"
        return comparable(lines), last.controller.state_dict()


def same(plan: Plan, kills: Sequence[tuple[int, str]]) -> None:
    """Line for line, and the controller's whole memory."""
    straight, broken = story(plan), story(plan, kills)
    for a, b in zip(straight[0], broken[0], strict=False):
        assert a == b, (plan, kills)
    assert len(straight[0]) == len(broken[0]) and straight[1] == broken[1]


FULL = Plan(start="bold", faults="frozen", script=tuple(SCRIPT))


def test_the_plan_has_something_to_lose() -> None:
    """Changes, verdicts, a frozen metric and all kinds of commands: else equality would prove little."""
    lines, _ = story(FULL)
    decided = [line["decision"] for line in lines if line["type"] == "rollout"]
    assert sum(bool(d["changes"]) for d in decided) >= 3 and any(d["verdicts"] for d in decided)
    assert any("entropy" in line.get("snapshot", {}).get("invalid", {}) for line in lines)
    told = [line["outcome"] for line in lines if line["type"] == "command"]
    assert (told.count("done"), told.count("refused")) == (6, 1)


@pytest.mark.parametrize("phase", PHASES)
def test_every_point_of_killing(phase: str) -> None:
    """One run that is killed in every one of its rollouts, each time one further on."""
    same(FULL, [(rollout, phase) for rollout in range(ROLLOUTS)])


plans = st.builds(
    Plan,
    start=st.sampled_from(sorted(STARTS)),
    faults=st.sampled_from(sorted(FAULTS)),
    seed=st.integers(0, 50),
    every=st.integers(1, 12),
    profile=st.sampled_from(["recommended", "documented", "literal"]),
    mode=st.sampled_from(["act", "act", "shadow"]),
    script=st.sets(st.sampled_from(sorted(SCRIPT))).map(sorted).map(tuple),
)
kills = st.lists(st.tuples(st.integers(0, ROLLOUTS - 1), st.sampled_from(PHASES)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(plans, kills)
def test_any_kills_of_any_run(plan: Plan, kills: list[tuple[int, str]]) -> None:
    """Several kills, also while rollouts are done again, whatever the run, its faults and its human."""
    same(plan, kills)


@pytest.mark.parametrize("part", ["adapter", "controller"])
def test_a_part_that_forgets_would_be_noticed(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The tests above can fail: without one part of the state they do."""
    straight = story(FULL)
    whole = Process._put_back

    def put_back(self: Process, saved: Mapping[str, Any]) -> None:
        fresh = {"adapter": {"frozen": {}}, "controller": self.controller.state_dict()}
        whole(self, {**saved, part: fresh[part]})

    monkeypatch.setattr(Process, "_put_back", put_back)
    try:
        broken: Any = story(FULL, [(12, "read")])
    except AssertionError:
        broken = None  # its own replay differs already
    assert broken != straight


def test_a_lost_command_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    straight = story(FULL)
    monkeypatch.setattr(Points, "inbox", staticmethod(lambda process, before: Silent()))
    assert story(FULL, [(8, "read")]) != straight


class Silent:
    def take(self, rollout: int) -> list[Command]:
        return []

    def done(self, command: Command) -> None:
        """Nothing to do."""
