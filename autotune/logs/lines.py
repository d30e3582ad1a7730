"""One line of a log -> one row, or None. Each format is one function; `LineParser` tries them in turn.

    {'loss': 0.01, 'reward': '0.5'}             TRL and friends print Python dicts; newer ones quote
    {"loss": 0.01, "actor": {"lr": 1e-6}}       JSONL, nested or flat
    step:3 - critic/score/mean:0.5 - ...        verl's console
    iteration  7/ 2174 | reward: 7.6E-01 | ...  Megatron and ms-swift

Prefixes (timestamps, Ray's `(main_task pid=1)`, progress bars) may stand before all of them. Printed
dicts are read with one regular expression, three times faster than `ast.literal_eval`; a line that
is more than flat numbers falls back to the slow and safe way.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from autotune.logs import wandb

Row = dict[str, Any]
"""Their key -> value as it stands in the log: a number, None, or text that is no number."""

_NUMBER = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf|NaN|Infinity|None)"
_PAIR = re.compile(rf"'([^'\\]+)': (?:'({_NUMBER})'|({_NUMBER}))(?:, |\}}$)")
_RAY = re.compile(r"^\([\w.]+ pid=\d+[^)]*\) ?")
_VERL = re.compile(r"(?:^|\s)step:(\d+) - ")
_NUMPY = re.compile(r"np\.\w+\(([^()]*)\)")
_SWIFT = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|")
_PLAIN = {float, int, bool, type(None)}
"""Types of values that need no work."""
_WORDS = {"None": None, "null": None, "": None}


def number(text: Any) -> Any:
    """`text` as a float where it is one (also 'nan', quoted numbers, `7/2174`); otherwise unchanged."""
    if isinstance(text, (int, float)) or text is None:
        return text
    if not isinstance(text, str):
        return text
    word = text.strip()
    if word in _WORDS:
        return None
    try:
        return float(word)
    except ValueError:
        head, slash, tail = word.partition("/")
        return float(head) if slash and head.strip().isdigit() and tail.strip().isdigit() else text


def unprefixed(line: str) -> str:
    """The line without Ray's actor prefix."""
    return _RAY.sub("", line)


def dict_line(line: str) -> Row | None:
    """A printed Python dict, wherever in the line it starts."""
    start = line.find("{'")
    if start < 0:
        return None
    body = line[start:].rstrip()
    if not body.endswith("}"):
        return None
    if body.count("{") == 1 and "[" not in body:
        pairs = _PAIR.findall(body)
        if pairs and _covers(pairs, body):
            return {key: _WORDS.get(v, v) if (v := q or n) in _WORDS else float(v) for key, q, n in pairs}
    return _literal(body)


def _covers(pairs: list[tuple[str, str, str]], body: str) -> bool:
    """Whether the pairs are the whole dict: as many as there are `': ` in it."""
    return len(pairs) == body.count("': ")


def _literal(body: str) -> Row | None:
    text = re.sub(r"(?<=[\s:\[,])(nan|-?inf)(?=[,\s}\]])", "None", _NUMPY.sub(r"\1", body))
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return flat(found) if isinstance(found, dict) else None


def json_line(line: str) -> Row | None:
    """One JSON object a line; bare NaN is accepted, as several trainers write it."""
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    if found.keys() == {"step", "data"} and isinstance(found["data"], dict):
        found = {"step": found["step"], **found["data"]}  # verl's file logger wraps its metrics
    return flat(found)


def is_journal(line: str) -> bool:
    """Whether this is any line of our own journal, the header too."""
    return line.startswith('{"v":') and '"type":"' in line[:80]


def journal_line(line: str) -> Row | None:
    """A line of our own journal: the snapshot's metrics of one rollout, faults as NaN."""
    if not is_journal(line) or '"type":"rollout"' not in line[:80]:
        return None
    try:
        snapshot = json.loads(line)["snapshot"]
    except (ValueError, KeyError):
        return None
    faults = {n: math.nan for n, (state, _) in snapshot["invalid"].items() if state == "non_finite"}
    return {"rollout": snapshot["rollout"], **snapshot["metrics"], **faults}


def verl_line(line: str) -> Row | None:
    """`step:3 - key:value - key:value`."""
    found = _VERL.search(line)
    if found is None:
        return None
    row: Row = {"step": float(found[1])}
    for pair in line[found.end() :].split(" - "):
        key, colon, value = pair.rpartition(":")
        if colon:
            row[key.strip()] = _verl_number(value.strip())
    return row


def _verl_number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return number(_NUMPY.sub(r"\1", text))


def swift_line(line: str) -> Row | None:
    """`iteration 7/ 2174 | key: value | key: value |`."""
    found = _SWIFT.search(line)
    if found is None:
        return None
    row: Row = {"iteration": float(found[1]), "_total_steps": float(found[2])}
    for pair in line[found.end() :].split("|"):
        key, colon, value = pair.partition(": ")
        if colon:
            row[key.strip()] = number(value)
    return row


def flat(data: Mapping[str, Any], prefix: str = "") -> Row:
    """Nested objects with their keys joined by `/`; lists are left out."""
    if not prefix and _PLAIN.issuperset(map(type, data.values())):
        return data if isinstance(data, dict) else dict(data)
    row: Row = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, float):
            row[name] = value
        elif isinstance(value, Mapping):
            row.update(flat(value, f"{name}/"))
        elif isinstance(value, str):
            row[name] = number(value)
        elif isinstance(value, (int, type(None))):
            row[name] = value
    return row


class Table:
    """A table in text: CSV, or a notebook's Markdown. Remembers its header."""

    def __init__(self, run: str = "") -> None:
        self.header: list[str] = []
        self.sep = ","
        self.run = run
        """Which run of a table that holds several."""
        self.runs: list[str] = []
        self._sparse = False
        """Whether an empty cell says "not logged at this step"."""

    def __call__(self, line: str) -> Row | None:
        if not self.header:
            self._take_header(line)
            return None
        cells = self._cells(line)
        if len(cells) != len(self.header) or all(set(c) <= set("-: ") for c in cells):
            return None
        row = {key: number(cell) for key, cell in zip(self.header, cells, strict=True) if key}
        if self._sparse:
            row = {key: value for key, value in row.items() if value is not None}
        return row if any(isinstance(v, float) for v in row.values()) else None

    def _take_header(self, line: str) -> None:
        for sep in ("|", "\t", ",", ";"):
            if line.count(sep) >= 1:
                self.sep = sep
                cells = self._cells(line)
                words = [c for c in cells if c and not isinstance(number(c), float)]
                if len(cells) >= 2 and len(words) == len([c for c in cells if c]) >= 2:
                    self.runs = wandb.runs(cells)
                    self._sparse = bool(self.runs) or wandb.is_history(cells)
                    self.header = wandb.columns(cells, self.run) if self._sparse else cells
                return

    def _cells(self, line: str) -> list[str]:
        if self.sep == "|":
            return [cell.strip() for cell in line.strip().strip("|").split("|")]
        if '"' in line:
            import csv

            return [cell.strip() for cell in next(csv.reader([line], delimiter=self.sep))]
        return [cell.strip() for cell in line.split(self.sep)]
