"""AdamW on one flat float32 copy of bfloat16 weights: a handful of kernels an update, however many layers.

An update gathers the gradients into one buffer, so norm and clipping are one operation each, steps the
flat copy (the "master") with torch's own AdamW, and copies it back into the weights. It is what ZeRO 0
steps with in bfloat16: DeepSpeed's own wrapper there launches some ten kernels per parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class FlatAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` whose only parameter is the flat master of all the weights."""

    def __init__(self, weights: Sequence[Tensor], **adamw: Any) -> None:
        self._weights = list(weights)
        total, device = sum(w.numel() for w in weights), weights[0].device
        master = torch.empty(total, dtype=torch.float32, device=device)  # [sum of sizes]
        self._masters = _views(master, self._weights)
        torch._foreach_copy_(self._masters, [w.detach() for w in self._weights])
        self._buffer = torch.zeros_like(master)
        self._gradients = _views(self._buffer, self._weights)
        self._filled = False
        super().__init__([torch.nn.Parameter(master)], **adamw)

    @property
    def weights(self) -> list[Tensor]:
        """What follows the master."""
        return self._weights

    @property
    def master(self) -> Tensor:
        """float32 [sum of sizes]."""
        master: Tensor = self.param_groups[0]["params"][0]
        return master

    @torch.no_grad()
    def gather(self) -> Tensor:
        """Add the weights' gradients to the flat one and drop them; a weight without one adds nothing.

        Called between micro batches, they accumulate in float32.
        """
        self.open()
        self.add([weight.grad for weight in self._weights])
        for weight in self._weights:
            weight.grad = None
        return self._buffer

    def open(self) -> None:
        """Get ready for gradients: the first of an update meet a buffer of zeros."""
        if not self._filled:
            self._buffer.zero_()
            self._filled = True
        self.master.grad = self._buffer

    @torch.no_grad()
    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one gradient per weight to the flat one; None adds nothing."""
        present = [gradient.flatten() for gradient in gradients if gradient is not None]
        if len(present) == len(self._weights):  # one concatenation instead of a kernel per weight
            self._buffer.add_(torch.cat(present))
        elif present:
            flat = [f for f, g in zip(self._gradients, gradients, strict=True) if g is not None]
            torch._foreach_add_([f.view(-1) for f in flat], present)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step the master with the gathered gradient, then let the weights follow."""
        super().step()
        torch._foreach_copy_([w.data for w in self._weights], self._masters)
        self._filled = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget what was gathered."""
        self._filled = False
        for weight in self._weights:
            weight.grad = None

    def part(self, index: int, kind: str) -> Tensor:
        """A weight's own part of the master (`model`) or of a moment, in the weight's shape."""
        whole = self.master if kind == "model" else self.state[self.master][kind]
        return _views(whole, self._weights)[index]


def _views(flat: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    parts = flat.detach().split([w.numel() for w in weights])
    return [part.view(w.shape) for part, w in zip(parts, weights, strict=True)]
