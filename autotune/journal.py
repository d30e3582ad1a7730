"""The run's record of itself: append-only JSON lines, each bound to the one before it.

    {"v": 1, "type": "rollout", "rollout": 7, "prev": "<sha256 of the previous line>", …}

`prev` makes every altered, removed or reordered line visible, save for the very last one. A line
is one `write` of a whole line, so a kill can only tear the last one: `Journal(resume=True)` cuts it
off and `read_journal` leaves it out. What must survive a power failure is forced to the disk by
`sync`, called at checkpoints: a sync per line would cost more than the whole controller.

JSON has no NaN: a number that is not finite is written as the text "nan", "inf" or "-inf".

After a kill the journal may be ahead of the last checkpoint. The resumed run appends a line
`resumed {"from": first rollout done again}`, and the last line per rollout wins (`winning_lines`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.errors import JournalError

VERSION = 1
RESERVED = ("v", "type", "rollout", "prev")
TYPES = (
    "header", "rollout", "checkpoint", "eval", "restore", "resumed", "command", "note", "schedule", "end",
)  # fmt: skip
START = "0" * 64
"""`prev` of the first line."""

Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a journal file holds, and what is wrong with it."""

    lines: list[Line]
    good_bytes: int
    """Length of the part that ends with a whole line."""
    last_hash: str
    torn: str = ""
    """What was found after the last whole line, in words; empty when nothing was."""
    altered: str = ""
    """The first break of the chain, in words; empty when the chain holds."""


class Journal:
    """The writing end; one process holds it at a time."""

    def __init__(self, path: str | Path, resume: bool = False) -> None:
        """Open a new journal, or with `resume` an existing one behind its last whole line.

        Raises:
            JournalError: the file exists already (or does not, with `resume`), another process is
                writing it, its chain is broken, or the disk refuses.
        """
        self.path = Path(path)
        self.recovered = ""
        """What was cut off when a torn last line was found."""
        self._prev, self._fd = START, self._open(resume)
        try:
            self._lock()
            if resume:
                self._continue()
        except BaseException:
            os.close(self._fd)
            raise

    def append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> Line:
        """Write one line and return it as it will be read back.

        Raises:
            JournalError: the line could not be written whole; nothing of it is left in the file.
        """
        if type not in TYPES or any(name in payload for name in RESERVED):
            raise ValueError(f"journal line {type!r} with {list(payload)}: see TYPES and RESERVED")
        line = {"v": VERSION, "type": type, "rollout": rollout, "prev": self._prev, **payload}
        text, line = _encode(line)
        self._write(text)
        self._prev = hashlib.sha256(text[:-1]).hexdigest()
        return line

    def sync(self) -> None:
        """Force everything written so far to the disk."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failed("forced to the disk", error) from error

    def close(self) -> None:
        if self._fd >= 0:
            self.sync()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _open(self, resume: bool) -> int:
        flags = os.O_RDWR | os.O_APPEND | (0 if resume else os.O_CREAT | os.O_EXCL)
        try:
            return os.open(self.path, flags, 0o644)
        except FileExistsError as error:
            message = f"{self.path} exists already; expected a new run. Resume it with --resume"
            raise JournalError(message) from error
        except OSError as error:
            raise self._failed("opened", error) from error

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"{self.path} is being written by another process; wait for it or stop it"
            raise JournalError(message) from error
        except OSError:
            pass  # a file system without locks: the run folder is still its own

    def _continue(self) -> None:
        reading = inspect_journal(self.path)
        if reading.altered:
            raise JournalError(f"{self.path} cannot be continued: {reading.altered}")
        if reading.torn:
            self.recovered = reading.torn
            os.ftruncate(self._fd, reading.good_bytes)
        self._prev = reading.last_hash

    def _write(self, text: bytes) -> None:
        size = os.fstat(self._fd).st_size
        try:
            written = os.write(self._fd, text)
            if written != len(text):
                raise OSError(
                    f"only {written} of {len(text)} bytes were written; is the disk full?"
                )
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, size)
            raise self._failed("written", error) from error

    def _failed(self, what: str, error: OSError) -> JournalError:
        reason = error.strerror or str(error)
        return JournalError(f"the journal {self.path} cannot be {what}: {reason}")


def _encode(line: Line) -> tuple[bytes, Line]:
    """(bytes with their newline, the line as it will be read back)."""
    try:
        text = json.dumps(line, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (ValueError, TypeError):  # a number that is not finite, or a numpy scalar: rare
        line = plain(line)
        text = json.dumps(line, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace") + b"\n", line


def plain(value: Any) -> Any:
    """A value in JSON's own types, numbers that are not finite as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "item"):  # a scalar of numpy or torch
        return plain(value.item())
    raise TypeError(f"a journal holds JSON types only; received {type(value).__name__}: {value!r}")


def inspect_journal(path: str | Path) -> Reading:
    """Read a journal whatever its state: whole lines, and in words what is torn or altered.

    Raises:
        JournalError: the file cannot be read at all, or is of another version.
    """
    try:
        raw = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        message = f"the journal {path} cannot be read: {reason}; expected RUN/journal.jsonl"
        raise JournalError(message) from error
    return _inspect(raw, str(path))


def _inspect(raw: bytes, path: str) -> Reading:
    pieces = raw.split(b"\n")
    tail = pieces.pop()  # what follows the last newline: nothing in a whole journal
    lines: list[Line] = []
    prev, altered, good = START, "", 0
    torn = f"a torn last line of {len(tail)} bytes" if tail else ""
    for number, piece in enumerate(pieces, 1):
        line = _decode(piece)
        if line is None and number == len(pieces) and not tail:
            torn = f"an unreadable last line of {len(piece)} bytes"
            break
        if line is None:
            raise JournalError(f"{path}:{number}: not a journal line; the file was damaged")
        _check_version(line, f"{path}:{number}")
        if not altered and line.get("prev") != prev:
            altered = f"line {max(number - 1, 1)} was altered, or a line before {number} is missing"
        prev = hashlib.sha256(piece).hexdigest()
        good += len(piece) + 1
        lines.append(line)
    return Reading(lines, good, prev, torn, altered)


def _decode(piece: bytes) -> Line | None:
    try:
        line = json.loads(piece)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) and "type" in line and "prev" in line else None


def _check_version(line: Line, where: str) -> None:
    if line.get("v") != VERSION:
        raise JournalError(f"{where}: version {line.get('v')!r}; this autotune reads {VERSION}")


def is_written(path: str | Path) -> bool:
    """Whether a process holds this journal: a run keeps it locked while it lasts.

    Where locks do not exist it is believed to be held; a file that cannot be opened is not.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def read_journal(path: str | Path) -> list[Line]:
    """All whole lines of a journal whose chain holds.

    Raises:
        JournalError: the file cannot be read, or was altered.
    """
    reading = inspect_journal(path)
    if reading.altered:
        raise JournalError(f"{path}: {reading.altered}; this journal cannot be trusted")
    return reading.lines


def winning_lines(lines: Iterable[Line]) -> list[Line]:
    """The run as it would read without interruptions.

    What a `resumed` line goes back behind was done again and is dropped; so are the marks of the
    interruption itself (`resumed`, and every `end` but the last).
    """
    kept: list[Line] = []
    for line in lines:
        if line["type"] == "resumed":
            kept = [old for old in kept if not _superseded(old, int(line["from"]))]
        else:
            _put(kept, line)
    return kept


def _superseded(line: Line, start: int) -> bool:
    """Whether a run that goes on with rollout `start` writes this line anew.

    A checkpoint or an evaluation numbered `start` shows the weights before that rollout: it stays.
    """
    if line["type"] in ("rollout", "note"):
        return int(line["rollout"]) >= start
    return line["type"] == "end" or (line["type"] != "header" and int(line["rollout"]) > start)


def _put(kept: list[Line], line: Line) -> None:
    """Append, or take the place of the same checkpoint, evaluation or start made twice."""
    if line["type"] in ("checkpoint", "eval", "schedule"):
        for index, old in enumerate(kept):
            if (old["type"], old["rollout"]) == (line["type"], line["rollout"]):
                kept[index] = line
                return
    kept.append(line)


def comparable(lines: Sequence[Line]) -> list[Line]:
    """Lines without what no two runs share: hashes, wall times, throughput, places."""
    return [_without_times(line) for line in winning_lines(lines)]


NOT_COMPARED = ("prev", "times", "at", "path", "environment")


def _without_times(line: Line) -> Line:
    line = {name: value for name, value in line.items() if name not in NOT_COMPARED}
    snapshot = line.get("snapshot")
    if isinstance(snapshot, dict) and isinstance(snapshot.get("metrics"), dict):
        metrics = {n: v for n, v in snapshot["metrics"].items() if not _is_speed(n)}
        line["snapshot"] = {**snapshot, "metrics": metrics}
    return line


def _is_speed(metric: str) -> bool:
    return metric == "tokens_per_second" or metric.startswith("time/")
