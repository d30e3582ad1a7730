"""The control loop's part of `autotune ctl`: commands carried out between two rollouts.

    before the decision   pause, pin: what holds the controller back holds from this very decision on
    after the decision    set, resume, unpin: what it must not overrun in the same breath
                          (and everything that was left behind one of these: order is kept)

A `set` goes through the adapter like every change: all or none, then read back. Its line in the
journal says what became of it; only then is the command's file removed. Without commands all of it
costs one look at a folder that does not exist.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from autotune.commands import wanted_values
from autotune.decisions import Applied, Change, Command, Decision, Kind, State, to_json
from autotune.errors import InputError
from autotune.hooks.base import Adapter

HOLDS_BACK = ("pause", "pin")
Apply = Callable[[Decision], list[Applied]]
Tell = Callable[[str, int, Mapping[str, Any]], None]


class Inbox(Protocol):
    """The part of `autotune.commands.Inbox` that is used here."""

    def take(self, rollout: int) -> list[Command]: ...
    def done(self, command: Command) -> None: ...


class Obedient(Protocol):
    """The part of `autotune.controller.Controller` that is used here."""

    @property
    def epoch(self) -> int: ...
    def obey(self, command: Command, applied: Sequence[Applied] = ()) -> str: ...
    def hand_state(self) -> dict[str, Any]: ...


class Hand:
    """Carries commands out, at one boundary after the other."""

    def __init__(
        self, adapter: Adapter, controller: Any, inbox: Inbox | None, apply: Apply, tell: Tell
    ) -> None:
        self.adapter, self.inbox = adapter, inbox
        self.controller: Obedient | None = controller if hasattr(controller, "obey") else None
        self.refusal = _refusal(controller)
        self.apply, self.tell = apply, tell
        self.facts = adapter.facts()
        self._waiting: list[Command] = []

    def before(self, rollout: int) -> None:
        """Take what waits, and obey what holds the controller back. `rollout` is the next one."""
        self._waiting = self.inbox.take(rollout) if self.inbox else []
        while self._waiting and self._waiting[0].command in HOLDS_BACK:
            self._obey(self._waiting.pop(0), rollout)

    def after(self, rollout: int, epoch: int) -> None:
        """Obey the rest. On several ranks rank 0's values are set on all of them.

        Args:
            rollout: the next one.
            epoch: config epoch of the finished rollout's data, for runs without a controller.
        """
        if not self._waiting and self.facts.world_size == 1:
            return
        epoch = self.controller.epoch if self.controller else epoch
        while True:
            command, order = self._next_order(rollout, epoch)
            order = self.adapter.broadcast(order) if self.facts.world_size > 1 else order
            if order is None:
                return
            applied = self.apply(order)
            if not all(item.ok for item in applied):
                self.adapter.apply({}, epoch)  # nothing was set: no new epoch begins
            elif command is not None:
                epoch = order.epoch
            if command is not None:
                self._finish(command, rollout, order.epoch, applied)

    def _next_order(self, rollout: int, epoch: int) -> tuple[Command | None, Decision | None]:
        """The next `set` as a decision that all ranks can follow; the others are obeyed on the way."""
        while self._waiting:
            command = self._waiting.pop(0)
            if command.command != "set" or command.problem:
                self._obey(command, rollout)
                continue
            try:
                return command, self._order(command, rollout, epoch + 1)
            except InputError as refused:
                self._journal(command, rollout, str(refused), refused=True)
        return None, None

    def _order(self, command: Command, rollout: int, epoch: int) -> Decision:
        if self.refusal and self.controller is None and "schedule" in self.refusal:
            raise InputError(self.refusal)
        now = self.adapter.knobs()
        values = wanted_values(command.values, now, self.facts)
        changes = tuple(
            Change("hand", k, now[k], v, "set by hand", Kind.INTERVENTION, {k: v}) for k, v in values.items()
        )
        return Decision(rollout - 1, State.OBSERVE, epoch, changes=changes)

    def _finish(self, command: Command, rollout: int, epoch: int, applied: Sequence[Applied]) -> None:
        wrong = [item for item in applied if not item.ok]
        if wrong:
            reason = wrong[0].error or f"{wrong[0].knob} reads back {wrong[0].read_back:g}"
            self._journal(command, rollout, reason, applied, refused=True)
            return
        words = "set: " + ", ".join(f"{item.knob} = {item.read_back:g}" for item in applied)
        if self.controller is not None:
            words = self.controller.obey(command, applied)
        self._journal(command, rollout, words, applied, epoch=epoch)

    def _obey(self, command: Command, rollout: int) -> None:
        """A command that is about the controller alone."""
        try:
            if command.problem or self.controller is None:
                raise InputError(command.problem or self.refusal)
            words = self.controller.obey(command)
        except InputError as refused:
            self._journal(command, rollout, str(refused), refused=True)
            return
        self.adapter.apply({}, self.controller.epoch)  # the coming data is stamped with it
        self._journal(command, rollout, words, epoch=self.controller.epoch)

    def _journal(
        self,
        command: Command,
        rollout: int,
        reason: str,
        applied: Sequence[Applied] = (),
        *,
        refused: bool = False,
        epoch: int | None = None,
    ) -> None:
        payload = {
            "id": command.id,
            "command": command.command,
            "knobs": list(command.knobs),
            "values": dict(command.values),
            "outcome": "refused" if refused else "done",
            "reason": reason,
            "applied": [to_json(item) for item in applied],
            "epoch": epoch,
            **(self.controller.hand_state() if self.controller else {}),
        }
        self.tell("command", rollout, payload)
        if self.inbox is not None:
            self.inbox.done(command)


def _refusal(controller: Any) -> str:
    """Why a command about the controller cannot be obeyed, where there is none."""
    if controller is None:
        return "this run has no controller (control.mode: off): nothing to pause or to pin"
    return "" if hasattr(controller, "obey") else "this run follows a schedule: its knobs are not set by hand"
