"""Run inside verl's worker processes by Ray's `__ray_call__`: the first argument is the worker.

A worker of verl holds its models by role in `worker_dict`: the actor's `TrainingWorker` is the field
`actor` of the role that begins with "actor", the critic's is the entry "critic" itself. Values come
back as plain floats, so that the driver compares ranks without loading anything of theirs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import AdapterError
from autotune.hooks.remote import rates, set_peak


def read_actor(worker: Any) -> dict[str, float]:
    """The actor's loss coefficients and rates, from the objects that its next update uses."""
    actor = _training(worker, "actor")
    config = actor.loss_fn.keywords["config"]
    return {
        "clip_range_low": float(config.clip_ratio_low),
        "clip_range_high": float(config.clip_ratio_high),
        "kl_loss_coef": float(config.kl_loss_coef),
        "entropy_coef": float(config.entropy_coeff),
        **_rates(actor),
    }


def read_critic(worker: Any) -> dict[str, float]:
    return _rates(_training(worker, "critic"))


def set_rate(worker: Any, role: str, value: float) -> None:
    """Make `value` the peak of the schedule of `role` (`actor` or `critic`), from the next update on.

    Raises:
        AdapterError: the schedule is no `LambdaLR`, or its rate is 0 and cannot be scaled.
    """
    engine = _training(worker, role).engine
    set_peak(engine.lr_scheduler, engine.optimizer, role, value)


def set_temperature(worker: Any, value: float) -> None:
    """The temperature that an agent-loop worker samples with, from its next batch on."""
    worker.config.actor_rollout_ref.rollout.temperature = value


def read_temperature(worker: Any) -> float:
    return float(worker.config.actor_rollout_ref.rollout.temperature)


def _training(worker: Any, role: str) -> Any:
    """The `TrainingWorker` of `role` among the models that this process holds."""
    held: Mapping[str, Any] = worker.worker_dict
    name = next((key for key in held if key.startswith(role)), None)
    if name is None:
        raise AdapterError(f"this worker holds {', '.join(held)}; expected a role that begins with {role!r}")
    return held[name].actor if role == "actor" else held[name]


def _rates(training: Any) -> dict[str, float]:
    return rates(training.engine.lr_scheduler, training.engine.optimizer)
