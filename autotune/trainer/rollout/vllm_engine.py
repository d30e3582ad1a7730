"""vLLM inside one process: what is asked of it, and the few places where its versions differ.

Written for 0.24 to 0.32. Requests are token ids, answers are token ids and log-probs; no text is made.
The log-probs are those of the distribution that was sampled from, temperature included, as the
trainer's are. The model's own sampling defaults are left out (`generation_config="vllm"`).

    generate    all requests at once; a group is one request with n responses, its prompt computed once
    load        the trainer's weights into the engine's own tensors, then the prefix cache is emptied
    sleep, wake give memory back between rollouts and take it again

**Weights.** On GPUs a dense model's own loader writes them into place (CUDA graphs keep their pointers).
On CPU, and for mixtures of experts, linear layers hold repacked copies, so vLLM's layerwise reload runs,
which repacks; the output head that shares the embedding's weight is repacked here, because that reload
passes it over.

**In process.** The engine shares the trainer's process group; ending it must not end that group. It also
seeds torch's global streams and, on CPU, forbids to set the number of threads: both are put back.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autotune.errors import EnvironmentProblem, TrainingError

Weights = Iterable[tuple[str, Tensor]]
"""Names as in the model's own checkpoints, and tensors."""

_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: weights need no wire
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",  # the terminal is the run's; set it to INFO to see how vLLM starts
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its kernels are compiled at first use
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How one engine is built; `RolloutSection` says what the fields mean."""

    model: str
    """A folder or hub id, for the architecture; its weights are replaced before anything is sampled."""
    dtype: str
    """`float32` or `bfloat16`, as the trainer computes."""
    seed: int
    max_num_seqs: int
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.3
    kv_cache_bytes: int | None = None
    enforce_eager: bool | None = None
    sleep: int = 0
    shared: bool = False
    """Every rank of a running process group builds one at the same time."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how many responses to it."""

    prompt: list[int]
    count: int
    seed: int | None
    """Of the first response; the i-th one uses seed + i. None draws from the engine's one stream."""
    log_probs: bool = True
    """Whether the log-probs of its responses are told."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """What all requests of one call share."""

    temperature: float
    """0 is greedy, without log-probs."""
    max_tokens: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Generated:
    """The responses, request by request, padded on the right."""

    ids: Tensor
    """int64 [B, r] on the CPU, 0 beyond `lengths`."""
    lengths: Tensor
    """int64 [B], the end token included."""
    log_probs: Tensor | None
    """float32 [B, r], NaN where they were not asked for; None when greedy."""


class VllmEngine:
    """One vLLM engine in this process."""

    def __init__(self, options: EngineOptions) -> None:
        """Load the architecture with placeholder weights and lay out the cache.

        Raises:
            EnvironmentProblem: vLLM is not installed.
            TrainingError: it could not start, such as for want of memory.
        """
        self._options = options
        self._asleep: set[str] = set()
        self._llm = _start(options)
        self._cpu = options_device() == "cpu"
        atexit.register(self.close)  # registered after the process group's own farewell, so it runs before

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Generated:
        """Responses to every request.

        Raises:
            torch.OutOfMemoryError: nothing is left running, so a smaller call may follow.
        """
        llm = self._awake()
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        parameters = [_parameters(request, sampling) for request in requests]
        try:
            outputs = llm.generate(prompts, parameters, use_tqdm=False)
        except torch.OutOfMemoryError:
            self._abort_all()
            raise
        completions = [completion for output in outputs for completion in output.outputs]
        return _collected(completions, with_log_probs=sampling.temperature > 0)

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Replace the engine's weights in place and forget what was computed with the old ones."""
        self.wake(["weights"])
        model = self._model()
        if self._cpu or _has_experts(model):
            _reload(self._llm, weights)
            _repack_heads(model)
        else:
            model.load_weights(weights)
        self.wake(["kv_cache"])
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Give memory back as the options say; weights are expected anew before the next call."""
        if self._options.sleep and not self._cpu and not self._asleep:
            self._llm.sleep(level=self._options.sleep)
            self._asleep = {"weights", "kv_cache"}

    def wake(self, what: Sequence[str]) -> None:
        """Take memory again: `weights`, `kv_cache` or both."""
        for tag in what:
            if tag in self._asleep:
                self._llm.wake_up(tags=[tag])
                self._asleep.discard(tag)

    def close(self) -> None:
        """End the engine and leave the trainer's process group alone."""
        llm, self._llm = self._llm, None
        if llm is not None:
            atexit.unregister(self.close)
            with _own_groups_only():
                llm.llm_engine.engine_core.shutdown()

    @property
    def max_model_len(self) -> int:
        """Longest prompt and response together."""
        return int(self._awake().llm_engine.model_config.max_model_len)

    def _awake(self) -> Any:
        if self._llm is None:
            raise TrainingError("the vLLM engine has been closed: expected no further call")
        self.wake(["weights", "kv_cache"])
        return self._llm

    def _model(self) -> Any:
        return self._llm.apply_model(lambda model: model)[0]

    def _abort_all(self) -> None:
        engine = self._llm.llm_engine
        running = list(engine.output_processor.request_states)
        engine.abort_request(running, internal=True)
        while engine.has_unfinished_requests():
            engine.step()
        if not self._cpu:
            torch.cuda.empty_cache()


# -- start and end -----------------------------------------------------------------------------


def options_device() -> str:
    """`cpu` or `cuda`: where vLLM computes here."""
    from vllm.platforms import current_platform

    return "cpu" if current_platform.is_cpu() else "cuda"


def _start(options: EngineOptions) -> Any:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from vllm import LLM
    except ImportError as error:
        raise EnvironmentProblem(
            f"rollout.engine needs vLLM, which cannot be imported: {error}; install it in an environment"
            " of its own as docs/engines.md says, or use rollout.engine: hf"
        ) from error
    try:
        with _streams_kept():
            return LLM(**_arguments(options))
    except (RuntimeError, ValueError, torch.OutOfMemoryError) as error:
        raise TrainingError(
            f"vLLM did not start: {error}\nNext: lower rollout.gpu_memory_utilization, or give"
            " rollout.kv_cache_bytes or a smaller rollout.max_model_len; rollout.engine: hf works without it"
        ) from error


def _arguments(options: EngineOptions) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`; what is None is left to vLLM."""
    cpu = options_device() == "cpu"
    eager = cpu if options.enforce_eager is None else options.enforce_eager
    wanted = {
        "model": options.model,
        "dtype": options.dtype,
        "seed": options.seed,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "kv_cache_memory_bytes": options.kv_cache_bytes or (_CPU_CACHE if cpu else None),
        "enforce_eager": eager,
        "enable_sleep_mode": options.sleep > 0 and not cpu,
        "distributed_executor_backend": "external_launcher" if options.shared else None,
    }
    fixed = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",
        "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }
    return fixed | {name: value for name, value in wanted.items() if value is not None}


_CPU_CACHE = 1 << 28
"""Bytes of the key-value cache on CPU unless the recipe says otherwise: a share of host memory, as vLLM
takes it by itself, would be gigabytes for a model of any size."""


@contextlib.contextmanager
def _streams_kept() -> Iterator[None]:
    """vLLM seeds every global stream and replaces `torch.set_num_threads`: not in our process."""
    import random

    threads, python, numpy = torch.set_num_threads, random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads = threads
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _own_groups_only() -> Iterator[None]:
    """Inside, vLLM's farewell ends its own process groups and spares the trainer's.

    Its shutdown ends torch's whole process group, which is right for a process of its own.
    """
    from vllm.distributed import parallel_state

    farewell = parallel_state.destroy_distributed_environment

    def own() -> None:
        if parallel_state._WORLD is not None:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = None
        parallel_state._NODE_COUNT = None

    parallel_state.destroy_distributed_environment = own
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = farewell


# -- weights -----------------------------------------------------------------------------------


def _has_experts(model: Any) -> bool:
    return any("MoE" in type(module).__name__ for module in model.modules())


def _reload(llm: Any, weights: Weights) -> None:
    """vLLM's layerwise reload: restores each layer's loadable form, loads, processes, copies into place."""
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})


def _repack_heads(model: Any) -> None:
    """Pack again what multiplies with a shared weight: the head that is the embedding's transpose."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
            module.quant_method.process_weights_after_loading(module)


# -- requests and answers ----------------------------------------------------------------------


def _parameters(request: Request, sampling: Sampling) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        n=request.count,
        seed=request.seed,
        temperature=sampling.temperature,
        max_tokens=sampling.max_tokens,
        # 0: the sampled token's alone
        logprobs=0 if sampling.temperature > 0 and request.log_probs else None,
        flat_logprobs=True,
        stop_token_ids=list(sampling.end_ids),
        ignore_eos=True,  # the end tokens are ours to name
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _collected(completions: Sequence[Any], with_log_probs: bool) -> Generated:
    lengths = torch.tensor([len(c.token_ids) for c in completions])
    width = int(lengths.max())
    ids = np.zeros((len(completions), width), dtype=np.int64)  # [B, r]
    log_probs = np.zeros((len(completions), width), dtype=np.float32)  # [B, r]
    for row, completion in enumerate(completions):
        used = len(completion.token_ids)
        ids[row, :used] = completion.token_ids
        if with_log_probs:
            log_probs[row, :used] = _chosen(completion)
    known = torch.from_numpy(log_probs) if with_log_probs else None
    return Generated(torch.from_numpy(ids), lengths, known)


def _chosen(completion: Any) -> list[float] | float:
    """Log-probs of the sampled tokens, or NaN for all of them; the flat form lists the sampled one first at
    each position."""
    flat = completion.logprobs
    if flat is None:
        return math.nan
    if hasattr(flat, "start_indices"):
        return [flat.logprobs[start] for start in flat.start_indices]
    return [place[token].logprob for place, token in zip(flat, completion.token_ids, strict=True)]
