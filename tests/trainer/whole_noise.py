"""The noise of one position put together, for tests that compare what was drawn with it."""

from __future__ import annotations

import torch
from torch import Tensor

from autotune.trainer.rollout.noise import gumbel, places, token_steps


def gumbel_noise(keys: Tensor, position: int, vocabulary: int) -> Tensor:
    """Float32 [B, V]."""
    where = places(keys, torch.tensor(position, device=keys.device))
    return gumbel(where, token_steps(vocabulary, keys.device))
