"""Rewards that are somebody else's code: a function in a process of its own, under a time limit.

    call answered                     its scores; a score that is no finite number is not scorable
    call raised, or wrong length      tried again response by response: only the guilty ones are lost
    call too slow, or process died    the same, with a new process each time
    16 such calls in a row            the rest of this batch is not tried: a rollout must end

The process is killed with everything that it started. What it prints goes to a file in the run
folder, cut when it has grown past 10 MB. It gets texts as JSON and gives numbers as JSON; nothing
is pickled in either direction.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import autotune
from autotune.errors import InputError
from autotune.trainer.rewards.base import Score, Surroundings, Unscorable

if TYPE_CHECKING:
    from autotune.recipe.schema import ImportReward, MathVerifyReward
    from autotune.trainer.tasks import Example, TaskData

START_SECONDS = 120.0
"""Time for importing the function's module, which may import a whole framework."""
GIVE_UP = 16
"""Calls in a row that cost a process, after which the rest of a batch is not tried."""
LOG_BYTES = 10_000_000
TEXTS = ("responses", "completions", "prompts", "answers", "meta")
"""Parameters that every function may have, beside columns of the data by their names."""

CHILD = (
    "import sys; sys.path.append(sys.argv[1]);"
    " from autotune.trainer.rewards.worker import main;"
    " main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)


def imported(section: ImportReward, task: TaskData, around: Surroundings, name: str) -> ForeignScorer:
    """The user's own function.

    Raises:
        InputError: it may not be run, cannot be loaded, or has a parameter that nobody can fill.
    """
    if not section.allow_code:
        raise InputError(
            f"rewards: {section.function} is Python code and the recipe does not permit it;"
            " add the line `allow_code: true` to that reward"
        )
    worker = Worker(section.function, section.time_limit, _log(around, name))
    try:
        _check_parameters(section.function, worker.start(), task)
    except WorkerFailure as failure:
        raise InputError(f"rewards: {section.function} cannot be loaded: {failure}") from failure
    return ForeignScorer(worker, section.batch_size)


MATH_BATCH = 32
"""Responses per call; one that exceeds the limit only costs its own score."""


def math_verify(section: MathVerifyReward, task: TaskData, around: Surroundings, name: str) -> ForeignScorer:
    """Mathematical equality, by a package whose parsers may take for ever.

    Raises:
        InputError: math-verify is not installed.
    """
    worker = Worker("autotune.trainer.rewards.mathematics:score", section.time_limit, _log(around, name))
    try:
        worker.start()
    except WorkerFailure as failure:
        raise InputError(
            f"rewards: math-verify cannot be loaded ({failure}); run: pip install 'autotune-rl[math]'"
        ) from failure
    return ForeignScorer(worker, MATH_BATCH, none_means="the answer has no mathematical expression")


def _check_parameters(function: str, required: Sequence[str], task: TaskData) -> None:
    columns = [name for example in task.train[:1] for name in example.meta]
    unknown = [name for name in required if name not in {*TEXTS, *columns}]
    if unknown:
        raise InputError(
            f"rewards: {function} has the parameter {unknown[0]!r}, which nobody can fill;"
            f" expected names among {', '.join((*TEXTS, *columns))}, or a default"
        )


def _log(around: Surroundings, name: str) -> Path | None:
    if around.folder is None:
        return None
    rank = f"-rank{around.rank}" if around.rank else ""
    return around.folder / f"reward-{name}{rank}.log"


class WorkerFailure(Exception):
    """A call that has no answer; the process is fine unless `WorkerLost`."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason + detail)
        self.reason = Unscorable(reason, detail)


class WorkerLost(WorkerFailure):
    """The process hung or died and is gone."""


class Worker:
    """The parent's end of one child process; started at need, and again after it was lost."""

    def __init__(self, target: str, limit: float, log: Path | None = None) -> None:
        self._target = target
        self._limit = limit
        self._log = log
        self._child: _Child | None = None
        self._takes: set[str] | None = None  # names of columns; None for all of them

    def start(self) -> list[str]:
        """Start the process now; the names of parameters that its function must be given."""
        self._child = _Child(self._target, self._log)
        wants = self._ask(None, START_SECONDS)
        self._takes = None if wants["takes"] is None else set(wants["takes"])
        return [str(name) for name in wants["required"]]

    def call(self, columns: Mapping[str, Sequence[Any]], count: int) -> list[Any]:
        """The scores of one call for `count` responses, as they came.

        Raises:
            WorkerFailure: the function raised or answered something else; the process serves on.
            WorkerLost: it took too long or the process died.
        """
        if self._child is None:
            self.start()
        taken = {n: c for n, c in columns.items() if self._takes is None or n in self._takes}
        request = {"columns": taken, "count": count, "limit": self._limit}
        return list(self._ask(request, self._limit)["scores"])

    def close(self) -> None:
        if self._child is not None:
            child, self._child = self._child, None
            child.kill()

    def _ask(self, request: Mapping[str, Any] | None, limit: float) -> dict[str, Any]:
        assert self._child is not None
        try:
            found = self._child.exchange(request, limit)
        except BaseException:  # an interrupt too: an answer that comes later must not be taken for another
            self.close()
            raise
        if "error" in found:
            raise WorkerFailure(found["error"])
        return found


class _Child:
    """One running process and its two pipes."""

    def __init__(self, target: str, log: Path | None) -> None:
        self._output = _output(log)
        child_reads, self._to = os.pipe()
        self._from, child_writes = os.pipe()
        root = str(Path(autotune.__file__).resolve().parent.parent)
        # -u: what it prints before it dies must be in the log, or nobody knows its last words
        command = [sys.executable, "-u", "-c", CHILD, root, target, str(child_reads), str(child_writes)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=(child_reads, child_writes),
                start_new_session=True,  # Ctrl-C is for the run; and a group of its own can be killed
            )
        finally:
            os.close(child_reads)
            os.close(child_writes)
        os.set_blocking(self._to, False)
        self._finalizer = weakref.finalize(self, _end, self._process, (self._to, self._from), self._output)

    def exchange(self, request: Mapping[str, Any] | None, limit: float) -> dict[str, Any]:
        """Send a request, if there is one, and wait for one line."""
        deadline = time.monotonic() + limit
        _shorten(self._output)
        if request is not None:
            self._send(json.dumps(request, default=str).encode() + b"\n", deadline, limit)
        answer: dict[str, Any] = json.loads(self._receive(deadline, limit))
        return answer

    def kill(self) -> None:
        self._finalizer()

    def _send(self, data: bytes, deadline: float, limit: float) -> None:
        while data:
            self._wait([], [self._to], deadline, limit)
            try:
                data = data[os.write(self._to, data) :]
            except BrokenPipeError:
                raise self._dead() from None

    def _receive(self, deadline: float, limit: float) -> bytes:
        got = bytearray()
        while not got.endswith(b"\n"):
            self._wait([self._from], [], deadline, limit)
            part = os.read(self._from, 1 << 16)
            if not part:
                raise self._dead()
            got += part
        return bytes(got)

    def _wait(self, reading: list[int], writing: list[int], deadline: float, limit: float) -> None:
        """Until a pipe is ready; a dead process is noticed even if a grandchild holds its pipes."""
        pipes = select.poll()
        for pipe in reading:
            pipes.register(pipe, select.POLLIN)
        for pipe in writing:
            pipes.register(pipe, select.POLLOUT)
        while not pipes.poll(1000 * min(0.2, max(deadline - time.monotonic(), 0.0))):
            if self._process.poll() is not None and not pipes.poll(0):
                raise self._dead()
            if time.monotonic() >= deadline:
                raise WorkerLost(f"it took longer than {limit:g} s and was stopped")

    def _dead(self) -> WorkerLost:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
        how = _how(self._process.returncode)
        return WorkerLost(f"its process ended ({how})", _last_words(self._output))


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _output(log: Path | None) -> IO[bytes]:
    """Where the child prints: a file of the run, or one without a name."""
    if log is None:
        return tempfile.TemporaryFile("a+b")
    log.parent.mkdir(parents=True, exist_ok=True)
    return log.open("a+b")


def _shorten(output: IO[bytes]) -> None:
    if os.fstat(output.fileno()).st_size > LOG_BYTES:
        os.ftruncate(output.fileno(), 0)  # opened for appending, so the child goes on at the beginning


def _last_words(output: IO[bytes]) -> str:
    size = os.fstat(output.fileno()).st_size
    tail = os.pread(output.fileno(), 4096, max(size - 4096, 0)).decode("utf-8", "replace")
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    return f"; its last words: {lines[-1][:120]}" if lines else ""


def _end(process: subprocess.Popen[bytes], pipes: tuple[int, int], output: IO[bytes]) -> None:
    """Kill the process with its group, and give everything back."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pipe in pipes:
        os.close(pipe)
    output.close()


class ForeignScorer:
    """`Scorer` around a worker."""

    def __init__(self, worker: Worker, batch: int, none_means: str = "") -> None:
        self._worker = worker
        self._batch = batch
        self._none_means = none_means
        self._lost = 0  # calls in a row that cost a process

    def __call__(self, responses: Sequence[str], examples: Sequence[Example]) -> list[Score]:
        self._lost = 0
        scores: list[Score] = []
        for start in range(0, len(responses), self._batch):
            part = slice(start, start + self._batch)
            scores.extend(self._score(responses[part], examples[part]))
        return scores

    def close(self) -> None:
        self._worker.close()

    def _score(self, responses: Sequence[str], examples: Sequence[Example]) -> list[Score]:
        if self._lost >= GIVE_UP:
            why = f"not tried: the {GIVE_UP} calls before it hung or ended the process"
            return [Unscorable(why)] * len(responses)
        try:
            found = self._worker.call(columns(responses, examples), len(responses))
        except WorkerFailure as failure:
            self._lost = self._lost + 1 if isinstance(failure, WorkerLost) else 0
            return self._one_by_one(responses, examples, failure)
        self._lost = 0
        return [self._judged(score) for score in found]

    def _one_by_one(
        self, responses: Sequence[str], examples: Sequence[Example], failure: WorkerFailure
    ) -> list[Score]:
        if len(responses) == 1:
            return [failure.reason]
        pairs = zip(responses, examples, strict=True)
        return [score for response, example in pairs for score in self._score([response], [example])]

    def _judged(self, score: Any) -> Score:
        if isinstance(score, dict):
            missing = self._none_means and score["why"].startswith("it returned None")
            return Unscorable(self._none_means if missing else score["why"])
        return float(score)


def columns(responses: Sequence[str], examples: Sequence[Example]) -> dict[str, list[Any]]:
    """Everything that a function may ask for by a parameter's name."""
    texts: dict[str, list[Any]] = {
        "responses": list(responses),
        "completions": list(responses),
        "prompts": [example.prompt for example in examples],
        "answers": [example.answer for example in examples],
        "meta": [dict(example.meta) for example in examples],
    }
    return {**dict(_data_columns(examples)), **texts}


def _data_columns(examples: Sequence[Example]) -> Iterator[tuple[str, list[Any]]]:
    names = dict.fromkeys(name for example in examples for name in example.meta)
    for name in names:
        yield str(name), [example.meta.get(name) for example in examples]
