"""Everything a run is made of, built once from its recipe."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from autotune.errors import InputError
from autotune.recipe.deepspeed import plan
from autotune.recipe.schema import Recipe
from autotune.trainer.critic import Critic, value_model
from autotune.trainer.engine import Engine
from autotune.trainer.evaluate import HeldOut
from autotune.trainer.group import first_goes_first, start_group
from autotune.trainer.lora import WithoutAdapters, with_adapters
from autotune.trainer.models import load_model
from autotune.trainer.prompts import PromptStream, held_out_prompts
from autotune.trainer.ranks import Ranks
from autotune.trainer.rewards import Rewards, Surroundings, build_rewards
from autotune.trainer.rollout.base import Sampler, pad_prompts
from autotune.trainer.rollout.build import build_sampler
from autotune.trainer.tasks import TaskData, load_task


@dataclass(frozen=True, slots=True)
class Parts:
    """Model, engine, task, rewards and sampler of one run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    engine: Engine
    reference: nn.Module | None
    """The model as it was at the start: a frozen copy, or the model with its adapters off; None when
    the recipe's `kl_coef` is 0."""
    critic: Critic | None
    """Of `algorithm: ppo`."""
    sampler: Sampler
    task: TaskData
    prompts: PromptStream
    rewards: Rewards
    held_out: HeldOut | None
    """None when the task holds nothing out."""
    ranks: Ranks
    pad_id: int


def build_parts(recipe: Recipe, folder: Path | None = None) -> Parts:
    """Load, copy the reference before training can touch it, and wrap.

    Args:
        recipe: the run.
        folder: its run folder, for the output of foreign reward functions.
    """
    trainer = recipe.trainer
    start_group()
    with first_goes_first():
        model, tokenizer = load_model(recipe.model)
        task = load_task(recipe.task, tokenizer)
    if not task.train:
        raise InputError("the task has no training prompts: expected at least one; check its file")
    prompts = PromptStream(task, recipe.seed, trainer.prompt_cut, trainer.max_prompt_length)
    values = value_model(model) if trainer.has_critic else None
    if recipe.model.lora is not None:
        model = with_adapters(model, recipe.model.lora, recipe.seed)
    reference = _reference(model, recipe)
    engine = _engine(model, recipe, trainer.actor_learning_rate)
    critic = None
    if values is not None:
        rate = trainer.critic_rate()
        critic = Critic(values, _engine(values, recipe, rate), trainer.critic.value_clip)
    if isinstance(reference, PreTrainedModel):
        reference.to(device=engine.device, dtype=model.dtype)
    end_ids = end_tokens(model, tokenizer)
    pad_id = end_ids[0] if tokenizer.pad_token_id is None else int(tokenizer.pad_token_id)
    ranks = Ranks(engine.rank, engine.world_size)
    return Parts(
        model=model,
        tokenizer=tokenizer,
        engine=engine,
        reference=reference,
        critic=critic,
        sampler=build_sampler(recipe, model, end_ids, pad_id, ranks),
        task=task,
        prompts=prompts,
        rewards=build_rewards(recipe.rewards, task, Surroundings(engine.device, folder, engine.rank)),
        held_out=_held_out(recipe, task, pad_id),
        ranks=ranks,
        pad_id=pad_id,
    )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that end a response: the tokenizer's, and those of the model's generation defaults."""
    config = model.generation_config.eos_token_id
    several = config if isinstance(config, list) else [config]
    known = [i for i in (tokenizer.eos_token_id, *several) if i is not None]
    if not known:
        raise InputError(
            "the model has no end-of-sequence token, so responses would never end:"
            " expected eos_token in the tokenizer or eos_token_id in generation_config.json"
        )
    return sorted(set(known), key=known.index)


def _engine(model: PreTrainedModel, recipe: Recipe, learning_rate: float) -> Engine:
    trainer, wanted = recipe.trainer, plan(recipe.deepspeed)
    return Engine(
        model,
        zero_stage=wanted.stage,
        learning_rate=learning_rate,
        betas=trainer.adam_betas,
        weight_decay=trainer.weight_decay,
        max_grad_norm=trainer.max_grad_norm,
        dtype=recipe.model.dtype,
        offload=wanted.offload,
        config=wanted.extra,
    )


def _reference(model: PreTrainedModel, recipe: Recipe) -> nn.Module | None:
    if recipe.trainer.kl_coef == 0:
        return None
    if recipe.model.lora is not None:
        return WithoutAdapters(model)
    return copy.deepcopy(model).eval().requires_grad_(False)


def _held_out(recipe: Recipe, task: TaskData, pad_id: int) -> HeldOut | None:
    trainer = recipe.trainer
    taken = held_out_prompts(task, recipe.eval.prompts, trainer.prompt_cut, trainer.max_prompt_length)
    if not taken.examples:
        return None
    return HeldOut(taken.examples, pad_prompts(taken.encoded, trainer.max_prompt_length, pad_id))
