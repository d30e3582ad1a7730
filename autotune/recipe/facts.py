"""What a recipe says about its run before anything is built: the knob vector and the run's facts.

The trainer answers the same facts once it stands; having them here lets `autotune check` tell,
without torch, which rules will have a live sensor and a live knob.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from autotune.decisions import RunFacts
from autotune.knobs import Capability, Liveness
from autotune.metrics import METRICS, Validity
from autotune.recipe.schema import ImportReward, ModelReward, Recipe, Reward

NEXT = Capability(Liveness.NEXT_ROLLOUT)
"""The trainer reads all of its knobs at the top of every rollout, and none of them in between."""

NO_CRITIC = "there is no critic: algorithm is not ppo"

NOT_MEASURED: dict[str, str] = {
    "gpu_memory_fraction": "this trainer has no GPU memory meter",
    "gpu_utilization": "this trainer has no GPU utilization meter",
    "data_age": "sampling and updating alternate, so data is always fresh",
}


def knob_vector(recipe: Recipe, world_size: int = 1) -> dict[str, float]:
    """Every knob of this recipe by its real name; without a critic its rate is absent."""
    t = recipe.trainer
    samples = t.train_batch_size * t.rollout_n // world_size  # of one rank
    critic = {"critic_learning_rate": t.critic_rate()} if t.has_critic else {}
    return {
        "train_batch_size": t.train_batch_size,
        "rollout_n": t.rollout_n,
        "ppo_mini_batch_size": t.ppo_mini_batch_size,
        "ppo_epochs": t.ppo_epochs,
        "micro_batch_size": t.micro_batch_size,
        "rollout_micro_batch_size": t.rollout_micro_batch_size,
        "num_rollout_batches": max(samples // t.rollout_micro_batch_size, 1),
        "kl_coef": t.kl_coef,
        "clip_range_low": t.clip_low(),
        "clip_range_high": t.clip_high(),
        "actor_learning_rate": t.actor_learning_rate,
        **critic,
        "max_prompt_length": t.max_prompt_length,
        "max_response_length": t.max_response_length,
        "temperature": t.temperature,
        "entropy_coef": t.entropy_coef,
    }


def recipe_facts(recipe: Recipe, world_size: int = 1) -> RunFacts:
    """The facts of the project's own trainer under this recipe."""
    return RunFacts(
        rollouts=recipe.trainer.rollouts,
        world_size=world_size,
        algorithm=recipe.trainer.algorithm,
        loss_kind=recipe.trainer.loss_kind,
        has_reference=recipe.trainer.kl_coef > 0,
        has_critic=recipe.trainer.has_critic,
        knobs=knob_vector(recipe, world_size),
        knob_capability=_knob_capability(recipe),
        metric_capability=_metric_capability(recipe),
        lr_warmup=recipe.trainer.lr_schedule.warmup,
        staleness=int(recipe.rollout.one_step_off),
        reward_maximum=reward_maximum(recipe),
    )


def component_names(rewards: Sequence[Reward]) -> list[str]:
    """What each reward is logged as; two unnamed ones of a type are told apart as `regex_2`."""
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        seen[reward.type] += reward.name is None
        count = seen[reward.type]
        names.append(reward.name or (reward.type if count == 1 else f"{reward.type}_{count}"))
    return names


def reward_maximum(recipe: Recipe) -> float | None:
    """Largest total that a response can get; None when a component has no known upper end."""
    tops = [(reward.weight, _component_range(reward)) for reward in recipe.rewards if reward.weight]
    ends = [high if weight > 0 else low for weight, (low, high) in tops]
    if any(end is None for end in ends):
        return None
    return sum(weight * end for (weight, _), end in zip(tops, ends, strict=True) if end is not None)


def reward_range(recipe: Recipe) -> tuple[float, float] | None:
    """Least and largest total that a response can get; None when one of them is not known."""
    scores = [(reward.weight, _component_range(reward)) for reward in recipe.rewards if reward.weight]
    ends = [(weight, low, high) for weight, (low, high) in scores if low is not None and high is not None]
    if len(ends) < len(scores):
        return None
    totals = [(min(w * low, w * high), max(w * low, w * high)) for w, low, high in ends]
    return sum(low for low, _ in totals), sum(high for _, high in totals)


def _component_range(reward: Reward) -> tuple[float | None, float | None]:
    """(lowest, highest) score of a component; None where nobody knows."""
    if isinstance(reward, ImportReward):
        return None, reward.maximum
    if isinstance(reward, ModelReward):  # the probability of a label, or a logit without bounds
        return (None, None) if reward.label is None else (0.0, 1.0)
    return 0.0, 1.0


def _knob_capability(recipe: Recipe) -> dict[str, Capability]:
    table = dict.fromkeys(knob_vector(recipe), NEXT)
    if not recipe.trainer.has_critic:
        table["critic_learning_rate"] = Capability(Liveness.UNAVAILABLE, NO_CRITIC)
    if recipe.trainer.kl_coef == 0:
        reason = "kl_coef is 0, so no reference model is built"
        table["kl_coef"] = Capability(Liveness.UNAVAILABLE, reason)
    return table


def _metric_capability(recipe: Recipe) -> dict[str, Capability]:
    table = {name: Capability(Validity.VALID) for name in METRICS}
    table |= {n: Capability(Validity.NOT_LOGGED, reason) for n, reason in NOT_MEASURED.items()}
    if recipe.rollout.one_step_off:
        table["data_age"] = Capability(Validity.VALID)
    if not recipe.trainer.has_critic:
        table["value_loss"] = Capability(Validity.NOT_LOGGED, NO_CRITIC)
    if recipe.trainer.kl_coef == 0:
        reason = "kl_coef is 0, so no reference model is built"
        table["kl_ref"] = Capability(Validity.NOT_LOGGED, reason)
    return table


def facts_from_json(data: Mapping[str, Any]) -> RunFacts:
    """Inverse of `autotune.decisions.to_json` for facts; a replay builds its controller so."""
    tables = ("knob_capability", "metric_capability")
    restored = {t: {n: Capability(**c) for n, c in data.get(t, {}).items()} for t in tables}
    return RunFacts(**{**data, **restored})
