"""One step off: the next rollout's responses are drawn while this one's updates run.

    rollout t     take what was drawn ahead with W(t-1) -> hand W(t) to the server -> begin drawing for t + 1
                  old log-probs under W(t), updates: W(t) becomes W(t+1) | meanwhile: drawing with W(t)

A rollout then takes max(sampling, training) instead of their sum, and its data is one rollout old. The old
log-probs are those of W(t), so ratios and clipping are what they always are; that the responses came from
W(t-1) is weighed token by token with the truncated importance weights of `mismatch.py`, where the sampler
told its log-probs.

What is drawn ahead is drawn under the knobs of now. Where one that sampling depends on has changed since, or
weights were brought back, it is thrown away and drawn anew: a change takes effect in the rollout that it was
made for, and a collapsed model's responses are not learnt from after a restore. The tokens are spent.

The thread does nothing but ask the server: no collective call, no device work, no random stream.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autotune.trainer.collect import Room
from autotune.trainer.prompts import Taken
from autotune.trainer.ranks import Rows
from autotune.trainer.rollout.base import Draw, Prompts
from autotune.trainer.rollout.vllm import VllmSampler
from autotune.trainer.rollout.vllm_engine import Generated


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rollout, or a further round of it, asks for: equal weights answer equal ones alike."""

    place: int
    """In the stream of prompts."""
    count: int
    """Prompts."""
    limit: int
    """Tokens of a prompt."""
    group: int
    """Responses per prompt."""
    draw: Draw


@dataclass(frozen=True, slots=True)
class Order:
    """A wish, and the prompts that it comes to."""

    wish: Wish
    taken: Taken
    prompts: Prompts


@dataclass(frozen=True, slots=True)
class Drawn:
    """This rank's responses to an order."""

    order: Order
    rows: Rows
    parts: Sequence[Generated]
    whole: bool
    """False where the server's memory was too small: then this rank draws again, less at once."""

    @property
    def tokens(self) -> int:
        """Sampled by this rank, prompts' and responses', also where memory ended before all was drawn."""
        drawn = self.rows[: sum(len(part.lengths) for part in self.parts)]
        prompts = self.order.prompts.lengths[torch.from_numpy(drawn // self.order.wish.group)]
        return int(prompts.sum()) + sum(int(part.lengths.sum()) for part in self.parts)


class Ahead:
    """At most one batch that is being drawn, or has been, for the next rollout."""

    def __init__(self, sampler: VllmSampler) -> None:
        self._sampler = sampler
        self._order: Order | None = None
        self._thread: threading.Thread | None = None
        self._rows: Rows = np.arange(0)
        self._chunk = 0
        self._parts: list[Generated] = []
        self._error: BaseException | None = None

    def begin(self, order: Order, rows: Rows, chunk: int) -> None:
        """Start drawing this rank's `rows`, `chunk` samples at once, with the weights loaded last."""
        assert self._order is None, "what was drawn ahead has not been taken yet"
        self._order, self._rows, self._chunk = order, rows, chunk
        self._parts, self._error = [], None
        self._thread = threading.Thread(target=self._draw, args=(order,), name="ahead", daemon=True)
        self._thread.start()

    def _draw(self, order: Order) -> None:
        try:
            group, draw = order.wish.group, order.wish.draw
            for start in range(0, len(self._rows), self._chunk):
                some = torch.from_numpy(self._rows[start : start + self._chunk])
                self._parts.append(self._sampler.generate(order.prompts, some // group, some % group, draw))
        except BaseException as error:  # raised in `take`: by the thread that can handle it
            self._error = error

    def wait(self) -> None:
        """Until nothing is being drawn any more: before anybody else may use the server."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def take(self, room: Room) -> Drawn | None:
        """What was drawn ahead, once; None where nothing was.

        Args:
            room: told when the server's memory was too small, so that less is asked for from now on.

        Raises:
            TrainingError: the server is gone, or has no memory for a single response.
        """
        self.wait()
        order, self._order = self._order, None
        if order is None:
            return None
        if isinstance(self._error, torch.OutOfMemoryError):
            room.shrink(min(self._chunk, len(self._rows)), self._error)
        elif self._error is not None:
            raise self._error
        return Drawn(order, self._rows, self._parts, whole=self._error is None)

    def close(self) -> None:
        """After the sampler: a call that was under way has ended with it."""
        self._order = None
        if self._thread is not None:
            self._thread.join(timeout=30)
            self._thread = None
