"""A human's commands to a live run, as small files: no sockets, no threads, nothing when there are none.

    autotune ctl RUN set kl_coef=0.01
        -> RUN/commands/<time>-<process>-<random>.json       written beside, then renamed into place
        -> the control loop's next rollout boundary           `Inbox.take`, in the order of the names
        -> a `command` line in the journal, with the outcome  then `Inbox.done` removes the file

A file appears whole or not at all; one that somebody else wrote halfway is given one more boundary
before it is refused. A file is removed only after its line is in the journal, and a line is known by
its id, so a kill between the two neither loses a command nor obeys it twice. A run that resumes from
before a command obeys it again at the very rollout where it was obeyed first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.decisions import Command, RunFacts, command_from_json
from autotune.errors import InputError
from autotune.knobs import ALIASES, KNOBS, batch_problems, divisors, expand, fit_micro_batch

FOLDER = "commands"
NAMES = ("pause", "resume", "pin", "unpin", "set")
LARGEST = 1 << 16
"""Bytes of a command file; real ones have about a hundred."""

Line = Mapping[str, Any]


# --------------------------------------------------------------------------------- the writing end


def drop(
    run: Path, command: str, knobs: Sequence[str] = (), values: Mapping[str, float] | None = None
) -> Path:
    """Leave a command for a run; its file's stem is the command's id.

    Raises:
        InputError: the folder cannot be written.
    """
    folder = run / FOLDER
    name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}"
    data = {"command": command, "knobs": list(knobs), "values": dict(values or {})}
    try:
        folder.mkdir(exist_ok=True)
        beside = folder / f".{name}.tmp"
        beside.write_text(json.dumps(data) + "\n", "utf-8")
        return beside.rename(folder / f"{name}.json")
    except OSError as error:
        raise InputError(f"no command can be left in {folder}: {error.strerror}") from error


# --------------------------------------------------------------------------------- the reading end


class Inbox:
    """Commands of one run, for its control loop."""

    def __init__(self, run: Path, before: Iterable[Line] = (), start: int = 0) -> None:
        """
        Args:
            run: the run's folder.
            before: winning journal lines from before a resume.
            start: first rollout done again; commands from behind it are obeyed again in their places.
        """
        self.folder = run / FOLDER
        told = [line for line in before if line["type"] == "command"]
        self._obeyed = {str(line["id"]) for line in told}
        lost = [line for line in told if int(line["rollout"]) > start and line["command"] in NAMES]
        self._again = [(int(line["rollout"]), command_from_json(line)) for line in lost]
        self._unreadable: dict[str, int] = {}  # name -> size at the last boundary

    def take(self, rollout: int) -> list[Command]:
        """Commands that wait at the boundary before `rollout`, oldest first."""
        again = [command for at, command in self._again if at <= rollout]
        self._again = [(at, command) for at, command in self._again if at > rollout]
        return again + self._files()

    def done(self, command: Command) -> None:
        """Its line is in the journal: it is never obeyed again, even where its file cannot go."""
        self._obeyed.add(command.id)
        self._remove(f"{command.id}.json")

    def _files(self) -> list[Command]:
        try:
            names = sorted(name for name in os.listdir(self.folder) if name.endswith(".json"))
        except OSError:
            return []
        found = []
        for name in names:
            if name.startswith("."):
                continue
            if name[:-5] in self._obeyed:
                self._remove(name)
            elif (command := self._read(name)) is not None:
                found.append(command)
        return found

    def _read(self, name: str) -> Command | None:
        """The command, or None while its file may still be being written."""
        raw = _bytes(self.folder / name)
        try:
            return parse(name[:-5], json.loads(raw))
        except InputError as error:
            return Command(name[:-5], "unreadable", problem=str(error))
        except (ValueError, RecursionError) as error:
            if self._unreadable.get(name) == len(raw):
                return Command(name[:-5], "unreadable", problem=f"the file is no JSON: {error}")
            self._unreadable[name] = len(raw)
            return None

    def _remove(self, name: str) -> None:
        with contextlib.suppress(OSError):  # its id is remembered
            (self.folder / name).unlink(missing_ok=True)


def _bytes(path: Path) -> bytes:
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return b""
        return path.read_bytes()
    except OSError:
        return b""


def parse(id: str, data: Any) -> Command:
    """A command from its file's content.

    Raises:
        InputError: what is wrong with it, and what was expected.
    """
    if not isinstance(data, dict) or data.get("command") not in NAMES:
        raise InputError(f"received {data!s:.80}; expected a command among {', '.join(NAMES)}")
    name, knobs, values = data["command"], data.get("knobs") or [], data.get("values") or {}
    if not isinstance(knobs, list) or not isinstance(values, dict):
        raise InputError("expected `knobs` as a list of names and `values` as a mapping of numbers")
    known = (*KNOBS, *ALIASES)
    unknown = [str(k) for k in (*knobs, *values) if k not in known]
    if unknown:
        raise InputError(f"{', '.join(unknown)} is no knob; expected any of {', '.join(known)}")
    if (name == "set") != bool(values) or (name in ("pin", "unpin")) != bool(knobs):
        raise InputError("expected values for set, knobs for pin and unpin, and nothing for pause and resume")
    return Command(id, name, tuple(knobs), {str(k): _number(k, v) for k, v in values.items()})


def _number(knob: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{knob} = {value!r}; expected a finite number")
    return int(value) if KNOBS[expand(knob)[0]].integer and value == int(value) else float(value)


# ------------------------------------------------------------------------- what a set amounts to


def wanted_values(
    values: Mapping[str, float], knobs: Mapping[str, float], facts: RunFacts
) -> dict[str, float]:
    """Real knobs to set, re-derived ones included, so that the whole vector is legal.

    Args:
        values: knob (or `clip_range`, for both sides) -> value that a human wants.
        knobs: the vector in force.
        facts: what can be moved in this run.

    Raises:
        InputError: a knob cannot be moved here, or a value is out of range or off the lattice.
    """
    wanted = {real: value for name, value in values.items() for real in expand(name)}
    for name, value in wanted.items():
        _check(name, value, knobs, facts)
    trial = {**knobs, **wanted}
    if wanted.keys() & set(BATCHES) and all(name in trial for name in BATCHES):
        trial = _derive(trial, wanted, facts)
        problems = [message for _, message in batch_problems(trial, facts.world_size)]
        batches = wanted.get("num_rollout_batches")
        if batches is not None and batches != trial["num_rollout_batches"]:
            samples = trial["train_batch_size"] * trial["rollout_n"]
            problems.append(f"num_rollout_batches = {batches:g} does not divide {samples:g} samples")
        if problems:
            raise InputError("; ".join(problems))
    told = set(wanted) | (set(DERIVED) if wanted.keys() & {*AMOUNT, "ppo_mini_batch_size"} else set())
    return {name: value for name, value in trial.items() if name in told or value != knobs[name]}


AMOUNT = ("train_batch_size", "rollout_n")
DERIVED = ("micro_batch_size", "rollout_micro_batch_size", "num_rollout_batches")
BATCHES = (
    "train_batch_size",
    "rollout_n",
    "ppo_mini_batch_size",
    "micro_batch_size",
    "rollout_micro_batch_size",
    "num_rollout_batches",
)


def _check(name: str, value: float, knobs: Mapping[str, float], facts: RunFacts) -> None:
    """One value on its own: the knob can move, and the number is within the table's bounds."""
    capability = facts.knob_capability.get(name)
    if name not in knobs or capability is None or not capability.acts:
        why = capability.reason or capability.state if capability else "this trainer has no such knob"
        raise InputError(f"{name} cannot be changed in this run: {why}")
    spec = KNOBS[name]
    start = facts.knobs.get(name, spec.low)  # a recipe may start outside the table; it may go back there
    low, high = min(spec.low, start), max(spec.high, start)
    if not low <= value <= high:
        raise InputError(f"{name} = {value:g}: expected {low:g} to {high:g} {_unit(spec.unit)}".rstrip())
    if spec.integer and value != int(value):
        raise InputError(f"{name} = {value:g}: expected a whole number of {spec.unit}")


def _unit(unit: str) -> str:
    return "" if unit == "1" else unit


def _derive(trial: dict[str, float], wanted: Mapping[str, float], facts: RunFacts) -> dict[str, float]:
    """Micro batches and the number of sampling batches follow from what they divide."""
    n, ranks = int(trial["rollout_n"]), facts.world_size
    mini, share = int(trial["ppo_mini_batch_size"]) * n // ranks, int(trial["train_batch_size"]) * n // ranks
    amount = set(AMOUNT) & wanted.keys()
    if mini and (amount or "ppo_mini_batch_size" in wanted) and "micro_batch_size" not in wanted:
        limit = int(facts.knobs["micro_batch_size"])
        trial["micro_batch_size"] = fit_micro_batch(int(trial["ppo_mini_batch_size"]), n, ranks, limit)
    if share and "rollout_micro_batch_size" not in wanted:
        if "num_rollout_batches" in wanted:
            trial["rollout_micro_batch_size"] = max(share // int(trial["num_rollout_batches"]), 1)
        elif amount:
            limit = max(int(facts.knobs["rollout_micro_batch_size"]), 1)
            trial["rollout_micro_batch_size"] = max(d for d in divisors(share) if d <= limit)
    trial["num_rollout_batches"] = max(share // int(trial["rollout_micro_batch_size"]), 1)
    return trial
