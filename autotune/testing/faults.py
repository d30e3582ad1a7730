"""Faults to inject into `FakeTrainer`: each a small object that breaks one thing.

A fault may act at four points, and does nothing at the others:

    on_facts(facts)              what the run says of itself before it starts
    before_rollout(trainer, t)   the world changes behind the controller's back
    on_set(knob, value)          the actuator: another value, None (ignored), or `AdapterError`
    on_record(record)            the sensor: another record

    FakeTrainer({...}, seed=1, faults=[NonFinite("kl_step", at=12), DeadKnob("kl_coef")])

A fault keeps what it remembers in itself: use a fresh one for every trainer.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from autotune.decisions import RunFacts
from autotune.errors import AdapterError
from autotune.trainer.records import RolloutRecord

if TYPE_CHECKING:
    from autotune.testing.fake import FakeTrainer

FOREVER = 1 << 60


class Fault:
    """Base of all faults: breaks nothing."""

    def on_facts(self, facts: RunFacts) -> RunFacts:
        """What the run says of itself."""
        return facts

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        """Called before rollout `rollout` samples."""

    def on_set(self, knob: str, value: float) -> float | None:
        """The value that is really set; None when the setter silently ignores the call."""
        return value

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        """The record that is really delivered."""
        return record


# ---------------------------------------------------------------------------------- sensors


@dataclass
class _Sensor(Fault):
    """Replaces one metric in rollouts [at, at + count)."""

    metric: str
    at: int = 0
    count: int = FOREVER

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        if not self.at <= record.rollout < self.at + self.count:
            return record
        honest = record.scalars.get(self.metric)
        return _with(record, self.metric, self.reported(honest))

    def reported(self, honest: float | None) -> float | None:
        raise NotImplementedError


@dataclass
class NonFinite(_Sensor):
    """NaN, or an infinity, in place of the metric."""

    value: float = math.nan

    def reported(self, honest: float | None) -> float | None:
        return self.value


@dataclass
class Missing(_Sensor):
    """The metric is not in the record."""

    def reported(self, honest: float | None) -> float | None:
        return None


@dataclass
class Frozen(_Sensor):
    """The exporter stopped: the number of rollout `at` for ever after."""

    _held: float | None = None

    def reported(self, honest: float | None) -> float | None:
        self._held = honest if self._held is None else self._held
        return self._held


@dataclass
class Lying(_Sensor):
    """The sensor reports a function of the truth."""

    lie: Callable[[float], float] = float

    def reported(self, honest: float | None) -> float | None:
        return None if honest is None else self.lie(honest)


def negative_kl(at: int = 0, metric: str = "kl_ref") -> Lying:
    """A k1 estimator where k3 is promised: the sign goes."""
    return Lying(metric, at, lie=lambda honest: -abs(honest) - 1e-3)


def percent(metric: str, at: int = 0) -> Lying:
    """A share reported as 0-100 from rollout `at` on."""
    return Lying(metric, at, lie=lambda honest: 100.0 * honest)


def outlier(metric: str, at: int, factor: float = 1e3) -> Lying:
    """One wild sample."""
    return Lying(metric, at, count=1, lie=lambda honest: factor * honest)


# ------------------------------------------------------------------------------------ records


@dataclass
class Late(Fault):
    """From rollout `at` on, every record arrives `lag` rollouts late, under its own old index."""

    at: int
    lag: int = 2
    _past: deque[RolloutRecord] = field(default_factory=deque)

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        self._past.append(record)
        if len(self._past) > self.lag + 1:
            self._past.popleft()
        return self._past[0] if record.rollout >= self.at else record


@dataclass
class Duplicate(Fault):
    """Rollout `at` is reported under the index of the one before: that index comes twice."""

    at: int

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        shift = 1 if record.rollout == self.at else 0
        return dataclasses.replace(record, rollout=record.rollout - shift)


@dataclass
class OutOfOrder(Fault):
    """Rollouts `at` and `at + 1` come under each other's index."""

    at: int

    def on_record(self, record: RolloutRecord) -> RolloutRecord:
        swapped = {self.at: self.at + 1, self.at + 1: self.at}
        return dataclasses.replace(record, rollout=swapped.get(record.rollout, record.rollout))


# ---------------------------------------------------------------------------------- actuators


@dataclass
class DeadKnob(Fault):
    """The setter returns without an error and changes nothing."""

    knob: str

    def on_set(self, knob: str, value: float) -> float | None:
        return None if knob == self.knob else value


@dataclass
class RefusedKnob(Fault):
    """The setter raises: in a call with several knobs, the apply stops halfway."""

    knob: str
    reason: str = "rank 1 did not answer"

    def on_set(self, knob: str, value: float) -> float | None:
        if knob == self.knob:
            raise AdapterError(f"{knob}={value:g}: {self.reason}")
        return value


@dataclass
class Overwrite(Fault):
    """A scheduler that also owns the knob: it writes its own value before every rollout."""

    knob: str = "actor_learning_rate"
    value: Callable[[int], float] = lambda rollout: 3e-4
    at: int = 0

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        if rollout >= self.at:
            trainer.live.force(self.knob, self.value(rollout))


# ---------------------------------------------------------------------------------- the model


@dataclass
class Collapse(Fault):
    """The model is dead from rollout `at` on, whatever the drift was."""

    at: int

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        if rollout == self.at:
            trainer.kill()


@dataclass
class LengthSurge(Fault):
    """Responses are `factor` times as long in rollouts [at, at + count)."""

    at: int
    factor: float = 3.0
    count: int = FOREVER

    def before_rollout(self, trainer: FakeTrainer, rollout: int) -> None:
        if self.at <= rollout < self.at + self.count:
            trainer.length_factor = self.factor
        elif rollout == self.at + self.count:
            trainer.length_factor = 1.0


def _with(record: RolloutRecord, metric: str, value: float | None) -> RolloutRecord:
    """The record with one scalar replaced, or left out when None."""
    scalars = {name: v for name, v in record.scalars.items() if name != metric}
    if value is not None:
        scalars[metric] = value
    return dataclasses.replace(record, scalars=scalars)
