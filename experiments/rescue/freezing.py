"""The freeze: which commit's rules and gains are reported on, and whether this checkout still has them.

    [{"commit": 40 hex digits, "date": "2026-12-01", "digest": sha256 of the files}, ...]   oldest first

Seeds of the reporting runs follow from the commit; the digest says, also where there is no git, that the
package, the suite and the sweep are the ones that were frozen.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from pathlib import Path

from experiments.rescue import runs

FROZEN = ("autotune", "experiments/rescue/suite.py", "experiments/rescue/sweep.py")
"""Nothing in these may change between a freeze and its reporting runs."""


def freezes(path: Path) -> list[dict[str, str]]:
    """Every freeze, oldest first; the last one is in force."""
    return list(json.loads(path.read_text("utf-8"))) if path.exists() else []


def frozen(path: Path, root: Path = runs.ROOT) -> str:
    """The freeze commit.

    Raises:
        SystemExit: there is none, or the frozen files are others now.
    """
    if not freezes(path):
        raise SystemExit(f"{path} is not there: reporting runs need a freeze; run `freeze` first")
    last = freezes(path)[-1]
    if digest(root) != last["digest"]:
        raise SystemExit(
            f"the package or the suite differs from the freeze {last['commit']}: run in a checkout of that"
            " commit (README, Seeds), or freeze again, with new seeds"
        )
    return last["commit"]


def freeze(path: Path, root: Path = runs.ROOT) -> None:
    """Write the current commit down; the tree must be clean, or the commit would not say what ran."""
    here = runs.commit()
    if here.endswith("+") or len(here) != 40:
        raise SystemExit(f"the tree is {here}; expected a clean commit, so that the seeds follow from it")
    new = {"commit": here, "date": str(datetime.date.today()), "digest": digest(root)}
    path.write_text(json.dumps([*freezes(path), new], indent=2) + "\n", "utf-8")
    print(f"frozen at {here}; commit {path.name} next")


def digest(root: Path) -> str:
    """sha256 over path and content of every frozen file; what Python compiled is none of them."""
    whole = hashlib.sha256()
    for file in sorted(file for part in FROZEN for file in _files(root / part)):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        whole.update(f"{file.relative_to(root).as_posix()} {content}\n".encode())
    return whole.hexdigest()


def _files(part: Path) -> list[Path]:
    if part.is_file():
        return [part]
    return [f for f in part.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
