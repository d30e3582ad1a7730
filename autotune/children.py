"""Training runs as child processes: started or resumed, followed by their journals, ended in order.

A sweep and the staged procedure are many runs. Each is `autotune run` in a process of its own, so a crash
ends one run and nothing else, and all that is known of a run is what its journal says:

    seed-1.json   the recipe that was given        seed-1.log   what it printed
    seed-1/       the run's own folder, resumed if it is there

A child whose parent is killed is told to end by the kernel; it saves and can be resumed by anybody.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import JournalError, RunError
from autotune.journal import Line, inspect_journal, winning_lines
from autotune.launch import ends_with_parent
from autotune.recipe import Recipe
from autotune.run import JOURNAL, RESOLVED
from autotune.story import Story, finite
from autotune.tracking.spool import Spool

DONE, STOPPED, INTERRUPTED = 0, 3, 130
POLL = 0.3
"""Seconds between two looks at a child."""
LAST_WORDS = 120.0
"""Seconds that a child has to save when it is told to end."""

Tick = Callable[[list[Line]], bool]
"""Told the new journal lines, often none; True ends the run."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One evaluation on the held-out prompts."""

    rollout: int
    line: Mapping[str, Any]

    def score(self, kind: str) -> float | None:
        """Mean score; None where it was not measured or is not finite."""
        return finite(self.line.get(kind))

    def per_prompt(self, kind: str) -> tuple[float, ...]:
        """Score of every prompt, where the recipe asked for them."""
        return tuple(self.line.get("scores", {}).get(kind, ()))


@dataclass(frozen=True, slots=True)
class Reading:
    """What a run's journal says, whether it has ended or not."""

    story: Story
    evaluations: tuple[HeldOut, ...]
    tokens: float
    """Prompt and response tokens of all rollouts, repeated ones included: they were paid for."""
    seconds: float
    """Of all rollouts, repeated ones included."""

    @property
    def status(self) -> str:
        return str((self.story.end or {}).get("status", "killed"))

    @property
    def reason(self) -> str:
        return str((self.story.end or {}).get("reason", ""))


@dataclass(frozen=True, slots=True)
class Ended:
    """A child's end."""

    code: int
    """Exit code; negative: the signal that ended it."""
    cut: bool
    """Whether it was ended by whoever watched it."""
    log: Path

    def reason(self) -> str:
        """The last line that it printed, for a person."""
        with contextlib.suppress(OSError):
            lines = self.log.read_text("utf-8", "replace").strip().splitlines()
            if lines:
                return lines[-1].strip()
        return f"exit code {self.code}"


def read(folder: Path) -> Reading:
    """A run by its journal.

    Raises:
        JournalError: there is none.
    """
    raw = inspect_journal(folder / JOURNAL).lines
    story, held = Story(), {}
    for line in winning_lines(raw):
        story.add(line)
        if line["type"] == "eval":
            held[line["rollout"]] = HeldOut(int(line["rollout"]), line)
    costs = [cost_of(line) for line in raw if line["type"] == "rollout"]
    tokens, seconds = (sum(part) for part in zip(*costs, strict=True)) if costs else (0.0, 0.0)
    return Reading(story, tuple(held.values()), tokens, seconds)


def cost_of(line: Line) -> tuple[float, float]:
    """(tokens, seconds) of one rollout."""
    seconds = float((line.get("times") or {}).get("total", 0.0))
    rate = finite((line.get("snapshot") or {}).get("metrics", {}).get("tokens_per_second"))
    return (rate or 0.0) * seconds, seconds


def finished(folder: Path) -> bool:
    """Whether the run in this folder came to its planned end."""
    with contextlib.suppress(JournalError):
        return read(folder).status == "done"
    return False


def carry_out(recipe: Mapping[str, Any], folder: Path, threads: int, tick: Tick | None = None) -> Ended:
    """Train a recipe in a folder to its end, or go on with the run that is there already.

    A child that something else killed (out of memory, say) is resumed once.

    Args:
        recipe: a resolved recipe as JSON data; its `run_dir` is set to `folder`.
        threads: CPU threads of the child.
        tick: looks at the run while it goes on.
    """
    ended = _attempt(recipe, folder, threads, tick)
    return _attempt(recipe, folder, threads, tick) if ended.code < 0 and not ended.cut else ended


def together(
    runs: Sequence[tuple[Mapping[str, Any], Path]], jobs: int, done: Callable[[Path], None]
) -> list[Ended | None]:
    """Several runs, some at a time; None for one that had come to its end before.

    Args:
        runs: (resolved recipe as JSON data, folder) of each.
        jobs: how many at a time, with this machine's threads divided among them.
        done: told each folder when its run has ended.

    Raises:
        KeyboardInterrupt: Ctrl-C; all of them have saved.
    """
    stop = threading.Event()

    def one(run: tuple[Mapping[str, Any], Path]) -> Ended | None:
        recipe, folder = run
        if finished(folder) or stop.is_set():
            return None
        ended = carry_out(recipe, folder, threads_for(jobs), lambda lines: stop.is_set())
        done(folder)
        return ended

    with ThreadPoolExecutor(max_workers=max(jobs, 1)) as pool:
        futures = [pool.submit(one, run) for run in runs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            stop.set()
            raise


def _attempt(recipe: Mapping[str, Any], folder: Path, threads: int, tick: Tick | None) -> Ended:
    log = _beside(folder, ".log")
    process = _start(recipe, folder, threads, log)
    spool = Spool(folder / JOURNAL, lambda: process.poll() is None)
    cut = False
    try:
        while process.poll() is None:
            if tick is not None and tick([dict(line) for line in spool.take() if line]) and not cut:
                cut = True
                process.terminate()
            time.sleep(POLL)
    except BaseException:  # Ctrl-C, or a tick that failed: the child saves and ends first
        end(process)
        raise
    return Ended(process.returncode, cut, log)


def _start(recipe: Mapping[str, Any], folder: Path, threads: int, log: Path) -> subprocess.Popen[bytes]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    if (folder / RESOLVED).is_file():
        wait_for_writer(folder)
        arguments = ["run", "--resume", str(folder)]
    else:
        shutil.rmtree(folder, ignore_errors=True)  # killed before anything was written
        given = _beside(folder, ".json")
        given.write_text(json.dumps({**recipe, "run_dir": str(folder)}, indent=1) + "\n", "utf-8")
        arguments = ["run", str(given)]
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "autotune", *arguments],
            env={**os.environ, **thread_variables(threads)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            preexec_fn=ends_with_parent(),
        )


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def thread_variables(threads: int) -> dict[str, str]:
    """What keeps children from fighting for cores."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))


def threads_for(jobs: int) -> int:
    """Threads of each of some processes that share this machine; what the user has set stays."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) else max((os.cpu_count() or 1) // max(jobs, 1), 1)


def wait_for_writer(folder: Path, patience: float = LAST_WORDS) -> None:
    """Until no process writes the run's journal: its last owner may still be saving.

    Raises:
        RunError: it is still being written after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while not _free(folder / JOURNAL):
        if time.monotonic() > deadline:
            raise RunError(f"{folder} is still written by another process after {patience:g} s; end that one")
        time.sleep(POLL)


def _free(journal: Path) -> bool:
    try:
        with journal.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    except BlockingIOError:
        return False
    except OSError:
        return True


def end(process: subprocess.Popen[bytes]) -> None:
    """Tell a child to save and end; kill it when it does not."""
    with _interrupts_held():
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(LAST_WORDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """A polite kill is treated like Ctrl-C, so that what is under way is saved and handed back."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """A second Ctrl-C does not leave a child behind."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def seeded(recipe: Recipe, seeds: int) -> Sequence[int]:
    """The seeds of repeated runs: the recipe's own and those after it."""
    return range(recipe.seed, recipe.seed + seeds)
