"""Low-rank adapters through peft: a few trained matrices beside frozen weights.

The frozen weights *are* the model as it was at the start, so the reference costs nothing: it is the
same model with its adapters switched off. Every adapter begins as the zero map (its second matrix is
0), so the first rollout's KL is exactly 0, as with a copy.

A checkpoint holds the adapter (`adapter_config.json`, `adapter_model.safetensors`), not the weights
that never change: `AutoModelForCausalLM.from_pretrained(checkpoint)` loads the base model named in
its configuration and puts the adapter on, wherever peft is installed and the base can be found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autotune.errors import EnvironmentProblem, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from autotune.recipe.schema import LoraSection


def with_adapters(model: PreTrainedModel, section: LoraSection, seed: int) -> PreTrainedModel:
    """The model with fresh adapters, everything else frozen.

    Raises:
        EnvironmentProblem: peft is not installed.
        InputError: `targets` names no layer of this model.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise EnvironmentProblem("model.lora: adapters need: pip install peft") from error
    config = LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=list(section.targets) or "all-linear",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)  # the first matrices are random
        try:
            adapted: PreTrainedModel = get_peft_model(model, config)
        except ValueError as error:
            raise InputError(f"model.lora.targets: {error}") from error
    return adapted


class WithoutAdapters(nn.Module):
    """The model as it was at the start: each forward pass runs with the adapters off."""

    def __init__(self, adapted: Any) -> None:
        super().__init__()
        self._adapted = [adapted]  # in a list: it is not a part of this module

    @property
    def adapted(self) -> Any:
        """The model whose adapters are switched off."""
        return self._adapted[0]

    def train(self, mode: bool = True) -> WithoutAdapters:
        self._adapted[0].train(mode)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._adapted[0].disable_adapter():
            return self._adapted[0](*args, **kwargs)
