"""Several trainers on one GPU, one at a time: each waits at a rollout's end until it is its turn.

A worker reads `build`, `go N` or `end` from its standard input and answers on a pipe of its own with one
JSON line per turn. So two trainers that take a minute to start are started once and measured in any order,
A B B A, under the same conditions; while one works the other holds memory and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class TurnsOver(BaseException):
    """Nothing more is wanted of this worker."""


class Turns:
    """A worker's side: call `boundary` between rollouts, and nowhere else."""

    def __init__(self) -> None:
        self._out = os.fdopen(int(os.environ["TURNS_FD"]), "w", buffering=1)
        self._left, self._rows, self._since = 0, [], 0.0  # type: ignore[var-annotated]

    def may_build(self) -> None:
        """Everything is imported; returns when the device is free for loading the model."""
        if sys.stdin.readline().split() != ["build"]:
            raise TurnsOver

    def boundary(self, facts: dict[str, Any] | None = None) -> None:
        """A rollout is over (or none has begun); returns when the next one may begin."""
        _wait_for_device()
        if self._left:
            self._rows.append({"seconds": time.perf_counter() - self._since, **(facts or {})})
            self._left -= 1
        if not self._left:
            self._answer_and_wait()
        self._since = time.perf_counter()

    def _answer_and_wait(self) -> None:
        self._out.write(json.dumps({"rows": self._rows, **_memory()}) + "\n")
        self._rows = []
        command = sys.stdin.readline().split()
        if command[:1] != ["go"]:
            raise TurnsOver
        self._left = int(command[1])

    def fail(self, error: BaseException) -> None:
        self._out.write(json.dumps({"error": f"{type(error).__name__}: {error}"[:2000]}) + "\n")


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory() -> dict[str, int]:
    """Peak of the turn that ended; cached blocks go back, for they are somebody else's turn's."""
    import torch

    if not torch.cuda.is_available():
        return {"peak_bytes": 0}
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return {"peak_bytes": peak}


class WorkerFailed(RuntimeError):
    """It said so, ended, or took too long; carries the end of its log."""


class Worker:
    """The conductor's side of one worker."""

    patience = 420.0
    """Seconds that it may take to stand, or for a turn."""
    tail = 3000
    """Characters of its log that are told when it fails."""

    def __init__(self, name: str, command: list[str], log: Path, env: dict[str, str]) -> None:
        self.name, self.log = name, log
        self.started = time.perf_counter()
        read, write = os.pipe()
        with log.open("w") as sink:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=subprocess.STDOUT,
                pass_fds=[write],
                env={**os.environ, **env, "TURNS_FD": str(write)},
                text=True,
                start_new_session=True,  # ends with all that it has started
            )
        os.close(write)
        self._in = os.fdopen(read)

    def build(self) -> None:
        """It may load its model now; it has been importing until then."""
        self._say("build")

    def ready(self) -> float:
        """Wait until it stands; seconds that took."""
        self._read()
        return time.perf_counter() - self.started

    def go(self, rollouts: int) -> dict[str, Any]:
        """Let it do so many rollouts; its answer."""
        self._say(f"go {rollouts}")
        return self._read()

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what became of it is read from its pipe
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()

    def _read(self) -> dict[str, Any]:
        waiting = select.select([self._in], [], [], self.patience)[0]
        line = self._in.readline() if waiting else None
        answer = {"error": f"no answer within {self.patience:.0f} s"} if line is None else _told(line)
        if "error" in answer:
            tail = self.log.read_text(errors="replace")[-self.tail :]
            raise WorkerFailed(f"{answer['error']}\n{tail}")
        return answer

    def end(self, patience: float = 5.0) -> None:
        """Ask it to end, and make sure."""
        self._say("end")
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._in.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        _shorten(self.log)


def _told(line: str) -> dict[str, Any]:
    return dict(json.loads(line)) if line else {"error": "it ended without a word"}


def _shorten(log: Path, most: int = 40_000) -> None:
    """Keep the end of a log that has grown long."""
    text = log.read_text(errors="replace")
    if len(text) > most:
        log.write_text(f"({len(text) - most} characters before)\n{text[-most:]}")
