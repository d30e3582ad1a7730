"""`--follow`: a growing log, its news as they come, and the verdict whenever it changes.

The newest rollout is decided when the next one begins, because rows that still belong to it may follow.
Ends when the log says that training is over, or with Ctrl-C; either way the last verdict stands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autotune.advise.shadow import Said, Shadow, prepare
from autotune.advise.verdict import Verdict, verdict
from autotune.errors import NothingYet

POLL = 1.0
"""Seconds between two looks at a log that has not grown."""

OnSaid = Callable[[Said], None]
OnVerdict = Callable[[Verdict], None]
OnWait = Callable[[str], None]


def follow(
    path: Path | str,
    on_said: OnSaid,
    on_verdict: OnVerdict,
    options: Mapping[str, Any],
    *,
    poll: float = POLL,
    stop_when: Callable[[], bool] = lambda: False,
    on_wait: OnWait = lambda why: None,
) -> Shadow:
    """Watch a log until it ends.

    Args:
        path: the log; it may still be empty or not there yet.
        on_said: called with every action, alarm and emergency at once.
        on_verdict: called when the verdict's title changes, and with the first one.
        options: as for `prepare`.
        poll: seconds between two looks.
        stop_when: asked at the end of the file; True ends the watch.
        on_wait: called with the reason when there is nothing to read yet, once for each reason.

    Raises:
        NothingYet: the watch was ended before the log had begun.
        InputError: what is there is no log.
    """
    shadow = _wait_for_rows(path, options, poll, stop_when, on_wait)
    title = ""

    def at_end() -> bool:
        nonlocal title
        now = verdict(shadow)
        if now.title != title:
            title = now.title
            on_verdict(now)
        if shadow.log.hints.finished or stop_when():
            return False
        time.sleep(poll)
        return True

    def news(items: list[Said]) -> None:
        for item in items:
            on_said(item)

    try:
        return shadow.run(at_end, news)
    except KeyboardInterrupt:
        return shadow


def _wait_for_rows(
    path: Path | str,
    options: Mapping[str, Any],
    poll: float,
    stop_when: Callable[[], bool],
    on_wait: OnWait,
) -> Shadow:
    """Their keys are learnt from the first rows, so there must be some."""
    told = ""
    while True:
        try:
            shadow = prepare(path, **options)
            if shadow.survey.rows or stop_when():
                return shadow
            why = f"{path} has no metric lines yet"
        except NothingYet as nothing:  # asked of the file again, it could have begun meanwhile
            if stop_when():
                raise
            why = str(nothing)
        if why != told:
            on_wait(why)
            told = why
        time.sleep(poll)
