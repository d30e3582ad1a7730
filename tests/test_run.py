"""`run.py`: where all parts meet, with the plant in the trainer's place.

`StubTrainer` has the native trainer's outside (events, phases, checkpoints on disk, extra state)
around `FakeTrainer`, so that files, endings, resumption and fences are tested in milliseconds and
without torch. `test_kill_and_resume.py` does it once with the real trainer.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import autotune.run as run_module
from autotune.commands import drop
from autotune.errors import ControlStop, InputError, JournalError
from autotune.journal import Journal, comparable, read_journal, winning_lines
from autotune.recipe import Recipe, dump_schedule, knob_vector, load_recipe
from autotune.replay import export, replay
from autotune.run import run
from autotune.testing import FakeTrainer
from autotune.testing.faults import Fault, Lying
from autotune.testing.plant import State


class StubTrainer:
    """The native trainer's interface around the plant."""

    faults: tuple[Fault, ...] = ()

    def __init__(self, recipe, folder, *, resume, on_phase, on_event, extra_state) -> None:
        if recipe.task.type == "sums":
            raise InputError("this stub has no sums")
        knobs = knob_vector(recipe)
        rollouts = recipe.trainer.rollouts
        self.fake = FakeTrainer(knobs, seed=recipe.seed, rollouts=rollouts, faults=self.faults)
        self.live, self.facts = self.fake.live, self.fake.facts
        self.recipe, self.root = recipe, Path(folder) / "checkpoints"
        self.on_phase, self.on_event, self.extra_state = on_phase, on_event, extra_state
        self.restored_state: dict[str, Any] | None = None
        self.resumed, self.closed = resume, False
        if resume:
            self._load(max(self.root.glob("rollout-*")))

    @property
    def rollout(self) -> int:
        return self.fake.rollout

    def run(self, on_rollout: Callable[[Any], None]) -> None:
        try:
            if not self.resumed:
                self._save()
            while self.rollout < self.recipe.trainer.rollouts:
                self._one(on_rollout)
            self._eval()
        except (ControlStop, KeyboardInterrupt):
            self._save()
            raise

    def _one(self, on_rollout: Callable[[Any], None]) -> None:
        if self.rollout % self.recipe.eval.every == 0:
            self._eval()
        self.on_phase("rollout", self.rollout)
        on_rollout(self.fake.advance())
        if self.rollout % self.recipe.checkpoint.every == 0:
            self._save()

    def undo_rollout(self) -> None:
        self.fake.undo_rollout()

    def restore_checkpoint(self, before_rollout: int) -> int:
        return self.fake.restore_checkpoint(before_rollout)

    def close(self) -> None:
        self.closed = True

    def _eval(self) -> None:
        score = self.fake.state.skill
        self.on_event("eval", {"rollout": self.rollout, "greedy": score, "sampled": score})

    def _save(self) -> None:
        self.on_phase("save", self.rollout)
        path = self.root / f"rollout-{self.rollout:05d}"
        path.mkdir(parents=True, exist_ok=True)
        states = {str(t): dataclasses.asdict(s) for t, s in self.fake.checkpoints.items()}
        state = {
            "rollout": self.rollout, "state": dataclasses.asdict(self.fake.state), "ring": states,
            "knobs": self.live.vector(), "epoch": self.live.epoch, "extra": self.extra_state(),
        }  # fmt: skip
        (path / "state.json").write_text(json.dumps(state))
        self.on_event("checkpoint", {"rollout": self.rollout, "path": str(path)})

    def _load(self, path: Path) -> None:
        saved = json.loads((path / "state.json").read_text())
        self.fake.rollout, self.fake.state = saved["rollout"], State(**saved["state"])
        self.fake.checkpoints = {int(t): State(**s) for t, s in saved["ring"].items()}
        self.live.epoch, self.restored_state = saved["epoch"], saved["extra"]
        for name, value in saved["knobs"].items():
            self.live.set(name, value)


class Killed(BaseException):
    """A kill -9 in miniature: nobody saves anything."""


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    module = types.ModuleType("autotune.trainer.loop")
    module.Trainer = StubTrainer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "autotune.trainer.loop", module)
    monkeypatch.setattr(run_module.doctor, "require", lambda recipe: None)
    monkeypatch.chdir(tmp_path)


def recipe(folder: str = "r", *changes: str) -> Recipe:
    """Bold enough that the controller has something to do."""
    file = Path("recipe.yaml")
    file.write_text(
        f"name: stub\nrun_dir: {folder}\ntracking: {{mlflow: {{enabled: false}}}}\n"
        "trainer: {rollouts: 24, actor_learning_rate: 1.5e-3, ppo_mini_batch_size: 8}\n"
        "checkpoint: {every: 5}\neval: {every: 8}\n"
    )
    return load_recipe(file, changes)


def screenless() -> Console:
    return Console(file=io.StringIO(), width=120)


def text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def at(phase: str, rollout: int, act: Callable[[], object]) -> Callable[[str, int], None]:
    def on_phase(name: str, t: int) -> None:
        if (name, t) == (phase, rollout):
            act()

    return on_phase


def throw(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def test_settings_from_elsewhere_are_warned_about_and_get_a_fingerprint_of_their_own() -> None:
    console = screenless()
    carried = recipe("r", "fingerprint={model: another, hardware: 8 x NVIDIA H200}")
    run(carried, console=console)
    assert text(console).count("B8: the settings were tuned on another") == 2
    resolved = load_recipe("r/recipe.resolved.json")
    assert resolved.fingerprint is not None and resolved.fingerprint.model == "builtin:digits"


def test_a_run_leaves_its_whole_record() -> None:
    console = screenless()
    result = run(recipe(), console=console)
    lines = read_journal("r/journal.jsonl")
    assert result.lines == lines and result.status == "done"
    assert [lines[0]["type"], lines[-1]["type"]] == ["header", "end"]
    assert sum(line["type"] == "rollout" for line in lines) == 24
    assert [line["rollout"] for line in lines if line["type"] == "eval"] == [0, 8, 16, 24]
    resolved = load_recipe("r/recipe.resolved.json")
    assert resolved.model_copy(update={"fingerprint": None}) == recipe()
    own = resolved.fingerprint
    assert own is not None and own.model == "builtin:digits" and own.data and own.reward and own.hardware
    assert lines[0]["recipe"]["fingerprint"] == own.model_dump()
    environment = json.loads(Path("r/environment.json").read_text())
    assert environment["python"] and len(environment["policies_sha256"]) == 64
    assert lines[0]["environment"] == environment
    assert "journal" in text(console) and "held-out, greedy" in text(console)
    assert any(line["decision"]["changes"] for line in lines if line["type"] == "rollout")


def test_an_existing_folder_is_left_alone() -> None:
    run(recipe(), console=screenless())
    before = Path("r/journal.jsonl").read_bytes()
    with pytest.raises(
        InputError, match=r"exists already; resume it with: autotune run --resume r"
    ):
        run(recipe(), console=screenless())
    Path("other").mkdir()
    with pytest.raises(InputError, match=r"exists already; run with another seed"):
        run(recipe("other"), console=screenless())
    assert Path("r/journal.jsonl").read_bytes() == before and not list(Path("other").iterdir())


def test_bad_input_found_late_leaves_no_folder() -> None:
    with pytest.raises(InputError, match="no sums"):
        run(recipe("r", "task={type: sums}"), console=screenless())
    assert not Path("r").exists()
    Path("file").touch()
    with pytest.raises(InputError, match="cannot be made"):
        run(recipe("file/r"), console=screenless())


@pytest.mark.parametrize("rollout", [0, 4, 5, 7, 20, 23])
def test_a_killed_run_goes_on_as_if_nothing_had_been(rollout: int) -> None:
    run(recipe("straight"), console=screenless())
    with pytest.raises(Killed):
        run(
            recipe("broken"), on_phase=at("rollout", rollout, throw(Killed())), console=screenless()
        )
    _forget_the_end(Path("broken"))
    run(recipe("broken"), resume=True, console=screenless())
    straight, broken = (read_journal(f"{name}/journal.jsonl") for name in ("straight", "broken"))
    assert _without_place(comparable(broken)) == _without_place(comparable(straight))
    assert replay("broken").equal and len(replay("broken").pairs) == 24


def test_a_sensor_that_stands_still_is_remembered_across_a_kill(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is called frozen at its fifth repeat, wherever the kill came between."""
    still = Lying("entropy", at=8, lie=lambda value: 0.4)
    monkeypatch.setattr(StubTrainer, "faults", (still,))
    run(recipe("straight"), console=screenless())
    with pytest.raises(Killed):
        run(recipe("broken"), on_phase=at("rollout", 11, throw(Killed())), console=screenless())
    _forget_the_end(Path("broken"))
    run(recipe("broken"), resume=True, console=screenless())
    straight, broken = (read_journal(f"{name}/journal.jsonl") for name in ("straight", "broken"))
    assert _without_place(comparable(broken)) == _without_place(comparable(straight))
    frozen = [
        ln["rollout"] for ln in straight if "entropy" in ln.get("snapshot", {}).get("invalid", ())
    ]
    assert frozen[0] == 12


def _forget_the_end(folder: Path) -> None:
    """A killed process writes no `end`; it leaves half a line instead."""
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    assert json.loads(lines[-1])["type"] == "end"
    (folder / "journal.jsonl").write_bytes(b"".join(lines[:-1]) + lines[-1][:20])


def _without_place(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for line in lines:
        line.get("recipe", {}).pop("run_dir", None)
    return lines


@pytest.mark.parametrize("rollout", [0, 3, 11])
def test_ctrl_c_saves_says_how_to_resume_and_loses_nothing(rollout: int) -> None:
    run(recipe("straight"), console=screenless())
    console = screenless()
    stop = at("rollout", rollout, throw(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        run(recipe("broken"), on_phase=stop, console=console)
    assert "resume with: autotune run --resume broken" in text(console)
    end = read_journal("broken/journal.jsonl")[-1]
    assert (end["type"], end["status"], end["rollout"]) == ("end", "interrupted", rollout)
    run(load_recipe("broken/recipe.resolved.json"), resume="broken", console=screenless())
    kinds = ("rollout", "eval")
    straight, broken = (
        [line for line in comparable(read_journal(f"{n}/journal.jsonl")) if line["type"] in kinds]
        for n in ("straight", "broken")
    )
    assert broken == straight


@pytest.mark.parametrize("ignoring", [False, True])
def test_sigterm_is_a_polite_ctrl_c(monkeypatch: pytest.MonkeyPatch, ignoring: bool) -> None:
    """A job in the background of a script ignores SIGINT; it can be terminated all the same."""
    if ignoring:
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _terminate_a_run()
    finally:
        if ignoring:
            signal.signal(signal.SIGINT, handler)


def _terminate_a_run() -> None:
    stop = at("rollout", 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        run(recipe(), on_phase=stop, console=screenless())
    assert read_journal("r/journal.jsonl")[-1]["status"] == "interrupted"
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_controllers_stop_is_saved_and_told() -> None:
    stop = at("rollout", 7, throw(ControlStop("the third collapse")))
    with pytest.raises(ControlStop) as caught:
        run(recipe(), on_phase=stop, console=screenless())
    assert caught.value.exit_code == 3
    lines = read_journal("r/journal.jsonl")
    assert lines[-1]["status"] == "stopped" and lines[-1]["reason"] == "the third collapse"
    assert [line["rollout"] for line in lines if line["type"] == "checkpoint"][-1] == 7


def test_any_other_failure_is_written_down_and_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        run(recipe(), on_phase=at("rollout", 2, lambda: 1 // 0), console=screenless())
    end = read_journal("r/journal.jsonl")[-1]
    assert end["status"] == "failed" and "zero" in end["reason"]


def test_a_journal_that_cannot_be_written_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Journal.append

    def append(self: Journal, type: str, rollout: int, payload: Any) -> Any:
        if rollout >= 3:
            raise JournalError("no space left")
        return whole(self, type, rollout, payload)

    monkeypatch.setattr(Journal, "append", append)
    with pytest.raises(JournalError, match="no space") as caught:
        run(recipe(), console=screenless())
    assert caught.value.exit_code == 1
    assert read_journal("r/journal.jsonl")[-1]["rollout"] == 2


def test_dashboards_may_break(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no screen today")

    for name in ("RunScreen", "start_feeder", "print_summary"):
        monkeypatch.setattr(run_module, name, broken)
    assert run(recipe(), console=screenless()).status == "done"


def test_off_and_shadow_are_the_same_run() -> None:
    for mode in ("off", "shadow"):
        run(recipe(mode, f"control.mode={mode}"), console=screenless())
    snapshots = [
        [ln["snapshot"]["metrics"] for ln in read_journal(f"{m}/journal.jsonl") if "snapshot" in ln]
        for m in ("off", "shadow")
    ]
    assert snapshots[0] == snapshots[1] and len(snapshots[0]) == 24
    decided = [ln.get("decision") for ln in read_journal("off/journal.jsonl") if "snapshot" in ln]
    assert decided == [None] * 24


# ----------------------------------------------------------------- a human's hand, and schedules


def test_a_command_outlives_a_kill_that_its_checkpoint_did_not_see() -> None:
    """Obeyed at rollout 7, killed at 9, resumed from 5: it is obeyed at 7 again, and decisions agree."""

    def say(phase: str, t: int) -> None:
        if (phase, t) == ("rollout", 7) and not Path("said").exists():
            Path("said").touch()
            drop(Path(folder), "set", values={"kl_coef": 0.02})
            drop(Path(folder), "pause")
        if (phase, t, folder) == ("rollout", 9, "broken") and not Path("killed").exists():
            Path("killed").touch()
            raise Killed

    folder = "straight"
    run(recipe(folder), on_phase=say, console=screenless())
    Path("said").unlink()
    folder = "broken"
    with pytest.raises(Killed):
        run(recipe(folder), on_phase=say, console=screenless())
    _forget_the_end(Path("broken"))
    run(recipe(folder), resume=True, on_phase=say, console=screenless())
    straight, broken = (
        [{**ln, "id": ""} for ln in _without_place(comparable(read_journal(f"{n}/journal.jsonl")))]
        for n in ("straight", "broken")
    )
    assert broken == straight
    told = [line for line in straight if line["type"] == "command"]
    assert [(ln["command"], ln["outcome"], ln["rollout"]) for ln in told] == [
        ("set", "done", 8), ("pause", "done", 8),
    ]  # fmt: skip
    assert replay("broken").equal and list(Path("broken/commands").iterdir()) == []


def test_a_schedule_is_followed_killed_and_resumed() -> None:
    run(recipe("source", "control.policies={X2: off}"), console=screenless())
    schedule = export("source")
    assert schedule.changes and not schedule.restores
    Path("s.yaml").write_text(dump_schedule(schedule))
    follow = recipe("f", "control.schedule=s.yaml", "trainer.actor_learning_rate=1.0e-4")
    with pytest.raises(Killed):
        run(follow, on_phase=at("rollout", 9, throw(Killed())), console=screenless())
    _forget_the_end(Path("f"))
    Path("s.yaml").write_text("start: {kl_coef: 1.0}\n")  # the run goes on with what it was started with
    run(follow, resume=True, console=screenless())
    source, followed = (winning_lines(read_journal(f"{n}/journal.jsonl")) for n in ("source", "f"))
    used = [[ln["snapshot"]["knobs"] for ln in of if "snapshot" in ln] for of in (source, followed)]
    assert used[0] == used[1] and replay("f").equal


# ------------------------------------------------------------------------------------- resuming


def test_a_run_killed_before_its_first_checkpoint_starts_in_place() -> None:
    with pytest.raises(Killed):
        run(recipe(), on_phase=at("save", 0, throw(Killed())), console=screenless())
    shutil.rmtree("r/checkpoints", ignore_errors=True)
    run(recipe(), resume=True, console=screenless())
    assert len(replay("r").pairs) == 24


def test_a_run_killed_before_its_journal_starts_in_place() -> None:
    Path("r").mkdir()
    Path("r/recipe.resolved.json").write_text(recipe().model_dump_json())
    run(recipe(), resume=True, console=screenless())
    assert read_journal("r/journal.jsonl")[0]["type"] == "header"


def test_a_finished_run_has_nothing_to_resume() -> None:
    run(recipe(), console=screenless())
    before, console = Path("r/journal.jsonl").read_bytes(), screenless()
    assert run(recipe(), resume=True, console=console).status == "done"
    assert "finished already" in text(console)
    assert Path("r/journal.jsonl").read_bytes() == before


def test_a_resumed_run_must_be_of_the_same_recipe() -> None:
    with pytest.raises(KeyboardInterrupt):
        stop = at("rollout", 3, throw(KeyboardInterrupt()))
        run(recipe(), on_phase=stop, console=screenless())
    changed = recipe("r", "trainer.kl_coef=0.5", "control.pin=[clip_range]")
    with pytest.raises(InputError) as caught:
        run(changed, resume=True, console=screenless())
    assert "trainer.kl_coef is 0.5, the run has 0.005" in str(caught.value)
    assert "control.pin is ['clip_range'], the run has []" in str(caught.value)
    harmless = recipe("r", "tracking.mlflow.experiment=other")
    assert run(harmless, resume=True, console=screenless()).status == "done"


def test_nothing_to_resume() -> None:
    with pytest.raises(InputError, match="no run to resume in r"):
        run(recipe(), resume=True, console=screenless())


def test_two_processes_cannot_write_one_run() -> None:
    with pytest.raises(KeyboardInterrupt):
        stop = at("rollout", 3, throw(KeyboardInterrupt()))
        run(recipe(), on_phase=stop, console=screenless())
    with (
        Journal("r/journal.jsonl", resume=True),
        pytest.raises(JournalError, match="another process"),
    ):
        run(recipe(), resume=True, console=screenless())
