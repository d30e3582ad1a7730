"""`rollout`: which engine samples, and how."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from autotune.recipe.schema.base import Count, Positive, Section

Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,253}$")]


class ServerSection(Section):
    """The sampling server of `engine: vllm_server`."""

    start: bool = True
    """Start one per rank and end it with the run; false uses servers that run already."""
    address: Address = "127.0.0.1"
    """Where it listens; anything but loopback opens it to the network."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers of each rank, which share its responses: on devices of their own, or two or more on one
    where a model is so small that vLLM waits for its host. Memory settings are a server's."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """The i-th server of rank r uses port + r * replicas + i; 0 takes free ones, for servers that the run
    starts itself."""
    devices: tuple[int, ...] = ()
    """CUDA devices of the servers, counted like their ports; empty shares the ranks' own."""
    transfer: Literal["auto", "file", "ipc", "broadcast"] = "auto"
    """How weights get there: a safetensors file in shared memory; CUDA's handles to the trainer's own memory,
    on the same GPU; NCCL, or gloo on CPUs. auto is `ipc` on the same GPU, `broadcast` to another one, and
    `file` elsewhere and where these fail."""


class RolloutSection(Section):
    """Who draws the responses, and how far its log-probs are trusted; `docs/engines.md`."""

    engine: Literal["hf", "vllm", "vllm_server"] = "hf"
    """transformers' `generate` on the training weights; vLLM inside the trainer's process; vLLM in
    processes of its own."""
    static_cache: bool | None = None
    """hf: a cache of fixed size, which lets the library compile decoding; unset, on GPUs only."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """vllm: share of the device's memory for its weights, its cache and its activations."""
    kv_cache_bytes: Count | None = None
    """vllm: bytes of its key-value cache, instead of what is left of that share."""
    max_num_seqs: Count | None = None
    """vllm: responses decoded at the same time; unset, `rollout_micro_batch_size`."""
    max_model_len: Count | None = None
    """vllm: longest prompt and response together; unset, the model's context. No knob can go beyond."""
    max_num_batched_tokens: Count | None = None
    """vllm: tokens of one forward pass; unset, vLLM's own choice."""
    enforce_eager: bool | None = None
    """vllm: no compilation and no CUDA graphs; unset, on CPU only."""
    request_seeds: bool = True
    """vllm: a seed per response, from its place in the run; false draws from one stream, which is faster
    on GPUs and cannot be repeated after a resume."""
    sleep: Literal[0, 1, 2] = 0
    """vllm on GPUs: what it gives back while training. 0 nothing; 1 its cache, weights wait in host memory;
    2 both, weights come anew with the next rollout."""
    server: ServerSection = ServerSection()
    one_step_off: bool = False
    """vllm_server: draw the next rollout's responses while this one's updates run. Data is then one rollout
    old, which `importance_cap` weighs; a change of a sampling knob throws away what was drawn."""
    log_probs: Literal["all", "some"] = "all"
    """vllm: which responses' log-probs the sampler tells. They cost it a third of its speed where a model is
    small; `some`, those of every eighth prompt, are enough to measure `kl_mismatch`. No token is
    weighted for it then, so `importance_cap` is auto or null, and `old_log_probs` are recomputed."""
    old_log_probs: Literal["recompute", "sampler"] = "recompute"
    """What ratios are against: a forward pass of the trainer, or the sampler's own log-probs while
    the two agree within `mismatch_bound`, which spares that pass."""
    mismatch_bound: Positive = 1.0e-3
    """Largest `kl_mismatch` (nats per token, k3) at which the sampler's log-probs stand in; beyond it the
    very same rollout is recomputed."""
    importance_cap: Literal["auto"] | Annotated[float, Field(ge=1)] | None = "auto"
    """A token's loss is weighted by min(trainer's probability / sampler's, cap); null does not weight;
    auto is 2 for vLLM and null for hf, which samples from the trained weights themselves."""

    def highest_temperature(self) -> float:
        """vLLM refuses more than 2."""
        return math.inf if self.engine == "hf" else 2.0

    def cap(self) -> float | None:
        """The importance weights' cap in force."""
        if self.importance_cap == "auto":
            return None if self.engine == "hf" or self.log_probs == "some" else 2.0
        return self.importance_cap
