"""`kl_step` by a forward pass of our own, for trainers that log no such number.

When a rollout's updates are made, some of its responses go through the trainer's own forward pass once more:

    r = log p_new - log p_old                 per token of a response
    kl_step = mean of exp(r) - 1 - r          k3 (Schulman 2020), nats/token, as the own trainer measures it

Which responses, and through which pass, is the framework's; when one is made and what a failure does is here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autotune.hooks.guest import Guest

log = logging.getLogger("autotune")

RESPONSES = 64
"""As many as the own trainer measures on."""
PATIENCE = 3
"""Passes in a row that may fail: a further one would only cost time."""


class DriftSensor:
    """Makes the pass where somebody decides on its number, and outlives its failures.

    Args:
        guest: whose run it is; `off` and a broken one get no pass.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest, self._failed = guest, 0

    def measure(self, drift: Callable[[], float | None]) -> dict[str, float]:
        """`kl_step` in nats per token and the pass's seconds; empty where there is no number.

        Args:
            drift: makes the pass; None where the rollout is too small for one.
        """
        if self._guest.broken or self._guest.control.mode == "off" or self._failed >= PATIENCE:
            return {}
        began = time.perf_counter()
        try:
            found = drift()
        except Exception as failure:  # a sensor's failure is no reason to stop the others
            self._count(failure)
            return {}
        self._failed = 0
        seconds = time.perf_counter() - began
        return {} if found is None else {"kl_step": found, "time/kl_step_forward": seconds}

    def _count(self, failure: Exception) -> None:
        self._failed += 1
        end = "" if self._failed < PATIENCE else f"; {PATIENCE} times in a row: it is not tried again"
        log.warning("autotune could not measure kl_step: %s: %s%s", type(failure).__name__, failure, end)


def mean_k3(pairs: Iterable[tuple[Any, Any, Any]]) -> float:
    """Mean k3 over the tokens that were trained on, in float64.

    Args:
        pairs: three tensors of one shape each: log-probs of the weights now, log-probs before the updates,
            and which tokens count.
    """
    from autotune.trainer.losses import log_ratio, precise_k3

    total = count = 0.0
    for new, old, mask in pairs:
        terms = precise_k3(log_ratio(new, old.to(new.device)))[mask.to(new.device).bool()]
        total, count = total + float(terms.sum()), count + terms.numel()
    return total / count
