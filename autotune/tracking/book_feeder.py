"""The process that delivers a book of groups to MLflow: `python -m autotune.tracking.book_feeder FILE`.

Each line is delivered whole and in order, then counted in the receipt. A line that is sent again
after a crash changes nothing: params are written once, a point keeps its time and value, and the
rest replaces itself.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from autotune.errors import InputError
from autotune.story import finite
from autotune.tracking.groups import BOOK_TAG
from autotune.tracking.names import clean_names, params_of, tags_in_limits
from autotune.tracking.patience import POLL_SECONDS, GaveUp, only_one, persist
from autotune.tracking.payload import STATUSES, Point
from autotune.tracking.receipt import URI_VARIABLE, Receipt, read_receipt, write_receipt
from autotune.tracking.spool import Spool, parent_alive
from autotune.tracking.store import Store, local_uri, safe_uri

Line = Mapping[str, Any]


class BookFeeder:
    """Delivers one book to one store."""

    def __init__(self, path: Path, uri: str | None, spool: Spool, patience: float) -> None:
        self.path, self.spool, self.patience = path, spool, patience
        self._wanted, self.uri = uri, ""
        self._lines: list[Line | None] = []
        self._store: Store | None = None
        self._experiment = "autotune"
        self._groups: dict[tuple[str, ...], Store] = {}
        self._open: dict[tuple[str, ...], None] = {}
        """Groups without an end, in the order in which they were told of."""

    def feed(self) -> None:
        """Deliver until nothing more can come; what is still open ends as the book ended.

        Raises:
            GaveUp: if the store stays out of reach after the book's end.
        """
        more = True
        while more:
            more = self.spool.open
            self._lines += self.spool.take()
            if self._lines and not self.uri:
                self._address(self._lines[0] or {})
            self._patiently()
            if more:
                time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End what is still open, innermost first; without an `end` line the writer was killed."""
        last = (self._lines[-1] if self._lines else None) or {}
        status = str(last.get("status")) if last.get("type") == "end" else "killed"

        def act() -> None:
            for names in reversed(list(self._open)):
                self._group(names, 0).terminate(STATUSES.get(status, "FAILED"), self._end_ms(last))
            self._sign(len(self._lines), finished=True)

        if self.uri:
            persist(act, self.spool, self.uri, self.patience, self._missing)

    def _address(self, header: Line) -> None:
        """The store asked for, else the book's own, else the local one; and how far it was delivered."""
        named = self._wanted or os.environ.get(URI_VARIABLE) or header.get("uri")
        self.uri = named or local_uri(self.path.parent)
        self._experiment = header.get("experiment") or self._experiment
        fresh, known = Receipt(safe_uri(self.uri)), read_receipt(self.path.parent, receipt_name(self.path))
        self.receipt = known if known is not None and known.store == fresh.store else fresh
        self._done = 0

    def _patiently(self) -> None:
        if self._lines and self._done < len(self._lines):
            persist(self._deliver, self.spool, self.uri, self.patience, self._missing)

    def _deliver(self) -> None:
        while self._done < len(self._lines):
            line = self._lines[self._done]
            if (line or {}).get("type") == "group":
                self._tell(line or {}, fresh=self._done >= self.receipt.lines)
            self._done += 1
            if self._done > self.receipt.lines:
                self._sign(self._done)

    def _tell(self, line: Line, fresh: bool) -> None:
        """Remember whether the group is open, and deliver what is not delivered yet."""
        names, status = tuple(line["names"]), line.get("status") or ""
        if status in ("", "running"):
            self._open.setdefault(names)
        else:
            self._open.pop(names, None)
        if fresh:
            self._send(names, line, status)

    def _send(self, names: tuple[str, ...], line: Line, status: str) -> None:
        moment = _milliseconds(line)
        group = self._group(names, moment)
        if line.get("params"):
            group.log_params(params_of(line["params"]))
        values = {name: finite(v) for name, v in clean_names(line.get("metrics") or {}).items()}
        step = int(line.get("step") or 0)
        group.log_points([Point(n, v, step, moment / 1000) for n, v in values.items() if v is not None])
        tags = {**(line.get("tags") or {}), "mlflow.note.content": line.get("note"), BOOK_TAG: self.path.name}
        for name, value in tags_in_limits(tags).items():
            group.set_tag(name, value)
        for file in line.get("files") or ():
            if Path(file).is_file():
                group.log_file(Path(file))
        if status == "running":
            group.set_status("RUNNING")
        elif status:
            group.terminate(STATUSES.get(status, "FAILED"), moment)

    def _group(self, names: tuple[str, ...], start_ms: int) -> Store:
        if self._store is None:
            self._store = Store(self.uri, self.path.parent)
        if names not in self._groups:
            self._groups[names] = self._store.open_group(self._experiment, names, start_ms)
        group = self._groups[names]
        if len(names) == 1 and not self.receipt.run_id:
            self._sign(self.receipt.lines, run_id=group.run_id, experiment_id=group.experiment_id)
        return group

    def _end_ms(self, last: Line) -> int:
        return _milliseconds(last) or round(self.path.stat().st_mtime * 1000)

    def _sign(self, lines: int, **changes: Any) -> None:
        fields = {**{k: getattr(self.receipt, k) for k in ("store", "run_id", "experiment_id")}, **changes}
        self.receipt = Receipt(lines=lines, **fields)
        write_receipt(self.path.parent, self.receipt, receipt_name(self.path))

    def _missing(self, why: str) -> str:
        return (
            f"MLflow at {safe_uri(self.uri)} did not take {self.path.name} ({why}); it is kept."
            f" Deliver it later with: autotune sync {self.path.parent}"
        )


def receipt_name(path: Path) -> str:
    """`groups.jsonl` -> `groups.mlflow.json`"""
    return path.with_suffix(".mlflow.json").name


def _milliseconds(line: Line) -> int:
    with contextlib.suppress(KeyError, TypeError, ValueError):
        return round(datetime.fromisoformat(line["at"]).timestamp() * 1000)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 0 when everything is delivered, 1 when not, 2 on bad input."""
    parser = argparse.ArgumentParser(prog="autotune.tracking.book_feeder", description=__doc__)
    parser.add_argument("book", type=Path, help="a file of groups")
    parser.add_argument("--uri", help="MLflow tracking URI; default: the book's own, else local SQLite")
    parser.add_argument("--follow", type=int, metavar="PID", help="parent process that writes the book")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds of retrying at the end")
    options = parser.parse_args(arguments)
    if options.follow:
        with contextlib.suppress(OSError):
            os.nice(15)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    alive = parent_alive(options.follow) if options.follow else lambda: False
    try:
        lock = options.book.with_name(f".{options.book.name}.lock")
        with only_one(lock, wait=30.0 if options.follow else 2.0):
            feeder = BookFeeder(options.book, options.uri, Spool(options.book, alive), options.patience)
            feeder.feed()
            feeder.close()
    except (GaveUp, InputError) as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
