"""Following a knob schedule: the controller's place in the loop, taken by a table.

`ScheduleFollower` has the two methods that `ControlLoop` calls, so a followed run is read, set, read
back and journalled like a controlled one, and replays the same way. It has no state of its own: what
rollout t + 1 must use stands in the schedule, and what rollout t did use stands in its snapshot. Where
the two differ the run is no longer the schedule's, and it stops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.commands import BATCHES
from autotune.decisions import Applied, Change, Decision, Kind, State
from autotune.errors import AdapterError
from autotune.hooks.base import Adapter
from autotune.metrics import Snapshot
from autotune.recipe.schedule import KnobSchedule


class ScheduleFollower:
    """Decides what a schedule says, and nothing else."""

    acting = True

    def __init__(self, schedule: KnobSchedule) -> None:
        self.schedule = schedule
        self._refused = ""  # why the trainer did not take the last change; for the message only

    def begin(self, adapter: Adapter) -> list[Applied]:
        """Put rollout 0's vector in force, before any rollout.

        Raises:
            AdapterError: the trainer refused it.
        """
        now = adapter.knobs()
        start, wanted = self.schedule.vector(0), dict[str, float]()
        for knob, value in start.items():
            if now.get(knob) != value:
                wanted |= _with_batches(knob, value, start)
        applied = adapter.apply(wanted, 0)
        wrong = next((item for item in applied if not item.ok), None)
        if wrong is not None:
            reason = wrong.error or f"{wrong.knob} reads back {wrong.read_back:g}"
            raise AdapterError(f"the schedule's start cannot be set in this run: {reason}")
        return applied

    def step(self, snapshot: Snapshot) -> Decision:
        """The change that the next rollout needs; a stop when this one was not the schedule's."""
        rollout = snapshot.rollout
        epoch = self.schedule.epoch(rollout + 1)
        stop = self._strayed(snapshot)
        if stop:
            return Decision(rollout, State.HOLD, epoch, alarms=(stop,), stop=stop)
        now, then = self.schedule.vector(rollout), self.schedule.vector(rollout + 1)
        reason = f"the schedule's value from rollout {rollout + 1} on"
        changes = tuple(
            Change("schedule", k, now[k], v, reason, Kind.REGULATOR, _with_batches(k, v, then))
            for k, v in then.items()
            if v != now[k]
        )
        return Decision(rollout, State.OBSERVE, epoch, changes=changes)

    def _strayed(self, snapshot: Snapshot) -> str:
        for knob, value in self.schedule.vector(snapshot.rollout).items():
            found = snapshot.knobs.get(knob)
            if found is None or abs(found - value) > 1e-6 * max(abs(value), 1e-12):
                why = f" ({self._refused})" if self._refused else ""
                return (
                    f"the schedule cannot be followed: rollout {snapshot.rollout} used {knob} = {found},"
                    f" the schedule says {value:g}{why}"
                )
        return ""

    def confirm(self, applied: Sequence[Applied], restored: int | None) -> None:
        """Keep the trainer's reason: the next rollout's snapshot will show that it did not obey."""
        self._refused = next((item.error for item in applied if not item.ok and item.error), "")

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def _with_batches(knob: str, value: float, vector: Mapping[str, float]) -> dict[str, float]:
    """A batch size comes with all the others, or a trainer would re-derive them from its own recipe."""
    if knob not in BATCHES:
        return {knob: value}
    return {name: vector[name] for name in BATCHES if name in vector}
