"""The weights of the model in training, as a sampling engine wants them: whole, named as on disk.

Adapters are folded in: an adapted layer gives its base weight plus the adapters' product, a new tensor
that lives until the engine has copied it. All other tensors are the training weights themselves.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

_ADAPTED = "base_layer."
_WRAPPER = "base_model.model."


def serving_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of every parameter; a shared one comes once.

    At ZeRO 3 only inside `Engine.whole_weights()`, where parameters hold their values.
    """
    adapted = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        layer_name = name.rpartition(f".{_ADAPTED}")[0]
        yield plain_name(name), _folded(adapted.get(layer_name), name, parameter.detach())


def plain_name(name: str) -> str:
    """The parameter's name in the model without adapters."""
    return name.removeprefix(_WRAPPER).replace(_ADAPTED, "")


def _folded(layer: nn.Module | None, name: str, weight: Tensor) -> Tensor:
    if layer is None or not name.endswith(".weight"):
        return weight
    with torch.no_grad():
        for adapter in layer.active_adapters:  # type: ignore[union-attr]
            weight = weight + layer.get_delta_weight(adapter).to(weight.dtype)  # type: ignore[operator]
    return weight
