"""Micro batches without padding: sequences one after the other in a single row.

Where everything lies is known on the host before the first forward pass (lengths are), so a layout is
a handful of index tensors and no step of the forward pass waits for the device. The last token of a
response is not fed, and only positions that predict a response token reach the output layer
(`head.py`). Log-probs leave as [b, R] like those of padded micro batches: losses and meters do not
know the difference.

    fed        p p p r r | p p r r r r | p r         prompt and response of three samples
    kept           ^ ^ ^ |   ^ ^ ^ ^ ^ | ^ ^         where the next token is one of the response
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from autotune.errors import InputError
from autotune.trainer.attention import can_pack, packed_attention
from autotune.trainer.forward import TokenBatch, token_entropy, token_log_probs
from autotune.trainer.head import head_scores, plain_head
from autotune.trainer.ranks import Ranks, Rows

if TYPE_CHECKING:
    from autotune.recipe.schema import PackingSection

ROUND = 128
"""The most tokens of a sequence are rounded up to this: a number that changes has layers compiled anew."""

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packing:
    """How a rollout's samples are packed."""

    prompt_lengths: Ints
    """Tokens per sample without padding, [N]."""
    prompt_width: int
    response_width: int
    budget: int | None
    """Tokens of a micro batch; None where it is cut by samples."""
    chunk: int
    """Positions whose logits exist at the same time."""
    compile: bool = False
    """Whether decoder layers run compiled."""
    compile_head: bool = False
    """Whether the passes over a chunk's logits run compiled."""
    whole_width: bool = False
    """Whether what comes out is always as wide as the longest response may be."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the tokens of one micro batch lie; index tensors on the device."""

    fed: Tensor
    """Into all prompt ids followed by all response ids, flat, int64 [T]."""
    positions: Tensor
    """Of each token in its own sequence, int64 [T]."""
    starts: Tensor
    """First position of each sequence and the end of the last, int32 [b + 1]."""
    kept: Tensor
    """Positions that predict a response token, int64 [n]."""
    targets: Tensor
    """The tokens that they predict, indexed like `fed`, int64 [n]."""
    places: Tensor
    """Where their numbers go in [b, width], flat, int64 [n]."""
    shape: tuple[int, int]
    """(b, width) of what comes out."""
    longest: int
    """That a sequence of this rollout can be, rounded up."""
    chunk: int
    compile: bool = False
    compile_head: bool = False


def packs(section: PackingSection, model: Any, device: torch.device) -> bool:
    """Whether this run packs: by its recipe, its device and its model.

    Raises:
        InputError: the recipe insists and the model cannot.
    """
    if section.enabled == "off" or (section.enabled == "auto" and device.type != "cuda"):
        return False
    if can_pack(model):
        return True
    if section.enabled == "auto":
        return False
    raise InputError(
        f"trainer.packing.enabled: on, but layers of {model.config.model_type!r} do not attend to all"
        " earlier tokens, or not through transformers' attention interface; set it to off or auto"
    )


def token_counts(lengths: Rows, packing: Packing) -> Ints:
    """Tokens fed per sample, [N]."""
    return packing.prompt_lengths + np.maximum(lengths - 1, 0)


def cut(rows: Rows, sizes: Ints, budget: int) -> list[Rows]:
    """Consecutive parts of at most `budget` tokens, or of one sample that is larger than that."""
    parts: list[Rows] = []
    start, filled = 0, 0
    for place, size in enumerate(sizes[rows]):
        if filled and filled + size > budget:
            parts.append(rows[start:place])
            start, filled = place, 0
        filled += int(size)
    return [*parts, rows[start:]] if len(rows) else parts


def cut_alike(rows: Rows, sizes: Ints, budget: int, ranks: Ranks) -> list[Rows]:
    """This rank's parts of `rows`: within the budget, and as many as every other rank has."""
    most = max(len(cut(part, sizes, budget)) for part in np.array_split(rows, ranks.size))
    parts = cut(ranks.share(rows), sizes, budget)
    while len(parts) < most and max(map(len, parts)) > 1:
        largest = max(range(len(parts)), key=lambda i: len(parts[i]))
        parts[largest : largest + 1] = np.array_split(parts[largest], 2)
    return parts


def make_layout(rows: Rows, lengths: Rows, packing: Packing, device: torch.device) -> Layout:
    """Lay out the samples `rows` [b]; one copy to the device.

    Args:
        rows: sample indices.
        lengths: response tokens of all samples, [N].
        packing: of the rollout.
        device: where indices are needed.
    """
    prompts, responses = packing.prompt_lengths[rows], lengths[rows]  # [b]
    total, fed_responses = len(packing.prompt_lengths), np.maximum(responses - 1, 0)
    width = packing.response_width if packing.whole_width else max(int(responses.max()), 1)
    first_prompt = rows * packing.prompt_width + packing.prompt_width - prompts  # padded on the left
    first_response = total * packing.prompt_width + rows * packing.response_width
    counts = np.stack([prompts, fed_responses], axis=1).ravel()  # [2 b]
    fed = _runs(np.stack([first_prompt, first_response], axis=1).ravel(), counts)
    sizes = prompts + fed_responses  # [b]
    starts = np.concatenate([[0], np.cumsum(sizes)])  # [b + 1]
    columns = (
        fed,
        _runs(np.zeros_like(sizes), sizes),
        starts,
        _runs(starts[:-1] + prompts - 1, responses),
        _runs(first_response, responses),
        _runs(np.arange(len(rows)) * width, responses),
    )
    whole = torch.from_numpy(np.concatenate(columns)).to(device, non_blocking=True)
    ids, positions, bounds, kept, targets, places = whole.split([len(column) for column in columns])
    return Layout(
        fed=ids,
        positions=positions,
        starts=bounds.to(torch.int32),
        kept=kept,
        targets=targets,
        places=places,
        shape=(len(rows), width),
        longest=-(-(packing.prompt_width + packing.response_width) // ROUND) * ROUND,
        chunk=packing.chunk,
        compile=packing.compile,
        compile_head=packing.compile_head,
    )


def _runs(first: Ints, counts: Ints) -> Ints:
    """`first[i], first[i] + 1, ...`, `counts[i]` of them, one run after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(first - (ends - counts), counts)


def packed_log_probs(
    model: nn.Module, batch: TokenBatch, layout: Layout, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs of the response tokens and, if asked for, the entropy there, float32 [b, width].

    Args:
        model: a causal language model, or what wraps it (an engine, adapters switched off).
        batch: all samples of the rollout.
        layout: of some of them.
        temperature: logits are divided by it.
        with_entropy: whether the entropy is wanted; padding is 0 in both.
    """
    flat = torch.cat([batch.prompt_ids.flatten(), batch.response_ids.flatten()])
    targets = flat[layout.targets]  # [n]
    inner = _inner(model)
    head = plain_head(inner)
    with ExitStack() as stack:
        stack.enter_context(packed_attention(inner.config))
        if layout.compile:
            stack.enter_context(compiled_layers(inner))
        if head is not None:
            settings = (temperature, with_entropy, layout.chunk, layout.compile_head)
            scores = head_scores(head, targets, *settings)
            stack.enter_context(scores)
        out = model(**_inputs(flat, layout)).logits  # [1, n, 2] or [1, n, V]
    if head is None:
        out = _from_logits(out, targets, temperature, with_entropy)
    log_probs, entropy = out[0, :, 0], out[0, :, 1]  # [n]
    return _spread(log_probs, layout), _spread(entropy, layout) if with_entropy else None


@contextmanager
def compiled_layers(model: Any) -> Iterator[None]:
    """Inside, the decoder layers run compiled; they are alike, so one compilation serves them all."""
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if (calls := _COMPILED.get(model)) is None:
        for layer in layers:
            layer.compile(dynamic=True)
        calls = _COMPILED[model] = [layer._compiled_call_impl for layer in layers]
    for layer, call in zip(layers, calls, strict=True):
        layer._compiled_call_impl = call
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


_COMPILED: WeakKeyDictionary[nn.Module, list[Any]] = WeakKeyDictionary()
"""Model -> its layers' compiled calls; layers themselves stay as they are, for sampling and for
checkpoints. By model, as a call holds its layer: by layer, none would ever be let go."""


def _inputs(flat: Tensor, layout: Layout) -> dict[str, Any]:
    return {
        "input_ids": flat[layout.fed][None],  # [1, T]
        "position_ids": layout.positions[None],  # [1, T]
        "use_cache": False,
        "logits_to_keep": layout.kept,
        "cu_seq_lens_q": layout.starts,
        "cu_seq_lens_k": layout.starts,
        "max_length_q": layout.longest,
        "max_length_k": layout.longest,
    }


def _from_logits(logits: Tensor, targets: Tensor, temperature: float, with_entropy: bool) -> Tensor:
    """The same two columns where the model does more to its logits than one product, [1, n, 2]."""
    scaled = logits.float() / temperature  # [1, n, V]
    log_probs = token_log_probs(scaled, targets[None])
    entropy = token_entropy(scaled) if with_entropy else torch.zeros_like(log_probs)
    return torch.stack([log_probs, entropy], dim=2)


def _spread(values: Tensor, layout: Layout) -> Tensor:
    """[n] -> [b, width], zero where there is no token."""
    rows, width = layout.shape
    return values.new_zeros(rows * width).index_copy(0, layout.places, values).view(rows, width)


def _inner(model: Any) -> Any:
    """The transformers (or peft) model inside an engine or a reference without adapters."""
    inner = getattr(model, "module", model)
    return getattr(inner, "adapted", inner)
