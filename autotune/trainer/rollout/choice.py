"""The choice of one token per sample: scores over the temperature, plus noise, the largest wins.

A logits processor for `generate`, which then takes the largest score itself. The log-prob of the winner is
read off the scores that are there anyway. Written out this is twenty passes over [B, V]; compiled, a few.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from autotune.trainer.rollout.noise import gumbel, places, token_steps

Choice = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]

_LOG = logging.getLogger(__name__)


def choose(scores: Tensor, where: Tensor, steps: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Perturbed scores, float32 [B, V], and the log-prob of their winner, float32 [B].

    Args:
        scores: logits, [B, V].
        where: `noise.places`, int64 [B].
        steps: `noise.token_steps`, int64 [V].
        temperature: float32, a scalar; a tensor, so that a compiled form serves all its values.
    """
    scaled = scores.float() / temperature  # [B, V]
    perturbed = scaled + gumbel(where, steps)  # [B, V]
    winner = perturbed.argmax(dim=1, keepdim=True)  # [B, 1]
    return perturbed, scaled.gather(1, winner).squeeze(1) - scaled.logsumexp(dim=1)


class CompiledChoice:
    """`choose`, compiled, and believed once it has agreed with the plain one, shape by shape.

    A hash that wraps is what a compiler's arithmetic may get wrong, and no metric would show it.
    """

    def __init__(self, compiled: Choice | None = None) -> None:
        """`compiled` replaces torch's compiler, for tests."""
        self._compiled = compiled
        self._agreed: dict[torch.Size, bool] = {}

    def __call__(self, scores: Tensor, *given: Tensor) -> tuple[Tensor, Tensor]:
        """As `choose`."""
        if scores.shape not in self._agreed:
            self._agreed[scores.shape] = self._agrees(scores, *given)
        return (self._program if self._agreed[scores.shape] else choose)(scores, *given)

    @property
    def _program(self) -> Choice:
        """Made when it is first needed: the compiler takes seconds to import."""
        if self._compiled is None:
            self._compiled = torch.compile(choose, dynamic=False)
        return self._compiled

    def _agrees(self, *given: Tensor) -> bool:
        plain = choose(*given)
        try:
            made = self._program(*given)
            same = all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(made, plain, strict=True))
            why = "it gave other numbers"
        except Exception as error:  # whatever a compiler raises: there is another way
            same, why = False, f"{type(error).__name__}: {error}"
        if not same:
            _LOG.warning("the choice of tokens is not compiled here (%s): sampling is slower", why)
        return same


class Perturb:
    """Logits processor: perturbed scores out; the log-prob of their winner is kept by position."""

    def __init__(self, keys: Tensor, temperature: float, gaps: bool, choice: Choice) -> None:
        """For one call of `generate`.

        Args:
            keys: from `noise.sample_keys`, int64 [B].
            temperature: of the softmax that is drawn from.
            gaps: whether the distance of the two best scores is kept too.
            choice: `choose`, or something that does the same.
        """
        self._keys, self._choice, self._want_gaps = keys, choice, gaps
        self._position = torch.zeros((), dtype=torch.int64, device=keys.device)  # no step waits for the host
        self._temperature = torch.tensor(temperature, dtype=torch.float32, device=keys.device)
        self._steps: Tensor | None = None
        self.log_probs: list[Tensor] = []  # per position, float32 [B]
        self.gaps: list[Tensor] = []  # per position, float32 [B]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """One position's perturbed scores, [B, V] -> float32 [B, V]."""
        if self._steps is None:
            self._steps = token_steps(scores.shape[1], scores.device)
        where = places(self._keys, self._position)
        perturbed, log_probs = self._choice(scores, where, self._steps, self._temperature)
        self._position += 1
        self.log_probs.append(log_probs)
        if self._want_gaps:
            best = perturbed.topk(2, dim=1).values  # [B, 2]
            self.gaps.append(best[:, 0] - best[:, 1])
        return perturbed
