"""Sampling through vLLM, in this process or through a server: rows in, responses out.

Consecutive rows of one prompt become one request with n responses, so the prompt is computed once.
A response's seed is a function of its place in the run, (seed, rollout, prompt, sample), however the
rows were cut into calls:

    seed of a response = 48 bits of hash(seed, rollout, prompt) + sample

What this promises is less than `hf` does. The noise is the same whenever the same response is drawn
again; the logits are not, to the last bit, when it is drawn in other company, and a token on the edge
may then fall to the other side. vLLM's `VLLM_BATCH_INVARIANT=1` narrows that on GPUs that support it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from autotune.trainer.rollout.base import Draw, Prompts, Responses
from autotune.trainer.rollout.noise import sample_keys
from autotune.trainer.rollout.vllm_engine import Generated, Request, Sampling, Weights
from autotune.trainer.rollout.weights import serving_weights

SOME = 8
"""Where only some log-probs are asked for: those of every so many-th prompt of a rollout."""

SEED_BITS = 48
"""Leaves room for the sample's index within 63 bits."""


class Generator(Protocol):
    """A vLLM engine, here or elsewhere."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generated: ...
    def load(self, weights: Weights) -> None: ...
    def sleep(self) -> None: ...
    def close(self) -> None: ...


class VllmSampler:
    """`Sampler` around a vLLM engine that has weights of its own."""

    has_own_weights = True

    def __init__(
        self,
        engine: Generator,
        model: PreTrainedModel,
        end_ids: Sequence[int],
        pad_id: int,
        request_seeds: bool = True,
        log_probs_of: int = 1,
    ) -> None:
        """Wrap an engine.

        Args:
            engine: what generates.
            model: the model in training, whose weights the engine is given.
            end_ids: tokens that end a response.
            pad_id: fills rows after their end token.
            request_seeds: a seed per response; without, the engine's one stream is used.
            log_probs_of: every so many-th prompt's responses come with log-probs, the others' are NaN.
        """
        self._engine = engine
        self._model = model
        self._end_ids = tuple(end_ids)
        self._pad_id = pad_id
        self._seeds = request_seeds
        self._log_probs_of = log_probs_of

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, the engine is awake and has the model's present weights."""
        self._model.eval()
        self._engine.load(serving_weights(self._model))
        yield
        self._engine.sleep()

    def sample(self, prompts: Prompts, prompt_of: Tensor, sample_of: Tensor, draw: Draw) -> Responses:
        """Draw one response per row; see `Sampler.sample`."""
        generated = self.generate(prompts, prompt_of, sample_of, draw)
        return self.responses(generated, draw.max_response_length)

    def generate(self, prompts: Prompts, prompt_of: Tensor, sample_of: Tensor, draw: Draw) -> Generated:
        """The first half of `sample`: the engine's answer, on the CPU; the training device is not touched."""
        requests = group_requests(prompts, prompt_of, sample_of, draw, self._seeds, self._log_probs_of)
        temperature = 0.0 if draw.greedy else draw.temperature
        sampling = Sampling(temperature, draw.max_response_length, self._end_ids)
        return self._engine.generate(requests, sampling)

    def responses(self, generated: Generated, width: int) -> Responses:
        """The second half: rows of `width` on the device of the model in training."""
        device = self._model.device
        ids, lengths = generated.ids.to(device), generated.lengths.to(device)  # [B, r], [B]
        missing = width - ids.shape[1]
        mask = torch.arange(ids.shape[1], device=device)[None, :] < lengths[:, None]  # [B, r]
        ended = (torch.isin(ids, torch.tensor(self._end_ids, device=device)) & mask).any(dim=1)  # [B]
        ids = ids.masked_fill(~mask, self._pad_id)
        log_probs = None if generated.log_probs is None else generated.log_probs.to(device)
        return Responses(
            ids=torch.nn.functional.pad(ids, (0, missing), value=self._pad_id),
            mask=torch.nn.functional.pad(mask, (0, missing)),
            truncated=~ended,
            log_probs=None if log_probs is None else torch.nn.functional.pad(log_probs, (0, missing)),
        )

    def close(self) -> None:
        """End the engine."""
        self._engine.close()


def group_requests(
    prompts: Prompts, prompt_of: Tensor, sample_of: Tensor, draw: Draw, seeded: bool, log_probs_of: int = 1
) -> list[Request]:
    """One request for each run of rows that are consecutive samples of one prompt.

    Greedy rows stay alone: vLLM draws groups only where their members can differ.
    """
    new = torch.ones_like(prompt_of, dtype=torch.bool)  # [B]
    same_prompt = prompt_of[1:] == prompt_of[:-1]
    if not draw.greedy:
        new[1:] = ~(same_prompt & (sample_of[1:] == sample_of[:-1] + 1))
    starts = new.nonzero().squeeze(1)  # [Q]
    counts = torch.diff(starts, append=torch.tensor([len(prompt_of)]))  # [Q]
    seeds = prompt_seeds(draw, prompt_of[starts]) + sample_of[starts]  # [Q]
    rows = zip(prompt_of[starts].tolist(), counts.tolist(), seeds.tolist(), strict=True)
    return [
        Request(
            prompts.ids[prompt][prompts.mask[prompt]].tolist(),
            count,
            seed if seeded else None,
            (prompt + draw.first_prompt) % log_probs_of == 0,
        )
        for prompt, count, seed in rows
    ]


def prompt_seeds(draw: Draw, prompts: Tensor) -> Tensor:
    """The seed that sample 0 of each prompt has, int64 [Q], below 2^48."""
    keys = sample_keys(draw.seed, draw.rollout, prompts + draw.first_prompt, torch.zeros_like(prompts))
    return (keys >> (64 - SEED_BITS)).bitwise_and((1 << SEED_BITS) - 1)
