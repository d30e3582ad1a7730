"""The observer of a running trainer's journal lines.

On a terminal `on_line` only puts the line into an inbox (a few microseconds); folding and drawing
happen in rich's refresh thread, once a second. Without a terminal, or in CI, the lines are printed
plainly as they come.

A screen must never harm the run: whatever goes wrong in here is counted in `failures`, and the
run goes on without that frame.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from autotune.screen.panel import MAX_WIDTH, Clock, Run, Size, draw
from autotune.screen.plain import plain_lines
from autotune.story import Line, Story

if TYPE_CHECKING:
    from autotune.decisions import RunFacts
    from autotune.recipe.schema import Recipe

FRAMES_PER_SECOND = 1
"""A frame costs some 10 ms of the interpreter, taken from the trainer whenever it needs that too."""
_RECENT = 10
"""Rollouts whose pace gives the estimate of the time left."""


class RunScreen:
    """Live panel on a terminal, plain lines elsewhere; a context manager and a line observer."""

    def __init__(self, recipe: Recipe, facts: RunFacts, console: Console | None = None) -> None:
        self.console = console or Console()
        self.story = Story()
        self.failures = 0
        self.seconds = 0.0
        """Time spent in `on_line`, all of it on the training path."""
        self._run = run_of(recipe, facts)
        self._inbox: deque[tuple[float, Line]] = deque()
        self._started = self._arrived = time.monotonic()
        self._live: Live | None = None
        self._frame: RenderableType = Text("")

    @property
    def live(self) -> bool:
        """Whether this console gets the panel."""
        quiet = os.environ.get("CI", "").lower() not in ("", "0", "false")
        return self.console.is_terminal and not self.console.is_dumb_terminal and not quiet

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self.live:
            self._live = Live(
                console=self.console,
                get_renderable=self.frame,
                refresh_per_second=FRAMES_PER_SECOND,
                vertical_overflow="crop",
            )
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        if self._live is not None:
            live, self._live = self._live, None
            self._safely(live.stop)

    def on_line(self, line: Mapping[str, Any]) -> None:
        """Take one journal line; never raises."""
        began = time.perf_counter()
        self._inbox.append((time.monotonic(), line))
        if self._live is None:
            self._safely(self._print)
        self.seconds += time.perf_counter() - began

    def frame(self) -> RenderableType:
        """The panel as of now; on trouble the last good one."""
        self._safely(self._redraw)
        return self._frame

    def _redraw(self) -> None:
        self._drain()
        self._frame = draw(self._run, self.story, self._clock(), self._size())

    def _print(self) -> None:
        for line in self._drain():
            for text in plain_lines(self._run, self.story, line, self._clock()):
                self._write(text)

    def _write(self, text: str) -> None:
        """A plain line, past rich's layout (ten times cheaper), in what the output can encode."""
        encoding = self.console.encoding or "utf-8"
        self.console.file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
        self.console.file.flush()

    def _drain(self) -> list[Line]:
        """Fold what arrived; one bad line is counted and passed over."""
        taken: list[Line] = []
        while self._inbox:
            arrived, line = self._inbox.popleft()
            if self._safely(partial(self.story.add, line)):
                taken.append(line)
                if line.get("type") == "rollout":
                    self._arrived = arrived
        return taken

    def _clock(self) -> Clock:
        now, done = time.monotonic(), self.story.last.rollout + 1 if self.story.last else 0
        return Clock(now - self._started, self._left(now, self._run.rollouts - done))

    def _left(self, now: float, rollouts: int) -> float | None:
        """Seconds to the end at the pace of the last rollouts; their own times, not their arrival,
        because a resumed run brings its past lines all at once."""
        recent = list(self.story.rows.values())[-_RECENT:]
        totals = [total for row in recent if (total := row.times.get("total"))]
        if not totals:
            return None
        return max(rollouts * statistics.fmean(totals) - (now - self._arrived), 0.0)

    def _size(self) -> Size:
        width, height = self.console.size
        blocks = "utf" in (self.console.encoding or "").lower()
        return Size(min(width, MAX_WIDTH), height, ascii_only=not blocks)

    def _safely(self, act: Callable[[], object]) -> bool:
        try:
            act()
        except Exception:  # a dashboard must not stop a run; BaseException still does
            self.failures += 1
            return False
        return True


def run_of(recipe: Recipe, facts: RunFacts) -> Run:
    """The fixed part of the panel."""
    return Run(
        name=recipe.name,
        seed=recipe.seed,
        folder=recipe.folder(),
        rollouts=facts.rollouts,
        mode=recipe.control.mode,
        profile=recipe.control.profile,
        reward_maximum=facts.reward_maximum,
    )
