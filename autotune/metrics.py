"""Canonical metrics, their validity, and the snapshot that control policies read.

A metric is a name with a unit, a range and an estimator; other trainers' spellings live in
their adapters. A reading that is structurally zero, missing, stale or not finite is a state of
its own and never the number 0: `Snapshot.value` answers `None` for it.

Adding a metric: one row in `METRICS`, then one row in each adapter that has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Validity(StrEnum):
    """Why a reading may or may not be used."""

    VALID = "valid"
    STRUCTURAL_ZERO = "structural_zero"
    """The configuration makes it a constant (one update per rollout: the ratio is always 1)."""
    NOT_LOGGED = "not_logged"
    """The trainer never emits it."""
    MISSING = "missing"
    """The trainer emits it, but not for this rollout."""
    NON_FINITE = "non_finite"
    OUT_OF_RANGE = "out_of_range"
    """Outside the metric's own range, such as a negative KL or a share above 1."""
    FROZEN = "frozen"
    """The very same number for many rollouts: an exporter that stopped."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the metric table."""

    name: str
    unit: str
    low: float
    high: float
    what: str

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high


_INF = math.inf


def _table(*rows: tuple[str, str, float, float, str]) -> dict[str, MetricSpec]:
    return {name: MetricSpec(name, unit, low, high, what) for name, unit, low, high, what in rows}


METRICS: dict[str, MetricSpec] = _table(
    ("reward_mean", "task units", -_INF, _INF, "mean reward over all responses of the rollout"),
    ("reward_std", "task units", 0.0, _INF, "standard deviation over all responses"),
    ("clip_ratio", "share", 0.0, 1.0, "tokens whose clipped branch is the active one, all updates"),
    ("ratio_low", "share", 0.0, 1.0, "tokens with policy ratio below 1 - clip_range_low"),
    ("ratio_in", "share", 0.0, 1.0, "tokens with policy ratio inside the clip range"),
    ("ratio_high", "share", 0.0, 1.0, "tokens with policy ratio above 1 + clip_range_high"),
    ("kl_ref", "nats/token", 0.0, _INF, "KL(model || reference), k3 unless named otherwise"),
    ("kl_step", "nats/token", 0.0, _INF, "drift from the sampling weights after the last update"),
    ("kl_mismatch", "nats/token", 0.0, _INF, "sampler against trainer for the same weights, k3"),
    ("entropy", "nats/token", 0.0, _INF, "mean token entropy of the sampling distribution"),
    ("grad_norm", "norm", 0.0, _INF, "mean gradient norm before clipping, over the updates"),
    ("loss", "loss", -_INF, _INF, "mean training loss over the updates"),
    ("value_loss", "loss", 0.0, _INF, "mean critic loss over the updates"),
    ("learning_rate", "1", 0.0, _INF, "the actor's learning rate that the optimizer used"),
    ("response_length_mean", "tokens", 0.0, _INF, "mean response length"),
    ("response_length_p50", "tokens", 0.0, _INF, "median response length"),
    ("response_length_p95", "tokens", 0.0, _INF, "95th percentile of the response length"),
    ("response_length_p995", "tokens", 0.0, _INF, "99.5th percentile of the response length"),
    ("response_length_max", "tokens", 0.0, _INF, "longest response"),
    ("truncated_fraction", "share", 0.0, 1.0, "responses that hit max_response_length"),
    ("prompt_length_mean", "tokens", 0.0, _INF, "mean prompt length"),
    ("prompt_length_max", "tokens", 0.0, _INF, "longest prompt"),
    ("prompts_cut", "prompts", 0.0, _INF, "prompts that were cut to max_prompt_length"),
    ("prompts_dropped", "prompts", 0.0, _INF, "prompts passed over as longer than max_prompt_length"),
    ("zero_std_fraction", "share", 0.0, 1.0, "groups whose rewards are all equal: no signal"),
    ("rollout_success_rate", "share", 0.0, 1.0, "responses generated and scorable"),
    ("gpu_memory_fraction", "share", 0.0, 1.0, "peak GPU memory in the rollout phase"),
    ("gpu_utilization", "share", 0.0, 1.0, "mean GPU utilization in the rollout phase"),
    ("tokens_per_second", "tokens/s", 0.0, _INF, "non-pad prompt + response tokens over step time"),
    ("data_age", "rollouts", 0.0, _INF, "age of the data at the update"),
    ("eval_score", "task units", -_INF, _INF, "held-out score, when evaluated"),
    ("updates_skipped", "updates", 0.0, _INF, "updates skipped: no signal or non-finite gradients"),
)
"""Name -> row. `reward/<component>` and `time/<phase>` are open families beside it."""

FAMILIES: dict[str, MetricSpec] = _table(
    ("reward/", "task units", -_INF, _INF, "one component of the reward"),
    ("time/", "s", 0.0, _INF, "wall time of one phase of the rollout"),
)

RATIO_BINS = 64
"""Log-spaced bins of the `policy_ratio` histogram over [1/8, 8], plus two overflow bins."""
RATIO_LIMIT = 8.0


def spec_of(name: str) -> MetricSpec:
    """The table row of `name`.

    Raises:
        KeyError: if the name is in neither the table nor an open family.
    """
    if name in METRICS:
        return METRICS[name]
    for prefix, spec in FAMILIES.items():
        if name.startswith(prefix):
            return spec
    raise KeyError(f"{name!r} is not a canonical metric; see autotune.metrics.METRICS")


@dataclass(frozen=True, slots=True)
class Reading:
    """One metric at one rollout: a number when valid, otherwise the reason why not."""

    value: float | None
    validity: Validity = Validity.VALID
    reason: str = ""


def read_metric(name: str, raw: Any) -> Reading:
    """Judge one raw value: only a finite real number inside the metric's range is valid.

    Booleans, strings and other types are not numbers here, so that `"nan"` and `True` never
    become 0.0 or 1.0.
    """
    if raw is None:
        return Reading(None, Validity.MISSING, f"{name} was not in this rollout's metrics")
    value = _real(raw)
    if value is None:
        return Reading(None, Validity.NON_FINITE, f"{name} is {raw!r:.60}, not a number")
    if not math.isfinite(value):
        return Reading(None, Validity.NON_FINITE, f"{name} is {value}")
    spec = spec_of(name)
    if not spec.contains(value):
        where = f"[{spec.low:g}, {spec.high:g}] {spec.unit}"
        return Reading(None, Validity.OUT_OF_RANGE, f"{name} is {value:g}, expected {where}")
    return Reading(value)


def _real(raw: Any) -> float | None:
    """One real number as a float (numpy scalars too), or None: no booleans, arrays or texts."""
    if isinstance(raw, (bool, str, bytes)) or type(raw).__name__ in ("bool_", "bool"):
        return None
    if not hasattr(raw, "__float__") or getattr(raw, "shape", ()) != ():
        return None
    try:
        return float(raw)
    except (OverflowError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known after one rollout; frozen, and stamped with the knobs its data was made under."""

    rollout: int
    knobs: Mapping[str, float]
    readings: Mapping[str, Reading]
    epoch: int = 0
    """Config epoch: every intervention opens a new one, a regulator's move does not."""
    per_update: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Metric -> one value per optimizer step of the rollout, [U]."""
    histograms: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """`policy_ratio` (all updates) and `policy_ratio_last` -> counts, [RATIO_BINS + 2]."""

    def reading(self, name: str) -> Reading:
        found = self.readings.get(name)
        if found is not None:
            return found
        return Reading(None, Validity.NOT_LOGGED, f"{name} is not logged by this trainer")

    def value(self, name: str) -> float | None:
        """The number, or None unless it was measured and is valid."""
        reading = self.reading(name)
        return reading.value if reading.validity is Validity.VALID else None

    def invalid(self) -> Iterator[tuple[str, Reading]]:
        """Readings that are faults: not finite, out of range or frozen."""
        faults = (Validity.NON_FINITE, Validity.OUT_OF_RANGE, Validity.FROZEN)
        return ((n, r) for n, r in self.readings.items() if r.validity in faults)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; valid readings as numbers, the others with their state and reason."""
        return {
            "rollout": self.rollout,
            "epoch": self.epoch,
            "knobs": dict(self.knobs),
            "metrics": {n: r.value for n, r in self.readings.items() if r.value is not None},
            "invalid": {
                n: [str(r.validity), r.reason]
                for n, r in self.readings.items()
                if r.validity is not Validity.VALID
            },
            "per_update": {n: list(v) for n, v in self.per_update.items()},
            "histograms": {n: list(v) for n, v in self.histograms.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Snapshot:
        """Inverse of `to_json`."""
        readings = {n: Reading(v) for n, v in data["metrics"].items()}
        for name, (state, reason) in data["invalid"].items():
            readings[name] = Reading(None, Validity(state), reason)
        return cls(
            rollout=data["rollout"],
            knobs=dict(data["knobs"]),
            readings=readings,
            epoch=data["epoch"],
            per_update={n: tuple(v) for n, v in data.get("per_update", {}).items()},
            histograms={n: tuple(v) for n, v in data.get("histograms", {}).items()},
        )
