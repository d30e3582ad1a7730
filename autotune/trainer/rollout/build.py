"""From a recipe's `rollout:` section to the engine that draws the responses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from autotune.recipe.deepspeed import plan
from autotune.recipe.schema import Recipe, ServerSection
from autotune.trainer.models import model_source
from autotune.trainer.ranks import Ranks
from autotune.trainer.rollout.base import Sampler
from autotune.trainer.rollout.client import ServerEngine
from autotune.trainer.rollout.hf import HfSampler
from autotune.trainer.rollout.several import SeveralEngines
from autotune.trainer.rollout.vllm import SOME, Generator, VllmSampler
from autotune.trainer.rollout.vllm_engine import EngineOptions, VllmEngine


def build_sampler(
    recipe: Recipe, model: PreTrainedModel, end_ids: Sequence[int], pad_id: int, ranks: Ranks
) -> Sampler:
    """Start what `rollout.engine` names, on every rank.

    Args:
        recipe: the run.
        model: the model in training, on its device and in its dtype.
        end_ids: tokens that end a response.
        pad_id: fills rows after their end token.
        ranks: this process among its peers.
    """
    rollout = recipe.rollout
    if rollout.engine == "hf":
        # At ZeRO 3 weights are gathered anew for every rollout: there is no place that a graph could keep.
        static = False if plan(recipe.deepspeed).stage == 3 else rollout.static_cache
        return HfSampler(model, end_ids, pad_id, static_cache=static)
    options = engine_options(recipe, model, ranks)
    engine: Generator
    if rollout.engine == "vllm_server":
        engine = _servers(options, rollout.server, ranks.rank)
    else:
        engine = VllmEngine(options)
    log_probs_of = SOME if rollout.log_probs == "some" else 1
    return VllmSampler(engine, model, end_ids, pad_id, rollout.request_seeds, log_probs_of)


def _servers(options: EngineOptions, section: ServerSection, rank: int) -> Generator:
    """This rank's servers, started one after the other: each looks at the memory that is free."""
    first = rank * section.replicas
    with ExitStack() as started:
        engines: list[Generator] = []
        for index in range(first, first + section.replicas):
            engines.append(ServerEngine(options, section, index))
            started.callback(engines[-1].close)  # should the next one not start
        started.pop_all()
    return engines[0] if len(engines) == 1 else SeveralEngines(engines)


def engine_options(recipe: Recipe, model: PreTrainedModel, ranks: Ranks) -> EngineOptions:
    """How this rank's vLLM engine is built."""
    rollout = recipe.rollout
    return EngineOptions(
        model=model_source(recipe.model),
        dtype="bfloat16" if model.dtype == torch.bfloat16 else "float32",
        seed=(recipe.seed + ranks.rank) % 2**31,
        max_num_seqs=rollout.max_num_seqs or recipe.trainer.rollout_micro_batch_size,
        max_model_len=rollout.max_model_len,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        kv_cache_bytes=rollout.kv_cache_bytes,
        enforce_eager=rollout.enforce_eager,
        sleep=rollout.sleep,
        shared=ranks.size > 1,
    )
