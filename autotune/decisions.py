"""What a control policy may say, what the controller grants, and what the adapter read back.

    Proposal  what a rule wants                      (policies -> controller)
    Veto      a proposal that a guard stopped        (controller -> journal)
    Change    what the controller grants             (controller -> adapter)
    Applied   what the trainer will really use next  (adapter -> controller)
    Verdict   whether a past change helped           (controller -> journal)
    Decision  all of it for one rollout

All of these are frozen and turn into plain JSON (`to_json`), so that a journal can be replayed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from autotune.knobs import Capability, Liveness


class Kind(StrEnum):
    """The two kinds of actor, and the emergency that outranks both."""

    INTERVENTION = "intervention"
    """On probation, one at a time, judged and reverted when it harms; opens a config epoch."""
    REGULATOR = "regulator"
    """A continuous loop under a slew limit, judged once per engagement."""
    EMERGENCY = "emergency"
    """Weights come back and the learning rate falls; never on probation."""
    REVERT = "revert"
    """A change that was found harmful is taken back."""


class State(StrEnum):
    """States of the controller's machine."""

    WARMUP = "warmup"
    OBSERVE = "observe"
    SETTLE = "settle"
    EVALUATE = "evaluate"
    COOLDOWN = "cooldown"
    HOLD = "hold"
    EMERGENCY = "emergency"
    FROZEN = "frozen"
    PAUSED = "paused"


class Outcome(StrEnum):
    KEPT = "kept"
    REVERTED = "reverted"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What is true of a run before its first rollout: the structure that decides who can sense what."""

    rollouts: int
    world_size: int
    algorithm: str
    loss_kind: str
    """`token` (PPO/GRPO ratios), `sequence` (GSPO) or `none` (no ratio: DPO and its kin)."""
    has_reference: bool
    has_critic: bool
    knobs: Mapping[str, float]
    """The recipe's own values: bounds relative to the start are taken from these."""
    knob_capability: Mapping[str, Capability] = field(default_factory=dict)
    metric_capability: Mapping[str, Capability] = field(default_factory=dict)
    """Metric -> `valid`, `structural_zero` or `not_logged` with the reason."""
    lr_warmup: int = 0
    """Rollouts of learning-rate warm-up in the schedule."""
    staleness: int = 0
    """Rollouts between sampling and update (0: synchronous)."""
    reward_maximum: float | None = None
    """Upper end of the reward where it is known (1.0 for exact match)."""
    fixed_micro_batch: int = 1
    """Samples of a backward pass, in a trainer that cannot cut them anew while it runs; else 1."""

    @property
    def cut(self) -> int:
        """Samples that every mini-batch must be a multiple of: whole micro batches on every rank."""
        return self.world_size * self.fixed_micro_batch

    def can_move(self, knob: str) -> bool:
        return knob in self.knob_capability and self.knob_capability[knob].acts

    def can_speak_of(self, knob: str) -> bool:
        """Whether a rule may propose it: what needs a restart cannot move, but makes good advice."""
        found = self.knob_capability.get(knob)
        return found is not None and (found.acts or found.state == Liveness.RESTART)


@dataclass(frozen=True, slots=True)
class Proposal:
    """What one rule wants done to one knob; `clip_range` stands for both of its sides."""

    rule: str
    knob: str
    value: float
    reason: str
    kind: Kind = Kind.INTERVENTION
    evidence: Mapping[str, float] = field(default_factory=dict)
    """The statistics that the rule decided on, by name."""


@dataclass(frozen=True, slots=True)
class Veto:
    """A proposal that did not become a change, and the guard that stopped it."""

    proposal: Proposal
    guard: str
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """One granted change. `values` are the real knobs to set, re-derived ones included."""

    rule: str
    knob: str
    before: float
    after: float
    reason: str
    kind: Kind
    values: Mapping[str, float]
    evidence: Mapping[str, float] = field(default_factory=dict)


RANKS_DISAGREE = "ranks read back different vectors"
"""How the error of an `Applied` begins when the previous vector had to be put back on all ranks."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One knob after `apply`: what was asked, and what the trainer will really use next."""

    knob: str
    requested: float
    read_back: float
    effective_from: int
    """First rollout whose data and updates use it."""
    error: str = ""

    @property
    def ok(self) -> bool:
        tolerance = 1e-6 * max(abs(self.requested), 1e-12)
        return not self.error and abs(self.read_back - self.requested) <= tolerance


@dataclass(frozen=True, slots=True)
class Restore:
    """Weights and optimizer moments that must come back.

    `undo` brings back the weights from before this rollout's updates; `checkpoint` the newest
    checkpoint that is not newer than `before_rollout`. The rollout index never rewinds.
    """

    kind: str
    before_rollout: int
    reason: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one past change, with the statistics that it rests on."""

    rule: str
    knob: str
    outcome: Outcome
    reason: str
    since_rollout: int
    statistics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Command:
    """What a human wants of a live run: `pause`, `resume`, `pin`, `unpin` or `set`."""

    id: str
    command: str
    knobs: tuple[str, ...] = ()
    """Of `pin` and `unpin`."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Knob -> wanted value, of `set`."""
    problem: str = ""
    """Why it cannot be obeyed whatever the run: it could not be read."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything the controller made of one rollout."""

    rollout: int
    state: State
    epoch: int
    """Config epoch that the next rollout's data belongs to."""
    proposals: tuple[Proposal, ...] = ()
    vetoes: tuple[Veto, ...] = ()
    changes: tuple[Change, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    restore: Restore | None = None
    alarms: tuple[str, ...] = ()
    stop: str = ""
    """Why the run must stop, or empty."""
    silent: Mapping[str, str] = field(default_factory=dict)
    """Rule -> why it cannot speak; only rules whose reason is new at this rollout."""
    act: bool = True
    """False in shadow: the changes are what would have been done."""

    @property
    def values(self) -> dict[str, float]:
        """Real knob -> value over all granted changes."""
        return {knob: v for change in self.changes for knob, v in change.values.items()}


def to_json(item: Any) -> Any:
    """Frozen dataclasses, mappings and tuples of this module as plain JSON types."""
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {f.name: to_json(getattr(item, f.name)) for f in dataclasses.fields(item)}
    if isinstance(item, Mapping):
        return {str(k): to_json(v) for k, v in item.items()}
    if isinstance(item, (tuple, list)):
        return [to_json(v) for v in item]
    return str(item) if isinstance(item, StrEnum) else item


def applied_from_json(data: Mapping[str, Any]) -> Applied:
    """Inverse of `to_json` for `Applied`: the only part of a decision that a replay feeds back."""
    return Applied(**{f.name: data[f.name] for f in dataclasses.fields(Applied)})


def decision_from_json(data: Mapping[str, Any]) -> Decision:
    """Inverse of `to_json` for `Decision`: rank 0's, as the other ranks receive it."""
    proposals = {"proposals": tuple(_proposal(p) for p in data["proposals"])}
    vetoes = {"vetoes": tuple(Veto(**{**v, "proposal": _proposal(v["proposal"])}) for v in data["vetoes"])}
    changes = {"changes": tuple(Change(**{**c, "kind": Kind(c["kind"])}) for c in data["changes"])}
    judged = ({**v, "outcome": Outcome(v["outcome"])} for v in data["verdicts"])
    verdicts = {"verdicts": tuple(Verdict(**v) for v in judged)}
    rest = {"state": State(data["state"]), "alarms": tuple(data["alarms"])}
    restore = {"restore": Restore(**data["restore"]) if data["restore"] else None}
    return Decision(**{**data, **proposals, **vetoes, **changes, **verdicts, **rest, **restore})


def _proposal(data: Mapping[str, Any]) -> Proposal:
    return Proposal(**{**data, "kind": Kind(data["kind"])})


def command_from_json(data: Mapping[str, Any]) -> Command:
    """The command of a journal line; a replay gives it to its own controller."""
    knobs, values = tuple(data.get("knobs", ())), dict(data.get("values", {}))
    return Command(str(data["id"]), str(data["command"]), knobs, values)
