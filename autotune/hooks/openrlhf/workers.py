"""Run inside OpenRLHF's model actors by Ray's `__ray_call__`: the first argument is the actor.

A policy or critic actor has a `trainer` with everything that its next `fit` reads. Values come back as
plain floats, so that the driver compares ranks without loading anything of theirs.
"""

from __future__ import annotations

from typing import Any

from autotune.errors import AdapterError
from autotune.hooks.remote import rates, set_peak


def read_policy(actor: Any) -> dict[str, float]:
    trainer, nan = actor.trainer, float("nan")
    entropy = trainer.args.actor.entropy_coef
    return {
        "clip_range_low": float(trainer.actor_loss_fn.clip_eps_low),
        "clip_range_high": float(trainer.actor_loss_fn.clip_eps_high),
        "entropy_coef": nan if entropy is None else float(entropy),
        "temperature": float(trainer.actor.temperature),
        **_common(actor, "actor"),
    }


def read_critic(actor: Any) -> dict[str, float]:
    return _common(actor, "critic")


def read_reference(actor: Any) -> float:
    """The temperature that the reference's log-probs are divided by."""
    return float(actor.model.temperature)


def set_clip(actor: Any, side: str, value: float) -> None:
    """`side` is `low` or `high`; read again at every forward pass of the loss."""
    setattr(actor.trainer.actor_loss_fn, f"clip_eps_{side}", value)


def set_entropy(actor: Any, value: float) -> None:
    actor.trainer.args.actor.entropy_coef = value


def set_temperature(actor: Any, value: float) -> None:
    actor.trainer.actor.temperature = value


def set_reference_temperature(actor: Any, value: float) -> None:
    actor.model.temperature = value


def set_epochs(actor: Any, value: int) -> None:
    actor.trainer.max_epochs = value


def set_rate(actor: Any, role: str, value: float) -> None:
    """Make `value` the peak of the schedule; the schedule rewrites the optimizer's rate at every update.

    Raises:
        AdapterError: the schedule cannot be scaled.
    """
    schedule = _schedule(actor, role)
    set_peak(schedule, schedule.optimizer, role, value)


def set_batch(actor: Any, role: str, samples: int, dynamic: bool) -> None:
    """Samples of an optimizer step, from the next `fit` on.

    Without dynamic batches two places count the same micro batches: DeepSpeed, when it steps, and OpenRLHF's
    strategy, when it normalises the loss. DeepSpeed counts on over the whole run, so its count is begun
    anew: we are between two rollouts, where no gradient is half gathered.
    """
    strategy = actor.trainer.strategy
    strategy.args.train.batch_size = samples
    if dynamic:
        return
    copies = strategy.ring_attn_size * strategy.ds_tensor_parallel_size
    accumulate, rest = divmod(samples * copies, strategy.micro_train_batch_size * strategy.world_size)
    if accumulate < 1 or rest:
        raise AdapterError(
            f"{samples} samples are no whole number of micro batches of {strategy.micro_train_batch_size}"
            f" on {strategy.world_size // copies} rank(s)"
        )
    engine = getattr(actor.trainer, role).model if role == "actor" else actor.trainer.critic
    ranks = strategy.world_size // copies
    engine.set_train_batch_size(engine.train_micro_batch_size_per_gpu() * accumulate * ranks)
    engine.micro_steps = 0
    strategy.accumulated_gradient = accumulate


def _common(actor: Any, role: str) -> dict[str, float]:
    trainer, schedule = actor.trainer, _schedule(actor, role)
    return {
        "ppo_epochs": float(trainer.max_epochs),
        "samples": float(trainer.strategy.args.train.batch_size),
        "accumulate": float(trainer.strategy.accumulated_gradient),
        **rates(schedule, schedule.optimizer),
    }


def _schedule(actor: Any, role: str) -> Any:
    return getattr(actor.trainer, f"{role}_scheduler")
