"""What adapters to trainers with worker processes share; it runs in the workers too, so it loads nothing.

In every worker lies a schedule that writes `base_lr x factor` into the optimizer at its next step: a rate
that is set in the optimizer alone lasts until then. So both are moved by the same factor (`set_peak`).
On the driver many workers' numbers become one (`same_on_all`), and samples become shares.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from autotune.errors import AdapterError
from autotune.knobs import Capability, Liveness

# -- in a worker -----------------------------------------------------------------------------------


def set_peak(schedule: Any, optimizer: Any, role: str, value: float) -> None:
    """Make `value` the peak of a schedule of torch's kind, from the next update on.

    Raises:
        AdapterError: the schedule is of another kind, or its rate is 0 and cannot be scaled.
    """
    if not scalable(schedule):
        raise AdapterError(
            f"the {role}'s schedule {type(schedule).__name__} cannot be rescaled while it runs"
        )
    factor = value / schedule.base_lrs[0]
    schedule.base_lrs = [value, *(base * factor for base in schedule.base_lrs[1:])]
    for group in optimizer.param_groups:
        group["lr"] *= factor
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def rates(schedule: Any, optimizer: Any) -> dict[str, float]:
    """The schedule's `peak`, NaN where there is none to scale, and the optimizer's `rate`."""
    peak = float(schedule.base_lrs[0]) if scalable(schedule) else math.nan
    return {"peak": peak, "rate": float(optimizer.param_groups[0]["lr"])}


def scalable(schedule: Any) -> bool:
    """Whether this is a schedule of torch's kind, with a peak that is not 0."""
    return bool(getattr(schedule, "base_lrs", None)) and schedule.base_lrs[0] > 0


# -- on the driver ---------------------------------------------------------------------------------


def same_on_all(answers: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """One worker's numbers where all agree, NaN where they do not."""
    first, *others = answers
    return {k: v if all(o[k] == v for o in others) else math.nan for k, v in first.items()}


def rate_capability(role: str, peak: float) -> Capability:
    """Whether a rate can move, by the `peak` that its workers read."""
    if math.isnan(peak):
        return Capability(Liveness.RESTART, f"the {role}'s schedule is not one that can be rescaled")
    return Capability(Liveness.NEXT_ROLLOUT)


def unavailable(reason: str) -> Capability:
    return Capability(Liveness.UNAVAILABLE, reason)


def length_view(lengths: Sequence[float]) -> dict[str, float]:
    """Largest response length and its 50th, 95th and 99.5th percentiles, by nearest rank."""
    ordered = sorted(lengths)
    shares = {"p50": 0.5, "p95": 0.95, "p995": 0.995}
    ranks = {name: min(math.ceil(q * len(ordered)), len(ordered)) - 1 for name, q in shares.items()}
    view = {f"response_length_{name}": float(ordered[rank]) for name, rank in ranks.items()}
    return {**view, "response_length_max": float(ordered[-1])}


def zero_std_view(groups: Mapping[str, Collection[float]]) -> dict[str, float]:
    """The share of prompts whose responses all got the same reward; empty where no prompt has two."""
    if all(len(group) < 2 for group in groups.values()):
        return {}
    return {"zero_std_fraction": sum(min(g) == max(g) for g in groups.values()) / len(groups)}
