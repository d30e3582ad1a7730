"""Attention of one new token to a long cache, read once for all query heads that share it.

With grouped queries several query heads look at the same keys. transformers' `sdpa` gives every one of them
a copy as soon as there is a mask, as there is with prompts of unequal length or a cache of fixed size: each
decoding step then writes and reads the whole cache several times over. Here the heads of a group stand where
positions of a longer query would stand, so the library's own kernel reads each key once.

In force only inside `grouped_attention`, under a name of its own; anything but one new token goes to `sdpa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from autotune.trainer.attention import attending

NAME = "autotune_grouped"
USUAL = "sdpa"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it.

    Args:
        module: the attention layer.
        query: [B, H, T, D]; key and value [B, K, L, D] with K a divisor of H.
        attention_mask: bool or additive, [B, 1, T, L]; None where everything is seen.
        scaling: of the scores; None is 1 / sqrt(D).

    Returns:
        [B, T, H, D], and no weights.
    """
    batch, heads, new, size = query.shape
    if not _foldable(query, key, attention_mask, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1], size)  # [B, K, H / K, D]
    found = torch.nn.functional.scaled_dot_product_attention(
        folded, key, value, attn_mask=attention_mask, scale=scaling
    )
    return found.reshape(batch, new, heads, size), None


def _foldable(query: Tensor, key: Tensor, mask: Tensor | None, more: dict[str, Any]) -> bool:
    """One new token, shared keys, and a mask that is the same for every head; no dropout, bias or paging."""
    same_for_all = mask is None or mask.shape[1] == 1
    plain = not more.get("dropout") and more.get("position_bias") is None and more.get("cache") is None
    return query.shape[2] == 1 and query.shape[1] != key.shape[1] and same_for_all and plain


@contextmanager
def grouped_attention(config: Any) -> Iterator[None]:
    """Inside, the model with this configuration attends so, where it would use `sdpa`."""
    if config._attn_implementation != USUAL:
        yield
        return
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    with attending(config, NAME):
        yield
