"""Sampling through transformers' `generate`, with noise keyed per sample.

`generate` runs greedily; our logits processor divides by the temperature and adds Gumbel noise
(`noise.py`), so the largest perturbed score *is* the sampled token. Three things make it cheap:
a prompt is prefilled once and its cache is copied to the samples of its group, logits are made
for one position at a time, and the log-probs are read off the logits that were there anyway.

With a static cache (`static_cache`, on GPUs by itself) the library compiles the decoding step into CUDA
graphs that read the training weights where they are: nothing is copied after an update. Every shape
must then stay: rows are filled up to a power of two with copies of the last one, the cache to a multiple
of 128 positions, and the prompt is computed for every sample.

Attention reads a cache once for all heads that share it (`grouped.py`); on a GPU the noise is compiled into
the choice of the token (`choice.py`).

The model's own generation defaults (top-p, repetition penalty, ...) are put aside while we sample:
the training log-probs know nothing of them, so sampling with them would be sampling another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
)

from autotune.trainer.rollout.base import Draw, Prompts, Responses, response_mask
from autotune.trainer.rollout.choice import Choice, CompiledChoice, Perturb, choose
from autotune.trainer.rollout.grouped import grouped_attention
from autotune.trainer.rollout.noise import sample_keys

CACHE_ROUND = 128
"""Positions of a static cache come in this many, so that a longer prompt seldom changes its shape."""


class HfSampler:
    """`Sampler` around a transformers causal LM: the very weights that are trained."""

    has_own_weights = False

    def __init__(
        self,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        pad_id: int,
        record_gaps: bool = False,
        static_cache: bool | None = None,
    ) -> None:
        """Wrap a model.

        Args:
            model: on its device; its weights are read where they are.
            end_ids: tokens that end a response.
            pad_id: fills rows after their end token.
            record_gaps: keep the distance of the two best scores, for tests.
            static_cache: a cache of fixed size and a compiled decoding step; None, on GPUs only.
        """
        self._model = model
        self._static = static_cache
        self._caches: dict[tuple[int, int], StaticCache] = {}
        self._compiled = CompiledChoice()  # nothing is compiled before its first call
        self._end_ids = list(end_ids)
        self._pad_id = pad_id
        self.record_gaps = record_gaps

    def ready(self) -> AbstractContextManager[None]:
        """Nothing to do: the weights are always the present ones."""
        return nullcontext()

    def close(self) -> None:
        """Drop the static caches."""
        self._caches.clear()

    @torch.no_grad()
    def sample(self, prompts: Prompts, prompt_of: Tensor, sample_of: Tensor, draw: Draw) -> Responses:
        """Draw one response per row; see `Sampler.sample`."""
        self._model.eval()
        rows = len(prompt_of)
        if self._static_here:
            prompt_of, sample_of = _filled(prompt_of), _filled(sample_of)
        device = self._model.device
        prompt_of, sample_of = prompt_of.to(device), sample_of.to(device)
        perturb = self._perturbation(prompt_of, sample_of, draw)
        ids = self._generate(prompts, prompt_of, draw, perturb)[:rows]  # [B, r], r <= R
        length = draw.max_response_length
        mask, truncated = response_mask(ids, torch.tensor(self._end_ids, device=device))
        return Responses(
            ids=_widen(ids, length, self._pad_id),
            mask=_widen(mask, length, False),
            truncated=truncated,
            log_probs=_stack(perturb.log_probs if perturb else [], ids.shape, length),
            gaps=_stack(perturb.gaps if perturb else [], ids.shape, length),
        )

    @property
    def _static_here(self) -> bool:
        return self._model.device.type == "cuda" if self._static is None else self._static

    def _perturbation(self, prompt_of: Tensor, sample_of: Tensor, draw: Draw) -> Perturb | None:
        if draw.greedy:
            return None
        keys = sample_keys(draw.seed, draw.rollout, prompt_of + draw.first_prompt, sample_of)  # [B]
        return Perturb(keys, draw.temperature, self.record_gaps, self._choice)

    @property
    def _choice(self) -> Choice:
        """Compiled on a GPU, where shapes stay: every other one would be compiled anew."""
        on_gpu = self._model.device.type == "cuda"
        return self._compiled if on_gpu and self._static_here else choose

    def _generate(self, prompts: Prompts, prompt_of: Tensor, draw: Draw, perturb: Perturb | None) -> Tensor:
        """New token ids, int64 [B, r]; r ends where every row had its end token."""
        device = self._model.device
        ids, mask = prompts.ids.to(device), prompts.mask.to(device)
        with _defaults_aside(self._model), grouped_attention(self._model.config):
            tokens = self._model.generate(
                input_ids=ids[prompt_of],  # [B, L]
                attention_mask=mask[prompt_of].long(),  # [B, L]
                past_key_values=self._cache(ids, mask, prompt_of, draw),
                generation_config=self._config(draw),
                logits_processor=LogitsProcessorList([perturb] if perturb else []),
            )
        return tokens[:, ids.shape[1] :]

    def _cache(self, ids: Tensor, mask: Tensor, prompt_of: Tensor, draw: Draw) -> Cache | None:
        if not self._static_here:
            return self._prefill(ids, mask, prompt_of)
        length = -(-(ids.shape[1] + draw.max_response_length) // CACHE_ROUND) * CACHE_ROUND
        key = (len(prompt_of), length)
        if key not in self._caches:
            self._caches = {key: StaticCache(config=self._model.config, max_cache_len=length)}
        self._caches[key].reset()
        return self._caches[key]

    def _prefill(self, ids: Tensor, mask: Tensor, prompt_of: Tensor) -> DynamicCache | None:
        """Keys and values of all prompt tokens but the last, computed once per prompt."""
        if ids.shape[1] < 2:
            return None
        used, row_of = torch.unique_consecutive(prompt_of, return_inverse=True)  # [p], [B]
        ids, mask = ids[used, :-1], mask[used, :-1]  # [p, L - 1]
        cache = DynamicCache(config=self._model.config)
        positions = (mask.long().cumsum(dim=1) - 1).clamp(min=0)  # [p, L - 1]
        self._model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache.batch_select_indices(row_of)
        return cache

    def _config(self, draw: Draw) -> GenerationConfig:
        return GenerationConfig(
            do_sample=False,
            max_new_tokens=draw.max_response_length,
            eos_token_id=self._end_ids,
            pad_token_id=self._pad_id,
        )


@contextmanager
def _defaults_aside(model: PreTrainedModel) -> Iterator[None]:
    """`generate` fills what we leave unset from the model's defaults: take these away meanwhile."""
    kept = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = kept


def _widen(rows: Tensor, width: int, fill: int | bool) -> Tensor:
    """Pad [B, r] on the right to [B, width]."""
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=fill)


def _filled(rows: Tensor) -> Tensor:
    """[B] filled with copies of its last entry up to the next power of two."""
    missing = (1 << (len(rows) - 1).bit_length()) - len(rows)
    return torch.cat([rows, rows[-1:].expand(missing)])


def _stack(columns: list[Tensor], used: torch.Size, width: int) -> Tensor | None:
    """Columns [>= B] -> [B, width], zeros after the `used` [B, r]; None when nothing was recorded."""
    if not columns:
        return None
    rows = torch.stack(columns[: used[1]], dim=1)[: used[0]]  # [B, r]
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
