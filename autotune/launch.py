"""`autotune run --nproc N`: N processes of the same command on this machine, and their endings as one.

Each rank gets what `torchrun` would have told it (`RANK`, `WORLD_SIZE`, …) and a session of its own, so
that a Ctrl-C on the terminal reaches this process alone, which passes it on exactly once; the ranks
then stop together, in step, and save. Rank 0 draws on the terminal as always.

A rank that ends badly leaves the others waiting: they are given a while to notice by themselves, then
they are ended. The exit code is rank 0's, or the first bad one. Nothing heavy is imported here.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

from autotune.errors import InputError
from autotune.trainer.group import launched

COMMAND = (sys.executable, "-m", "autotune")
"""What every rank runs."""
ORDERLY = (0, 3, 130)
"""Exit codes with which a rank has said goodbye to the others: done, stopped, interrupted."""
PATIENCE = 30.0
"""Seconds that the others have after a rank ended badly, before they are told to end."""
LAST_WORDS = 10.0
"""Seconds between telling and ending."""
INTERRUPTS = 3
"""Ctrl-C once: save and end. Twice: end without waiting for each other. This often: end now."""


def launch(nproc: int, arguments: Sequence[str]) -> int:
    """Run `autotune ARGUMENTS` on `nproc` ranks; the exit code to pass on.

    Raises:
        InputError: this process is a rank itself already.
    """
    if launched():
        raise InputError(
            "--nproc starts the ranks itself, but a launcher (torchrun, deepspeed) has started this"
            " process as one; leave out one of the two"
        )
    port = free_port()
    team = Team([_start(rank, nproc, port, arguments) for rank in range(nproc)])
    with _passed_on(team.interrupt):
        return team.wait()


def _start(rank: int, nproc: int, port: int, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": nproc,
        "AUTOTUNE_NPROC": nproc,  # so that a run can say how it is resumed
        "LOCAL_WORLD_SIZE": nproc,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        # Results on CPU depend on it, so it is the same everywhere, and N ranks share the cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max((os.cpu_count() or 1) // nproc, 1)),
    }
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env={**os.environ, **{name: str(value) for name, value in told.items()}},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=ends_with_parent(),
    )


@dataclass
class Team:
    """The ranks' processes while they last."""

    ranks: list[subprocess.Popen[bytes]]
    interrupts: int = 0
    failed: dict[int, int] = field(default_factory=dict)
    """Rank -> its exit code, of those that ended badly by themselves, the first one first."""

    def wait(self) -> int:
        """Until all have ended."""
        deadline = float("inf")
        while any(process.poll() is None for process in self.ranks):
            if not self.failed and self._look():
                deadline = time.monotonic() + PATIENCE
            if time.monotonic() > deadline:
                self._end()
            time.sleep(0.05)
        self._look()
        return self._code()

    def interrupt(self) -> None:
        """Pass an interrupt on; at last, do not ask any more."""
        self.interrupts += 1
        self._signal(signal.SIGKILL if self.interrupts >= INTERRUPTS else signal.SIGINT)

    def _look(self) -> bool:
        """Whether a rank has ended badly by now."""
        for rank, process in enumerate(self.ranks):
            code = process.poll()
            if code is not None and code not in ORDERLY and not self.failed:
                self.failed[rank] = code
                if len(self.ranks) > 1 and rank > 0:
                    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
                    print(f"✗ rank {rank} {how}; the others cannot go on without it", file=sys.stderr)
        return bool(self.failed)

    def _end(self) -> None:
        """Tell the remaining ones, wait a moment, end them."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + LAST_WORDS
        while time.monotonic() < deadline and any(p.poll() is None for p in self.ranks):
            time.sleep(0.05)
        self._signal(signal.SIGKILL)
        for process in self.ranks:
            process.wait()

    def _signal(self, number: int) -> None:
        for process in self.ranks:
            if process.poll() is None:
                process.send_signal(number)

    def _code(self) -> int:
        own = max(self.ranks[0].returncode, 0)  # negative: it was ended, by us perhaps
        codes = [own, *self.failed.values(), *(p.returncode for p in self.ranks)]
        bad = next((code for code in codes if code), 0)
        return 128 - bad if bad < 0 else bad


@contextlib.contextmanager
def _passed_on(interrupt: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM go to the ranks; this process waits for what they make of it."""

    def handler(number: int, frame: FrameType | None) -> None:
        interrupt()

    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def free_port() -> int:
    """A port that nobody listens on now, for the ranks to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ends_with_parent() -> Callable[[], None] | None:
    """On Linux: makes the kernel end a child whose parent was killed, so no rank is left behind."""
    if sys.platform != "linux":
        return None
    libc, set_death_signal = ctypes.CDLL(None), 1

    def before_exec() -> None:
        libc.prctl(set_death_signal, int(signal.SIGTERM))

    return before_exec
