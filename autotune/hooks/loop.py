"""The whole of `autotune` in one call: `ControlLoop.on_rollout`. Start reading here.

    trainer finishes rollout t
        adapter.read        raw metrics -> Snapshot: what is known, and what must not be believed
        hand.before         a human's pause and pins, when there are any (`autotune ctl`)
        controller.step     Snapshot -> Decision: rules propose, guards limit, the past is judged
        adapter.restore     weights from before the damage, when the decision says so
        adapter.apply       all knobs or none, then read back: in force from rollout t+1
        controller.confirm  what really happened goes back to the controller
        journal.append      one line; what is not written down did not happen
        hand.after          a human's set, resume and unpin
        observers           screen and friends: they may fail, the run does not
    trainer starts rollout t+1

Nothing flows back into the trainer except through `restore` and `apply`. In shadow both are left
out, and without a controller (`mode: off`) there is no decision: the rest is the same program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Protocol

from autotune.decisions import RANKS_DISAGREE, Applied, Decision, to_json
from autotune.errors import ControlStop, RunError
from autotune.hooks.base import Adapter, vector_digest
from autotune.hooks.obey import Hand, Inbox
from autotune.metrics import Snapshot


class Controller(Protocol):
    """The part of `autotune.controller.Controller` that the loop calls."""

    def step(self, snapshot: Snapshot) -> Decision: ...
    def confirm(self, applied: Sequence[Applied], restored: int | None) -> None: ...


class Journal(Protocol):
    """The part of `autotune.journal.Journal` that the loop calls."""

    def append(self, type: str, rollout: int, payload: Mapping[str, Any]) -> dict[str, Any]: ...


@dataclasses.dataclass
class Outcome:
    """What acting on one decision came to."""

    applied: list[Applied] = dataclasses.field(default_factory=list)
    restored: int | None = None
    """Rollout whose starting weights came back, or None."""
    restore_error: str = ""


class ControlLoop:
    """Reads, decides, acts, records: once per rollout, on the trainer's own thread."""

    def __init__(
        self,
        adapter: Adapter,
        controller: Controller | None,
        journal: Journal,
        observers: Sequence[Callable[[dict[str, Any]], None]] = (),
        inbox: Inbox | None = None,
    ) -> None:
        self.adapter = adapter
        self.controller = controller
        self.journal = journal
        self.observers = tuple(observers)
        self.observer_failures = 0
        self.last_observer_error = ""
        self.hook_seconds: list[float] = []
        """Wall time of every `on_rollout`, journal and observers included."""
        self._next_rollout = 0
        self._hand = Hand(adapter, controller, inbox, self._apply, self._tell)

    def on_rollout(self, raw: Any) -> Decision | None:
        """Handle one finished rollout.

        Args:
            raw: the trainer's own metrics of the rollout, in whatever form its adapter reads.

        Returns:
            The decision, already acted on and journalled; None without a controller.

        Raises:
            ControlStop: the decision was to stop; the line that says why is in the journal.
        """
        started = perf_counter()
        snapshot = self.adapter.read(raw, self._next_rollout)
        self._hand.before(snapshot.rollout + 1)
        decision = self.controller.step(snapshot) if self.controller else None
        decision = self.adapter.broadcast(decision)
        outcome = self._act(decision)
        times = {**_phases(raw), "hook": perf_counter() - started}
        payload = _payload(snapshot, decision, outcome, times)
        self._tell("rollout", snapshot.rollout, payload)
        self._next_rollout = snapshot.rollout + 1
        stop = decision.stop if decision and decision.act else ""
        if not stop:
            self._hand.after(self._next_rollout, snapshot.epoch)
        self.hook_seconds.append(perf_counter() - started)
        if stop:
            raise ControlStop(stop)
        return decision

    def _act(self, decision: Decision | None) -> Outcome:
        if decision is None or not decision.act:
            return Outcome()
        outcome = self._restore(decision)
        outcome.applied = self._apply(decision)
        if self.controller:
            self.controller.confirm(outcome.applied, outcome.restored)
        return outcome

    def _restore(self, decision: Decision) -> Outcome:
        """A restore that fails is told to the controller as `restored=None`: the LR still falls."""
        if decision.restore is None:
            return Outcome()
        try:
            return Outcome(restored=self.adapter.restore(decision.restore))
        except RunError as failure:
            return Outcome(restore_error=f"{type(failure).__name__}: {failure}")

    def _apply(self, decision: Decision) -> list[Applied]:
        """Apply; when the ranks do not read back the same vector, take it back on all of them."""
        before = self.adapter.knobs()
        applied = self.adapter.apply(decision.values, decision.epoch)
        if self.adapter.agree(vector_digest(self.adapter.knobs())):
            return applied
        known = [item for item in applied if item.knob in before]
        self.adapter.apply({item.knob: before[item.knob] for item in known}, decision.epoch)
        after = self.adapter.knobs()
        error = f"{RANKS_DISAGREE}; the previous one was put back on all of them"
        return [dataclasses.replace(item, read_back=after[item.knob], error=error) for item in known]

    def _tell(self, type: str, rollout: int, payload: Mapping[str, Any]) -> None:
        self._show(self.journal.append(type, rollout, payload))

    def _show(self, line: dict[str, Any]) -> None:
        """Observers are fed last and may fail: a broken screen must not end a run."""
        for observer in self.observers:
            try:
                observer(line)
            except Exception as failure:
                self.observer_failures += 1
                self.last_observer_error = f"{type(failure).__name__}: {failure}"


def _phases(raw: Any) -> dict[str, float]:
    """Seconds per phase, where the trainer's record has them."""
    return dict(getattr(raw, "times", {}))


def _payload(
    snapshot: Snapshot, decision: Decision | None, outcome: Outcome, times: Mapping[str, float]
) -> dict[str, Any]:
    """Payload of a `rollout` line."""
    payload: dict[str, Any] = {
        "snapshot": snapshot.to_json(),
        "decision": None if decision is None else to_json(decision),
        "applied": [to_json(item) for item in outcome.applied],
        "restored": outcome.restored,
        "times": dict(times),
    }
    return payload | ({"restore_error": outcome.restore_error} if outcome.restore_error else {})
