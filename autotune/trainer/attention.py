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
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D], [T, K, D]
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dropout == 0.0:
        return flash(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None
    k, v = _repeated(k, v, q.shape[1])
    return _one_by_one(q, k, v, cu_seq_lens_q, scaling, dropout)[None], None


def flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float | None) -> Tensor:
    """The variable-length flash kernel, [T, H, D].

    torch's public function for it is a Python operator, which costs more time than the kernel when
    sequences are short; the operator that it calls is used directly where it proved to be the same.
    """
    if native_proven(q.device):
        return _native(q, k, v, starts, longest, scaling)
    return _public(q, *_repeated(k, v, q.shape[1]), starts, longest, scaling)


def _native(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float | None) -> Tensor:
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scaling
    )[0]
    return out


def _public(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scaling: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn(q, k, v, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0))


def _repeated(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values for every head of the queries."""
    times = heads // k.shape[1]
    return (k, v) if times == 1 else (k.repeat_interleave(times, dim=1), v.repeat_interleave(times, dim=1))


_PROVEN: dict[torch.device, bool] = {}


def native_proven(device: torch.device) -> bool:
    """Whether the operator behind torch's function agrees with it here, gradients included.

    Tried once per device, before anything is compiled.
    """
    if device not in _PROVEN:
        try:
            _PROVEN[device] = _agree(device)
        except (RuntimeError, TypeError, AttributeError):
            _PROVEN[device] = False
    return _PROVEN[device]


@torch.enable_grad()
def _agree(device: torch.device) -> bool:
    g = torch.Generator().manual_seed(1)
    heads = (4, 2, 2)
    inputs = [torch.randn(96, h, 64, generator=g).to(device, torch.bfloat16).requires_grad_() for h in heads]
    starts = torch.tensor([0, 40, 41, 96], dtype=torch.int32, device=device)
    pull = torch.randn(96, 4, 64, generator=g).to(device, torch.bfloat16)
    found = []
    for kind in ("native", "public"):
        q, k, v = inputs
        out = (
            _native(q, k, v, starts, 128, None)
            if kind == "native"
            else _public(q, *_repeated(k, v, 4), starts, 128, None)
        )
        found.append([out, *torch.autograd.grad(out, inputs, pull)])
    pairs = [(a.float(), b.float()) for a, b in zip(*found, strict=True)]
    return all(torch.allclose(a, b, rtol=2e-2, atol=2e-2) for a, b in pairs)


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
    if torch.cuda.is_available():
        native_proven(torch.device("cuda", torch.cuda.current_device()))  # not while compiling
    with attending(config, NAME):
        yield


@contextmanager
def attending(config: Any, name: str) -> Iterator[None]:
    """Inside, the model with this configuration attends by the function that is registered under a name."""
    kept = config._attn_implementation
    config._attn_implementation = name
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
