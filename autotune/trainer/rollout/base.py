"""What goes into a sampling engine and what comes out: the seam behind which engines differ.

A `Sampler` gets prompts and the key of its noise, and answers with token ids. It knows neither
rewards nor updates, and it leaves the model in eval mode.

Layout everywhere: prompts are padded on the left, responses on the right, so that the first
response token of every row sits in the same column.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompts:
    """Encoded prompts of one rollout, cut to `max_prompt_length` and padded on the left."""

    ids: Tensor
    """Token ids, int64 [P, L]."""
    mask: Tensor
    """True on prompt tokens, bool [P, L]."""
    cut: int
    """Prompts that lost tokens at their beginning."""

    @property
    def lengths(self) -> Tensor:
        """Prompt tokens, int64 [P]."""
        return self.mask.sum(dim=1)


def pad_prompts(encoded: Sequence[Sequence[int]], limit: int, pad: int) -> Prompts:
    """Keep the last `limit` tokens of every prompt and pad them on the left to one length."""
    kept = [list(ids[-limit:]) for ids in encoded]
    width = max(len(ids) for ids in kept)
    rows = [[pad] * (width - len(ids)) + ids for ids in kept]
    lengths = torch.tensor([len(ids) for ids in kept])  # [P]
    mask = torch.arange(width)[None, :] >= (width - lengths)[:, None]  # [P, L]
    return Prompts(torch.tensor(rows), mask, sum(len(ids) > limit for ids in encoded))


@dataclass(frozen=True, slots=True)
class Draw:
    """How one round of responses is drawn."""

    seed: int
    rollout: int
    """Keys the noise; evaluations use negative ones."""
    temperature: float
    max_response_length: int
    """Tokens a response may have, its end token included."""
    greedy: bool = False
    first_prompt: int = 0
    """Prompts that this rollout has drawn for before: keys the noise of later rounds."""


@dataclass(frozen=True, slots=True)
class Responses:
    """Sampled responses, one row per sample, padded on the right."""

    ids: Tensor
    """Token ids, int64 [B, R]; padding after the end token."""
    mask: Tensor
    """True on response tokens up to and including the end token, bool [B, R]."""
    truncated: Tensor
    """True where no end token came within `max_response_length`, bool [B]."""
    log_probs: Tensor | None
    """The sampler's own log-probs at its temperature, float32 [B, R], NaN where it told none; None when
    greedy."""
    gaps: Tensor | None = None
    """Distance of the two best perturbed scores, float32 [B, R]; only when it was asked for."""


class Sampler(Protocol):
    """An engine that turns prompts into responses."""

    @property
    def has_own_weights(self) -> bool:
        """Whether it holds a copy of the model's weights, so that `ready` costs something."""
        ...

    def ready(self) -> AbstractContextManager[None]:
        """Inside, `sample` draws with the model's present weights. Do not train inside."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...

    def sample(self, prompts: Prompts, prompt_of: Tensor, sample_of: Tensor, draw: Draw) -> Responses:
        """Draw one response per row.

        Args:
            prompts: all prompts of the rollout.
            prompt_of: row -> prompt index, int64 [B], ascending.
            sample_of: row -> index of the sample within its group, int64 [B].
            draw: seed, temperature and length.
        """
        ...


def response_mask(ids: Tensor, end_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Mask up to and including the first end token, bool [B, R]; and truncated, bool [B].

    Padding may be the same id as the end token, so the mask cannot be read off the padding.
    """
    ends = torch.isin(ids, end_ids)  # [B, R]
    ended_before = ends.cumsum(dim=1) - ends.long() > 0  # [B, R]
    return ~ended_before, ~ends.any(dim=1)
