"""Several trainers on one GPU, one at a time: each waits at a rollout's end until it is its turn.

A worker reads `go N` or `end` from its standard input and answers on a pipe of its own with one JSON
line per turn. So two trainers that take a minute to start are started once and measured in any order,
A B B A, under the same conditions; while one works the other holds memory and nothing else.
"""

from __future__ import annotations

import json
import os
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


class Worker:
    """The conductor's side of one worker."""

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
            )
        os.close(write)
        self._in = os.fdopen(read)

    def ready(self) -> float:
        """Wait until it stands; seconds that took."""
        self._read()
        return time.perf_counter() - self.started

    def go(self, rollouts: int) -> dict[str, Any]:
        """Let it do so many rollouts; its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"go {rollouts}\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        line = self._in.readline()
        answer = json.loads(line) if line else {"error": "it ended without a word"}
        if "error" in answer:
            tail = self.log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{self.name}: {answer['error']}\n{tail}")
        return dict(answer)

    def end(self) -> None:
        """Ask it to end, and make sure."""
        try:
            if self._process.stdin is not None:
                self._process.stdin.write("end\n")
                self._process.stdin.close()
            self._process.wait(timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
