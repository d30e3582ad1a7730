"""The critic: a value model with an engine, an optimizer and a learning rate of its own.

It starts as the actor's transformer with a new head of one number, which is zero: every value is 0
at first, so the first advantages are the rewards themselves. (transformers' token classifier with one
label, so its checkpoint is an ordinary model folder.) It is trained whole even where the actor has
adapters only, and reads the same padded batches as the actor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedModel

from autotune.errors import InputError
from autotune.trainer.engine import Engine
from autotune.trainer.forward import TokenBatch, sequence_inputs

if TYPE_CHECKING:
    from autotune.trainer.ranks import Ranks


class Part(Protocol):
    """Some samples and how wide their longest response is."""

    @property
    def index(self) -> Tensor: ...
    @property
    def width(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Critic:
    """A value model in its engine."""

    model: PreTrainedModel
    engine: Engine
    value_clip: float | None

    @staticmethod
    def values(module: nn.Module, batch: TokenBatch) -> Tensor:
        """Value of the text before each response token, float32 [B, R]."""
        width = batch.response_ids.shape[1]
        logits: Tensor = module(**sequence_inputs(batch), use_cache=False).logits  # [B, L + R - 1, 1]
        return logits[:, -width:, 0].float()

    @torch.no_grad()
    def score(self, batch: TokenBatch, parts: Iterable[Part], ranks: Ranks) -> Tensor:
        """Values of all samples in eval mode, [N, R]; each rank computes its own parts."""
        self.model.eval()
        values = torch.zeros(batch.response_ids.shape, device=batch.response_ids.device)  # [N, R]
        for part in parts:
            rows = batch.rows(part.index, part.width)
            values[part.index, : part.width] = self.values(self.model, rows)
        return ranks.sum(values)


def value_model(actor: PreTrainedModel) -> PreTrainedModel:
    """The actor's transformer under a head of one number, all zero.

    Raises:
        InputError: transformers has no token classifier of this architecture.
    """
    config = copy.deepcopy(actor.config)
    config.num_labels = 1
    config.classifier_dropout = 0.0  # its default is 0.1: values would be noise while training
    try:
        with torch.random.fork_rng(devices=[]):  # the weights drawn here are all replaced
            model = AutoModelForTokenClassification.from_config(config, dtype=actor.dtype)
    except ValueError as error:
        raise InputError(
            f"trainer.algorithm: ppo needs a value model, and transformers has no token classifier of"
            f" {config.model_type!r}; use a Qwen2, Llama or similar model, or a critic-free algorithm"
        ) from error
    body = getattr(model, model.base_model_prefix)
    body.load_state_dict(getattr(actor, actor.base_model_prefix).state_dict())
    for parameter in _head(model, body):
        nn.init.zeros_(parameter)
    return model


def _head(model: PreTrainedModel, body: nn.Module) -> list[nn.Parameter]:
    """Parameters that the actor's transformer does not have."""
    known = {id(parameter) for parameter in body.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in known]
