"""One run from a recipe to its summary: the only place where all parts meet.

    trainer -> adapter -> controller -> adapter -> trainer     through `ControlLoop.on_rollout`
    every line -> journal -> screen                            on the training path, microseconds
    journal.jsonl -> feeder -> MLflow                          another process

The run folder is claimed first and given back when the trainer finds the input wrong, so bad input
leaves nothing behind. The journal is written before anything is shown. What may fail without harm
(screen, MLflow) is fenced here; what may not (journal, trainer) ends the run with its reason in the
`end` line and the newest state saved.

Resuming is idempotent: a run that was killed before its first checkpoint starts again in place,
and a finished one only prints its summary.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console

from autotune import doctor, ranks
from autotune.commands import Inbox
from autotune.controller import Controller, ControlSettings
from autotune.decisions import to_json
from autotune.errors import AutotuneError, ControlStop, InputError
from autotune.hooks.loop import ControlLoop
from autotune.hooks.native import NativeAdapter
from autotune.hooks.schedule import ScheduleFollower
from autotune.journal import Journal, Line, inspect_journal, winning_lines
from autotune.preflight import transfer
from autotune.recipe import KnobSchedule, Recipe, load_schedule
from autotune.recipe.fingerprint import fingerprint, known
from autotune.screen import RunScreen, print_summary
from autotune.tracking import Delivery, FeederHandle, start_feeder

if TYPE_CHECKING:
    from autotune.trainer.loop import Trainer

RESOLVED, ENVIRONMENT, JOURNAL = "recipe.resolved.json", "environment.json", "journal.jsonl"
MAY_CHANGE = ("run_dir", "tracking", "fingerprint", "sweep", "tune")
"""Sections that a resumed run may have other values in: they do not touch the training."""

FITTED = ("trainer.micro_batch_size ", "trainer.rollout_micro_batch_size ")
"""Fields that follow from the number of ranks where the recipe leaves them open; see `fit_unset_batches`."""

FEEDER_SECONDS = {"done": 60.0, "stopped": 60.0}
"""How long the end of a run waits for MLflow; an interrupted one waits a moment only."""

OnPhase = Callable[[str, int], None]
Observer = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """A finished run: where it is and what it wrote; ranks other than 0 wrote nothing."""

    folder: Path
    status: str
    lines: list[Line]
    delivery: Delivery | None = None


def run(
    recipe: Recipe,
    *,
    resume: bool | str | Path = False,
    on_phase: OnPhase | None = None,
    console: Console | None = None,
) -> RunResult:
    """Train a recipe under its controller.

    Args:
        recipe: a checked recipe.
        resume: True to continue in the recipe's own folder, or the folder of the run.
        on_phase: told (phase, rollout) by the trainer; tests kill there.
        console: where the screen and the summary go.

    Raises:
        InputError: the folder is taken or does not fit, or something needed is not installed;
            nothing was started.
        ControlStop: the controller stopped the run; everything is saved.
        KeyboardInterrupt: Ctrl-C or SIGTERM; everything is saved and the way to resume was printed.
        RunError: the run failed.
        ElsewhereError: on ranks other than 0, when rank 0 could not start.
    """
    doctor.require(recipe)
    console = console or Console()
    place = ranks.first_decides(lambda: _place(recipe, resume))
    folder = Path(place["folder"])
    if ranks.rank() > 0:
        return _follow(recipe, folder, place, on_phase)
    if place["finished"]:
        console.print(f"{folder} is finished already; nothing to do.", markup=False)
        return _tell(console, folder, "done", None)
    recipe = _stamped(recipe, console)
    with _terminating():
        return _Session(recipe, folder, bool(resume), on_phase, console).run()


def _place(recipe: Recipe, resume: bool | str | Path) -> dict[str, Any]:
    """The run's folder, and how far the run in it has come."""
    folder = resumed_folder(recipe, resume) if resume else claim_folder(recipe)
    finished = bool(resume) and _finished(folder)
    return {"folder": str(folder), "finished": finished, "progress": bool(resume) and _has_progress(folder)}


def _follow(recipe: Recipe, folder: Path, place: Mapping[str, Any], on_phase: OnPhase | None) -> RunResult:
    """A rank other than 0."""
    if not place["finished"]:
        with _terminating():
            ranks.follow(recipe, folder, place["progress"], on_phase)
    return RunResult(folder, "done", [])


def _has_progress(folder: Path) -> bool:
    """Whether there is something to continue: a kill may come before the first checkpoint."""
    if any((folder / "checkpoints").glob("rollout-*")):
        return True
    written = (folder / JOURNAL).exists()
    return written and any(line["type"] == "rollout" for line in inspect_journal(folder / JOURNAL).lines)


def _stamped(recipe: Recipe, console: Console) -> Recipe:
    """The recipe with this run's own fingerprint (rule B8); one that it brought along is compared first."""
    here = fingerprint(recipe, doctor.hardware())
    for advice in transfer(known(recipe.fingerprint), known(here)):
        console.print(f"{advice.rule}: {advice.text}", style="yellow", markup=False, highlight=False)
    return recipe.model_copy(update={"fingerprint": here})


def run_folder(recipe: Recipe) -> Path:
    return Path(recipe.folder())


def claim_folder(recipe: Recipe) -> Path:
    """Make the run's own folder; an existing one belongs to another run.

    Raises:
        InputError: with the next move.
    """
    folder = run_folder(recipe)
    try:
        folder.mkdir(parents=True)
    except FileExistsError as error:
        resume = resume_command(folder) if (folder / JOURNAL).exists() else ""
        moves = [f"resume it with: {resume}"] if resume else []
        moves += ["run with another seed, such as seed=2, or another run_dir"]
        message = f"the run folder {folder} exists already; {', or '.join(moves)}"
        raise InputError(message) from error
    except OSError as error:
        message = f"the run folder {folder} cannot be made ({error.strerror}); set run_dir=PATH"
        raise InputError(message) from error
    return folder


def resumed_folder(recipe: Recipe, resume: bool | str | Path) -> Path:
    """The folder of the run that is to go on, which must be of this very recipe.

    Raises:
        InputError: there is no such run, or the recipe has changed since; with the differences.
    """
    folder = run_folder(recipe) if resume is True else Path(str(resume))
    resolved = folder / RESOLVED
    if not resolved.is_file():
        message = f"there is no run to resume in {folder}: expected its {RESOLVED}"
        raise InputError(f"{message}; start it without --resume")
    changed = list(_changes(json.loads(resolved.read_text("utf-8")), recipe.model_dump(mode="json")))
    if _other_ranks(folder):
        changed = [change for change in changed if not change.startswith(FITTED)]
    if changed:
        shown = "; ".join(changed[:8]) + (
            f"; and {len(changed) - 8} more" if len(changed) > 8 else ""
        )
        raise InputError(
            f"the recipe is not the one that {folder} was started with: {shown}."
            f" Resume with the recorded one: {resume_command(folder)}"
        )
    return folder


def _other_ranks(folder: Path) -> bool:
    """Whether the run in the folder was started on another number of ranks."""
    lines = inspect_journal(folder / JOURNAL).lines if (folder / JOURNAL).exists() else []
    return bool(lines) and lines[0].get("facts", {}).get("world_size", 1) != ranks.count()


def _changes(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Fields that differ between two resolved recipes, in words."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*new, *(n for n in old if n not in new)]:
            if path or name not in MAY_CHANGE:
                here = f"{path}.{name}" if path else name
                yield from _changes(old.get(name), new.get(name), here)
    elif old != new:
        yield f"{path} is {new!r}, the run has {old!r}"


def resume_command(folder: Path) -> str:
    ranks_too = f" --nproc {os.environ['AUTOTUNE_NPROC']}" if "AUTOTUNE_NPROC" in os.environ else ""
    return f"autotune run --resume {shlex.quote(str(folder))}{ranks_too}"


def _finished(folder: Path) -> bool:
    if not (folder / JOURNAL).exists():
        return False
    lines = inspect_journal(folder / JOURNAL).lines
    return bool(lines) and lines[-1]["type"] == "end" and lines[-1].get("status") == "done"


@contextlib.contextmanager
def _terminating() -> Iterator[None]:
    """SIGTERM (a cluster's polite kill) is treated like Ctrl-C: save and say how to resume."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started by `nohup … &`
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)  # held back while a checkpoint is written

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass
class _Session:
    """The parts of one run while it lasts."""

    recipe: Recipe
    folder: Path
    resume: bool
    on_phase: OnPhase | None
    console: Console
    adapter: NativeAdapter | None = None
    controller: Controller | ScheduleFollower | None = None
    observers: list[Observer] = field(default_factory=list)

    def run(self) -> RunResult:
        """Open the books, train, close the books."""
        journal, trainer = self._open()
        with contextlib.closing(journal), contextlib.closing(trainer):
            self.adapter = adapter = NativeAdapter(trainer)
            self.controller = self._controller(adapter)
            self._restore(trainer.restored_state or {})
            inbox = self._inbox(trainer)
            self._first_lines(trainer, adapter)
            self._begin_schedule(trainer, adapter)
            adapter.share_knobs()
            feeder = self._feeder()
            loop = ControlLoop(adapter, self.controller, journal, (self._show,), inbox)
            with self._screen(adapter):
                status, error = self._train(trainer, loop)
        return self._close(status, error, feeder)

    # -- opening -----------------------------------------------------------------------------------

    def _open(self) -> tuple[Journal, Trainer]:
        """Journal and trainer; when the trainer finds the input wrong, nothing is left behind."""
        if not self.resume:
            self._write(RESOLVED, self.recipe.model_dump(mode="json"))
        self._write(ENVIRONMENT, doctor.environment())
        self.journal = Journal(self.folder / JOURNAL, resume=(self.folder / JOURNAL).exists())
        try:
            return self.journal, self._build_trainer()
        except BaseException as error:
            self.journal.close()
            if isinstance(error, InputError) and not self.resume:
                shutil.rmtree(self.folder)
            elif isinstance(error, KeyboardInterrupt):
                self._say_how_to_resume()
            raise

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        beside = self.folder / f".{name}"
        beside.write_text(text, "utf-8")
        beside.replace(self.folder / name)

    def _build_trainer(self) -> Trainer:
        with self._patience("building model, tokenizer and engine"):
            from autotune.trainer.loop import Trainer

            return Trainer(
                self.recipe,
                self.folder,
                resume=self.resume and _has_progress(self.folder),
                on_phase=self._phase,
                on_event=self._event,
                extra_state=self._extra_state,
            )

    def _patience(self, what: str) -> contextlib.AbstractContextManager[Any]:
        """A spinner on a terminal, nothing elsewhere."""
        return (
            self.console.status(f"{what} …")
            if self.console.is_terminal
            else contextlib.nullcontext()
        )

    def _controller(self, adapter: NativeAdapter) -> Controller | ScheduleFollower | None:
        if self.recipe.control.schedule is not None:
            return ScheduleFollower(self._schedule(self.recipe.control.schedule))
        if self.recipe.control.mode == "off":
            return None
        return Controller(ControlSettings(**self.recipe.control.model_dump()), adapter.facts())

    def _schedule(self, path: str) -> KnobSchedule:
        """The schedule as the run was started with it; its file may have changed since."""
        header = next((ln for ln in inspect_journal(self.folder / JOURNAL).lines if "schedule" in ln), None)
        schedule = KnobSchedule.model_validate(header["schedule"]) if header else load_schedule(path)
        if warning := schedule.warning():
            self.console.print(f"• {warning}", style="yellow", markup=False)
        return schedule

    def _begin_schedule(self, trainer: Trainer, adapter: NativeAdapter) -> None:
        """Rollout 0's vector is in force before rollout 0, and the journal says how it read back."""
        if isinstance(self.controller, ScheduleFollower) and trainer.rollout == 0:
            applied = self.controller.begin(adapter)
            self._append("schedule", 0, {"applied": [to_json(item) for item in applied]})

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Put back what a checkpoint keeps for the parts that are not the trainer."""
        if self.adapter and "adapter" in state:
            self.adapter.load_state_dict(state["adapter"])
        if self.controller and "controller" in state:
            self.controller.load_state_dict(state["controller"])

    def _inbox(self, trainer: Trainer) -> Inbox:
        """Commands of `autotune ctl`; those from behind the checkpoint are obeyed again in their places."""
        before = winning_lines(inspect_journal(self.folder / JOURNAL).lines)
        return Inbox(self.folder, before, trainer.rollout)

    def _first_lines(self, trainer: Trainer, adapter: NativeAdapter) -> None:
        before = inspect_journal(self.folder / JOURNAL).lines
        if any(line["type"] == "header" for line in before):
            self._resumed_lines(trainer, before)
            return
        self._append("header", -1, {
            "at": _now(),
            "recipe": self.recipe.model_dump(mode="json"),
            "facts": to_json(adapter.facts()),
            "environment": json.loads((self.folder / ENVIRONMENT).read_text("utf-8")),
            **self._followed(),
        })  # fmt: skip
        self.journal.sync()

    def _followed(self) -> dict[str, Any]:
        """The schedule itself goes into the header, so that the journal can be replayed alone."""
        follows = isinstance(self.controller, ScheduleFollower)
        return {"schedule": self.controller.schedule.model_dump(mode="json")} if follows else {}

    def _resumed_lines(self, trainer: Trainer, before: list[Line]) -> None:
        payload: dict[str, Any] = {"from": trainer.rollout, "at": _now()}
        if self.journal.recovered:
            payload["recovered"] = self.journal.recovered
        self._append("resumed", trainer.rollout, payload)
        told = {line["rollout"] for line in before if line["type"] == "checkpoint"}
        path = self.folder / "checkpoints" / f"rollout-{trainer.rollout:05d}"
        if trainer.rollout not in told and path.is_dir():  # killed between checkpoint and line
            self._append("checkpoint", trainer.rollout, {"path": str(path)})

    @contextlib.contextmanager
    def _screen(self, adapter: NativeAdapter) -> Iterator[None]:
        """The live view; the run does not depend on it."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(Exception):
                screen = stack.enter_context(RunScreen(self.recipe, adapter.facts(), self.console))
                for line in self._told(screen.live):
                    screen.on_line(line)
                self.observers.append(screen.on_line)
            yield

    def _feeder(self) -> FeederHandle | None:
        with contextlib.suppress(Exception):
            return start_feeder(self.folder, self.recipe)
        return None

    def _told(self, all_of_it: bool) -> list[Line]:
        """What a screen must know at its start; plain output has shown the rest before."""
        lines = inspect_journal(self.folder / JOURNAL).lines
        resumed = [i for i, line in enumerate(lines) if line["type"] == "resumed"]
        return lines if all_of_it or not resumed else [lines[0], *lines[resumed[-1] :]]

    # -- while it runs -----------------------------------------------------------------------------

    def _train(self, trainer: Trainer, loop: ControlLoop) -> tuple[str, BaseException | None]:
        """Run to the end, and write the `end` line whatever the end is."""
        status, error = "done", None
        try:
            trainer.run(loop.on_rollout)  # type: ignore[arg-type]  # its answer is journalled already
        except BaseException as caught:
            status, error = _status(caught), caught
        try:
            self._append("end", trainer.rollout, self._end(status, error, loop))
            self.journal.sync()
        except AutotuneError as failure:  # the journal is what failed, or fails now
            status, error = ("failed", failure) if error is None else (status, error)
        return status, error

    def _end(self, status: str, error: BaseException | None, loop: ControlLoop) -> dict[str, Any]:
        quiet = error is None or isinstance(error, KeyboardInterrupt)
        reason = "" if quiet else str(error) or type(error).__name__
        payload: dict[str, Any] = {"status": status, "reason": reason, "at": _now()}
        payload["times"] = {"hook": sum(loop.hook_seconds)}
        if loop.observer_failures:
            payload["screen"] = f"{loop.observer_failures} failures: {loop.last_observer_error}"
        return payload

    def _append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> None:
        self._show(self.journal.append(type, rollout, payload))

    def _show(self, line: Mapping[str, Any]) -> None:
        for observer in self.observers:
            with contextlib.suppress(Exception):
                observer(line)

    def _event(self, name: str, payload: dict[str, Any]) -> None:
        rest = {key: value for key, value in payload.items() if key != "rollout"}
        self._append(name, int(payload["rollout"]), rest)
        if name == "checkpoint":
            self.journal.sync()

    def _phase(self, phase: str, rollout: int) -> None:
        """The journal reaches the disk before the checkpoint that it leads up to."""
        if phase == "save":
            self.journal.sync()
        if self.on_phase is not None:
            self.on_phase(phase, rollout)

    def _extra_state(self) -> dict[str, Any]:
        parts = {"adapter": self.adapter, "controller": self.controller}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    # -- closing -----------------------------------------------------------------------------------

    def _close(
        self, status: str, error: BaseException | None, feeder: FeederHandle | None
    ) -> RunResult:
        delivery = self._deliver(status, feeder)
        result = _tell(self.console, self.folder, status, delivery)
        if error is None:
            return result
        if status != "stopped":
            self._say_how_to_resume()
        raise error

    def _say_how_to_resume(self) -> None:
        words = f"resume with: {resume_command(self.folder)}"
        self.console.print(words, style="bold", soft_wrap=True, markup=False, highlight=False)

    def _deliver(self, status: str, feeder: FeederHandle | None) -> Delivery | None:
        if feeder is None:
            return None
        with contextlib.suppress(Exception), self._patience("delivering to MLflow"):
            return feeder.finish(FEEDER_SECONDS.get(status, 10.0))
        return None


def _status(error: BaseException) -> str:
    if isinstance(error, ControlStop):
        return "stopped"
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


def _tell(console: Console, folder: Path, status: str, delivery: Delivery | None) -> RunResult:
    """Print the summary from the journal alone."""
    lines = inspect_journal(folder / JOURNAL).lines
    with contextlib.suppress(Exception):
        print_summary(console, lines, folder, delivery.message if delivery else "")
    return RunResult(folder, status, lines, delivery)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
