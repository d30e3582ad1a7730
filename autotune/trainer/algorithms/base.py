"""What makes one algorithm differ from another: four answers, everything else is shared.

    advantages   how much better was a response than what was to be expected of its prompt?
    ratio        what is compared with its old probability, and clipped: a token or a whole response
    average      what weighs the same in a mini-batch's loss
    critic       whether a value model says what was to be expected, token by token

Clip ranges are knobs and follow from the recipe (`autotune.recipe.schema.CLIP_RANGES`). So do the
average and the ratio's kind, because a check without torch must know them too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

GroupAdvantages = Callable[[Tensor, Tensor], Tensor]
"""(rewards [G, n], scored bool [G, n]) -> advantages [G, n]; 0 for what could not be scored."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way of giving credit."""

    name: str
    advantages: GroupAdvantages | None
    """Of the responses to one prompt; None where a critic gives one to every token."""
    source: str
    """Where it was published."""
