"""Log-probs of responses: one forward pass, logits for response positions only.

The logits that predict a response's tokens sit one column to their left, so the last response
token is not fed at all and `logits_to_keep` is the response length: no full-vocabulary work is
ever done for a prompt position. Log-probs are those of the distribution that was sampled from:
logits are divided by the temperature, for the model, its old weights and the reference alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Prompts and responses of some samples on the model's device."""

    prompt_ids: Tensor
    """int64 [B, L], padded on the left."""
    prompt_mask: Tensor | None
    """bool [B, L]; None when no prompt is padded, which spares building attention masks."""
    response_ids: Tensor
    """int64 [B, R], padded on the right."""
    response_mask: Tensor
    """bool [B, R]."""

    def rows(self, index: Tensor, width: int) -> TokenBatch:
        """The samples at `index` [b], responses cut to `width` columns."""
        mask = None if self.prompt_mask is None else self.prompt_mask[index]
        return TokenBatch(
            self.prompt_ids[index],
            mask,
            self.response_ids[index, :width],
            self.response_mask[index, :width],
        )


def response_logits(model: nn.Module, batch: TokenBatch, temperature: float) -> Tensor:
    """Scaled logits that predict each response token, float32 [B, R, V]."""
    width = batch.response_ids.shape[1]
    output = model(**sequence_inputs(batch), use_cache=False, logits_to_keep=width)
    logits: Tensor = output.logits  # [B, R, V]
    return logits.float() / temperature


def sequence_inputs(batch: TokenBatch) -> dict[str, Tensor | None]:
    """Keyword arguments of a forward pass over prompt and response, its last token left out."""
    width = batch.response_ids.shape[1]
    ids = torch.cat([batch.prompt_ids, batch.response_ids[:, :-1]], dim=1)  # [B, L + R - 1]
    mask, positions = _mask_and_positions(batch.prompt_mask, width)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def _mask_and_positions(prompt_mask: Tensor | None, width: int) -> tuple[Tensor | None, Tensor | None]:
    """Only padding on the left needs a mask: what is padded on the right comes after, unseen."""
    if prompt_mask is None:
        return None, None
    mask = nn.functional.pad(prompt_mask.long(), (0, width - 1), value=1)  # [B, L + R - 1]
    return mask, (mask.cumsum(dim=1) - 1).clamp(min=0)


def token_log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """log softmax(logits)[ids] without keeping the whole of it, [B, R]."""
    chosen = logits.gather(2, ids[:, :, None]).squeeze(2)  # [B, R]
    return chosen - logits.logsumexp(dim=2)


def token_entropy(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits), nats, [B, R]: logsumexp - E[logit]."""
    log_probs = logits.log_softmax(dim=2)  # [B, R, V]
    return -(log_probs.exp() * log_probs).sum(dim=2)


def response_log_probs(model: nn.Module, batch: TokenBatch, temperature: float) -> Tensor:
    """Log-probs of the response tokens, float32 [B, R]; padding holds numbers without meaning."""
    return token_log_probs(response_logits(model, batch, temperature), batch.response_ids)


def log_probs_and_entropy(model: nn.Module, batch: TokenBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs of the response tokens and the entropy where they were drawn, both [B, R]."""
    logits = response_logits(model, batch, temperature)  # [B, R, V]
    return token_log_probs(logits, batch.response_ids), token_entropy(logits)
