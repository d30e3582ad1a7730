"""Attention over sequences that lie one after the other in a single row, none seeing another.

Registered with transformers' attention interface under a name of its own, and in force only inside
`packed_attention`: sampling and padded forwards keep the model's usual attention. On a GPU in half
precision it is torch's variable-length flash kernel; elsewhere each sequence is given to
`scaled_dot_product_attention` alone, which is exact and slow.

A name without a mask function makes transformers build no mask at all, so nothing quadratic in the
length of the row exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NAME = "autotune_packed"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sequence, as transformers calls it.

    Args:
        module: the attention layer.
        query: [1, H, T, D]; key and value [1, K, T, D] with K a divisor of H.
        attention_mask: always None here.
        scaling: of the scores; None is 1 / sqrt(D).
        dropout: of the attention weights while training.
        cu_seq_lens_q: first position of every sequence and the end of the last, int32 [S + 1].
        max_length_q: at least the longest sequence.

    Returns:
        [1, T, H, D], and no weights.
    """
    assert cu_seq_lens_q is not None and max_length_q is not None, "packed attention without sequences"
    groups = query.shape[1] // key.shape[1]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D], [T, K, D]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # [T, H, D]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        return _flash(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None
    return _one_by_one(q, k, v, cu_seq_lens_q, scaling, dropout)[None], None


def _flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0))


def _one_by_one(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scaling: float | None, dropout: float
) -> Tensor:
    lengths = starts.diff().tolist()
    parts = [
        nn.functional.scaled_dot_product_attention(
            *(x.transpose(0, 1) for x in part), is_causal=True, scale=scaling, dropout_p=dropout
        ).transpose(0, 1)  # [t, H, D]
        for part in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    ]
    return torch.cat(parts)


@contextmanager
def packed_attention(config: Any) -> Iterator[None]:
    """Inside, the model with this configuration attends within packed sequences only."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)
    kept = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = kept


def can_pack(model: Any) -> bool:
    """Whether every layer of this model attends to all that came before, through the interface."""
    config = model.config.get_text_config()
    layers = getattr(config, "layer_types", None)
    if layers is None:
        whole = not getattr(config, "sliding_window", None)
    else:
        whole = set(layers) == {"full_attention"}
    return bool(getattr(model, "_supports_attention_backend", False)) and whole
