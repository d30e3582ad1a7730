"""Several vLLM servers that share a rank's responses: one `Generator` made of others.

Requests are cut into runs of about as many responses, one for each server, and their answers are put
together in the order of the requests. A request's seed depends on its place in the run alone, so what is
drawn does not depend on the number of servers, but for the logits' last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from autotune.trainer.rollout.vllm import Generator
from autotune.trainer.rollout.vllm_engine import Generated, Request, Sampling, Weights

T = TypeVar("T")


class SeveralEngines:
    """A `Generator` that hands every call to all of its engines at the same time."""

    def __init__(self, engines: Sequence[Generator]) -> None:
        """Take over engines; they are closed with this object."""
        self._engines = list(engines)
        self._threads = ThreadPoolExecutor(len(self._engines), thread_name_prefix="sampling")

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generated:
        """Responses to every request, in their order."""
        parts = shares(requests, len(self._engines))
        pairs = zip(self._engines, parts, strict=False)  # fewer requests than engines leave some idle
        return joined(self._all([partial(engine.generate, part, sampling) for engine, part in pairs]))

    def load(self, weights: Weights) -> None:
        """Hand all weights to every engine."""
        tensors = list(weights)
        self._all([partial(engine.load, tensors) for engine in self._engines])

    def sleep(self) -> None:
        """Tell every engine to give memory back."""
        self._all([engine.sleep for engine in self._engines])

    def close(self) -> None:
        """End every engine, whatever becomes of the others."""
        with ExitStack() as ends:
            ends.callback(self._threads.shutdown)
            for engine in self._engines:
                ends.callback(engine.close)

    def _all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """All answers; the first error, once no call is under way any more."""
        running = [self._threads.submit(call) for call in calls]
        errors = [error for one in running if (error := one.exception()) is not None]
        if errors:
            raise errors[0]
        return [one.result() for one in running]


def shares(requests: Sequence[Request], parts: int) -> list[Sequence[Request]]:
    """Runs of consecutive requests with about as many responses each; none is empty."""
    ends = list(accumulate(request.count for request in requests))
    middles = [2 * end - request.count for end, request in zip(ends, requests, strict=True)]  # in halves
    owner = [middle * parts // (2 * ends[-1]) for middle in middles]
    return [[requests[i] for i in range(len(requests)) if owner[i] == part] for part in sorted(set(owner))]


def joined(parts: Sequence[Generated]) -> Generated:
    """One answer below the other, padded to the longest response."""
    width = max(part.ids.shape[1] for part in parts)

    def padded(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))  # [b, r] -> [b, width]

    log_probs = [part.log_probs for part in parts if part.log_probs is not None]
    return Generated(
        ids=torch.cat([padded(part.ids) for part in parts]),
        lengths=torch.cat([part.lengths for part in parts]),
        log_probs=torch.cat([padded(rows) for rows in log_probs]) if log_probs else None,
    )
