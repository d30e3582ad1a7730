"""Where rows come from when a log is not lines of text: JSON documents, MLflow runs, TensorBoard events.

None of them needs its own package. MLflow's file store keeps one text file a metric; its database is
SQLite; an event file is a chain of length-prefixed records in which a scalar is four protobuf fields.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.logs.header import Hints, trl_args
from autotune.logs.lines import Row, flat, json_line, number

# -------------------------------------------------------------------------------------- JSON


def json_rows(path: Path, hints: Hints) -> Iterator[Row]:
    """`trainer_state.json`, or a bare list of rows."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{path} is not JSON: {error}. Expected trainer_state.json or a list of rows"
        ) from None
    if isinstance(document, Mapping):
        _trainer_state(document, hints)
        document = document.get("log_history", [document])
    for entry in document if isinstance(document, list) else []:
        if isinstance(entry, Mapping):
            yield flat(entry)


def _trainer_state(document: Mapping[str, Any], hints: Hints) -> None:
    hints.total_steps = int(document.get("max_steps") or 0)
    every = document.get("logging_steps")
    if isinstance(every, (int, float)) and every >= 1:
        hints.steps_per_row = int(every)


# ------------------------------------------------------------------------------------ MLflow


def mlflow_folder(path: Path, hints: Hints) -> Iterator[Row]:
    """A run of MLflow's file store: `metrics/<key>` holds `timestamp value step` lines."""
    params = {p.name: number(p.read_text().strip()) for p in (path / "params").glob("*") if p.is_file()}
    trl_args(params, hints)
    root = path / "metrics"
    points = (
        (file.relative_to(root).as_posix(), int(parts[2]), number(parts[1]))
        for file in sorted(root.rglob("*"))
        if file.is_file()
        for line in file.read_text().splitlines()
        if len(parts := line.split()) >= 3
    )
    yield from by_step(points)


def mlflow_sqlite(path: Path, run: str, hints: Hints) -> Iterator[Row]:
    """A run in MLflow's SQLite store; `run` is an id or a name, or the newest one."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        run_id = _run_id(db, path, run)
        params = {
            k: number(v) for k, v in db.execute("select key, value from params where run_uuid = ?", (run_id,))
        }
        trl_args(params, hints)
        query = "select key, step, value, is_nan from metrics where run_uuid = ? order by step, timestamp"
        points = (
            (key, int(step), float("nan") if is_nan else value)
            for key, step, value, is_nan in db.execute(query, (run_id,))
        )
        yield from by_step(points)


def _run_id(db: sqlite3.Connection, path: Path, run: str) -> str:
    try:
        rows = db.execute("select run_uuid, name from runs order by start_time desc").fetchall()
    except sqlite3.DatabaseError as error:
        raise InputError(f"{path} is not an MLflow database: {error}") from None
    wanted = [uuid for uuid, name in rows if not run or run in (uuid, name)]
    if not wanted:
        known = ", ".join(f"{name or '?'} ({uuid[:8]})" for uuid, name in rows[:8]) or "none"
        raise InputError(f"there is no run {run!r} in {path}; its runs are: {known}")
    return str(wanted[0])


def by_step(points: Iterable[tuple[str, int, Any]]) -> Iterator[Row]:
    """Scalars one by one -> rows; the last value of a key at a step wins."""
    rows: dict[int, Row] = {}
    for key, step, value in points:
        rows.setdefault(step, {"step": step})[key] = value
    for step in sorted(rows):
        yield rows[step]


# ---------------------------------------------------------------------------------- prime-rl

METRICS_FILE = "metrics.jsonl"


def metrics_folder(path: Path) -> Iterator[Row]:
    """Every `metrics.jsonl` below a folder as one log: prime-rl's trainer and orchestrator write one each.

    The rewards are in the one, the optimizer's numbers in the other, and both count the same steps.
    """
    rows = (row for file in sorted(path.rglob(METRICS_FILE)) for row in _json_lines(file) if "step" in row)
    yield from by_step((key, int(row["step"]), value) for row in rows for key, value in row.items())


def _json_lines(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", errors="replace") as stream:
        yield from (row for line in stream if (row := json_line(line)))


# ------------------------------------------------------------------------------- TensorBoard


def tensorboard_rows(path: Path) -> Iterator[Row]:
    """All scalars of one event file, or of every event file below a folder."""
    files = [path] if path.is_file() else sorted(path.rglob("events.out.tfevents.*"))
    yield from by_step(point for file in files for point in event_scalars(file))


def event_scalars(file: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of one event file. A torn last record ends it: the writer may still be alive."""
    for record in _records(file):
        step, summary = 0, []
        for number_, value in _fields(record):
            if number_ == 2:
                step = value
            elif number_ == 5:
                summary.append(value)
        for message in summary:
            for one, value in _fields(message):
                if one == 1 and (scalar := _scalar(value)):
                    yield scalar[0], step, scalar[1]


def _records(file: Path) -> Iterator[bytes]:
    """TFRecord frames: u64 length, u32 checksum, data, u32 checksum."""
    with file.open("rb") as stream:
        while len(head := stream.read(12)) == 12:
            (length,) = struct.unpack("<Q", head[:8])
            data = stream.read(length)
            if len(data) < length or len(stream.read(4)) < 4:
                return
            yield data


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of one protobuf message: varints as int, the rest as bytes or float."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif kind == 1:
            yield tag >> 3, data[at : at + 8]
            at += 8
        elif kind == 2:
            size, at = _varint(data, at)
            yield tag >> 3, data[at : at + size]
            at += size
        elif kind == 5:
            yield tag >> 3, data[at : at + 4]
            at += 4
        else:
            return


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            break
        shift += 7
    return value, at


def _scalar(message: bytes) -> tuple[str, float] | None:
    """Summary.Value: tag = 1, simple_value = 2, tensor = 8."""
    tag, found = "", None
    for field, value in _fields(message):
        if field == 1:
            tag = value.decode("utf-8", "replace")
        elif field == 2:
            found = struct.unpack("<f", value)[0]
        elif field == 8:
            found = _tensor(value)
    return (tag, found) if found is not None else None


def _tensor(message: bytes) -> float | None:
    """TensorProto with one float or double: dtype = 1, content = 4, float_val = 5, double_val = 6."""
    dtype, content, values = 1, b"", b""
    for field, value in _fields(message):
        if field == 1:
            dtype = value
        elif field == 4:
            content = value
        elif field in (5, 6):
            values = value
    code, size = ("<f", 4) if dtype == 1 else ("<d", 8)
    raw = content or values
    return float(struct.unpack(code, raw)[0]) if dtype in (1, 2) and len(raw) == size else None
