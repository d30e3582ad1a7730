"""Run inside verl's worker processes by Ray's `__ray_call__`: the first argument is the worker.

A worker of verl holds its models by role in `worker_dict`: the actor's `TrainingWorker` is the field
`actor` of the role that begins with "actor", the critic's is the entry "critic" itself. Values come
back as plain floats, so that the driver compares ranks without loading anything of theirs.

The schedule owns the learning rate: verl's `LambdaLR` writes `base_lr x factor` into the optimizer once a
step, so a rate that is set in the optimizer alone lasts until then. Both are moved by the same factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.errors import AdapterError


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
    schedule = engine.lr_scheduler
    if not scalable(schedule):
        raise AdapterError(
            f"the {role}'s schedule {type(schedule).__name__} cannot be rescaled while it runs"
        )
    factor = value / schedule.base_lrs[0]
    schedule.base_lrs = [value, *(base * factor for base in schedule.base_lrs[1:])]
    for group in engine.optimizer.param_groups:
        group["lr"] *= factor
    schedule._last_lr = [group["lr"] for group in engine.optimizer.param_groups]


def scalable(schedule: Any) -> bool:
    """Whether this is a schedule of torch's kind, with a peak that is not 0."""
    return bool(getattr(schedule, "base_lrs", None)) and schedule.base_lrs[0] > 0


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
    schedule = training.engine.lr_scheduler
    peak = float(schedule.base_lrs[0]) if scalable(schedule) else float("nan")
    return {"peak": peak, "rate": float(training.engine.optimizer.param_groups[0]["lr"])}
