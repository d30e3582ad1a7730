"""The journal as a spool: its complete lines as they appear, and whether more can come.

Only lines that end in a newline are taken, so a line that is being written, or that a kill has
torn, is never read in half. More lines can come while the process that writes the journal lives
and the newest line is not `end`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class Spool:
    """Tail of one journal file."""

    def __init__(self, path: Path, alive: Callable[[], bool]) -> None:
        self.path = path
        self._alive = alive
        self._offset = 0
        self._ended = False
        self._ahead: list[Mapping[str, Any] | None] = []

    @property
    def open(self) -> bool:
        """Whether more lines can come. The writer is asked first, so that its last line is seen."""
        alive = self._alive()
        self._read()
        return alive and not self._ended

    def take(self) -> list[Mapping[str, Any] | None]:
        """New complete lines; None stands for one that is not a JSON object."""
        self._read()
        taken, self._ahead = self._ahead, []
        return taken

    def _read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for raw in whole.splitlines():
            self._ahead.append(_parse(raw))
            self._ended = (self._ahead[-1] or {}).get("type") == "end"


def _parse(raw: bytes) -> Mapping[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def parent_alive(pid: int) -> Callable[[], bool]:
    """Whether the process that started this one still lives: an orphan gets another parent."""
    return lambda: os.getppid() == pid
