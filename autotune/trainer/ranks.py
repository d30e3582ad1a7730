"""Sharing samples over ranks: each fills its own rows, a sum makes everybody's whole.

What a rollout consists of (token ids, rewards, log-probs of the chosen tokens) is small beside one
training forward, so every rank holds all of it and trains on its part of each mini-batch. That
keeps any mini-batch legal that the batch algebra allows, groups cut between ranks included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Rows = NDArray[np.int64]
"""Sample indices within a rollout; sample s is response s % n to prompt s // n."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among its peers; one rank needs no communication at all."""

    rank: int = 0
    size: int = 1

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def share(self, rows: Rows) -> Rows:
        """This rank's contiguous part of `rows`."""
        return np.array_split(rows, self.size)[self.rank]

    def whole(self, rows: Rows, part: Tensor, total: int) -> Tensor:
        """All `total` rows from every rank's `part` [len(rows), ...]; the parts do not overlap."""
        full = part.new_zeros((total, *part.shape[1:]))  # [total, ...]
        full[torch.from_numpy(rows).to(part.device)] = part
        return self.sum(full)
