"""Which code decided: a hash of it, that a journal keeps and a replay compares."""

from __future__ import annotations

import hashlib
from pathlib import Path

import autotune

POLICY_SOURCES = (
    "statistics.py",
    "history.py",
    "guards.py",
    "judge.py",
    "ledger.py",
    "controller.py",
)


def policies_hash() -> str:
    """Hash of all code that decides: a replay under other rules can say so."""
    package = Path(autotune.__file__).parent
    files = [package / name for name in POLICY_SOURCES] + sorted((package / "policies").glob("*.py"))
    total = hashlib.sha256()
    for file in files:
        if file.is_file():
            total.update(f"{file.name}\0".encode() + file.read_bytes())
    return total.hexdigest()
