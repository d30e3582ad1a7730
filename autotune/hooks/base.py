"""What the control loop needs of a trainer, and the judging and read-back that all adapters share.

An adapter is the one file that knows one trainer's spellings and setters. It owes three things:

    read    raw metrics -> Snapshot: canonical names, and for each reading whether it may be used.
            The configuration speaks first (`structural_readings`: with one update per rollout the
            policy ratio is 1 by construction), then the number itself (`metrics.read_metric`),
            then its past (`FrozenDetector`: a noisy metric that repeats to the last bit is dead).
    apply   all or none (`set_all_or_none`): a knob that refuses, or that reads back another value
            than it was given, takes every other knob of the same call back with it.
    knobs   read from where the trainer will use them next, never from a copy of what was asked.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from autotune.decisions import Applied, Decision, Restore, RunFacts
from autotune.errors import AdapterError
from autotune.knobs import KNOBS, updates_per_rollout
from autotune.metrics import Reading, Snapshot, Validity, read_metric
from autotune.trainer.records import RolloutRecord

RATIO_METRICS = ("clip_ratio", "ratio_low", "ratio_in", "ratio_high", "policy_ratio")
"""Functions of the policy ratio: constants when a rollout has a single update."""

NOISY_METRICS = ("kl_step", "kl_ref", "entropy", "grad_norm", "loss", "reward_mean")
"""Metrics that no healthy run repeats to the last bit."""


class Adapter(Protocol):
    """One trainer behind the seam; `autotune.testing.adapters.AdapterContract` tests it."""

    def facts(self) -> RunFacts:
        """The run's structure: which knobs can move, which metrics can be sensed, and why not."""

    def read(self, raw: Any, rollout: int) -> Snapshot:
        """Judge one rollout's raw metrics; `rollout` is its index unless `raw` has its own."""

    def knobs(self) -> dict[str, float]:
        """Real knob -> value, from where the trainer will use it next."""

    def apply(self, values: Mapping[str, float], epoch: int) -> list[Applied]:
        """Set all of `values` or none, read back, and stamp the data that follows with `epoch`."""

    def restore(self, restore: Restore) -> int:
        """Bring weights and optimizer back; the rollout that started from them."""

    def broadcast(self, decision: Decision | None) -> Decision | None:
        """Rank 0's decision on every rank; the identity in a single process."""

    def agree(self, digest: str) -> bool:
        """Whether all ranks read back the same vector; True in a single process."""


class SingleProcess:
    """`broadcast` and `agree` of an adapter that has one rank."""

    def broadcast(self, decision: Decision | None) -> Decision | None:
        return decision

    def agree(self, digest: str) -> bool:
        return True


def vector_digest(knobs: Mapping[str, float]) -> str:
    """Hash of a knob vector, for comparing read-backs between ranks."""
    return hashlib.sha256(json.dumps(dict(knobs), sort_keys=True).encode()).hexdigest()


# ------------------------------------------------------------------------------------- acting

Vector = Mapping[str, float]
Setter = Callable[[Vector], object]
"""Sets several knobs; raises `AdapterError` when it refuses, possibly halfway."""


def set_all_or_none(
    values: Vector, get: Callable[[], Vector], setter: Setter, effective_from: int
) -> list[Applied]:
    """Set every knob of `values`, or leave the trainer as it was.

    Args:
        values: real knob -> wanted value.
        get: the trainer's own vector, read from where it is used.
        setter: the trainer's setter; `one_by_one` makes one of a setter for single knobs.
        effective_from: first rollout that will use the new values.

    Returns:
        One `Applied` per knob. After a failure all of them carry the reason, and the read-back is
        what the trainer has after everything that had moved was put back.
    """
    before = dict(get())
    failure = _try_set(values, before, get, setter)
    if failure:
        failure += _put_back(before, get, setter)
    after = get()
    return [
        Applied(knob, value, after.get(knob, math.nan), effective_from, failure)
        for knob, value in values.items()
    ]


def _try_set(values: Vector, before: Vector, get: Callable[[], Vector], setter: Setter) -> str:
    """What went wrong, or an empty string. A setter that changes nothing is a failure too."""
    unknown = [knob for knob in values if knob not in before]
    if unknown:
        return f"{', '.join(unknown)} does not exist here; expected any of {', '.join(before)}"
    try:
        setter(values)
    except AdapterError as refusal:
        return str(refusal) or "the trainer refused without a reason"
    after = get()
    return "; ".join(
        f"{knob} was set to {value:g} and reads back {after[knob]:g}"
        for knob, value in values.items()
        if not Applied(knob, value, after[knob], effective_from=0).ok
    )


def _put_back(before: Vector, get: Callable[[], Vector], setter: Setter) -> str:
    """Undo what has moved, knobs that the trainer re-derived included; what could not be undone."""
    moved = {knob: before[knob] for knob, value in get().items() if value != before[knob]}
    try:
        setter(moved)
    except AdapterError as refusal:
        return f"; putting {', '.join(moved)} back failed: {refusal}"
    left = [knob for knob, value in get().items() if value != before[knob]]
    return f"; {', '.join(left)} could not be put back" if left else ""


def one_by_one(set_one: Callable[[str, float], object]) -> Setter:
    """A setter of several knobs from a setter of one.

    The order is the knob table's: batch sizes come before the micro batch derived from them.
    """

    def setter(values: Vector) -> None:
        for knob in sorted(values, key=list(KNOBS).index):
            set_one(knob, values[knob])

    return setter


def move(
    setters: Mapping[str, Callable[[float], object]], knob: str, value: float,
    facts: RunFacts, get: Callable[[], Mapping[str, float]],
) -> None:  # fmt: skip
    """Set one knob of a foreign trainer by its own setter.

    What has no setter follows from others or needs a restart: the read-back decides whether it fits.

    Raises:
        AdapterError: the value is not finite, or the knob cannot move in this run.
    """
    if not math.isfinite(value):
        raise AdapterError(f"{knob} = {value} is not a finite number")
    if knob not in setters:
        return
    capability = facts.knob_capability.get(knob)
    if capability is not None and not capability.acts and value != get().get(knob):
        raise AdapterError(f"{knob} cannot move: {capability.reason}")
    setters[knob](value)


# ------------------------------------------------------------------------------------ sensing


def structural_readings(facts: RunFacts, knobs: Mapping[str, float]) -> dict[str, Reading]:
    """Readings that the configuration decides, whatever number arrives."""
    readings = {
        name: Reading(None, Validity(capability.state), capability.reason)
        for name, capability in facts.metric_capability.items()
        if capability.state != Validity.VALID
    }
    if not facts.has_reference and "kl_ref" not in readings:
        reason = "kl_coef is 0: there is no reference model to measure against"
        readings["kl_ref"] = Reading(None, Validity.NOT_LOGGED, reason)
    if updates_per_rollout(knobs) == 1:
        reason = "one update per rollout: the policy ratio is 1 by construction"
        one = Reading(None, Validity.STRUCTURAL_ZERO, reason)
        readings.update(dict.fromkeys(RATIO_METRICS, one))
    return readings


def judge(scalars: Mapping[str, Any], facts: RunFacts, knobs: Mapping[str, float]) -> dict[str, Reading]:
    """Canonical name -> reading. A metric that `facts` promises and that is absent is missing."""
    readings = structural_readings(facts, knobs)
    for name in {**dict.fromkeys(facts.metric_capability), **dict.fromkeys(scalars)}:
        if name not in readings:
            readings[name] = read_metric(name, scalars.get(name))
    return readings


@dataclass
class FrozenDetector:
    """Notices an exporter that stopped: a noisy metric with the very same float, again and again.

    Zero is never frozen (a dead model's gradient norm is honestly 0), nor is a mean reward whose
    sampling noise is so small that repeats are likely: for 0/1 rewards the number of successes
    must have a standard deviation of at least 4 (a repeat is then below 10 %, five running 1e-4).
    """

    patience: int = 5
    """Rollouts with the same number until it is called frozen."""
    runs: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Metric -> last number and how many rollouts running it was seen."""

    def check(self, readings: Mapping[str, Reading], responses: int) -> dict[str, Reading]:
        """The readings with frozen ones replaced by their state; call once per rollout."""
        judged = dict(readings)
        for name in NOISY_METRICS:
            reading = readings.get(name)
            if reading is None or reading.value is None:
                self.runs.pop(name, None)  # a gap or a fault ends the run of equal numbers
            elif self._count(name, reading.value) >= self.patience and self._telling(
                name, readings, responses
            ):
                judged[name] = self._frozen(name, reading.value)
        return judged

    def _count(self, name: str, value: float) -> int:
        last, count = self.runs.get(name, (math.nan, 0))
        self.runs[name] = (value, count + 1 if value == last else 1)
        return self.runs[name][1]

    def _telling(self, name: str, readings: Mapping[str, Reading], responses: int) -> bool:
        if readings[name].value == 0.0:
            return False
        if name != "reward_mean":
            return True
        spread = readings.get("reward_std", Reading(None)).value or 0.0
        return spread * math.sqrt(responses) >= 4.0

    def _frozen(self, name: str, value: float) -> Reading:
        reason = f"{name} has been exactly {value!r} for {self.runs[name][1]} rollouts"
        return Reading(None, Validity.FROZEN, reason)

    def state(self) -> dict[str, list[float]]:
        """JSON state for a checkpoint."""
        return {name: list(seen) for name, seen in self.runs.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state`."""
        self.runs = {name: (last, count) for name, (last, count) in state.items()}


def snapshot_of(record: RolloutRecord, facts: RunFacts, frozen: FrozenDetector) -> Snapshot:
    """One rollout's record, judged: what is known, and why the rest is not.

    The record carries its own index, which is believed: the controller checks its order.
    """
    knobs = dict(record.knobs)
    readings = judge(record.scalars, facts, knobs)
    responses = int(knobs["train_batch_size"] * knobs["rollout_n"])
    blind = {name for name in RATIO_METRICS if name in readings and readings[name].reason}
    return Snapshot(
        rollout=record.rollout,
        knobs=knobs,
        readings=frozen.check(readings, responses),
        epoch=record.epoch,
        per_update={n: tuple(v) for n, v in record.per_update.items() if n not in blind},
        histograms={n: tuple(v) for n, v in record.histograms.items() if not _of(n, blind)},
    )


def _of(histogram: str, blind: set[str]) -> bool:
    """`policy_ratio_last` goes where `policy_ratio` goes."""
    return any(histogram.startswith(name) for name in blind)
