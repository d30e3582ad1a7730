"""Starts `autotune run` and tells how it ended: in a fresh interpreter, or as a fork of a warm one.

    fork server (once: imports) -> supervisor (a fork, waits) -> the run (a fork: the command line's own main)

Importing torch, transformers and DeepSpeed costs six core-seconds, a sixth of a small run, and twelve times
that in population-based training. A fork has them already; beyond that it is the same program with the same
words, its own log and one thread. The supervisor exists for `wait4`: it alone is told what the run has used,
even if it was killed. Where there is a GPU every run gets a fresh interpreter, since CUDA survives no fork.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_STARTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended and what it cost."""

    exit_code: int
    """Negative: the number of the signal that ended it."""
    seconds: float
    core_seconds: float


def start(
    words: Sequence[str], log: Path, fresh: bool | None = None, up: Callable[[], bool] | None = None
) -> Ended:
    """Run the command `autotune` to its end.

    Args:
        words: its arguments.
        log: what it prints is appended here.
        fresh: whether in a fresh interpreter; None: where there is a GPU.
        up: whether its model and engine stand. On a GPU the next run is started no earlier: engines
            measure the free memory of a card that they share, and must do so one after another.
    """
    fresh = has_gpu() if fresh is None else fresh
    began = time.monotonic()
    exit_code, cores = _fresh(list(words), log, up) if fresh else _forked(list(words), log)
    return Ended(exit_code, round(time.monotonic() - began, 1), round(cores, 1))


def has_gpu() -> bool:
    """Whether the driver of an NVIDIA card is loaded; asking torch would initialise CUDA."""
    return Path("/dev/nvidiactl").exists()


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return ONE_THREAD | {"PYTHONPATH": path}


def _fresh(words: list[str], log: Path, up: Callable[[], bool] | None) -> tuple[int, float]:
    """Exit code and core-seconds of a process of its own."""
    with log.open("a", encoding="utf-8") as stream, _STARTING:
        process = subprocess.Popen(
            [sys.executable, "-m", "autotune", *words],
            cwd=ROOT,
            env=os.environ | environment(),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        while has_gpu() and up is not None and not up() and _alive(process.pid):
            time.sleep(0.2)
    ended = _wait(process.pid)
    process.returncode = ended[0]  # or Popen would wait for it once more
    return ended


def _alive(pid: int) -> bool:
    """Whether the child still runs; an ended one is left to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _wait(pid: int) -> tuple[int, float]:
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


# -- forks ---------------------------------------------------------------------------------------


@functools.cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["experiments.rescue.warm"])
    return context


def _forked(words: list[str], log: Path) -> tuple[int, float]:
    here, there = _context().Pipe(duplex=False)
    process = _context().Process(target=_supervise, args=(words, str(log), there))
    with _STARTING, _environ(environment()):  # the first one starts the server, which keeps what it saw
        process.start()
    there.close()
    with here:
        try:
            ended: tuple[int, float] = here.recv()
        except EOFError:  # the supervisor itself was killed
            ended = (1, 0.0)
    process.join()
    return ended


@contextlib.contextmanager
def _environ(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _supervise(words: list[str], log: str, back: Connection) -> None:
    """In a fork of the server: fork the run, wait for it, report."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the run too, which saves and ends
    pid = os.fork()
    if pid == 0:
        back.close()
        _run(words, log)
    back.send(_wait(pid))


def _run(words: list[str], log: str) -> NoReturn:
    """The command line, as a user's shell would call it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _redirect(log)
    os.chdir(ROOT)
    sys.argv = ["autotune", *words]
    from autotune.cli import main
    from autotune.trainer.group import leave_now

    code = 0
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(bool(leaving.code))
    except BaseException:
        traceback.print_exc()
        code = 1
    leave_now(code)


def _redirect(log: str) -> None:
    with open(os.devnull, "rb") as nothing, open(log, "ab") as stream:
        os.dup2(nothing.fileno(), 0)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
