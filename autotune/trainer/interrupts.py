"""Ctrl-C waits for a moment where stopping leaves nothing half done, on several ranks the same moment.

Ranks stop in step: one that left in the middle of an update would leave the others waiting for it, and
saving is a thing that all of them do together. So on several ranks an interrupt is only remembered,
and at the places where the loop asks, all of them learn whether anybody was interrupted.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from autotune.trainer.group import any_rank


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Hold SIGINT back inside the block and deliver it right after.

    Only the main thread receives signals; elsewhere there is nothing to hold.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        caught.append(number)

    before = signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if caught and callable(before):
        before(signal.SIGINT, None)  # Python's own handler, or that of `TogetherInterrupts`
    elif caught:
        raise KeyboardInterrupt


class TogetherInterrupts:
    """Interrupts of several ranks, obeyed by all of them at the same place; one rank needs none of it."""

    def __init__(self, ranks: int) -> None:
        self._several = ranks > 1
        self._caught = 0
        self.in_step = True
        """False after a second Ctrl-C, which waits for nobody: nothing can be done together any more."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Remember SIGINT inside the block."""
        if not self._several or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, self._remember)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._caught += 1
        if self._caught > 1:
            self.in_step = False
            raise KeyboardInterrupt

    def obey(self) -> None:
        """Raise `KeyboardInterrupt` on all ranks when one was interrupted; a collective call."""
        if self._several and any_rank(self._caught > 0):
            self._caught = max(self._caught, 1)
            raise KeyboardInterrupt
