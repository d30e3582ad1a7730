"""Whether a process is still there: a killed one is gone a moment after its files are closed."""

from __future__ import annotations

import time
from pathlib import Path


def alive(pid: int) -> bool:
    """Neither gone nor a zombie that nobody has collected."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def ends(*pids: int, seconds: float = 20.0) -> bool:
    """Whether all of them are gone within so many seconds."""
    until = time.monotonic() + seconds
    while any(map(alive, pids)):
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
