"""Which kind of log a path is, and its rows.

A folder is an MLflow run or holds TensorBoard events; a file is SQLite, an event file, one JSON document,
or lines of text. Text is decided line by line, so that a console log with a header, progress bars and
metric lines in between is one log. `follow` makes the rows of a growing file endless.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import InputError, NothingYet
from autotune.logs import sources
from autotune.logs.blocks import LINES, Block, read_block
from autotune.logs.header import HeaderReader, Hints
from autotune.logs.join import whole_document
from autotune.logs.lines import (
    Row,
    Table,
    dict_line,
    is_journal,
    journal_line,
    json_line,
    swift_line,
    unprefixed,
    verl_line,
)

Parser = Callable[[str], Row | None]

_LINE_FORMATS: dict[str, Parser] = {
    "autotune journal": journal_line,
    "printed dicts": dict_line,
    "JSONL": json_line,
    "verl console": verl_line,
    "Megatron/ms-swift console": swift_line,
}
KEPT = 32_000_000
"""Numbers that are kept for a second pass: 256 MiB."""
LOOSE = 16
"""Room that a number outside a block takes, in numbers."""
_SUMMARY = "train_runtime"
"""HF prints one row with this key when training is over."""


@dataclass
class Log:
    """One log: where it is, what kind, and what its header said so far."""

    path: Path
    format: str
    run: str = ""
    """Run id or name inside an MLflow database."""
    hints: Hints = field(default_factory=Hints)
    _kept: list[Row | Block] | None = field(default=None, init=False, repr=False)
    """What the last pass of `parts` read, where it was little enough; the next pass takes it."""

    def rows(self, follow: Callable[[], bool] | None = None) -> Iterator[Row]:
        """Every row from the start; `follow` is asked at the end of the file whether to wait on."""
        self.hints.progress = 0
        self._kept = None
        if self.format in _DOCUMENTS:
            yield from self._documents(follow)
        else:
            yield from self._lines(_text_lines(self.path, follow))

    def parts(self) -> Iterator[Row | Block]:
        """Every row of a finished log, regular stretches of JSONL as blocks.

        The second pass over a log finds its numbers in memory, within `KEPT`.
        """
        if self._kept is not None:
            kept, self._kept = self._kept, None
            yield from kept
        elif self.format == "JSONL":
            yield from self._keeping(self._blocks())
        else:
            yield from self.rows()

    def _blocks(self) -> Iterator[Row | Block]:
        self.hints.progress = 0
        lines = _finished_lines(self.path)
        while chunk := list(itertools.islice(lines, LINES)):
            block = read_block(chunk)
            regular = block is not None and not {_SUMMARY, "_total_steps"} & set(block.keys)
            yield from [block] if block is not None and regular else self._lines(chunk)

    def _keeping(self, parts: Iterable[Row | Block]) -> Iterator[Row | Block]:
        kept, room = list[Row | Block](), KEPT
        for part in parts:
            room -= part.numbers.size if isinstance(part, Block) else LOOSE * len(part)
            if room >= 0:
                kept.append(part)
            else:
                kept.clear()
            yield part
        self._kept = kept if room >= 0 else None

    def _documents(self, follow: Callable[[], bool] | None) -> Iterator[Row]:
        """Whole documents have no tail: they are read again and the rows already seen left out."""
        seen = 0
        while True:
            rows = whole_document(_DOCUMENTS[self.format](self))
            ready = rows if follow is None else rows[:-1]  # the newest may still lack some of its keys
            for row in ready[seen:]:
                if _SUMMARY in row:
                    self.hints.finished = True
                else:
                    yield row
            seen = max(seen, len(ready))
            if follow is None:
                return
            if not follow():
                follow = None  # one last look, the newest row included

    def _lines(self, lines: Iterable[str]) -> Iterator[Row]:
        header, table, parser = HeaderReader(self.hints), Table(self.run), None
        is_table = self.format.startswith("table")
        for line in lines:
            if is_table:
                row = table(line)
            else:
                row = parser(line) if parser else None
                if row is None:
                    row, found = _any_format(line)
                    parser = found or parser
            if row is None:
                if not is_table:
                    header.feed(line)
            elif _SUMMARY in row:
                self.hints.finished = True
            else:
                if "_total_steps" in row:
                    self.hints.total_steps = int(row.pop("_total_steps"))
                yield row
        if len(table.runs) > 1:
            read = self.run if self.run in table.runs else table.runs[0]
            count = len(table.runs)
            self.hints.remark(f"this table holds {count} runs; {read!r} is read, --run picks another")
        header.finish()


def _any_format(line: str) -> tuple[Row | None, Parser | None]:
    if "{'actor_rollout_ref'" in line:
        return None, None  # a configuration dump, not a row
    if is_journal(line):
        return journal_line(line), journal_line
    for parser in _LINE_FORMATS.values():
        row = parser(line)
        if row:
            return row, parser
    return None, None


def _text_lines(path: Path, follow: Callable[[], bool] | None) -> Iterator[str]:
    """Lines without their ends; progress bars rewrite theirs with carriage returns."""
    if follow is None:
        yield from _finished_lines(path)
        return
    rest = ""
    with path.open(encoding="utf-8", errors="replace", newline="") as stream:
        while True:
            chunk = stream.readline()
            if chunk.endswith("\n"):
                whole, rest = rest + chunk, ""
                yield from whole.rstrip("\r\n").split("\r") if "\r" in whole else (whole.rstrip("\n"),)
            elif chunk:
                rest += chunk  # a half-written line: wait for its end
            elif not follow():
                if rest:
                    yield rest
                return


def _finished_lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace", newline="\n") as stream:
        for line in stream:
            if "\r" in line:
                yield from line.rstrip("\r\n").split("\r")
            else:
                yield line


_DOCUMENTS: dict[str, Callable[[Log], Iterator[Row]]] = {
    "JSON": lambda log: sources.json_rows(log.path, log.hints),
    "MLflow run folder": lambda log: sources.mlflow_folder(log.path, log.hints),
    "MLflow database": lambda log: sources.mlflow_sqlite(log.path, log.run, log.hints),
    "TensorBoard events": lambda log: sources.tensorboard_rows(log.path),
    "prime-rl metrics folder": lambda log: sources.metrics_folder(log.path),
}


def open_log(path: Path | str, run: str = "") -> Log:
    """Find out what a log is.

    Args:
        path: a file or a folder.
        run: id or name of the run inside an MLflow database.

    Raises:
        NothingYet: there is nothing at this path, or it is still empty.
        InputError: there is nothing that could be a log.
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path, run)
    if not path.is_file():
        raise NothingYet(f"there is no log at {path}; expected a log file, an MLflow run or an event folder")
    return Log(path, _file_format(path), run)


def _folder(path: Path, run: str) -> Log:
    if (path / "metrics").is_dir():
        return Log(path, "MLflow run folder")
    for name in ("journal.jsonl", "trainer_state.json", "mlflow.db", "experiment_log.jsonl"):
        if (path / name).is_file():
            return open_log(path / name, run)
    if next(path.rglob("events.out.tfevents.*"), None) is not None:
        return Log(path, "TensorBoard events")
    if next(path.rglob(sources.METRICS_FILE), None) is not None:
        return Log(path, "prime-rl metrics folder")
    error = InputError if any(path.iterdir()) else NothingYet
    raise error(
        f"{path} holds no log that can be read: expected metrics/ (an MLflow run), trainer_state.json,"
        f" mlflow.db, experiment_log.jsonl, {sources.METRICS_FILE} or events.out.tfevents.* files"
    )


def _file_format(path: Path) -> str:
    if "tfevents" in path.name:
        return "TensorBoard events"
    with path.open("rb") as stream:
        start = stream.read(65536)
    if start.startswith(b"SQLite format 3"):
        return "MLflow database"
    if b"\0" in start:
        raise InputError(f"{path} is a binary file; expected text, an MLflow database or TensorBoard events")
    return _text_format(path, start.decode("utf-8", "replace"))


def _text_format(path: Path, start: str) -> str:
    lines = [line for line in start.replace("\r", "\n").split("\n") if line.strip()]
    if not lines:
        raise NothingYet(f"{path} is empty; expected metric lines")
    first = lines[0].strip()
    if (
        path.suffix == ".json"
        or first in ("{", "[")
        or (first.startswith("[") and first[1:].strip()[:1] == "{")
    ):
        return "JSON" if json_line(first) is None or len(lines) == 1 else "JSONL"
    for line in lines:
        row, parser = _any_format(unprefixed(line))
        if parser and (row or parser is journal_line):
            return next(name for name, one in _LINE_FORMATS.items() if one is parser)
    return _table_format(path, lines) or "text without metric lines"


def _table_format(path: Path, lines: list[str]) -> str:
    table = Table()
    rows = [row for line in lines[:4] if (row := table(line))]
    if not rows or (path.suffix not in (".csv", ".tsv", ".md") and len(table.header) < 3):
        return ""
    return "table (Markdown)" if table.sep == "|" else "table (CSV)"


def waiter(seconds: float, stop_when: Callable[[], bool] = lambda: False) -> Callable[[], bool]:
    """A `follow` for `Log.rows`: sleeps and answers True until `stop_when`."""

    def wait() -> bool:
        if stop_when():
            return False
        time.sleep(seconds)
        return True

    return wait
