"""The control loop as a guest in somebody else's training run.

    trainer's own hook at the end of a rollout
        -> Guest.on_rollout(record)     journal, controller and adapter, by `ControlLoop` on the first rank
        -> one exchange between ranks   the others set what the first one read back, then all compare

A guest has manners. It never raises into its host: whatever fails in here, controller, adapter, disk, is
told in the log and the journal, and from then on the guest does nothing (`broken`). It keeps its books in
the host's output folder, like a run of our own, so that replay, ctl and the other readers work there.
An untested trainer version is watched and not touched (`reason`). A rule's stop is only handed on (`stop`).
"""

from __future__ import annotations

import contextlib
import logging
import platform
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import autotune
from autotune.commands import Inbox
from autotune.controller import Controller, ControlSettings
from autotune.decisions import Restore, RunFacts, to_json
from autotune.errors import ControlStop, InputError
from autotune.hooks.base import vector_digest
from autotune.hooks.declared import Declaration
from autotune.hooks.loop import ControlLoop
from autotune.journal import Journal, inspect_journal, winning_lines
from autotune.knobs import KNOBS, Liveness, expand
from autotune.provenance import policies_hash
from autotune.recipe import ControlSection, load_control
from autotune.trainer.records import RolloutRecord

JOURNAL = "journal.jsonl"
log = logging.getLogger("autotune")


class GuestAdapter(Protocol):
    """`hooks.base.Adapter` with a state of its own."""

    def facts(self) -> RunFacts: ...
    def read(self, raw: Any, rollout: int) -> Any: ...
    def knobs(self) -> dict[str, float]: ...
    def apply(self, values: Mapping[str, float], epoch: int) -> list[Any]: ...
    def restore(self, restore: Restore) -> int: ...
    def broadcast(self, decision: Any) -> Any: ...
    def agree(self, digest: str) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Peers(Protocol):
    """The ranks of the host, as far as a guest needs them; all calls are collective."""

    @property
    def first(self) -> bool: ...
    def from_first(self, value: Any) -> Any: ...
    def from_all(self, text: str) -> list[str]: ...


class Alone:
    """A host of one process."""

    first = True

    def from_first(self, value: Any) -> Any:
        return value

    def from_all(self, text: str) -> list[str]:
        return [text]


def read_control(control: str | Path | Mapping[str, Any] | ControlSection) -> ControlSection:
    """A `control.yaml`, a mapping of its fields, or the section itself.

    Raises:
        InputError: it is wrong, or asks for what only a run of our own can do.
    """
    if isinstance(control, (str, Path)):
        section = load_control(control)
    else:
        section = control if isinstance(control, ControlSection) else ControlSection(**control)
    if section.schedule is not None:
        raise InputError(
            f"control.schedule is {section.schedule!r}: a schedule is followed by `autotune run` only;"
            " leave it out here"
        )
    return section


class Guest:
    """One run's controller, journal and adapter behind a door that nothing gets out of.

    Args:
        adapter: of the host's trainer, on every rank.
        control: who decides, by which rules.
        folder: the host's output folder; the journal is made in it.
        declared: the adapter's declaration.
        version: of the trainer's package, for the header and for the question whether it was tested.
        accept: a version that is acted on although it was not tested.
        name: of the run, for the readers of the journal.
        seed: of the run.
        config: the host's own settings worth keeping, JSON types.
        peers: the host's ranks.
    """

    def __init__(
        self,
        adapter: GuestAdapter,
        control: ControlSection,
        folder: str | Path,
        declared: Declaration,
        *,
        version: str = "",
        accept: str = "",
        name: str = "",
        seed: int = 0,
        config: Mapping[str, Any] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.adapter, self.folder, self.declared = adapter, Path(folder), declared
        self.version, self.peers = version, peers or Alone()
        self.reason = "" if version and version == accept else declared.untested(version)
        """Why this run is only watched, or empty."""
        if self.reason and control.mode == "act":
            control = control.model_copy(update={"mode": "shadow"})
        self.control = control
        self.broken = ""
        """Why the guest stood down, or empty."""
        self.stop = ""
        """Why a rule wants the run to end, or empty."""
        self.rollout = 0
        """Index of the next rollout."""
        self.epoch = 0
        self.controller: Controller | None = None
        self._name, self._seed, self._config = name or self.folder.name or "run", seed, dict(config or {})
        self._journal: Journal | None = None
        self._loop: ControlLoop | None = None
        self._advised: dict[str, float] = {}
        self._last_line: Mapping[str, Any] = {}
        if control.mode != "off":
            self.controller = Controller(ControlSettings(**control.model_dump()), adapter.facts())

    # -- opening -----------------------------------------------------------------------------------

    def begin(self, state: Mapping[str, Any] | None = None) -> None:
        """Open the books; with a checkpoint's `state` go on where it was taken. On every rank."""
        with self._fence("could not begin"):
            if state:
                self._load(state)
            if self.peers.first:
                self._open(resumed=bool(state))
        self._share()

    def _load(self, state: Mapping[str, Any]) -> None:
        self.rollout, self.epoch = int(state["rollout"]), int(state["epoch"])
        self.adapter.load_state_dict(state["adapter"])
        if self.controller is not None and state["controller"] is not None:
            self.controller.load_state_dict(state["controller"])
        now = self.adapter.knobs()
        moved = {k: v for k, v in state["knobs"].items() if k in now and now[k] != v}
        wrong = [item for item in self.adapter.apply(moved, self.epoch) if not item.ok]
        if wrong:
            raise InputError(f"the resumed run does not take its knobs back: {wrong[0].error}")

    def _open(self, resumed: bool) -> None:
        path = self.folder / JOURNAL
        self.folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and not resumed:
            _set_aside(path)
        before = inspect_journal(path).lines if path.exists() else []
        self._journal = Journal(path, resume=path.exists())
        inbox = Inbox(self.folder, winning_lines(before), self.rollout)
        self._loop = ControlLoop(self.adapter, self.controller, self._journal, (self._keep,), inbox)
        if before:
            self._append("resumed", {"from": self.rollout, "at": _now()})
        else:
            self._append("header", self._header(), rollout=-1)
        if self.reason:
            self._say(f"shadow: {self.reason}; it is watched and not touched")
        self._journal.sync()

    def _header(self) -> dict[str, Any]:
        facts = self.adapter.facts()
        kind = f"{self.declared.trainer} {self.version}".strip()
        recipe = {
            "name": self._name,
            "seed": self._seed,
            "trainer": {"rollouts": facts.rollouts, "kind": kind, **self._config},
            "control": self.control.model_dump(mode="json"),
        }
        environment = {
            "autotune": autotune.__version__,
            "python": platform.python_version(),
            "packages": {self.declared.package: self.version} if self.declared.package else {},
            "policies_sha256": policies_hash(),
        }
        return {"at": _now(), "recipe": recipe, "facts": to_json(facts), "environment": environment}

    # -- one rollout -------------------------------------------------------------------------------

    def on_rollout(self, record: RolloutRecord | Any) -> None:
        """Handle one finished rollout, on every rank; nothing is raised.

        Args:
            record: what the adapter reads, or a function that makes it, so that its failing stays here too.
        """
        self._last_line = {}
        if self.broken:
            return
        with self._fence("failed"):
            if self._loop is not None:
                self._decide(record)
        self.rollout += 1
        self._share()

    def _decide(self, record: RolloutRecord | Any) -> None:
        assert self._loop is not None
        try:
            self._loop.on_rollout(record() if callable(record) else record)
        except ControlStop as stop:
            self.stop = str(stop)
            log.warning("autotune asks for a stop: %s", stop)
        self.epoch = self.controller.epoch if self.controller else self.epoch
        self._tell_of_changes()
        for text in self._advice():
            self._say(text)

    def _keep(self, line: Mapping[str, Any]) -> None:
        if line["type"] == "rollout":
            self._last_line = line

    @property
    def changed(self) -> dict[str, float]:
        """What the last rollout's decision changed: knob -> the value that was read back."""
        applied = self._last_line.get("applied") or ()
        return {item["knob"]: item["read_back"] for item in applied if not item["error"]}

    def note(self, text: str) -> None:
        """Tell something in the log and the journal."""
        with self._fence("could not write a note"):
            self._say(text)

    def _tell_of_changes(self) -> None:
        for item in self._last_line.get("applied") or ():
            if item["error"]:
                log.warning("autotune: %s refused: %s", item["knob"], item["error"])
            else:
                log.info("autotune: %s = %.6g from rollout %d", *(
                    item[k] for k in ("knob", "read_back", "effective_from")))  # fmt: skip

    def _advice(self) -> Iterator[str]:
        """What a rule wants of a knob that only a restart moves; each value is said once."""
        decision, table = self._last_line.get("decision") or {}, self.adapter.facts().knob_capability
        knobs = self._last_line.get("snapshot", {}).get("knobs", {})
        for veto in decision.get("vetoes", ()):
            proposal = veto["proposal"]
            for knob in expand(proposal["knob"]):
                value, capability = proposal["value"], table.get(knob)
                known = veto["guard"] == "knob_movable" and knob in KNOBS
                if not known or capability is None or capability.state != Liveness.RESTART:
                    continue
                if self._advised.get(knob) != value:
                    self._advised[knob] = value
                    line = self.declared.restart_line(knob, value, knobs)
                    then = f"; at the next start: {line}" if line else ""
                    yield f"advice {proposal['rule']}: {knob} {value:g}{then} ({proposal['reason']})"

    # -- ranks -------------------------------------------------------------------------------------

    def _share(self) -> None:
        """The first rank's vector, weights and state on all of them. One rank alone has nothing to do."""
        if isinstance(self.peers, Alone):
            return
        message = {"broken": "the first rank has no vector to tell", "stop": self.stop}
        with self._fence("failed on the first rank"):
            message = self._message() if self.peers.first else {}
        told = self.peers.from_first(message)  # told in any case: the others are waiting
        digest = "broken"
        if not told["broken"]:
            with self._fence("failed on this rank"):
                self._follow(told)
                digest = vector_digest(self.adapter.knobs())
        digests = self.peers.from_all("broken" if self.broken else digest)
        self.stop = told["stop"]
        if told["broken"] or len(set(digests)) > 1 or "broken" in digests:
            self._break(told["broken"] or "ranks read back different knobs: nothing is changed any more")

    def _message(self) -> dict[str, Any]:
        decision = self._last_line.get("decision") or {}
        back = decision.get("restore") if self._last_line.get("restored") is not None else None
        return {
            "broken": self.broken,
            "stop": self.stop,
            "restore": back,
            "epoch": self.epoch,
            "knobs": {} if self.broken else self.adapter.knobs(),
        }

    def _follow(self, told: Mapping[str, Any]) -> None:
        if self.peers.first:
            return
        if told["restore"] is not None:
            self.adapter.restore(Restore(**told["restore"]))
        now = self.adapter.knobs()
        self.epoch = told["epoch"]
        self.adapter.apply({k: v for k, v in told["knobs"].items() if now.get(k) != v}, self.epoch)

    # -- closing and keeping -----------------------------------------------------------------------

    def checkpoint(self, path: str | Path) -> None:
        """The host has saved a checkpoint before the next rollout."""
        with self._fence("could not note a checkpoint"):
            if self._journal is not None and not self.broken:
                self._append("checkpoint", {"path": str(path)})
                self._journal.sync()

    def end(self, status: str = "done", reason: str = "") -> None:
        """Close the books; calling it twice does nothing more."""
        journal, self._journal = self._journal, None
        if journal is None:
            return
        with self._fence("could not end"), contextlib.closing(journal):
            seconds = sum(self._loop.hook_seconds) if self._loop else 0.0
            status, reason = ("stopped", self.stop) if self.stop else (status, reason)
            payload = {"status": status, "reason": reason, "at": _now(), "times": {"hook": seconds}}
            journal.append("end", self.rollout, payload)

    def state_dict(self) -> dict[str, Any]:
        """JSON state for the host's checkpoint."""
        return {
            "rollout": self.rollout,
            "epoch": self.epoch,
            "knobs": self.adapter.knobs(),
            "adapter": self.adapter.state_dict(),
            "controller": self.controller.state_dict() if self.controller else None,
        }

    # -- manners -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _fence(self, what: str) -> Iterator[None]:
        """Whatever is raised inside ends the guest and not the host."""
        try:
            yield
        except Exception as failure:
            self._break(f"{what}: {type(failure).__name__}: {failure}")

    def stand_down(self, reason: str) -> None:
        """For the hook itself: something of the trainer is not as expected, so nothing is done any more."""
        self._break(reason)

    def _break(self, reason: str) -> None:
        if self.broken:
            return
        self.broken = reason
        log.warning("autotune stands down, training goes on: %s", reason)
        with contextlib.suppress(Exception):
            self._append("note", {"text": f"stood down: {reason}"})

    def _say(self, text: str) -> None:
        log.warning("autotune: %s", text)
        self._append("note", {"text": text})

    def _append(self, type: str, payload: Mapping[str, Any], rollout: int | None = None) -> None:
        if self._journal is not None:
            self._journal.append(type, self.rollout if rollout is None else rollout, payload)


def _set_aside(path: Path) -> None:
    """An earlier run's journal in the same folder is kept under another name."""
    for number in range(1, 10_000):
        other = path.with_name(f"journal-{number}.jsonl")
        if not other.exists():
            path.rename(other)
            return


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
