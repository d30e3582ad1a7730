"""How a feeder bears with a store that is down, slow or gone, and that it is alone at its work."""

from __future__ import annotations

import contextlib
import fcntl
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.errors import InputError, RunError
from autotune.tracking.spool import Spool
from autotune.tracking.store import hide_password, safe_uri

POLL_SECONDS = 1.0
LONGEST_WAIT = 30.0
"""Seconds between two tries at a store that is down."""


class GaveUp(RunError):
    """The store could not be reached; what is missing can be delivered later."""


def persist(
    act: Callable[[], None], spool: Spool, uri: str, patience: float, missing: Callable[[str], str]
) -> None:
    """Do it; while the store is down wait longer and longer, the run's length if need be.

    Args:
        act: what talks to the store; done again from its start until it does not raise.
        spool: while it is open there is no end to trying.
        patience: seconds of trying after the spool's end.
        missing: an error in words -> what was not delivered, for the person.

    Raises:
        GaveUp: the store stayed out of reach after the end.
    """
    wait, since_end = POLL_SECONDS, None
    while True:
        try:
            act()
            return
        except Exception as error:  # the store's own errors are of many kinds
            why, now = brief(error, uri), time.monotonic()
            if not spool.open:
                since_end = since_end or now
                if now - since_end >= patience:
                    raise GaveUp(missing(why)) from error
            print(f"{safe_uri(uri)}: {why}; next try in {wait:.0f} s", file=sys.stderr, flush=True)
            _wait(wait, spool, since_end, patience)
            wait = min(wait * 2, LONGEST_WAIT)


def _wait(seconds: float, spool: Spool, since_end: float | None, patience: float) -> None:
    """Sleep, but wake up when the spool ends: from then on patience counts."""
    until = time.monotonic() + seconds
    if since_end is not None:
        until = min(until, since_end + patience)
    while time.monotonic() < until:
        time.sleep(min(POLL_SECONDS, max(until - time.monotonic(), 0.0)))
        if since_end is None and not spool.open:
            return


def brief(error: Exception, uri: str) -> str:
    """First line of an error, without the password that it may quote."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {hide_password(text, uri)[:200]}"


@contextlib.contextmanager
def only_one(path: Path, wait: float) -> Iterator[None]:
    """Hold the delivery lock that is this file.

    Raises:
        InputError: if another feeder still holds it after `wait` seconds.
    """
    until = time.monotonic() + wait
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise InputError(
                        f"another feeder is delivering {path.parent}; it will finish by itself, "
                        "or stop it and run autotune sync again"
                    ) from None
                time.sleep(0.2)
        yield
