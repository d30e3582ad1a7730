"""Log-probs and entropies straight from hidden states: no tensor of positions x vocabulary is kept.

Positions are taken a chunk at a time: logits in float32 are made, reduced to two numbers a position
(log-prob of the chosen token, entropy) and dropped; the backward pass makes them again. With
z = logits / temperature, p = softmax(z) and H the entropy:

    d log p[y] / dz = onehot(y) - p          dH / dz = -p (log p + H)

Each line of that is a pass over the chunk's logits, and at small models these passes are what the output
layer costs. Compiled (`compile`), they are one pass to reduce and one for the gradient.

The gradient of the weights is summed over chunks in float32: per-chunk sums rounded to bfloat16 would
lose what many small contributions add up to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn


class _TokenHead(torch.autograd.Function):
    """(hidden [n, h], weight [V, h], targets [n]) -> float32 [n, 2]: log-prob and entropy."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        with_entropy: bool,
        chunk: int,
        compile: bool,
    ) -> Tensor:
        n = hidden.shape[0]
        norms = hidden.new_zeros(n, dtype=torch.float32)  # logsumexp of z, [n]
        out = hidden.new_zeros((n, 2), dtype=torch.float32)
        for part in _parts(n, chunk):
            z = _logits(hidden[part], weight, temperature)  # [c, V]
            reduce = _compiled(_reduced) if compile else _reduced
            norms[part], out[part, 0], entropy = reduce(z, targets[part], with_entropy)  # [c] each
            if entropy is not None:
                out[part, 1] = entropy
        ctx.save_for_backward(hidden, weight, targets, norms, out)
        ctx.settings = (temperature, with_entropy, chunk, compile)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, norms, out = ctx.saved_tensors
        temperature, with_entropy, chunk, compile = ctx.settings
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        dh = torch.zeros_like(hidden) if want_hidden else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if want_weight else None  # [V, h]
        for part in _parts(hidden.shape[0], chunk):
            z = _logits(hidden[part], weight, temperature)  # [c, V]
            entropy = out[part, 1] if with_entropy else None
            if compile:
                fused = _compiled(_fused_gradient)
                scaled = grads[0][part] / temperature  # [c, 2]
                dz = fused(z, norms[part], targets[part], entropy, scaled, hidden.dtype)  # [c, V]
            else:
                dz = _logit_gradient(z, norms[part], targets[part], entropy, grads[0][part])
                dz = dz.div_(temperature).to(hidden.dtype)  # [c, V]
            if dh is not None:
                dh[part] = dz @ weight
            if dw is not None:
                _add_product(dw, dz.t(), hidden[part])
        return dh, None if dw is None else dw.to(weight.dtype), None, None, None, None, None


def _reduced(z: Tensor, targets: Tensor, with_entropy: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """logsumexp, the targets' log-probs and, if asked for, the entropies, [c] each."""
    norm = z.logsumexp(dim=1)  # [c]
    log_probs = z.gather(1, targets[:, None]).squeeze(1) - norm
    if not with_entropy:
        return norm, log_probs, None
    return norm, log_probs, norm - ((z - norm[:, None]).exp_() * z).sum(dim=1)


def _fused_gradient(
    z: Tensor, norm: Tensor, targets: Tensor, entropy: Tensor | None, grad: Tensor, dtype: torch.dtype
) -> Tensor:
    """`_logit_gradient` as one expression, rounded to `dtype`; leaves z alone."""
    log_p = z - norm[:, None]  # [c, V]
    weights = -grad[:, :1]  # [c, 1]
    if entropy is not None:
        weights = weights - grad[:, 1:] * (log_p + entropy[:, None])
    chosen = torch.arange(z.shape[1], device=z.device) == targets[:, None]  # [c, V]
    return (log_p.exp() * weights + torch.where(chosen, grad[:, :1], 0.0)).to(dtype)


@cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _logit_gradient(
    z: Tensor, norm: Tensor, targets: Tensor, entropy: Tensor | None, grad: Tensor
) -> Tensor:
    """dL/dz [c, V] from dL/d(log-prob, entropy) [c, 2]; writes into z."""
    log_p = z.sub_(norm[:, None])  # [c, V]
    weights = -grad[:, :1]  # [c, 1]
    if entropy is None:
        dz = log_p.exp_().mul_(weights)
    else:
        dz = log_p.exp() * (weights - grad[:, 1:] * (log_p + entropy[:, None]))
    return dz.scatter_add_(1, targets[:, None], grad[:, :1].contiguous())


def _parts(total: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, total)) for start in range(0, total, chunk)]


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """float32 [c, V], never rounded to a shorter type on the way."""
    if hidden.is_cuda and hidden.dtype != torch.float32:
        z = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        z = (hidden @ weight.t()).float()
    return z if temperature == 1.0 else z.div_(temperature)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())


def plain_head(model: Any) -> nn.Linear | None:
    """The layer that makes logits, where they are a product with its weights and nothing else."""
    head = model.get_output_embeddings()
    config = model.config.get_text_config()
    scaled = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    return None if any(getattr(config, name, None) for name in scaled) else head


@contextmanager
def head_scores(
    head: nn.Linear,
    targets: Tensor,
    temperature: float,
    with_entropy: bool,
    chunk: int,
    compile: bool = False,
) -> Iterator[None]:
    """Inside, the layer called on hidden states [1, n, h] gives [1, n, 2] instead of logits.

    The layer itself is still what is called, so whatever hooks it (ZeRO 3 gathers its weights) works.

    Args:
        head: the model's output layer.
        targets: chosen tokens, int64 [n].
        temperature: what logits are divided by.
        with_entropy: without it, the second column is 0.
        chunk: positions whose logits exist at the same time.
        compile: whether the passes over a chunk's logits are compiled into one.
    """
    settings = (temperature, with_entropy, chunk, compile)

    def scores(hidden: Tensor) -> Tensor:
        out: Tensor = _TokenHead.apply(hidden[0], head.weight, targets, *settings)
        return out[None]

    head.forward = scores  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward
