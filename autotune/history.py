"""What the controller remembers of past rollouts: bounded, so that a step's cost never grows.

One `Sample` is the valid scalars of one snapshot with the knob vector its data was made under.
Windows never mix config epochs; a sensor of the trust region may also ask for samples made under
the very same values of some knobs (`under`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.metrics import Snapshot, Validity

DEPTH = 128
"""Rollouts kept: more than any window that a rule asks for."""
HEAD = 16
"""First rollouts of the run, kept for good: its own baseline."""


@dataclass(frozen=True, slots=True)
class Sample:
    rollout: int
    epoch: int
    knobs: Mapping[str, float]
    values: Mapping[str, float]

    @classmethod
    def of(cls, snapshot: Snapshot) -> Sample:
        readings = snapshot.readings.items()
        values = {
            name: r.value
            for name, r in readings
            if r.value is not None and r.validity is Validity.VALID and not name.startswith("time/")
        }
        return cls(snapshot.rollout, snapshot.epoch, dict(snapshot.knobs), values)

    def to_json(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout,
            "epoch": self.epoch,
            "knobs": dict(self.knobs),
            "values": dict(self.values),
        }


class History:
    """The last `DEPTH` samples, oldest first, and the first `HEAD` of the run."""

    def __init__(self, samples: Iterable[Sample] = (), head: Iterable[Sample] = ()) -> None:
        self._samples: list[Sample] = []
        self._epoch_streak = self._knob_streak = 0
        """Newest samples running with one config epoch, and with one knob vector."""
        for sample in samples:
            self._remember(sample)
        self._head = list(head)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def last(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    @property
    def head(self) -> Sequence[Sample]:
        return self._head

    def add(self, sample: Sample) -> None:
        self._remember(sample)
        if len(self._head) < HEAD:
            self._head.append(sample)

    def _remember(self, sample: Sample) -> None:
        """Append; neighbours with equal knobs share one mapping, so that `samples` compares it once."""
        before = self.last
        if before is not None and before.knobs is not sample.knobs and before.knobs == sample.knobs:
            sample = replace(sample, knobs=before.knobs)
        self._epoch_streak = self._epoch_streak + 1 if before and before.epoch == sample.epoch else 1
        self._knob_streak = self._knob_streak + 1 if before and before.knobs is sample.knobs else 1
        self._samples.append(sample)
        del self._samples[:-DEPTH]

    def samples(
        self,
        n: int,
        *,
        epoch: int | None = None,
        since: int = 0,
        under: Mapping[str, float] | None = None,
    ) -> list[Sample]:
        """The newest run of at most n samples, cut at the first that does not belong to it.

        Args:
            n: how many at most.
            epoch: config epoch the samples must come from.
            since: first rollout that counts.
            under: knob -> value that the samples must have been made under.

        Rollouts grow, so only the oldest has to be compared with `since`.
        """
        items = self._samples
        first = max(len(items) - n, 0)
        if epoch is not None and first < len(items):
            streak = self._epoch_streak if items[-1].epoch == epoch else 0
            first = max(first, len(items) - streak)
        while first < len(items) and items[first].rollout < since:
            first += 1
        return items[self._first_under(first, under) if under else first :]

    def _first_under(self, first: int, under: Mapping[str, float]) -> int:
        """Where the newest run of samples made under these values begins, not before `first`."""
        items, start = self._samples, len(self._samples)
        while start > first:
            if not _made_under(items[start - 1], under):
                break
            shared = items[start - 1].knobs
            start = max(len(items) - self._knob_streak, first) if start == len(items) else start - 1
            while start > first and items[start - 1].knobs is shared:
                start -= 1
        return start

    def values(self, metric: str, samples: Sequence[Sample]) -> list[float]:
        """The metric over these samples, skipping those where it was not valid."""
        return [s.values[metric] for s in samples if metric in s.values]

    def to_json(self) -> dict[str, Any]:
        return {
            "samples": [s.to_json() for s in self._samples],
            "head": [s.to_json() for s in self._head],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Iterable[Mapping[str, Any]]]) -> History:
        return cls(map(_sample, data["samples"]), map(_sample, data["head"]))


def _sample(data: Mapping[str, Any]) -> Sample:
    return Sample(data["rollout"], data["epoch"], dict(data["knobs"]), dict(data["values"]))


def _made_under(sample: Sample, under: Mapping[str, float]) -> bool:
    return all(sample.knobs.get(knob) == value for knob, value in under.items())
